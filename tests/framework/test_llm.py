"""LLM on a tiny model: prompts, parameters, order, errors, life cycle."""

from __future__ import annotations

import inspect
import itertools
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenyard
from omegaconf import OmegaConf
from tokenyard import LLM, SamplingParams
from tokenyard.engine.input_processor import InputProcessor, Prompt
from tokenyard.errors import (
    CapacityError,
    ConfigError,
    EngineDeadError,
    PluginError,
    TokenyardError,
    UserError,
    ValidationError,
)
from tokenyard.request import EngineCoreRequest

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS: list[Prompt] = [
    "hi",
    "the hi the",
    "hihihi the the",
    [5, 6, 7],
    {"prompt": "he"},
    {"prompt_token_ids": [9, 8]},
    "t",
    "h" * 30,
]


@pytest.fixture(scope="module")
def llm(tiny_llama_dir: Path) -> Iterator[LLM]:
    with LLM(
        tiny_llama_dir,
        dtype="float32",
        max_model_len=128,
        scheduler="fcfs",
        attention="torch_native",
        overrides=["kv_cache.num_blocks=64"],
    ) as made:
        yield made


def tokens(llm: LLM, prompts: Prompt | Sequence[Prompt] = PROMPTS, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def free_blocks(llm: LLM) -> tuple[int, int]:
    stats = llm.engine.core.stats()
    return stats.num_free_blocks, stats.num_total_blocks


def test_results_are_in_the_order_of_the_prompts_and_say_everything(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == [
        "hi",
        "the hi the",
        "hihihi the the",
        None,
        "he",
        None,
        "t",
        "h" * 30,
    ]
    for output in outputs:
        assert output.finished
        (completion,) = output.outputs
        assert (completion.index, completion.finish_reason, completion.stop_reason) == (0, "length", None)
        assert len(completion.token_ids) == 6
        assert completion.text == llm.get_tokenizer().decode(completion.token_ids)
        assert output.metrics is not None
        assert output.metrics.first_token_time is not None
    assert outputs[3].prompt_token_ids == [5, 6, 7]
    assert free_blocks(llm) == (64, 64)


@pytest.mark.parametrize(
    "overrides",
    [
        ["scheduler.max_num_batched_tokens=7", "scheduler.max_num_seqs=4"],
        ["scheduler.max_num_seqs=1"],
        ["scheduler.long_prefill_token_threshold=5"],
        ["kv_cache.enable_prefix_caching=false"],
        ["kv_cache.block_size=1", "kv_cache.num_blocks=128"],
        ["kv_cache.block_size=64"],
        ["kv_cache.block_size=2", "kv_cache.num_blocks=20"],
    ],
    ids=lambda overrides: " ".join(overrides),
)
def test_no_schedule_changes_the_tokens(llm: LLM, tiny_llama_dir: Path, overrides: list[str]) -> None:
    with LLM(tiny_llama_dir, dtype="float32", max_model_len=128, overrides=overrides) as other:
        assert tokens(other) == tokens(llm)
        assert tokens(other) == tokens(llm)  # now with a warm prefix cache
        free, total = free_blocks(other)
        assert free == total
        preempted = other.engine.core.stats().num_preemptions
        assert (preempted > 0) == ("kv_cache.num_blocks=20" in overrides)


def test_a_prompt_alone_gives_the_tokens_it_gives_among_others(llm: LLM) -> None:
    together = tokens(llm)
    assert [tokens(llm, prompt)[0] for prompt in PROMPTS] == together


def test_a_seeded_request_gives_the_same_tokens_alone_and_among_others(llm: LLM) -> None:
    seeded = SamplingParams(temperature=0.9, seed=7, max_tokens=8, ignore_eos=True)
    alone = tokens(llm, "the hi", seeded)
    mixed = llm.generate(["hi", "the hi", "t"], [SamplingParams(), seeded, GREEDY], use_tqdm=False)
    assert [mixed[1].outputs[0].token_ids] == alone
    assert tokens(llm, "the hi", SamplingParams(temperature=0.9, seed=8, max_tokens=8, ignore_eos=True)) != alone


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    (whole,) = llm.generate("the", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)
    text = whole.outputs[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    before = llm.engine.core.stats()
    (output,) = llm.generate(
        "the", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=stop), use_tqdm=False
    )
    completion = output.outputs[0]
    assert completion.text == text[: text.index(stop)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert free_blocks(llm) == (64, 64)
    # The engine decodes no token more than the text took.
    after = llm.engine.core.stats()
    assert len(completion.token_ids) < 12
    assert after.num_steps - before.num_steps == len(completion.token_ids)
    assert after.num_generation_tokens - before.num_generation_tokens == len(completion.token_ids)


def test_the_prefix_cache_counts_and_can_be_reset(llm: LLM) -> None:
    assert llm.reset_prefix_cache()
    before = {metric.name: metric.value for metric in llm.get_metrics()}
    prompt = list(range(10, 50))
    assert llm.generate([prompt], GREEDY, use_tqdm=False)[0].num_cached_tokens == 0
    assert llm.generate([prompt], GREEDY, use_tqdm=False)[0].num_cached_tokens == 32
    assert llm.reset_prefix_cache()
    assert llm.generate([prompt], GREEDY, use_tqdm=False)[0].num_cached_tokens == 0
    after = {metric.name: metric.value for metric in llm.get_metrics()}
    assert after["tokenyard:prefix_cache_hits"] - before["tokenyard:prefix_cache_hits"] == 32
    assert after["tokenyard:prompt_tokens"] - before["tokenyard:prompt_tokens"] == 120
    assert after["tokenyard:generation_tokens"] - before["tokenyard:generation_tokens"] == 18
    assert {metric.alias for metric in llm.get_metrics()} >= {"vllm:num_requests_running", "vllm:kv_cache_usage_perc"}


def test_chat_takes_one_conversation_or_several(llm: LLM) -> None:
    one = [{"role": "user", "content": "hi"}]
    (alone,) = llm.chat(one, GREEDY, use_tqdm=False)
    both = llm.chat([one, [*one, {"role": "assistant", "content": "he"}, *one]], GREEDY, use_tqdm=False)
    assert both[0].outputs[0].token_ids == alone.outputs[0].token_ids
    assert len(both[1].prompt_token_ids) > len(both[0].prompt_token_ids)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("", "the prompt is empty"),
        ([""], "the prompt is empty"),
        ([[]], "the prompt is empty"),
        (["a", ""], "the prompt is empty"),
        ([10**6], "outside the vocabulary"),
        ([[-1]], "outside the vocabulary"),
        ([[1.5]], "integers"),
        ([[True, "a"]], "integers"),
        ([[1, "a"]], "integers"),
        ([{"text": "a"}], "no key 'text'"),
        ([{"prompt": "a", "prompt_token_ids": [1]}], "one key"),
        ([None], "NoneType"),
        (3, "int"),
        ("h" * 200, "200 tokens"),
        ([["x"] * 3], "integers"),
    ],
)
def test_smp_17_api_01_a_bad_prompt_is_refused_before_anything_is_queued(
    llm: LLM, prompts: object, message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        llm.generate(prompts, GREEDY, use_tqdm=False)  # type: ignore[arg-type]
    assert not llm.engine.core.has_requests()
    assert len(tokens(llm, "hi")[0]) == 6


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_a_request_that_never_fits_takes_nobody_with_it(tiny_llama_dir: Path) -> None:
    prompts: list[Prompt] = ["hi", [7] * 40]
    with LLM(tiny_llama_dir, dtype="float32", overrides=["kv_cache.num_blocks=2"]) as llm:
        with pytest.raises(CapacityError, match=r"40 tokens.*holds 32"):
            llm.generate(prompts, GREEDY, use_tqdm=False)
        assert not llm.engine.core.has_requests()
        assert len(tokens(llm, "hi")[0]) == 6
        assert free_blocks(llm) == (2, 2)


def test_parameters_are_one_for_all_or_one_each(llm: LLM) -> None:
    outputs = llm.generate(
        ["hi", "he"], [GREEDY, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)], use_tqdm=False
    )
    assert [len(output.outputs[0].token_ids) for output in outputs] == [6, 2]
    with pytest.raises(ValidationError, match="1 entries for 2 prompts"):
        llm.generate(["hi", "he"], [GREEDY], use_tqdm=False)
    with pytest.raises(ValidationError, match="SamplingParams"):
        llm.generate(["hi"], {"temperature": 0}, use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="priority"):
        llm.generate(["hi"], GREEDY, use_tqdm=False, priority=[1, 2])


def test_max_tokens_none_fills_the_context(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    (output,) = llm.generate([[7] * 100], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 28
    assert output.outputs[0].finish_reason == "length"


def test_api_05_the_longest_prompt_leaves_room_for_one_token(llm: LLM) -> None:
    (output,) = llm.generate([[7] * 127], GREEDY, use_tqdm=False)
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (1, "length")
    with pytest.raises(ValidationError, match="128 tokens"):
        llm.generate([[7] * 128], GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"scheduler": "nope"}, PluginError, "nope"),
        ({"attention": "nope"}, PluginError, "nope"),
        ({"tensor_parallel_size": 2}, ConfigError, "set executor=multiproc"),
        ({"quantization": "awq"}, ConfigError, "quantization='awq' is not available"),
        ({"trust_remote_code": True}, ConfigError, "trust_remote_code"),
        ({"max_model_length": 5}, ConfigError, "did you mean 'max_model_len'"),
        ({"max_model_len": 10**6}, ConfigError, "max_model_len=1000000"),
        ({"dtype": "int3"}, ConfigError, "model.dtype"),
        ({"overrides": "kv_cache.num_blocks=3"}, UserError, "list of strings"),
        ({"overrides": ["kv_cache.num_block=3"]}, ConfigError, "kv_cache.num_blocks"),
        ({"scheduler": 3}, ConfigError, "name of a plugin"),
        ({"max_num_seqs": "many"}, ConfigError, "scheduler.max_num_seqs"),
    ],
)
def test_a_bad_argument_is_refused_by_name(
    tiny_llama_dir: Path, arguments: dict[str, object], error: type[TokenyardError], message: str
) -> None:
    with pytest.raises(error, match=message):
        LLM(tiny_llama_dir, **arguments)  # type: ignore[arg-type]


def test_arguments_of_vllm_scripts_that_change_nothing_are_taken(tiny_llama_dir: Path) -> None:
    with LLM(
        model=str(tiny_llama_dir),
        enforce_eager=True,
        trust_remote_code=False,
        tensor_parallel_size=1,
        max_num_seqs=2,
        num_gpu_blocks_override=16,
        disable_log_stats=True,
    ) as llm:
        assert llm.model_config.model == str(tiny_llama_dir)
        assert free_blocks(llm) == (16, 16)


def test_from_config_takes_overrides_a_dict_or_a_dictconfig(llm: LLM, tiny_llama_dir: Path) -> None:
    values = {"model": {"name": str(tiny_llama_dir), "dtype": "float32"}, "kv_cache": {"num_blocks": 64}, "mine": 3}
    lists = [f'model.name="{tiny_llama_dir}"', "model.dtype=float32", "kv_cache.num_blocks=64"]
    for config in (values, OmegaConf.create(values), lists):
        with LLM.from_config(config) as made:
            assert tokens(made, "hi") == tokens(llm, "hi")
            assert free_blocks(made) == (64, 64)


def test_a_shut_down_engine_says_so(tiny_llama_dir: Path) -> None:
    llm = LLM(tiny_llama_dir, overrides=["kv_cache.num_blocks=16"])
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.generate("hi", GREEDY, use_tqdm=False)


def test_ctrl_c_ends_the_requests_and_keeps_the_engine(llm: LLM) -> None:
    before = tokens(llm, "hi")
    seen = []

    def interrupt(piece: str) -> None:
        seen.append(piece)
        if len(seen) == 2:
            signal.raise_signal(signal.SIGINT)

    long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    with pytest.raises(KeyboardInterrupt):
        llm.stream(llm.tokenize("the"), long, interrupt)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not llm.engine.core.has_requests()
    assert free_blocks(llm) == (64, 64)
    assert tokens(llm, "hi") == before


def test_ctrl_c_while_requests_are_queued_keeps_the_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    make, count = InputProcessor.make_requests, itertools.count()

    def interrupted(self: InputProcessor, *arguments: Any, **others: Any) -> list[EngineCoreRequest]:
        if next(count) == 3:
            signal.raise_signal(signal.SIGINT)
        return make(self, *arguments, **others)

    monkeypatch.setattr(InputProcessor, "make_requests", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["hi"] * 6, GREEDY, use_tqdm=False)
    assert not llm.engine.core.has_requests()
    assert free_blocks(llm) == (64, 64)
    assert len(tokens(llm, "hi")[0]) == 6


def test_a_callback_that_raises_leaves_nothing_behind_and_one_that_says_no_ends_its_request(llm: LLM) -> None:
    def fail(piece: str) -> None:
        raise ZeroDivisionError("mine")

    long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    with pytest.raises(ZeroDivisionError, match="mine"):
        llm.stream(llm.tokenize("the"), long, fail)
    assert free_blocks(llm) == (64, 64)
    output = llm.stream(llm.tokenize("the"), long, lambda piece: False)
    assert (output.outputs[0].finish_reason, len(output.outputs[0].token_ids)) == ("abort", 1)
    assert free_blocks(llm) == (64, 64)


def test_threads_take_turns(llm: LLM) -> None:
    expected = {prompt: tokens(llm, prompt) for prompt in ("hi", "the", "he t")}
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda prompt: (prompt, tokens(llm, prompt)), [*expected] * 6))
    assert all(expected[prompt] == got for prompt, got in found)
    assert free_blocks(llm) == (64, 64)


def test_logits_that_are_not_finite_end_their_request_with_an_error_and_no_other(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenyard.model.decoder import FastDecoder

    alone = tokens(llm, ["hi", "he t"])
    plain = FastDecoder.logits

    def damaged(self, states):  # type: ignore[no-untyped-def]
        logits = plain(self, states)
        if len(logits) == 3:
            logits[1, 5] = float("nan")
        return logits

    monkeypatch.setattr(FastDecoder, "logits", damaged)
    outputs = llm.generate(["hi", "the", "he t"], GREEDY, use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert outputs[1].outputs[0].token_ids == []
    assert "not finite" in (outputs[1].error or "")
    assert [outputs[0].outputs[0].token_ids, outputs[2].outputs[0].token_ids] == alone
    assert free_blocks(llm) == (64, 64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate("hi", lora_request="x"), "lora_request='x' is not available"),
        (lambda llm: llm.generate("hi", tool=1), "no argument 'tool'"),
        (lambda llm: llm.chat([{"role": "user", "content": "x"}], tools=[{}]), "no place for tools"),
        (lambda llm: llm.chat([{"role": "user", "content": "x"}], chat_template_kwargs=3), "chat_template_kwargs"),
        (lambda llm: llm.chat([{"role": "user", "content": "x"}], chat_template_kwargs={"messages": []}), "messages"),
        (lambda llm: llm.generate("\ud800"), "UTF-8 cannot encode"),
        (lambda llm: llm.chat([{"role": "user", "content": "\ud800"}]), "UTF-8 cannot encode"),
        (lambda llm: llm.generate("hi", priority=1.5), "priority"),
        (lambda llm: llm.generate({"prompt_token_ids": "abc"}), "one key of"),
        (lambda llm: LLM.from_config(None), "from_config"),  # type: ignore[arg-type]
        (lambda llm: LLM.from_config({"model.name": "x"}), "has a dot"),
        (lambda llm: LLM.from_config({"scheduler": None}), "got null"),
    ],
)
def test_misuse_is_a_user_error(llm: LLM, call: Callable[[LLM], object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        call(llm)
    assert free_blocks(llm) == (64, 64)


def test_vllms_neutral_arguments_pass(llm: LLM) -> None:
    assert llm.generate("hi", GREEDY, use_tqdm=False, lora_request=None)
    assert llm.chat([{"role": "user", "content": "x"}], GREEDY, use_tqdm=False, tools=None, chat_template=None)


def test_vllms_names_of_our_groups_are_aliases(tiny_llama_dir: Path) -> None:
    with LLM(
        tiny_llama_dir, attention_backend="torch_native", scheduling_policy="fcfs", dtype="half", max_model_len=32
    ) as made:
        assert made.model_config.dtype == "float16"


def test_the_public_names_are_sorted_loadable_and_documented() -> None:
    assert tokenyard.__all__ == sorted(tokenyard.__all__, key=lambda name: (not name.isupper(), name))
    for name in tokenyard.__all__:
        value = getattr(tokenyard, name)
        assert name == "PLUGIN_API" or inspect.getdoc(value)
    assert set(tokenyard.__all__) <= set(dir(tokenyard))
    with pytest.raises(AttributeError, match="nothing"):
        tokenyard.nothing  # noqa: B018
