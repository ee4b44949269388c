"""Every family that runs: the engine's greedy tokens and logits are transformers', however the work is cut and placed.

The weights are random and large: what a token attends to changes its logits by several per cent and more, which the
first test shows, so that equal tokens mean right positions, windows and borders between sequences.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import pytest
import torch
import transformers
from family_models import prompt_of, transformers_greedy
from lone_logits import logits_of
from model_table import PAGE, how_it_runs, with_table
from teacher_forcing import BOUND, bfloat16_differences
from tiny_models import MAX_LENGTH, REFUSED, RUNNING, WINDOW, write_model
from tokenyard import LLM, SamplingParams
from tokenyard.errors import ModelLoadError
from tokenyard.kv_cache import LRUEviction
from tokenyard.model.files import ModelFiles, resolve_model
from tokenyard.model.loader import adapter_reasons, load_model
from tokenyard.model.self_check import PackedReference, Part
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.gemma2 import modeling_gemma2

if TYPE_CHECKING:
    from tokenyard.model.causal_lm import CausalLM, PagedAttention

CPU = torch.device("cpu")
NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
SHARED = prompt_of(2 * WINDOW, seed=99)
PROMPTS = [
    *(prompt_of(length, seed=length) for length in (1, WINDOW, 3 * WINDOW + 1)),
    *(SHARED + prompt_of(length, seed=length) for length in (2, 9)),
]
FOUND_BY_LOADING = {refusal.case.model_type for refusal in REFUSED.values()} | {"gemma3n"}
FolderOf = Callable[[str], Path]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path) -> FolderOf:
    """A function that gives the folder of a case of `RUNNING`, written when it is first asked for."""

    @cache
    def folder_of(name: str) -> Path:
        return write_model(tmp_path_factory.mktemp("family"), RUNNING[name], tiny_llama_dir)

    return folder_of


@cache
def greedy(folder: Path) -> list[list[int]]:
    """What transformers generates after each prompt alone, with eager attention."""
    return [transformers_greedy(folder, prompt, NUM_TOKENS) for prompt in PROMPTS]


@cache
def eager(folder: Path) -> torch.nn.Module:
    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    return model


@torch.inference_mode()
def eager_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [T, V] of one sequence."""
    logits: torch.Tensor = eager(folder)(tokens[None], use_cache=False).logits[0]
    return logits.float()


class Batch(NamedTuple):
    """Packed rows, and which sequence each belongs to."""

    tokens: torch.Tensor
    positions: torch.Tensor
    parts: list[Part]


@torch.inference_mode()
def packed_logits(model: CausalLM, batch: Batch) -> torch.Tensor:
    attention = PackedReference(model.shape.layers)
    attention.begin_step(batch.parts)
    rows = torch.arange(len(batch.tokens))
    return model.forward(batch.tokens, batch.positions, rows, cast("PagedAttention", attention))


def difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest logit."""
    return float((logits - expected).abs().max() / expected.abs().max())


def changed(batch: Batch) -> Iterable[Batch]:
    """Batches that a wrong engine would compute: without the border, and with the second sequence's positions off."""
    tokens, positions, _ = batch
    yield Batch(tokens, positions, [Part(0, 0, len(tokens))])
    yield Batch(tokens, torch.cat((positions[:20], positions[20:] * 2)), batch.parts)


@pytest.mark.parametrize("name", RUNNING)
def test_packed_logits_are_those_of_eager_attention_alone_and_mistakes_would_show(name: str, family: FolderOf) -> None:
    folder = family(name)
    model = load_model(resolve_model(str(folder)), dtype=torch.float32, device=CPU)
    first, second = torch.tensor(prompt_of(20, seed=1)), torch.tensor(prompt_of(30, seed=2))
    expected = torch.cat((eager_logits(folder, first), eager_logits(folder, second)))
    positions = torch.cat((torch.arange(20), torch.arange(30)))
    batch = Batch(torch.cat((first, second)), positions, [Part(0, 0, 20), Part(1, 20, 50)])
    assert difference(packed_logits(model, batch), expected) < 1e-5
    for wrong in changed(batch):
        assert (packed_logits(model, wrong) - expected).abs().max() > 0.1


@pytest.mark.parametrize("name", RUNNING)
def test_greedy_tokens_are_transformers_in_chunks_and_from_a_warm_prefix_cache(name: str, family: FolderOf) -> None:
    folder = family(name)
    assert len({tuple(tokens) for tokens in greedy(folder)}) > 1
    overrides = ["kv_cache.num_blocks=300", "scheduler.max_num_seqs=4"]
    with LLM(folder, block_size=4, max_num_batched_tokens=7, overrides=overrides) as llm:
        for is_warm in (False, True):
            outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == greedy(folder)
            assert not is_warm or all(output.num_cached_tokens for output in outputs[1:])


class ShuffledEviction(LRUEviction):
    """Hands out free blocks in no order, and keeps which."""

    handed_out: list[int]

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        order = super().pop(num_blocks)
        random.Random(3).shuffle(order)
        self.append(order)
        self.handed_out = []

    def pop(self, count: int) -> list[int]:
        block_ids = super().pop(count)
        self.handed_out += block_ids
        return block_ids


@pytest.fixture
def shuffled(monkeypatch: pytest.MonkeyPatch) -> list[ShuffledEviction]:
    """From now on pools have their blocks in no order; the free lists that were made."""
    made: list[ShuffledEviction] = []

    def make(num_blocks: int) -> ShuffledEviction:
        made.append(ShuffledEviction(num_blocks))
        return made[-1]

    monkeypatch.setattr("tokenyard.kv_cache.LRUEviction", make)
    return made


@pytest.mark.parametrize("name", RUNNING)
def test_tokens_and_prompt_logprobs_are_transformers_whole_and_in_shuffled_blocks(
    name: str, family: FolderOf, shuffled: list[ShuffledEviction]
) -> None:
    folder = family(name)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, prompt_logprobs=0, logprobs=0)
    with LLM(folder, block_size=4, overrides=["kv_cache.num_blocks=200"]) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    blocks = [block for free in shuffled for block in free.handed_out]
    assert sum(abs(after - before) == 1 for before, after in itertools.pairwise(blocks)) < len(blocks) / 4
    assert [output.outputs[0].token_ids for output in outputs] == greedy(folder)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        answer = output.outputs[0]
        tokens = torch.tensor([*prompt, *answer.token_ids])
        logits = eager_logits(folder, tokens)
        expected = logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
        assert output.prompt_logprobs is not None
        assert answer.logprobs is not None
        rows = [*output.prompt_logprobs[1:], *answer.logprobs]
        actual = [row[token].logprob for row, token in zip(rows, tokens[1:].tolist(), strict=True) if row is not None]
        assert (torch.tensor(actual) - expected).abs().max() < 1e-4 * logits.abs().max()


def rounds_alike(folder: Path, model: CausalLM) -> bool:
    """Whether a bfloat16 model is as near to float32 as transformers' is.

    Rounding sends a token that is near a tie to other experts, in one of two equally good models and not in the other,
    and all later rows see it. That needs bad luck, a mistake shows with every prompt: so the best of three counts.
    """
    prompts = (prompt_of(16, seed=seed) for seed in (3, 4, 5))
    results = (bfloat16_differences(folder, prompt, 24, lambda ids: logits_of(model, ids)) for prompt in prompts)
    return any(result.ours <= BOUND * result.transformers for result in results)


@pytest.mark.parametrize("name", RUNNING)
@torch.inference_mode()
def test_bfloat16_rounds_no_more_than_transformers(name: str, family: FolderOf) -> None:
    folder = family(name)
    assert rounds_alike(folder, load_model(resolve_model(str(folder)), dtype=torch.bfloat16, device=CPU))


@torch.inference_mode()
def test_a_mistake_in_attention_is_no_rounding(family: FolderOf) -> None:
    folder = family("mixtral")
    files = resolve_model(str(folder))
    wrong = replace(files, config={**files.config, "sliding_window": WINDOW + 1})
    assert not rounds_alike(folder, load_model(wrong, dtype=torch.bfloat16, device=CPU))


@pytest.mark.parametrize("name", REFUSED)
def test_what_only_loading_finds_out_is_refused_with_the_reason(
    name: str, tmp_path: Path, tiny_llama_dir: Path
) -> None:
    case, reason, _ = REFUSED[name]
    files = resolve_model(str(write_model(tmp_path / "model", case, tiny_llama_dir)))
    with pytest.raises(ModelLoadError, match=reason) as caught:
        load_model(files, dtype=torch.float32, device=CPU)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["gemma3", "got_ocr2", "fuyu", "emu3", "moss_transcribe_diarize"])
def test_length_limit_eos_and_dtype_may_stand_in_the_text_models_config(name: str, family: FolderOf) -> None:
    files = resolve_model(str(family(name)))
    outer = {key: value for key, value in files.config.items() if key not in ("eos_token_id", "dtype")}
    nested = {**files.text_config, "dtype": "bfloat16"}
    files = replace(files, config={**outer, "text_config": nested}, generation_config={})
    assert (files.max_model_len, files.eos_token_ids, files.torch_dtype) == (MAX_LENGTH, (2,), "bfloat16")


def test_a_family_that_hides_what_it_computes_is_refused_with_the_measured_difference(
    family: FolderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that does not pass on its soft cap: with transformers' own attention it has one."""
    original = modeling_gemma2.eager_attention_forward

    def with_cap(*args: Any, softcap: float | None = None, **keywords: Any) -> object:
        return original(*args, softcap=0.5, **keywords)

    monkeypatch.setattr(modeling_gemma2, "eager_attention_forward", with_cap)
    with pytest.raises(ModelLoadError, match=r"differ by \d\.\d+ of their size, allowed is 0.0001; its attention"):
        load_model(resolve_model(str(family("gemma2"))), dtype=torch.float32, device=CPU)


@pytest.mark.parametrize(("model_type", "architecture"), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())
def test_a_bare_config_of_any_model_type_has_an_answer_and_no_traceback(
    model_type: str, architecture: str, tmp_path: Path
) -> None:
    config = {"model_type": model_type, "architectures": [architecture]}
    files = ModelFiles(name=model_type, path=tmp_path, format="safetensors", config=config, generation_config={})
    reasons = adapter_reasons(files)
    assert all(reason and "\n" not in reason for reason in reasons)
    assert reasons or how_it_runs(model_type) in ("adapter", "fast decoder") or model_type in FOUND_BY_LOADING


@pytest.mark.parametrize("model_type", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_the_docs_say_of_every_model_type_how_it_runs_or_why_not(model_type: str) -> None:
    how = how_it_runs(model_type)
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("|") and f" `{model_type}`" in line]
    assert [row.split(" | ")[0] for row in rows] == [f"| {how}"], "write it: python tests/helpers/model_table.py"


def test_the_table_is_as_it_would_be_written_now() -> None:
    assert with_table(PAGE.read_text()) == PAGE.read_text(), "write it: python tests/helpers/model_table.py"
