"""LLM.enqueue and wait_for_completion, scheduling hints, progress bars, and one bad request among many."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenyard import LLM, ComponentDescriptor, SamplingParams
from tokenyard.config import LogitsProcessorConfig
from tokenyard.errors import ModelLoadError, UnsupportedError, UserError, ValidationError
from tokenyard.interfaces import LogitsProcessor, LogitsRequest, RowLogitsProcessor
from tokenyard.launch.compose import load_engine_config
from tokenyard.outputs import RequestOutput
from tokenyard.testing import catalogue_with

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
OVERRIDES = ["kv_cache.num_blocks=64"]


@pytest.fixture(scope="module", params=["in", "own"])
def llm(request: pytest.FixtureRequest, tiny_llama_dir: Path) -> Iterator[LLM]:
    overrides = [*OVERRIDES, f"engine.process={request.param}"]
    with LLM(tiny_llama_dir, dtype="float32", max_model_len=128, overrides=overrides) as made:
        yield made
        stats = made.engine.core.stats()
        assert (stats.num_free_blocks, stats.num_running, stats.num_waiting) == (64, 0, 0)


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_what_is_enqueued_comes_back_in_that_order_whatever_runs_between(llm: LLM) -> None:
    alone = {prompt: llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].text for prompt in ("hi", "he", "t")}
    first = llm.enqueue(["hi", "he"], [dataclasses.replace(GREEDY, max_tokens=20), GREEDY])
    second = llm.enqueue("t", GREEDY, priority=3)
    assert texts(llm.generate("he", GREEDY, use_tqdm=False)) == [alone["he"]]
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == [*first, *second]
    assert [output.prompt for output in outputs] == ["hi", "he", "t"]
    assert texts(outputs)[1:] == [alone["he"], alone["t"]]
    assert len(outputs[0].outputs[0].token_ids) == 20
    assert llm.wait_for_completion(RequestOutput) == []


def test_nothing_is_enqueued_when_one_of_them_is_refused(llm: LLM) -> None:
    with pytest.raises(ValidationError):
        llm.enqueue(["hi"] * 63 + [[10**6]], GREEDY)
    with pytest.raises(ValidationError):
        llm.enqueue(["hi", "he"], [GREEDY, SamplingParams(allowed_token_ids=[10**6])])
    with pytest.raises(UnsupportedError, match="output_type"):
        llm.wait_for_completion(int)  # type: ignore[arg-type]
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_e4_an_aborted_request_still_comes_with_its_tokens_so_far(llm: LLM) -> None:
    def until_three(piece: str) -> bool:
        seen.append(piece)
        return len(seen) < 3

    seen: list[str] = []
    output = llm.stream(llm.tokenize("hi"), dataclasses.replace(GREEDY, max_tokens=50), until_three)
    assert output.outputs[0].finish_reason == "abort"
    assert output.finished
    assert len(output.outputs[0].token_ids) == 3


def test_a_stream_tells_of_tokens_and_not_of_steps_that_only_read_the_prompt(tiny_llama_dir: Path) -> None:
    params = dataclasses.replace(GREEDY, max_tokens=30)
    with LLM(tiny_llama_dir, dtype="float32", max_num_seqs=4, max_num_batched_tokens=4, overrides=OVERRIDES) as small:
        pieces: list[str] = []
        output = small.stream(small.tokenize("hi the hi the hi the hi"), params, pieces.append)
        assert len(output.prompt_token_ids) > 8
        assert len(pieces) == len(output.outputs[0].token_ids) == 30
        assert "".join(pieces) == output.outputs[0].text


@pytest.mark.parametrize("method", ["encode", "embed", "classify", "score", "beam_search", "sleep", "collective_rpc"])
def test_methods_that_are_not_there_yet_refuse_by_name(llm: LLM, method: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"LLM\.{method} is not available"):
        getattr(llm, method)("x")


def test_names_that_nobody_has_are_attribute_errors(llm: LLM) -> None:
    assert not hasattr(llm, "nothing_of_this_name")


class Bar:
    """A user's progress bar."""

    def __init__(self, **arguments: object) -> None:
        self.arguments, self.count, self.is_closed, self.text = arguments, 0, False, ""

    def update(self, n: int) -> None:
        self.count += n

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        self.text = text

    def close(self) -> None:
        self.is_closed = True


def test_a_bar_of_the_users_own_counts_requests_and_tells_tokens_a_second(llm: LLM) -> None:
    bars: list[Bar] = []

    def make(**arguments: object) -> Bar:
        bars.append(Bar(**arguments))
        return bars[-1]

    llm.enqueue("he", GREEDY)
    llm.enqueue("he", dataclasses.replace(GREEDY, max_tokens=90))
    llm.generate(["hi"] * 5, GREEDY, use_tqdm=make)  # the first of those ends along with them
    llm.wait_for_completion(use_tqdm=make)
    assert [(bar.arguments["total"], bar.count, bar.is_closed) for bar in bars] == [(5, 5, True), (1, 1, True)]
    assert "output tokens/s" in bars[0].text
    with pytest.raises(ZeroDivisionError):
        llm.generate("hi", GREEDY, use_tqdm=lambda **arguments: 1 / 0)
    assert texts(llm.generate("hi", GREEDY, use_tqdm=False))


def test_hints_are_checked_before_anything_is_queued(llm: LLM) -> None:
    with pytest.raises(ValidationError, match="deadline"):
        llm.generate(["hi", "he"], GREEDY, scheduling=[None, {"dead": 3}], use_tqdm=False)
    with pytest.raises(ValidationError, match="scheduling has 1 entries for 2"):
        llm.generate(["hi", "he"], GREEDY, scheduling=[None], use_tqdm=False)
    (output,) = llm.generate("hi", GREEDY, scheduling={"client": "me", "slo": {"ttft": 1.5}}, use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"


def test_a_deadline_given_as_a_hint_ends_the_request(llm: LLM) -> None:
    long = dataclasses.replace(GREEDY, max_tokens=100)
    (late, other) = llm.generate(["hi", "he"], long, scheduling=[{"deadline": 1e-9}, None], use_tqdm=False)
    assert (late.outputs[0].finish_reason, late.outputs[0].stop_reason) == ("abort", "deadline")
    assert len(other.outputs[0].token_ids) == 100


def test_special_tokens_are_added_unless_the_caller_says_not(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("hi", add_special_tokens=False)
    (output,) = llm.generate("hi", GREEDY, tokenization_kwargs={"add_special_tokens": False}, use_tqdm=False)
    assert output.prompt_token_ids == ids
    with pytest.raises(ValidationError, match="add_special_tokens"):
        llm.generate("hi", GREEDY, tokenization_kwargs={"truncation": True}, use_tqdm=False)


def test_chat_takes_a_template_tools_and_an_open_last_message(llm: LLM) -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if tools %}{{ tools[0].name }}{% endif %}"
    )
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "he"}]
    (output,) = llm.chat(
        chat, GREEDY, use_tqdm=False, chat_template=template, add_generation_prompt=False, tools=[{"name": "t"}]
    )
    assert llm.get_tokenizer().decode(output.prompt_token_ids) == "[user]hi[assistant]het"
    (output,) = llm.chat(
        chat,
        GREEDY,
        use_tqdm=False,
        chat_template=template,
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert llm.get_tokenizer().decode(output.prompt_token_ids) == "[user]hi[assistant]he"
    with pytest.raises(UserError, match="chat_template_content_format"):
        llm.chat(chat, GREEDY, chat_template_content_format="openai")


class FailsForSome(LogitsProcessor):
    """Raises at the third token of requests that ask for it."""

    def start(self, request: LogitsRequest) -> RowLogitsProcessor | None:
        if not (request.params.extra_args or {}).get("fails"):
            return None

        def process(logits: torch.Tensor, output_token_ids: object) -> None:
            if len(output_token_ids) == 2:  # type: ignore[arg-type]
                raise ValueError("no third token")

        return process


@pytest.mark.parametrize("engine", ["sync", "overlap"])
def test_one_bad_request_among_64_fails_alone_with_its_own_error(
    tiny_llama_dir: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptor = ComponentDescriptor(
        component_kind="logits_processor",
        name="fails_for_some",
        api_version=(1, 3),
        factory=lambda options, context: FailsForSome(),
    )
    catalogue = catalogue_with(descriptor)
    monkeypatch.setattr("tokenyard.worker.worker.load_catalogue", lambda plugins: catalogue)  # it loads for itself
    overrides = [f"model.name={tiny_llama_dir}", "model.dtype=float32", "model.max_model_len=128", f"engine={engine}"]
    prompts = [[1 + (index * 7 + step) % 90 for step in range(3 + index % 9)] for index in range(64)]
    params = [SamplingParams(temperature=index % 2, seed=index, max_tokens=8, ignore_eos=True) for index in range(64)]
    bad = [*params]
    bad[20] = dataclasses.replace(params[20], extra_args={"fails": True})
    config, _ = load_engine_config([*overrides, "kv_cache.num_blocks=400"])
    config = dataclasses.replace(config, logits_processors=(LogitsProcessorConfig(name="fails_for_some"),))
    with LLM.from_parts(config, catalogue) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
        found = llm.generate(prompts, bad, use_tqdm=False)
        stats = llm.engine.core.stats()
        assert stats.num_free_blocks == stats.num_total_blocks
    assert found[20].outputs[0].finish_reason == "error"
    assert "no third token" in str(found[20].error)
    assert [output.outputs[0].token_ids for index, output in enumerate(found) if index != 20] == [
        output.outputs[0].token_ids for index, output in enumerate(expected) if index != 20
    ]


def test_d11_max_tokens_0_is_refused_however_often_and_holds_no_block(llm: LLM) -> None:
    for _ in range(1000):
        with pytest.raises(ValidationError, match="max_tokens=0"):
            llm.generate("hi", SamplingParams(max_tokens=0), use_tqdm=False)
    stats = llm.engine.core.stats()
    assert (stats.num_free_blocks, stats.num_waiting) == (64, 0)


@pytest.mark.parametrize(
    "prompt",
    [{"prompt_embeds": [[0.5]]}, {"prompt": "hi", "prompt_embeds": "x"}, {"prompt_embeds": torch.zeros(2, 48)}],
)
def test_d16_embeddings_as_prompts_are_refused_by_name(llm: LLM, prompt: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="prompt_embeds"):
        llm.generate(prompt, GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    "asked", [{"json": {"type": "nonsense"}}, {"regex": "(a+)+b"}, {"regex": "("}, {"grammar": "x"}]
)
def test_d2_d3_d4_d5_structured_outputs_are_refused_by_name_before_anything_is_compiled(asked: object) -> None:
    with pytest.raises(UnsupportedError, match="structured_outputs"):
        SamplingParams(structured_outputs=asked)


def test_b12_an_architecture_that_nobody_knows_is_one_clear_error(tmp_path: Path, tiny_llama_dir: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama_dir, folder)
    config = json.loads((folder / "config.json").read_text())
    for changes in (
        {"architectures": ["OsSystemForCausalLM"], "model_type": "os_system"},
        {"architectures": ["Nobody"]},
    ):
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(ModelLoadError) as caught:
            LLM(folder)
        assert "\n" not in str(caught.value)
        assert changes["architectures"][0] in str(caught.value) or "os_system" in str(caught.value)


def test_sequences_of_any_length_are_refused_by_their_length(llm: LLM) -> None:
    for prompts in (range(10**12), [range(10**12)], [range(10**30)], {"prompt_token_ids": range(10**12)}):
        with pytest.raises(ValidationError, match=r"the prompt has \d+ tokens"):
            llm.generate(prompts, GREEDY, use_tqdm=False)
    for field in ("stop_token_ids", "allowed_token_ids", "stop", "bad_words"):
        with pytest.raises(ValidationError, match=rf"{field} has \d+ (token ids|strings); at most"):
            SamplingParams(**{field: range(10**12)})


def test_with_overlap_no_step_is_left_in_flight_when_the_last_request_has_ended(tiny_llama_dir: Path) -> None:
    with LLM(tiny_llama_dir, dtype="float32", max_model_len=128, engine="overlap", overrides=OVERRIDES) as overlapping:
        long = dataclasses.replace(GREEDY, max_tokens=50)
        (whole,) = overlapping.generate("hi", long, use_tqdm=False)
        stops = dataclasses.replace(long, stop=[whole.outputs[0].text[3:6]])  # seen when the next step runs already
        (output,) = overlapping.generate("hi", stops, use_tqdm=False)
        assert output.outputs[0].finish_reason == "stop"
        assert not overlapping.engine.core.has_requests()
