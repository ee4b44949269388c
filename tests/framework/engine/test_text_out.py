"""Detokenizer and OutputProcessor: stop strings, held-back text, requests that end in every way."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from step_outputs import step
from tiny_tokenizers import BOS, EOS, byte_fallback, byte_level
from tokenizers import decoders, models, pre_tokenizers
from tokenyard.engine.detokenizer import Detokenizer
from tokenyard.engine.input_processor import TokenizedPrompt
from tokenyard.engine.output_processor import OutputProcessor
from tokenyard.engine_outputs import AdmittedRequest, EngineCoreOutputs, FinishedRequest
from tokenyard.model.tokenizer import Tokenizer
from tokenyard.outputs import CompletionOutput
from tokenyard.request import FinishReason
from tokenyard.sampling_params import SamplingParams


def make_tokenizer(*merges: tuple[str, str]) -> Tokenizer:
    """One token a byte, so that every character of several bytes spans several tokens, and one for each merge."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)]
    backend = tokenizers.Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, {}, None)


TOKENIZER = make_tokenizer()
LONG_TOKENS = make_tokenizer(("a", "b"), ("ab", "a"), ("b", "b"), ("aba", "bb"), ("ab", "c"), ("abc", "d"))


def stream(
    text: str, stop: Sequence[str] = (), *, cut_bytes: int = 0, tokenizer: Tokenizer = TOKENIZER
) -> tuple[list[str], Detokenizer]:
    """Feed a text token by token: (the texts shown after each token and at the end, the detokenizer)."""
    ids = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer, [], stop)
    shown = []
    for token_id in ids[: len(ids) - cut_bytes]:
        if detokenizer.add([token_id]) is not None:
            break
        shown.append(detokenizer.text)
    detokenizer.finish()
    return [*shown, detokenizer.text], detokenizer


def make(tokenizer: Tokenizer = TOKENIZER, prompt: str = "x", **options: object) -> OutputProcessor:
    """A processor that expects request "a"."""
    processor = OutputProcessor(tokenizer)
    params = SamplingParams(**options)  # type: ignore[arg-type]
    processor.add("a", TokenizedPrompt(prompt, tokenizer.encode(prompt)), params, arrival_time=1.0, child_ids=["a"])
    return processor


def run(processor: OutputProcessor, ids: Sequence[int], finished: Sequence[FinishedRequest] = ()) -> CompletionOutput:
    """One token a step; `finished` comes with the last."""
    for place, token_id in enumerate(ids):
        processor.process(step([("a", [token_id])], finished=finished if place == len(ids) - 1 else ()), now=1.0)
    return processor.pop("a").outputs[0]


def ended_by(stop_reason: int | None) -> list[FinishedRequest]:
    return [FinishedRequest(request_id="a", reason=FinishReason.STOP, stop_reason=stop_reason)]


def expected(text: str, stop: Sequence[str]) -> str:
    """Text before the stop string whose match ends first; of two that end together, the longer."""
    matches = [(text.find(string) + len(string), text.find(string)) for string in stop if string in text]
    return text[: min(matches)[1]] if matches else text


def test_txt_07_no_half_character_is_ever_shown() -> None:
    shown, _ = stream("你好😀ď é")
    assert shown[-1] == "你好😀ď é"
    assert all("\ufffd" not in text for text in shown)
    assert all("你好😀ď é".startswith(text) for text in shown)


def test_txt_07_an_incomplete_character_at_the_end_is_shown_at_the_end() -> None:
    shown, _ = stream("ab😀", cut_bytes=2)
    assert shown[-2] == "ab"
    assert shown[-1].startswith("ab\ufffd")


@pytest.mark.parametrize("stop", [["DEFGHIJ"], ["own fox"], ["x", "DEF"], ["CDE", "DEFG"]])
def test_txt_01_nothing_of_a_stop_string_is_shown(stop: list[str]) -> None:
    text = "the brown fox: ABCDEFGHIJKL"
    shown, detokenizer = stream(text, stop)
    assert shown[-1] == expected(text, stop)
    assert detokenizer.stop_string in stop
    assert all(shown[-1].startswith(part) for part in shown)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    shown, _ = stream("aab", ["abc"])
    assert shown == ["", "a", "a", "aab"]


def test_txt_06_held_back_text_is_flushed_at_the_end() -> None:
    shown, detokenizer = stream("xx abc", ["abcdef"])
    assert shown[-2:] == ["xx ", "xx abc"]
    assert detokenizer.stop_string is None


@pytest.mark.parametrize(
    ("stop", "shown", "met"),
    [
        (["abcd", "bc"], "a", "bc"),  # the other begins first and ends later
        (["bc", "abcd"], "a", "bc"),
        (["bcd", "abcd"], "", "abcd"),  # both end together: nothing of the longer one is shown either
        (["cd", "abc"], "", "abc"),
    ],
)
def test_of_the_stop_strings_in_one_token_the_one_that_ends_first_counts(stop: list[str], shown: str, met: str) -> None:
    assert len(LONG_TOKENS.encode("abcd")) == 1
    texts, detokenizer = stream("abcd", stop, tokenizer=LONG_TOKENS)
    assert (texts[-1], detokenizer.stop_string) == (shown, met)


@settings(deadline=None)
@given(
    tokenizer=st.sampled_from([TOKENIZER, LONG_TOKENS]),
    text=st.text(alphabet="ab你😀 ", max_size=30),
    stop=st.lists(st.text(alphabet="ab你😀 ", min_size=1, max_size=4), max_size=3),
)
def test_what_is_shown_only_grows_and_ends_before_the_first_stop_string(
    tokenizer: Tokenizer, text: str, stop: list[str]
) -> None:
    shown, _ = stream(text, stop, tokenizer=tokenizer)
    assert shown[-1] == expected(text, stop)
    for before, after in itertools.pairwise(shown):
        assert after.startswith(before)


@pytest.mark.parametrize(
    ("min_tokens", "shown"),
    [
        (0, "x"),
        (3, "x"),  # the fourth token completes the first match
        (4, "xab"),
        (5, "xab"),  # the second match begins within the first five tokens and ends after them
        (6, "xabababc"),
    ],
)
def test_s13_a_stop_string_is_not_complete_within_the_first_min_tokens_tokens(min_tokens: int, shown: str) -> None:
    """S13, for text: matches of "aba" in "xabababc" end at tokens 4 and 6."""
    detokenizer = Detokenizer(TOKENIZER, [], ["aba"], min_tokens)
    texts = []
    for token_id in TOKENIZER.encode("xabababc"):
        if detokenizer.add([token_id]) is not None:
            break
        texts.append(detokenizer.text)
    detokenizer.finish()
    assert detokenizer.text == shown
    assert all(shown.startswith(text) for text in texts)


@settings(deadline=None)
@given(
    text=st.text(alphabet="ab😀", max_size=20),
    stop=st.lists(st.text(alphabet="ab😀", min_size=1, max_size=3), max_size=2),
    min_tokens=st.integers(0, 12),
)
def test_s13_text_after_min_tokens_ends_before_the_first_stop_string_that_ends_there(
    text: str, stop: list[str], min_tokens: int
) -> None:
    ids = TOKENIZER.encode(text)
    detokenizer = Detokenizer(TOKENIZER, [], stop, min_tokens)
    plain = Detokenizer(TOKENIZER, [], [])
    plain.add(ids[:min_tokens])
    kept = len(plain.text)  # characters that are complete after the first tokens
    detokenizer.add(ids)
    detokenizer.finish()
    ends = [
        (at + len(string), at)
        for string in stop
        for at in range(len(text))
        if text.startswith(string, at) and at + len(string) > kept
    ]
    assert detokenizer.text == (text[: min(ends)[1]] if ends and len(ids) > min_tokens else text)


def test_e8_the_token_that_ended_a_request_has_no_text_but_is_among_its_tokens() -> None:
    for stop_reason in (TOKENIZER.encode("!")[0], None):
        processor = make()
        end = FinishedRequest(request_id="a", reason=FinishReason.STOP, stop_reason=stop_reason)
        processor.process(outputs("ye"), now=1.0)
        update = processor.process(outputs("s!", [end]), now=2.0)
        assert (list(update.finished), list(update.stopped)) == (["a"], [])
        completion = processor.pop("a").outputs[0]
        assert completion.text == "yes"
        assert list(completion.token_ids) == TOKENIZER.encode("yes!")
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop_reason)


def test_e8_a_stop_string_before_the_stop_token_of_the_same_step_wins() -> None:
    processor = make(stop="end")
    end = FinishedRequest(request_id="a", reason=FinishReason.STOP, stop_reason=TOKENIZER.encode("!")[0])
    update = processor.process(outputs("the end.!", [end]), now=1.0)
    assert (list(update.finished), list(update.stopped)) == (["a"], [])
    completion = processor.pop("a").outputs[0]
    assert (completion.text, completion.stop_reason) == ("the ", "end")
    assert list(completion.token_ids) == TOKENIZER.encode("the end")


def test_e8_text_that_was_held_back_is_shown_when_a_stop_token_ends_the_request() -> None:
    processor = make(stop="end")
    end = FinishedRequest(request_id="a", reason=FinishReason.STOP, stop_reason=TOKENIZER.encode("d")[0])
    processor.process(outputs("the end", [end]), now=1.0)  # the stop token's own text completes no stop string
    completion = processor.pop("a").outputs[0]
    assert (completion.text, completion.stop_reason) == ("the en", TOKENIZER.encode("d")[0])


# Options


def test_txt_03_a_stop_tokens_text_shows_only_when_it_is_asked_for() -> None:
    the = LONG_TOKENS.encode("abc")
    assert len(the) == 1
    ids = [*LONG_TOKENS.encode("x "), *the]
    for includes, text in ((False, "x "), (True, "x abc")):
        processor = make(LONG_TOKENS, stop_token_ids=the, include_stop_str_in_output=includes)
        completion = run(processor, ids, ended_by(the[0]))
        assert (completion.text, completion.stop_reason) == (text, the[0])
        assert list(completion.token_ids) == ids


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("includes", [True, False])
def test_txt_03_a_special_stop_token_has_text_when_special_tokens_have(skips: bool, includes: bool) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode(f"a{BOS}b{EOS}")
    processor = make(tokenizer, skip_special_tokens=skips, include_stop_str_in_output=includes)
    completion = run(processor, ids, ended_by(None))
    assert completion.text == ("ab" if skips else f"a{BOS}b") + ("" if skips or not includes else EOS)


def test_txt_03_a_stop_token_that_is_kept_completes_no_stop_string() -> None:
    processor = make(stop="end", stop_token_ids=TOKENIZER.encode("d"), include_stop_str_in_output=True)
    completion = run(processor, TOKENIZER.encode("the end"), ended_by(TOKENIZER.encode("d")[0]))
    assert (completion.text, completion.stop_reason) == ("the end", TOKENIZER.encode("d")[0])


def test_txt_03_what_is_left_of_a_stop_tokens_character_completes_no_stop_string() -> None:
    ids = TOKENIZER.encode("a😀")[:-1]
    processor = make(stop="\ufffd", stop_token_ids=ids[-1:], include_stop_str_in_output=True)
    assert run(processor, ids, ended_by(ids[-1])).stop_reason == ids[-1]


def test_txt_03_a_stop_token_may_complete_a_character() -> None:
    ids = TOKENIZER.encode("a😀")
    included = run(make(stop_token_ids=ids[-1:], include_stop_str_in_output=True), ids, ended_by(ids[-1]))
    left_out = run(make(stop_token_ids=ids[-1:]), ids, ended_by(ids[-1]))
    assert (included.text, left_out.text) == ("a😀", "a\ufffd")


def test_a_stop_string_that_is_kept_holds_nothing_back() -> None:
    detokenizer = Detokenizer(LONG_TOKENS, [], ["bcx", "abcd"], includes_stop=True)
    shown = []
    for token_id in [*LONG_TOKENS.encode("x abc"), *LONG_TOKENS.encode("d a")]:
        detokenizer.add([token_id])
        shown.append(detokenizer.text)
    detokenizer.finish()
    assert shown == ["x", "x ", "x abc", "x abcd", "x abcd", "x abcd"]
    assert (detokenizer.text, detokenizer.stop_string) == ("x abcd", "abcd")


@settings(deadline=None)
@given(
    tokenizer=st.sampled_from([TOKENIZER, LONG_TOKENS, byte_fallback()]),
    text=st.text(alphabet="ab你😀 ", max_size=30),
    stop=st.lists(st.text(alphabet="ab你😀 ", min_size=1, max_size=4), max_size=3),
    includes=st.booleans(),
)
def test_e9_deltas_add_up_to_the_text_which_ends_with_or_before_the_first_stop_string(
    tokenizer: Tokenizer, text: str, stop: list[str], includes: bool
) -> None:
    ids = tokenizer.encode(text)
    whole = tokenizer.decode(ids)
    detokenizer, plain = Detokenizer(tokenizer, [], stop, includes_stop=includes), Detokenizer(tokenizer, [])
    deltas, mark = [], 0
    for token_id in ids:
        detokenizer.add([token_id])
        plain.add([token_id])
        deltas.append(detokenizer.text_since(mark))
        mark = detokenizer.num_pieces
        assert "".join(deltas) == detokenizer.text
        if includes and detokenizer.stop_string is None:
            assert detokenizer.text == plain.text
    detokenizer.finish()
    deltas.append(detokenizer.text_since(mark))
    ends = [whole.find(string) + len(string) for string in stop if string in whole]
    assert "".join(deltas) == (whole[: min(ends)] if includes and ends else expected(whole, stop))


def test_without_detokenizing_there_are_tokens_and_no_text() -> None:
    ids = TOKENIZER.encode("a😀b")
    completion = run(make(detokenize=False), ids, ended_by(ids[-1]))
    assert (completion.text, list(completion.token_ids), completion.finish_reason) == ("", ids, "stop")
    assert run(make(detokenize=False, include_stop_str_in_output=True), ids, ended_by(ids[-1])).text == ""


def test_smp_07_ids_without_tokens_are_tokens_without_text() -> None:
    unknown = TOKENIZER.vocab_size + 500
    ids = [unknown, *TOKENIZER.encode("ab"), unknown, *TOKENIZER.encode("c"), unknown]
    processor = make(stop="bcd")
    completion = run(processor, ids, [FinishedRequest(request_id="a", reason=FinishReason.LENGTH)])
    assert (completion.text, list(completion.token_ids)) == ("abc", ids)


@pytest.mark.parametrize("includes", [True, False])
def test_smp_09_a_stop_string_within_min_tokens_is_not_found_afterwards(includes: bool) -> None:
    text = "a\nb\ncdefgh\ni"
    processor = make(stop="\n", min_tokens=8, max_tokens=60, include_stop_str_in_output=includes)
    completion = run(processor, TOKENIZER.encode(text))
    assert completion.text == "a\nb\ncdefgh" + "\n" * includes
    assert len(completion.token_ids) == 11


def test_txt_10_the_first_delta_has_nothing_of_the_prompt() -> None:
    character = TOKENIZER.encode("你")
    prompt = [*TOKENIZER.encode("Hello "), *character[:2]]
    for output, text in (([character[2]], "你"), (TOKENIZER.encode("ab"), "ab")):
        detokenizer = Detokenizer(TOKENIZER, prompt)
        detokenizer.add(output)
        assert detokenizer.text == text


# Requests


def outputs(text: str = "", finished: Sequence[FinishedRequest] = (), cached: int | None = None) -> EngineCoreOutputs:
    ids = np.array(TOKENIZER.encode(text), dtype=np.int32)
    return EngineCoreOutputs(
        request_ids=("a",) if text else (),
        num_tokens=np.array([len(ids)] if text else [], dtype=np.int32),
        token_ids=ids,
        finished=finished,
        admitted=()
        if cached is None
        else (AdmittedRequest(request_id="a", num_cached_tokens=cached, scheduled_at=2.0),),
    )


def test_a_request_gathers_text_times_and_cached_tokens() -> None:
    processor = make()
    processor.process(outputs("yes", cached=16), now=3.0)
    update = processor.process(outputs("!", [FinishedRequest(request_id="a", reason=FinishReason.LENGTH)]), now=4.0)
    assert (list(update.finished), list(update.stopped)) == (["a"], [])
    output = processor.pop("a")
    assert (output.outputs[0].text, output.outputs[0].finish_reason, output.num_cached_tokens) == ("yes!", "length", 16)
    assert output.finished
    assert output.outputs[0].finished()
    assert output.metrics is not None
    assert output.metrics.first_scheduled_time == 2.0
    assert (output.metrics.arrival_time, output.metrics.first_token_time, output.metrics.finished_time) == (
        1.0,
        3.0,
        4.0,
    )


def test_a_stop_string_ends_the_request_and_the_engine_is_told() -> None:
    processor = make(stop="end")
    update = processor.process(outputs("the end."), now=1.0)
    assert (list(update.finished), list(update.stopped)) == (["a"], ["a"])
    processor.process(outputs("surplus"), now=2.0)
    completion = processor.pop("a").outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("the ", "stop", "end")


def test_a_stop_string_wins_over_a_length_of_the_same_step() -> None:
    processor = make(stop="end")
    finished = [FinishedRequest(request_id="a", reason=FinishReason.LENGTH)]
    update = processor.process(outputs("the end", finished), now=1.0)
    assert (list(update.finished), list(update.stopped)) == (["a"], [])
    assert processor.pop("a").outputs[0].finish_reason == "stop"


def test_an_aborted_request_keeps_what_it_had() -> None:
    processor = make(stop="zzz")
    processor.process(outputs("so far z"), now=1.0)
    processor.abort(["a", "unknown"], now=2.0)
    completion = processor.pop("a").outputs[0]
    assert (completion.text, completion.finish_reason) == ("so far z", "abort")


def test_a_failed_request_carries_its_error() -> None:
    processor = make()
    processor.process(outputs("", [FinishedRequest(request_id="a", reason=FinishReason.ERROR, error="why")]), now=1.0)
    output = processor.pop("a")
    assert (output.outputs[0].finish_reason, output.error) == ("error", "why")


def test_a_request_that_fails_is_told_as_failed_though_its_last_text_completes_a_stop_string() -> None:
    ids = TOKENIZER.encode("a😀")[:-1]
    failed = [FinishedRequest(request_id="a", reason=FinishReason.ERROR, error="why")]
    completion = run(make(stop="\ufffd"), ids, failed)
    assert (completion.finish_reason, completion.stop_reason) == ("error", None)
    assert (
        run(make(stop="\ufffd"), ids, [FinishedRequest(request_id="a", reason=FinishReason.LENGTH)]).finish_reason
        == "stop"
    )
