"""n > 1 on its way out: the choices of a request, each a request of its own to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from step_outputs import ended, prompt_logprobs, step
from tiny_tokenizers import byte_level
from tokenyard import LLM
from tokenyard.engine.input_processor import TokenizedPrompt
from tokenyard.engine.output_processor import OutputProcessor, Update
from tokenyard.sampling_params import RequestOutputKind, SamplingParams

TOKENIZER = byte_level()
A, C = (TOKENIZER.encode(letter)[0] for letter in "ac")
PROMPT = TokenizedPrompt("x", TOKENIZER.encode("x"))


def make(n: int = 3, **options: object) -> OutputProcessor:
    processor = OutputProcessor(TOKENIZER)
    params = SamplingParams(n=n, **options)  # type: ignore[arg-type]
    processor.add("r", PROMPT, params, 1.0, [f"{index}_r" for index in range(n)])
    return processor


# OutputProcessor


def test_e12_choices_are_in_order_and_the_request_ends_with_the_last() -> None:
    processor = make()
    first = processor.process(step([("2_r", [C]), ("0_r", [A])]), now=2.0)
    assert (list(first.touched), list(first.finished)) == (["r"], [])
    second = processor.process(step([("1_r", [C])], finished=[ended("2_r"), ended("1_r")]), now=3.0)
    assert (list(second.touched), list(second.finished)) == (["r"], [])
    assert not processor.output("r").finished
    third = processor.process(step([("0_r", [C])], finished=[ended("0_r")]), now=4.0)
    assert list(third.finished) == ["r"]
    output = processor.pop("r")
    assert [(choice.index, choice.text) for choice in output.outputs] == [(0, "ac"), (1, "c"), (2, "c")]
    assert output.finished
    assert output.metrics is not None
    assert (output.metrics.first_token_time, output.metrics.finished_time) == (2.0, 4.0)


def test_req_05_each_choice_keeps_its_own_text_and_reasons() -> None:
    processor = make(stop="c")
    update = processor.process(
        step([("0_r", [A, A]), ("1_r", [A, C]), ("2_r", [A])], finished=[ended("2_r", "stop", stop_reason=A)]), now=1.0
    )
    assert (list(update.stopped), list(update.finished)) == (["1_r"], [])
    update = processor.process(step([("1_r", [A]), ("0_r", [A])], finished=[ended("0_r")]), now=2.0)
    assert (list(update.stopped), list(update.finished)) == ([], ["r"])
    found = [(choice.text, choice.finish_reason, choice.stop_reason) for choice in processor.pop("r").outputs]
    assert found == [("aaa", "length", None), ("a", "stop", "c"), ("", "stop", A)]


def test_req_05_aborting_and_forgetting_reach_all_choices() -> None:
    processor = make()
    processor.process(step([("0_r", [A]), ("1_r", [A])], finished=[ended("1_r")]), now=1.0)
    assert processor.engine_ids(["r", "unknown"]) == ["0_r", "2_r"]
    processor.abort(["r", "unknown"], now=2.0)
    assert processor.engine_ids(["r"]) == []
    assert [choice.finish_reason for choice in processor.output("r").outputs] == ["abort", "length", "abort"]
    assert processor.num_unfinished == 0
    processor = make()
    processor.forget(["r"])
    assert processor.num_unfinished == 0
    assert processor.is_finished("r")
    assert not processor.process(step([("0_r", [A])]), now=1.0).touched


def test_e4_an_aborted_request_has_the_tokens_so_far() -> None:
    processor = make(output_kind=RequestOutputKind.DELTA)
    processor.process(step([("0_r", [A]), ("1_r", [C])]), now=1.0)
    assert processor.stream_output("r") is not None
    processor.abort(["r"], now=2.0)
    output = processor.stream_output("r")
    assert output is not None
    assert [(choice.index, choice.finish_reason) for choice in output.outputs] == [
        (0, "abort"),
        (1, "abort"),
        (2, "abort"),
    ]
    assert [choice.text for choice in processor.pop("r").outputs] == ["a", "c", ""]


def test_cached_tokens_are_those_that_the_first_choice_found() -> None:
    processor = make()
    processor.process(step([("0_r", [A])], admitted=[("0_r", 16)]), now=1.0)
    processor.process(step([("1_r", [A])], admitted=[("1_r", 48), ("2_r", 48)]), now=1.0)
    output = processor.pop("r")
    assert output.num_cached_tokens == 16
    assert output.metrics is not None
    assert output.metrics.first_scheduled_time == 2.0


def test_the_choices_share_the_prompts_logprobs_whoever_brings_them() -> None:
    processor = OutputProcessor(TOKENIZER)
    prompt = TokenizedPrompt(None, [A, C, A])
    processor.add("r", prompt, SamplingParams(n=2, prompt_logprobs=0), 1.0, ["0_r", "1_r"])
    processor.process(step(prompt=[prompt_logprobs("1_r", 1, [C]), prompt_logprobs("0_r", 1, [C, A])]), now=1.0)
    positions = processor.pop("r").prompt_logprobs or []
    assert [list(position or {}) for position in positions] == [[], [C], [A]]


def test_a_stream_gets_the_prompts_logprobs_once_when_they_are_whole_though_another_choice_is_ahead() -> None:
    processor = OutputProcessor(TOKENIZER)
    prompt = TokenizedPrompt(None, [A, C, A])
    params = SamplingParams(n=2, prompt_logprobs=0, output_kind=RequestOutputKind.DELTA)
    processor.add("r", prompt, params, 1.0, ["0_r", "1_r"])
    sent = []
    for outputs in (
        step([("1_r", [A])], prompt=[prompt_logprobs("0_r", 1, [C])]),
        step([("0_r", [A])], prompt=[prompt_logprobs("0_r", 2, [A])]),
        step([("0_r", [C]), ("1_r", [C])], finished=[ended("0_r"), ended("1_r")]),
    ):
        processor.process(outputs, now=1.0)
        output = processor.stream_output("r")
        assert output is not None
        sent.append(output.prompt_logprobs)
    assert sent[0] is sent[2] is None
    assert [list(position or {}) for position in sent[1] or []] == [[], [C], [A]]


def test_a_choice_that_fails_leaves_the_others_alone() -> None:
    processor = make(n=2)
    processor.process(step([("1_r", [A])], finished=[ended("0_r", "error", error="why")]), now=1.0)
    processor.process(step([("1_r", [C])], finished=[ended("1_r")]), now=1.0)
    output = processor.pop("r")
    assert output.error == "why"
    assert [(choice.text, choice.finish_reason) for choice in output.outputs] == [("", "error"), ("ac", "length")]


# A model


@pytest.fixture(scope="module", params=["sync", "overlap"])
def llm(request: pytest.FixtureRequest, tiny_llama_dir: Path) -> LLM:
    return LLM(str(tiny_llama_dir), engine=request.param, overrides=["kv_cache.num_blocks=200"])


def blocks(llm: LLM) -> tuple[int, int]:
    stats = llm.engine.core.stats()
    return stats.num_running + stats.num_waiting, stats.num_total_blocks - stats.num_free_blocks


def test_e12_choices_of_one_prompt_differ_unless_greedy(llm: LLM) -> None:
    sampled = llm.generate("hi", SamplingParams(n=4, max_tokens=12, ignore_eos=True, seed=3), use_tqdm=False)[0]
    assert [choice.index for choice in sampled.outputs] == [0, 1, 2, 3]
    assert len({tuple(choice.token_ids) for choice in sampled.outputs}) == 4
    greedy = llm.generate("hi", SamplingParams(n=3, max_tokens=12, temperature=0), use_tqdm=False)[0]
    assert len({tuple(choice.token_ids) for choice in greedy.outputs}) == 1
    assert blocks(llm) == (0, 0)


def test_req_06_each_choice_ends_where_the_request_alone_does(llm: LLM) -> None:
    for seed in range(8):
        alone = [
            llm.generate("hi", SamplingParams(seed=seed + index, max_tokens=None), use_tqdm=False)[0].outputs[0]
            for index in range(2)
        ]
        together = llm.generate("hi", SamplingParams(n=2, seed=seed, max_tokens=None), use_tqdm=False)[0].outputs
        for one, other in zip(alone, together, strict=True):
            assert (list(one.token_ids), one.finish_reason) == (list(other.token_ids), other.finish_reason)


def test_e3_aborting_some_of_many_leaves_the_others_their_full_count(llm: LLM) -> None:
    client = llm._client
    params = SamplingParams(n=2, max_tokens=10, ignore_eos=True)
    ids = client.submit([llm.tokenize("hi")] * 6, [params] * 6, [0] * 6)
    num_steps = 0

    def abort_some(request_ids: Sequence[str], update: Update) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 4:
            client.abort(ids[::2])

    client.run(ids, abort_some)
    outputs = [client.take(request_id) for request_id in ids]
    assert all(choice.finish_reason == "abort" for output in outputs[::2] for choice in output.outputs)
    assert all(0 < len(choice.token_ids) < 10 for output in outputs[::2] for choice in output.outputs)
    assert all(len(choice.token_ids) == 10 for output in outputs[1::2] for choice in output.outputs)
    assert blocks(llm) == (0, 0)


def test_e16_logprobs_come_out_for_every_token_and_every_prompt_token(llm: LLM) -> None:
    params = SamplingParams(n=2, max_tokens=6, ignore_eos=True, seed=1, logprobs=3, prompt_logprobs=2)
    plain = SamplingParams(n=2, max_tokens=6, ignore_eos=True, seed=1)
    output, without = (llm.generate("hi the hi", row, use_tqdm=False)[0] for row in (params, plain))
    assert [choice.token_ids for choice in output.outputs] == [choice.token_ids for choice in without.outputs]
    for choice in output.outputs:
        positions = choice.logprobs or []
        assert len(positions) == 6
        for token_id, position in zip(choice.token_ids, positions, strict=True):
            assert token_id in position
            assert len(position) == 3 + (position[token_id].rank not in (1, 2, 3))
        own = sum(position[token_id].logprob for token_id, position in zip(choice.token_ids, positions, strict=True))
        assert choice.cumulative_logprob == pytest.approx(own)
    prompt = output.prompt_logprobs or []
    assert (len(prompt), prompt[0]) == (len(output.prompt_token_ids), None)
    assert all(
        token in (position or {}) for token, position in list(zip(output.prompt_token_ids, prompt, strict=True))[1:]
    )


def test_e8_ignore_eos_runs_to_the_length_and_its_text_is_the_full_decode(llm: LLM) -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=2, seed=7)
    output = llm.generate("hi", params, use_tqdm=False)[0].outputs[0]
    assert (output.finish_reason, len(output.token_ids)) == ("length", 60)
    assert output.text == llm.get_tokenizer().decode(output.token_ids)
