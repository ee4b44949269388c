"""`tokenyard doctor [MODEL] [overrides]`: what this machine has, which parts would run, and how a model would."""

from __future__ import annotations

import json
import os
import platform as python_platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING

from tokenyard.cli.arguments import Parser, make_parser, parse
from tokenyard.cli.attention_report import attention_report
from tokenyard.cli.model_report import model_report
from tokenyard.errors import UserError
from tokenyard.paths import cache_dir, config_dir
from tokenyard.platform import Platform
from tokenyard.plugin_report import describe

if TYPE_CHECKING:
    from tokenyard.catalogue import Catalogue
    from tokenyard.config import EngineConfig

_PACKAGES = ("tokenyard", "torch", "transformers", "tokenizers", "safetensors", "gguf", "numpy", "hydra-core", "pluggy")


def command_parser() -> Parser:
    """The command's own flags."""
    description = "Check this machine, the plugins and a model."
    parser = make_parser("doctor", "[MODEL] [--json] [overrides]", description, model_at=0)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Exit code 0 when an engine with this config could start, 2 when it could not."""
    given = parse(command_parser(), arguments)
    names_model = any("model.name" in str(override) for override in given.overrides)
    config, catalogue = given.load()
    report: dict[str, dict[str, object]] = {
        "versions": _versions(),
        "machine": _machine(config),
        "plugins": _plugins(catalogue),
        "model": model_report(config, fetch=names_model),
    }
    if not _problems(report):  # else its device or what its layers ask is not known
        report["attention"] = attention_report(config, catalogue, fetch=names_model)
    problems = _problems(report)
    if given.flags.json:
        print(json.dumps({**report, "problems": problems}))
    else:
        for title, section in report.items():
            print(title)
            for name, value in section.items():
                text = ", ".join(map(str, value)) if isinstance(value, list) else value
                print(f"  {name:<16} {text}")
        print("no problem found" if not problems else f"{len(problems)} problem(s) found")
    return UserError.exit_code if problems else 0


def _problems(report: Mapping[str, Mapping[str, object]]) -> list[str]:
    return [str(section["problem"]) for section in report.values() if "problem" in section]


def _versions() -> dict[str, object]:
    versions: dict[str, object] = {"python": python_platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _machine(config: EngineConfig) -> dict[str, object]:
    from tokenyard.worker.device import available_kv_bytes, choose_device, physical_cores

    try:
        device = choose_device(config.executor.device)
    except UserError as error:
        return {"problem": str(error)}
    return {
        "system": f"{python_platform.system()} {python_platform.machine()}",
        "device": str(device),
        "cores": f"{physical_cores()} physical, {os.cpu_count()} logical",
        "K/V memory": f"{available_kv_bytes(config.kv_cache, device) / 2**20:.0f} MiB",
        "cache": str(cache_dir()),
        "configs": str(config_dir()),
    }


def _plugins(catalogue: Catalogue) -> dict[str, object]:
    """Those that would run by name, and a line for each of the others."""
    rows = describe(catalogue, Platform())
    found: dict[str, object] = {"available": [row.name for row in rows if row.reason is None]}
    for row in rows:
        if row.reason is not None:
            found[row.name] = f"{row.status}: {row.reason}"
    return found
