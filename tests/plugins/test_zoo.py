"""What holds of every policy that comes with Tokenyard."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import re
from collections.abc import AsyncIterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
from tokenyard import LLM, AsyncLLM, PolicyDescriptor, RequestOutput, SamplingParams
from tokenyard.errors import ConfigError
from tokenyard.interfaces import SchedulingPolicy
from tokenyard.plugins import load_catalogue
from tokenyard.scheduler.policy_calls import DECISION_POINTS
from tokenyard.testing import EngineHarness, catalogue_with

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "reference" / "policies"
WRITE_A_POLICY = ROOT / "docs" / "how-to" / "write-a-policy.md"
MOST_LINES = 80  # without docstrings

ZOO = {entry.descriptor.name: entry for entry in load_catalogue().entries() if entry.kind == "policy"}
OWN = sorted(name for name, entry in ZOO.items() if entry.provider.distribution == "tokenyard")
NEED_LATENCY = ["scorpio", "stall-free"]
LATENCY = ("latency=linear", "latency.per_step=0.01", "latency.per_token=0.001")

POOL = (
    "kv_cache.num_blocks=14",
    "kv_cache.block_size=4",
    "model.max_model_len=48",
    "model.dtype=float32",
    "attention=torch_native",
    "scheduler.max_num_seqs=5",
    "scheduler.max_num_batched_tokens=16",
)
PROMPTS = [[5 + (7 * number + index) % 60 for index in range(3 + 5 * (number % 4))] for number in range(8)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


def chosen(name: str) -> list[str]:
    """Overrides that choose a policy with its defaults, and what it cannot do without."""
    return [f"scheduler={name}", *(LATENCY if name in NEED_LATENCY else ())]


def module_of(name: str) -> Path:
    spec = find_spec(f"tokenyard_plugins.{ZOO[name].provider.entry_point}")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin)


def num_lines(source: str) -> int:
    """Of a module, without its docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    count = len(source.splitlines())
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            count -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
    return count


def test_the_zoo_is_what_was_promised() -> None:
    promised = (
        "fcfs priority sjf srpt mlfq las plas hrrn lpm dfs-weight vtc weighted-vtc dlpm wfq edf scorpio stall-free "
        "least-computed cost-aware random longest-first"
    )
    assert set(promised.split()) <= set(OWN)


@pytest.mark.parametrize("name", OWN)
def test_a_policy_is_a_small_file_with_a_config(name: str) -> None:
    assert num_lines(module_of(name).read_text(encoding="utf-8")) <= MOST_LINES
    config = (ROOT / "configs" / "scheduler" / f"{name}.yaml").read_text(encoding="utf-8")
    assert f"name: {name}" in config
    assert config.startswith("# ")


@pytest.mark.parametrize("name", OWN)
def test_a_policy_has_a_page_that_names_its_options_and_is_in_the_index(name: str) -> None:
    page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    for option in dataclasses.fields(ZOO[name].descriptor.options_type):
        assert f"`scheduler.policy.{option.name}`" in page
    assert f"]({name}.md)" in (PAGES / "index.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", OWN)
def test_plain_defaults_work_or_say_what_is_missing(name: str) -> None:
    if name in NEED_LATENCY:
        with pytest.raises(ConfigError, match=rf"{name} .*latency=linear"):
            EngineHarness([f"scheduler={name}"])
    with EngineHarness([*chosen(name), "kv_cache.num_blocks=12", "kv_cache.block_size=4"]) as engine:
        for number in range(6):
            engine.add(range(10 * number, 10 * number + 9), max_tokens=12, ignore_eos=True)
        engine.run()
        assert all(len(record.output_token_ids) == 12 for record in engine.requests.values())


EXAMPLES = re.findall(r"^```python\n(.*?)^```", WRITE_A_POLICY.read_text(encoding="utf-8"), re.M | re.S)


def policies_in(source: str) -> list[type[SchedulingPolicy]]:
    made: dict[str, object] = {}
    exec(compile(source, str(WRITE_A_POLICY), "exec"), made)
    kinds = [value for value in made.values() if isinstance(value, type) and issubclass(value, SchedulingPolicy)]
    return [kind for kind in kinds if kind is not SchedulingPolicy]


def test_each_decision_point_has_an_example_that_runs() -> None:
    shown: set[str] = set()
    for kind in (kind for source in EXAMPLES for kind in policies_in(source)):
        shown.update(vars(kind))
        takes_context = "__init__" in vars(kind)
        descriptor = PolicyDescriptor(
            name="example",
            api_version=(1, 7),
            factory=lambda options, context, kind=kind, takes=takes_context: kind(*((context,) if takes else ())),
        )
        overrides = ["scheduler=example", "kv_cache.num_blocks=12", "kv_cache.block_size=4", "scheduler.max_num_seqs=3"]
        with EngineHarness(overrides, catalogue=catalogue_with(descriptor)) as engine:
            for number in range(6):
                engine.add(range(10 * number, 10 * number + 9), client=f"c{number % 2}", max_tokens=12, ignore_eos=True)
            engine.run()
            assert all(len(record.output_token_ids) == 12 for record in engine.requests.values())
    assert shown >= DECISION_POINTS - {"token_budget"}  # prefill_budget stands for both


# With a model


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def expected(tiny_llama_dir: Path) -> list[list[int]]:
    """The tokens where there is room for all."""
    with LLM(tiny_llama_dir, overrides=[*POOL, "kv_cache.num_blocks=200"]) as llm:
        return tokens_of(llm.generate(PROMPTS, GREEDY))


@pytest.mark.parametrize("engine", [pytest.param("sync", marks=pytest.mark.slow), "overlap"])
@pytest.mark.parametrize("name", OWN)
def test_a_policy_changes_no_token_of_a_model_in_a_small_pool(
    name: str, engine: str, tiny_llama_dir: Path, expected: list[list[int]]
) -> None:
    with LLM(tiny_llama_dir, overrides=[*POOL, *chosen(name), f"engine={engine}"]) as llm:
        assert tokens_of(llm.generate(PROMPTS, GREEDY)) == expected


async def last(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    return [output async for output in stream][-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_a_policy_survives_streams_that_are_cancelled(
    name: str, tiny_llama_dir: Path, expected: list[list[int]]
) -> None:
    async def abandon(llm: AsyncLLM, prompt: list[int]) -> None:
        async for _ in llm.generate(prompt, GREEDY):
            return

    async def main(llm: AsyncLLM) -> list[RequestOutput]:
        leaving = [asyncio.create_task(abandon(llm, prompt)) for prompt in PROMPTS * 2]
        outputs = await asyncio.gather(*(last(llm.generate(prompt, GREEDY)) for prompt in PROMPTS))
        await asyncio.gather(*leaving)
        return outputs

    llm = AsyncLLM(tiny_llama_dir, overrides=[*POOL, *chosen(name), "engine=overlap"])
    try:
        assert tokens_of(asyncio.run(asyncio.wait_for(main(llm), 60))) == expected
    finally:
        llm.shutdown()
