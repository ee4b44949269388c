"""What of attention needs a GPU to be seen, in a few minutes, with no network: one table, and JSON.

    python benchmarks/gpu_check.py [--minutes 6] [--json FILE] [--only PART ...] [--backends NAME ...]

From any folder, with a Python that has torch >= 2.11 (and triton >= 3.6); tokenyard itself need not be installed, the
checkout's own is used. Each part runs in a process of its own with a limit of time, so that a crash of one does not end
the rest. What is not there is skipped by name.

A run without a GPU is there to exercise this script before a GPU is at hand: the parts that a CPU can run do so on few
examples, in about a minute together. It says little of the backends: their tests in tests/backends try far more.

- contract: AttentionBackendContract, for each backend
- equality: greedy tokens of small random models (plain, sliding windows, sinks) against torch_native's
- attention: the time of a layer against the time that reading its K/V takes, and against FlashInfer's
- decode: output tokens a second of a random model of the shape of Qwen3-0.6B
- graphs: the same with CUDA graphs against without, and that they give the same tokens
- memory: what an engine takes of the GPU at its peak, against kv_cache.gpu_memory_utilization

Packages that an image with torch and transformers may lack are named in the table. They can be brought: `pip wheel -w
DIR hydra-core msgspec gguf` where there is a network, `pip install --no-index --no-deps --target SITE DIR/*.whl` here,
PYTHONPATH=SITE.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import logging
import math
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

if TYPE_CHECKING:
    import pytest
    from tokenyard import RequestOutput

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("framework", "plugins", "backends")
BASELINE = "torch_native"
BLOCK_SIZE = 64  # what every backend takes
LEAST_SECONDS = 5.0  # what a process needs to start
ENGINE = (
    "pluggy",
    "hydra",
    "omegaconf",
    "msgspec",
    "gguf",
    "safetensors",
    "tokenizers",
    "transformers",
    "jinja2",
    "rich",
)
NEEDS = {
    "contract": (*ENGINE, "pytest", "hypothesis"),
    "equality": ENGINE,
    "attention": ("pluggy",),
    "decode": ENGINE,
    "memory": ENGINE,
}
WEIGHTS = {"contract": 4.0, "equality": 2.0, "attention": 3.0, "decode": 3.0, "memory": 2.0}
INSTALL_AS = {"hydra": "hydra-core", "jinja2": "Jinja2"}
CLAIMS: Mapping[str, Mapping[str, object]] = {
    "flashinfer": {
        "dtypes": ("bfloat16",),
        "head_dims": (64, 128),
        "v_head_dims": (),
    },  # each more is compiled a minute
    "xformers": {
        "dtypes": ("bfloat16", "float16"),
        "head_dims": (64, 128),
        "v_head_dims": (),
        "block_sizes": (64, 128),
        "soft_caps": False,
        "longest_context": 300,
    },
}
"""What a backend is tested for here, where that is less than what it claims in its own tests."""
CPU_CLAIMS: Mapping[str, object] = {
    "dtypes": ("float32",),
    "head_dims": (64,),
    "v_head_dims": (),
    "group_sizes": (1, 3),
    "block_sizes": (16, 64),
}
"""The same for all on a CPU."""
CPU_FAMILIES = ("gpt_oss",)
CPU_SHARE = 0.5  # of the time that is left, for a part: they are short, and a limit only ends those of a busy machine


class Job(NamedTuple):
    """What a part is run for; `backend` is empty where it takes all."""

    part: str
    backend: str
    device: str
    seconds: float
    scratch: Path

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def overrides(self, *more: str) -> list[str]:
        """Of an engine."""
        return [f"executor.device={self.device}", f"kv_cache.block_size={BLOCK_SIZE}", *more]


@dataclass(slots=True, kw_only=True)
class Result:
    """A row of the table."""

    part: str
    backend: str = ""
    status: str = "passed"  # passed, failed, skipped, unfinished
    told: str = ""
    seconds: float = 0.0
    figures: dict[str, object] = field(default_factory=dict)


# ---- Parts: each runs in a process of its own and yields its result, also before it is complete ----------------------


def machine(job: Job) -> Iterator[Result]:
    """What is here, and why each backend cannot run, if it cannot."""
    import torch
    from tokenyard.interfaces import AttentionSpec
    from tokenyard.platform import Platform
    from tokenyard.plugins import load_catalogue
    from tokenyard.worker.attention_choice import refusals

    device = "cuda" if torch.cuda.is_available() else "cpu"
    spec = AttentionSpec(
        device_type=device,
        dtype="bfloat16",
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        v_head_dim=64,
        block_size=BLOCK_SIZE,
    )
    platform = Platform()
    entries = [entry for entry in load_catalogue().entries() if entry.kind == "attention"]
    facts: dict[str, object] = {
        "device": device,
        "device_name": torch.cuda.get_device_name() if device == "cuda" else "",
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        **{
            name: platform.package_version(name) for name in ("triton", "transformers", "flashinfer-python", "xformers")
        },
        "backends": {entry.name: refusals(entry, spec, platform) for entry in entries},
    }
    yield Result(part="machine", figures=facts)


def contract(job: Job) -> Iterator[Result]:
    """The suite that every backend's own tests run."""
    import pytest

    less = CLAIMS.get(job.backend, {}) if job.on_gpu else CPU_CLAIMS
    claims = {"max_examples": 4 if job.on_gpu else 1, "simplifies": False, **less}
    lines = [f"    {name} = {value!r}\n" for name, value in claims.items()]
    file = job.scratch / f"test_{job.backend}.py"
    file.write_text(
        "from tokenyard.testing import AttentionBackendContract\n\n\nclass TestBackend(AttentionBackendContract):\n"
        f"    overrides = ['attention={job.backend}']\n    device = {job.device!r}\n{''.join(lines)}"
    )
    tally = _Tally(job)
    options = ["-q", "-p", "no:cacheprovider", f"--rootdir={job.scratch}", "--tb=short"]
    if less:
        options += ["--deselect", f"{file.name}::TestBackend::test_what_is_claimed_is_accepted_and_nothing_else"]
    with contextlib.redirect_stdout(sys.stderr):
        code = pytest.main([str(file), *options], plugins=[tally])
    yield tally.result(is_done=int(code) in (0, 1) and not tally.is_late)


class _Tally:
    """A pytest plugin: counts, tells after each test, and stops in time."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._deadline = time.monotonic() + job.seconds * 0.9
        self._counts = {"passed": 0, "failed": 0, "skipped": 0}
        self._failures: list[str] = []
        self.is_late = False
        self.session: pytest.Session | None = None

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self.session = session

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._counts[report.outcome] += 1
        if report.outcome == "failed":
            last = str(report.longrepr).strip().splitlines()[-1]
            self._failures.append(f"{report.nodeid.rpartition('::')[2]}: {last}")
        if report.when == "teardown":
            show(self.result(is_done=False))
            self.is_late = time.monotonic() > self._deadline
            if self.is_late and self.session is not None:
                self.session.shouldstop = "the time is over"

    def result(self, *, is_done: bool) -> Result:
        counts = ", ".join(f"{count} {name}" for name, count in self._counts.items() if count)
        told = "; ".join([counts or "no test ran", *self._failures[:3]])
        status = "failed" if self._failures else "passed" if is_done and self._counts["passed"] else "unfinished"
        figures: dict[str, object] = {**self._counts, "failures": self._failures}
        return Result(part="contract", backend=self._job.backend, status=status, told=told, figures=figures)


FAMILIES: Mapping[str, Mapping[str, object]] = {
    "qwen3": {"num_hidden_layers": 3},
    "gemma3_text": {"num_hidden_layers": 6, "layer_types": [*["sliding_attention"] * 5, "full_attention"]},
    "gpt_oss": {"num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
}
"""Plain attention, windows on five of six layers, windows on every other one with sinks."""

_SMALL: Mapping[str, object] = {
    "vocab_size": 384,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "sliding_window": 20,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_LARGE: Mapping[str, object] = {  # Qwen3-0.6B
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
_GAIN = 6  # random weights as they come make attention matter little


def equality(job: Job) -> Iterator[Result]:
    """Tokens may differ only where torch_native itself was in doubt between two."""
    told: list[str] = []
    is_wrong = False
    families = tuple(FAMILIES) if job.on_gpu else CPU_FAMILIES
    for family in families:
        folder = write_model(job, family, {**_SMALL, **FAMILIES[family]}, "float32")
        says, is_right = _compare_with_baseline(job, folder)
        told.append(f"{family}: {says}")
        is_wrong = is_wrong or not is_right
        status = "failed" if is_wrong else "passed" if len(told) == len(families) else "unfinished"
        yield Result(part="equality", backend=job.backend, status=status, told="; ".join(told))


def _compare_with_baseline(job: Job, folder: Path) -> tuple[str, bool]:
    """In words, and whether it is right. A model that a backend refuses in float32 is tried in bfloat16."""
    from tokenyard.errors import PluginError

    reason = ""
    for dtype, doubt in (("float32", 1e-3), ("bfloat16", 0.3)):
        try:
            found = generate(folder, job.overrides(f"attention={job.backend}", f"model.dtype={dtype}"))
        except PluginError as error:
            reason = str(error)
            continue
        expected = generate(folder, job.overrides(f"attention={BASELINE}", f"model.dtype={dtype}"))
        says, is_right = compare(expected, found, doubt)
        return f"{dtype}, {says}", is_right
    return f"refused ({reason})", True


def compare(expected: Sequence[RequestOutput], found: Sequence[RequestOutput], doubt: float) -> tuple[str, bool]:
    """`doubt` is how far apart, in log probability, the two most likely tokens are at most where others may come."""
    num_equal = num_doubtful = 0
    worst = 0.0
    for ours, theirs in zip(expected, found, strict=True):
        pairs = zip(ours.outputs[0].token_ids, theirs.outputs[0].token_ids, strict=True)
        first = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
        if first is None:
            num_equal += 1
            continue
        choices = sorted((row.logprob for row in (ours.outputs[0].logprobs or [])[first].values()), reverse=True)
        gap = choices[0] - choices[1]
        num_doubtful += gap <= doubt
        worst = max(worst, gap)
    says = f"{num_equal} of {len(expected)} equal" + (f", {num_doubtful} ties" if num_doubtful else "")
    is_right = num_equal + num_doubtful == len(expected)
    return says + ("" if is_right else f", others where the choice was {worst:.2g} apart"), is_right


def attention(job: Job) -> Iterator[Result]:
    """`tokenyard bench attention`, which refuses wrong numbers."""
    from tokenyard.bench.attention import run_attention_bench
    from tokenyard.bench.settings import AttentionBench
    from tokenyard.config import EngineConfig, ExecutorConfig, KVCacheConfig
    from tokenyard.plugins import load_catalogue

    shapes = ("64x1024", "8x8192", "1x32768", "2048+0", "1024+3072") if job.on_gpu else ("4x256", "64+64")
    heads = (32, 8, 128) if job.on_gpu else (9, 3, 64)
    settings = AttentionBench(
        shapes=shapes,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        seconds=job.seconds / 3 if job.on_gpu else 1.0,
    )
    config = EngineConfig(
        kv_cache=KVCacheConfig(block_size=BLOCK_SIZE), executor=ExecutorConfig(device="cuda" if job.on_gpu else "cpu")
    )
    report = run_attention_bench(settings, config, load_catalogue())
    by_shape = {shape: [row for row in report.rows if row["shape"] == shape] for shape in shapes}
    parts = [f"{shape}: {_attention_text(rows)}" for shape, rows in by_shape.items()]
    yield Result(
        part="attention",
        status="failed" if report.failures or not report.rows else "passed",
        told="; ".join([*report.failures, *parts]),
        figures={**report.facts, "rows": report.rows, "failures": report.failures},
    )


def _attention_text(rows: Sequence[Mapping[str, object]]) -> str:
    flashinfer = [row["median_us"] for row in rows if row["backend"] == "flashinfer"]
    texts = []
    for row in rows:
        median = row["median_us"]
        texts.append(f"{row['backend']} ({row['mode']}) {median} us, {_speed_text(row)}")
        if flashinfer and row["backend"] != "flashinfer" and isinstance(median, float):
            texts[-1] += f", {median / min(flashinfer):.2f} x flashinfer"  # type: ignore[type-var,operator]
    return ", ".join(texts)


def _speed_text(row: Mapping[str, object]) -> str:
    """Decoding beside the memory's speed, prefill by its arithmetic."""
    times_floor = row["times_floor"]
    return f"{row['gflop_per_s']} GFLOP/s" if times_floor is None else f"{times_floor} x floor"


def decode(job: Job) -> Iterator[Result]:
    """An engine with its defaults, which on a GPU are CUDA graphs, then without them."""
    folder = write_model(job, "qwen3", _LARGE, "bfloat16") if job.on_gpu else _small_model(job)
    rates, log = _rates(job, folder, "executor.enforce_eager=false")
    yield Result(
        part="decode", backend=job.backend, told=_rates_text(rates), figures={"tokens_per_s": rates, "log": log}
    )
    if not job.on_gpu:
        yield Result(part="graphs", backend=job.backend, status="skipped", told="needs a GPU")
        return
    if why := [line for line in log if line.startswith("no CUDA graphs")]:
        yield Result(part="graphs", backend=job.backend, status="skipped", told=why[0])
        return
    eager, _ = _rates(job, folder, "executor.enforce_eager=true")
    with_graphs, without = (
        generate(_small_model(job), job.overrides(f"attention={job.backend}", "model.dtype=bfloat16", f"{key}={value}"))
        for key, value in (("executor.enforce_eager", "false"), ("executor.enforce_eager", "true"))
    )
    says, is_right = compare(without, with_graphs, 0.3)
    gains = {shape: round(rate / eager[shape], 2) for shape, rate in rates.items()}
    yield Result(
        part="graphs",
        backend=job.backend,
        status="passed" if is_right else "failed",
        told=f"times as fast as eager: {_rates_text(gains)}; tokens: {says}",
        figures={"eager_tokens_per_s": eager, "gains": gains, "log": log},
    )


def _rates(job: Job, folder: Path, *more: str) -> tuple[dict[str, float], list[str]]:
    """Output tokens a second by shape, and what the worker logged."""
    from tokenyard.bench.generation import run_throughput_bench
    from tokenyard.bench.settings import ThroughputBench
    from tokenyard.launch.compose import load_engine_config
    from tokenyard.launch.overrides import quote_override

    shapes = ("1x16+128", "32x16+128", "128x16+128") if job.on_gpu else ("1x8+8", "4x8+8")
    name = quote_override("model.name", str(folder))
    limits = ("scheduler.max_num_seqs=128", "model.max_model_len=256", *more)
    overrides = job.overrides(name, f"attention={job.backend}", *limits)
    with _logged() as lines:
        rows = run_throughput_bench(ThroughputBench(shapes=shapes), *load_engine_config(overrides))
    return {str(row["shape"]): float(str(row["output_tokens_per_s"])) for row in rows}, lines


def _rates_text(rates: Mapping[str, float]) -> str:
    return ", ".join(f"{shape} {rate:g}" for shape, rate in rates.items())


def memory(job: Job) -> Iterator[Result]:
    """A full engine at a share of the GPU that leaves room to be seen."""
    import torch
    from tokenyard import LLM, SamplingParams

    share, num_requests, num_prompt = 0.5, 256, 1000
    folder = write_model(job, "qwen3", _LARGE, "bfloat16")
    overrides = job.overrides("scheduler.max_num_seqs=256", "scheduler.max_num_batched_tokens=8192")
    with _logged() as lines, LLM(str(folder), gpu_memory_utilization=share, overrides=overrides) as llm:
        prompts = [
            {"prompt_token_ids": [(7 * n + at) % 1000 + 5 for at in range(num_prompt)]} for n in range(num_requests)
        ]
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True), use_tqdm=False)
        free, total = torch.cuda.mem_get_info()
        num_blocks = llm.engine.num_blocks
    used = (total - free) / total
    yield Result(
        part="memory",
        status="passed" if used <= share * 1.01 else "failed",
        told=f"{used:.3f} of the GPU's memory used, {share} allowed; {num_blocks} blocks of {BLOCK_SIZE}",
        figures={"used": round(used, 4), "allowed": share, "gib": round(total / 2**30, 1), "log": lines},
    )


# ---- What the parts share -----------------------------------------------------------------------------------------


def write_model(job: Job, family: str, sizes: Mapping[str, object], dtype: str) -> Path:
    """A random model with a tokenizer of bytes; one that another part has written already is kept."""
    import tokenizers
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    folder = job.scratch / f"{family}-{sizes['hidden_size']}"
    if (folder / "tokenizer_config.json").exists():
        return folder
    torch.manual_seed(5)
    config = CONFIG_MAPPING[family].from_dict({"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **sizes})
    with torch.device(job.device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(_GAIN)
    model.save_pretrained(folder)
    del model, parameter
    if job.on_gpu:
        torch.cuda.empty_cache()  # an engine in this process would count it as somebody else's
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def _small_model(job: Job) -> Path:
    return write_model(job, "qwen3", {**_SMALL, **FAMILIES["qwen3"]}, "float32")


def generate(folder: Path, overrides: Sequence[str]) -> list[RequestOutput]:
    """Greedy answers of requests that join one after the other, some with a prefix in common."""
    from tokenyard import LLM, SamplingParams

    shared = [(17 * at) % 250 + 3 for at in range(70)]
    own = [[(29 * number + 7 * at) % 250 + 3 for at in range(1 + 13 * number)] for number in range(4)]
    prompts = [{"prompt_token_ids": tokens} for tokens in (*own, *(shared + tokens for tokens in own))]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
    limits = ["scheduler.max_num_seqs=6", "scheduler.max_num_batched_tokens=96", "kv_cache.num_blocks=40"]
    with LLM(str(folder), max_model_len=256, overrides=[*limits, *overrides]) as llm:
        return llm.generate(prompts, params, use_tqdm=False)


@contextlib.contextmanager
def _logged() -> Iterator[list[str]]:
    """What the worker logs at its start: graphs, memory, the backend."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    source = logging.getLogger("tokenyard.worker")
    level = source.level
    source.addHandler(handler)
    source.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        source.removeHandler(handler)
        source.setLevel(level)


def show(result: Result) -> None:
    """For the process that waits: of each part and backend the last line counts."""
    print(json.dumps(asdict(result)), flush=True)


PARTS: Mapping[str, Callable[[Job], Iterator[Result]]] = {
    "contract": contract,
    "equality": equality,
    "attention": attention,
    "decode": decode,
    "memory": memory,
}


# ---- The process that starts the others ---------------------------------------------------------------------------


def environment(scratch: Path) -> dict[str, str]:
    """With the checkout's packages first, and with metadata, which is where plugins are found."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    site = scratch / "site"
    folder = site / f"{project['name']}-{project['version']}.dist-info"
    folder.mkdir(parents=True)
    head = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (folder / "METADATA").write_text(head)
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    lines = [[f"[{group}]", *(f"{name} = {value}" for name, value in of.items())] for group, of in groups.items()]
    (folder / "entry_points.txt").write_text("\n".join(itertools.chain.from_iterable(lines)) + "\n")
    paths = [str(site), *(str(ROOT / source) for source in SOURCES), os.environ.get("PYTHONPATH", "")]
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENYARD_CACHE": str(scratch / "cache")}
    return {**os.environ, **quiet, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def missing(part: str) -> list[str]:
    """Packages that a part needs and that are not installed, by their names in an index."""
    absent = [name for name in NEEDS[part] if importlib.util.find_spec(name) is None]
    return [INSTALL_AS.get(name, name) for name in absent]


class Runner:
    """Runs parts in processes of their own until the time is over."""

    def __init__(self, scratch: Path, minutes: float) -> None:
        self._scratch = scratch
        self._deadline = time.monotonic() + 60 * minutes
        self._environment = environment(scratch)

    @property
    def left(self) -> float:
        """Seconds."""
        return self._deadline - time.monotonic()

    def run(self, part: str, backend: str, device: str, share: float) -> list[Result]:
        """What a part told; `share` is the part of the time left that it may take."""
        limit = self.left * share
        if limit < LEAST_SECONDS:
            return [Result(part=part, backend=backend, status="skipped", told="no time is left")]
        job = Job(part, backend, device, limit, self._scratch)
        command = [sys.executable, str(Path(__file__).resolve()), "--child", json.dumps([*job[:4], str(job.scratch)])]
        began = time.monotonic()
        log = self._scratch / "stderr.txt"
        with log.open("w") as errors:
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=self._environment, text=True)
            try:
                out, problem = child.communicate(timeout=limit)[0], ""
            except subprocess.TimeoutExpired:
                child.kill()
                out, problem = child.communicate()[0], f"stopped after {limit:.0f} s"
        if child.returncode and not problem:
            last = (log.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
            problem = f"ended with code {child.returncode}: {last}"
        return _collected(part, backend, out, problem, time.monotonic() - began)


def _collected(part: str, backend: str, out: str, problem: str, seconds: float) -> list[Result]:
    """The last result of each part in a process's output, and what ended it."""
    lines = [line for line in out.splitlines() if line.startswith('{"part"')]
    found = {result.part: result for result in (Result(**json.loads(line)) for line in lines)}
    first = found.setdefault(part, Result(part=part, backend=backend, status="unfinished"))
    first.seconds = round(seconds, 1)
    if problem:
        first.told = "; ".join(filter(None, [first.told, problem]))
        first.status = "unfinished" if problem.startswith("stopped") and first.status != "failed" else "failed"
    return list(found.values())


class Task(NamedTuple):
    """A part to run, or why not."""

    part: str
    backend: str
    why_not: str = ""


def tasks(facts: Mapping[str, object], parts: Sequence[str], names: Sequence[str] | None) -> Iterator[Task]:
    """In order; a backend that cannot run has one row for all parts."""
    reasons_of: Mapping[str, Sequence[str]] = facts["backends"]  # type: ignore[assignment]
    chosen = [name for name in reasons_of if names is None or name in names]
    yield from (Task("all", name, "; ".join(reasons_of[name])) for name in chosen if reasons_of[name])
    for part in parts:
        absent = missing(part)
        why_not = f"not installed: {', '.join(absent)}" if absent else ""
        if part == "memory" and facts["device"] != "cuda":
            why_not = "needs a GPU"
        if why_not or part in ("attention", "memory"):
            yield Task(part, "", why_not)
            continue
        yield from (
            Task(part, name) for name in chosen if not reasons_of[name] and (part, name) != ("equality", BASELINE)
        )


def check(runner: Runner, parts: Sequence[str], names: Sequence[str] | None) -> tuple[dict[str, object], list[Result]]:
    """Facts about the machine, and everything that could be found out."""
    (seen,) = runner.run("machine", "", "", 0.3)
    if seen.status != "passed":
        return {}, [seen]
    known = cast("Mapping[str, object]", seen.figures["backends"])
    if unknown := [name for name in names or () if name not in known]:
        told = f"no backend is called {', '.join(unknown)}; there are: {', '.join(known)}"
        return seen.figures, [Result(part="machine", status="failed", told=told)]
    planned = list(tasks(seen.figures, parts, names))
    results: list[Result] = []
    for number, (part, backend, why_not) in enumerate(planned):
        if why_not:
            results.append(Result(part=part, backend=backend, status="skipped", told=why_not))
            continue
        later = sum(WEIGHTS[task.part] for task in planned[number:] if not task.why_not)
        print(f"{part} {backend} ({runner.left:.0f} s left)", file=sys.stderr, flush=True)
        device, share = str(seen.figures["device"]), WEIGHTS[part] / later
        results += runner.run(part, backend, device, share if device == "cuda" else max(share, CPU_SHARE))
    return seen.figures, results


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=6.0, help="all together")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything there")
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), default=tuple(PARTS), metavar="PART")
    parser.add_argument("--backends", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not 0 < given.minutes < math.inf:
        parser.error(f"--minutes takes a number above 0, got {given.minutes}")
    if given.json is not None:  # found out now, not after six minutes
        try:
            given.json.open("a", encoding="utf-8").close()
        except OSError as error:
            parser.error(f"--json {given.json} cannot be written: {error.strerror}")
    return given


def main() -> int:
    given = arguments()
    if given.child:
        part, backend, device, seconds, scratch = json.loads(given.child)
        for result in {**PARTS, "machine": machine}[part](Job(part, backend, device, seconds, Path(scratch))):
            show(result)
        return 0
    began = time.monotonic()
    absent = {part: names for part in given.only if (names := missing(part))}
    with tempfile.TemporaryDirectory() as scratch:
        facts, results = check(Runner(Path(scratch), given.minutes), given.only, given.backends)
    report = {
        "benchmark": "gpu_check",
        **facts,
        "missing": absent,
        "seconds": round(time.monotonic() - began, 1),
        "results": [asdict(result) for result in results],
    }
    if given.json is not None:
        given.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(table(results))
    told = {name: value for name, value in report.items() if name not in ("results", "backends")}
    print(json.dumps(told), file=sys.stderr)
    return 1 if any(result.status == "failed" for result in results) else 0


def table(results: Sequence[Result]) -> str:
    """A line for each result."""
    rows = [("part", "backend", "status", "seconds", "what was seen")]
    rows += [(one.part, one.backend or "-", one.status, f"{one.seconds:.0f}", one.told) for one in results]
    widths = [max(len(row[at]) for row in rows) for at in range(4)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row[:4], widths, strict=True)), row[4]]) for row in rows
    )


if __name__ == "__main__":
    sys.exit(main())
