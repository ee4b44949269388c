"""The public names of the package `tokenyard`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any

import tokenyard
from tokenyard import errors as error_module
from tokenyard.async_llm import AsyncLLM
from tokenyard.descriptors import Descriptor
from tokenyard.engine_outputs import PluginStats, PluginTime, SchedulerStats
from tokenyard.errors import TokenyardError
from tokenyard.language_model import LanguageModel
from tokenyard.launch.llm_arguments import _COMPONENTS, _KEYS, _NEUTRAL
from tokenyard.launch.schema import GROUPS
from tokenyard.llm import LLM
from tokenyard.metrics import metrics_of
from tokenyard.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from tokenyard.request import SchedulingHints
from tokenyard.sampling_params import NOT_YET, RequestOutputKind, SamplingParams

from reference_sections.interfaces import members, method
from reference_sections.markdown import code, joined, table
from reference_sections.source import constructor_of, doc_of, fields_of, methods_of

_ELSEWHERE = {
    "hookimpl": ("marks a function of a plugin as a hook", "plugins.md#hooks"),
    "PLUGIN_API": ("(major, minor) of the plugin contract", "plugins.md#versions"),
    "SamplingParams": ("how the tokens of a request are chosen, and when it ends", "#samplingparams"),
    "EngineConfig": ("a whole engine's settings, as frozen dataclasses", "config.md"),
}
_COMMAND_LINE_ONLY = frozenset({"stream", "tokenize", "tokenize_chat", "from_parts"})
_BULLET = re.compile(r"- `(\w+)`:?\s*(.*?)(?=\n- |\n\n|\Z)", re.DOTALL)


def names() -> str:
    """Every public name with the place where it is described."""
    return table(("name", "what it is"), (_name(name) for name in tokenyard.__all__))


def _name(name: str) -> tuple[str, str]:
    if name in _ELSEWHERE:
        about, link = _ELSEWHERE[name]
        return f"[{code(name)}]({link})", about
    value = inspect.getattr_static(tokenyard, name, None) or tokenyard.__getattr__(name)
    page = "plugins.md" if isinstance(value, type) and issubclass(value, Descriptor) else ""
    return f"[{code(name)}]({page}#{name.lower()})", doc_of(value).partition("\n")[0]


def llm_arguments() -> str:
    """The arguments of LLM(...) and the key that each one sets."""
    arguments = {field.name: field.annotation for field in constructor_of(LLM)}
    arguments |= {name: f"{_type_of(key)} | None" for name, key in _KEYS.items() if name not in arguments}
    rows = [
        (code(name), code(annotation.replace(" | None | None", " | None")), _sets(name))
        for name, annotation in arguments.items()
    ]
    return table(("argument", "type", "sets"), rows)


def _type_of(key: str) -> str:
    """How the core's own key is annotated."""
    if key == "logits_processors":
        return "list[str | dict[str, object]]"  # which the config converts
    group, _, name = key.partition(".")
    return {field.name: field.annotation for field in fields_of(GROUPS[group])}[name]


def _sets(name: str) -> str:
    if name == "model":
        return code("model.name")
    if name == "overrides":
        return "any key: Hydra overrides, which come last"
    if name == "hf_token":
        return "no key: a secret, used to fetch the model"
    if name in _COMPONENTS:
        return f"the group {code(name)}: a plugin's name"
    return code(_KEYS[name])


def llm_neutral_arguments() -> str:
    """vLLM's arguments that are accepted with values that change nothing."""
    rows = [(code(name), ", ".join(code(repr(value)) for value in values)) for name, values in _NEUTRAL.items()]
    return table(("argument", "accepted"), rows)


def llm_methods() -> str:
    """The methods for users of LLM."""
    return joined(_methods(LLM))


def async_llm() -> str:
    """AsyncLLM and its methods."""
    return joined([doc_of(AsyncLLM), *_methods(AsyncLLM)])


def _methods(owner: type[LanguageModel]) -> Iterator[str]:
    rows = [*methods_of(LanguageModel, owner), *methods_of(owner)]
    return (method(row) for row in rows if row.name not in _COMMAND_LINE_ONLY)


def sampling_params() -> str:
    """Available fields with their ranges, then the others with the only value that they take."""
    about = {match[1]: match[2] for match in _BULLET.finditer(doc_of(SamplingParams))}
    written = {field.name: field for field in fields_of(SamplingParams)}
    available = [
        (code(field.name), code(written[field.name].annotation), code(repr(field.default)), about[field.name])
        for field in fields(SamplingParams)
        if field.name not in NOT_YET
    ]
    others = [
        (code(field.name), code(written[field.name].default or ""))
        for field in fields(SamplingParams)
        if field.name in NOT_YET
    ]
    return joined(
        [
            table(("field", "type", "default", "meaning"), available),
            "The other fields of vLLM's class are there with their default; another value raises `UnsupportedError`:",
            table(("field", "only value"), others),
        ]
    )


def outputs() -> str:
    """What generate() and chat() return."""
    owners = (RequestOutput, CompletionOutput, Logprob, RequestMetrics, RequestOutputKind, SchedulingHints)
    return joined(joined([f"### {owner.__name__}", doc_of(owner), members(owner)]) for owner in owners)


def metrics() -> str:
    """The names that LLM.get_metrics() returns."""
    zeros: dict[str, Any] = {field.name: 0 for field in fields(SchedulerStats) if field.default is MISSING}
    one = PluginTime("", "", "", 0.0, 0)
    stats = SchedulerStats(**zeros, plugins=PluginStats(times=(one,)))
    rows = [
        (code(metric.name), code(metric.alias), metric.kind, ", ".join(map(code, metric.labels)))
        for metric in metrics_of(stats)
    ]
    return table(("name", "alias", "kind", "labels"), rows)


def errors() -> str:
    """Every error class with the exit code of the command line."""
    return table(("error", "is a", "exit code", "raised for"), _error_rows())


def _error_rows() -> Iterator[tuple[str, str, str, str]]:
    for name, owner in vars(error_module).items():
        if inspect.isclass(owner) and issubclass(owner, TokenyardError):
            bases = ", ".join(code(base.__name__) for base in owner.__bases__)
            yield code(name), bases, str(owner.exit_code), doc_of(owner)
