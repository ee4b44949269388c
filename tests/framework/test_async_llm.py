"""AsyncLLM: streams, cancellation, labels, errors, the end."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import pytest
from tokenyard import LLM, AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams
from tokenyard.errors import EngineDeadError, ModelLoadError, UnsupportedError, UserError, ValidationError
from tokenyard.interfaces.engine_core import EngineCore
from tokenyard.request import FinishReason

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
DELTA = dataclasses.replace(GREEDY, output_kind=RequestOutputKind.DELTA)
FINAL = dataclasses.replace(GREEDY, output_kind=RequestOutputKind.FINAL_ONLY)
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
PROMPTS = ["hi", "the hi the", "hihihi the the", "he"]
OVERRIDES = ["kv_cache.num_blocks=64"]
DEADLINE = 60.0  # seconds: liveness only

Run = Callable[[Awaitable[object]], object]


@pytest.fixture(scope="module", params=["sync", "overlap"])
def llm(request: pytest.FixtureRequest, tiny_llama_dir: Path) -> Iterator[AsyncLLM]:
    made = AsyncLLM(tiny_llama_dir, dtype="float32", max_model_len=128, engine=request.param, overrides=OVERRIDES)
    yield made
    assert num_streams(made) == 0
    assert free_blocks(made) == 64
    made.shutdown()


@pytest.fixture(scope="module")
def expected(tiny_llama_dir: Path) -> dict[str, list[int]]:
    with LLM(tiny_llama_dir, dtype="float32", max_model_len=128, overrides=OVERRIDES) as offline:
        outputs = offline.generate(PROMPTS, LONG, use_tqdm=False)
    return {str(output.prompt): output.outputs[0].token_ids for output in outputs}


def num_streams(llm: AsyncLLM) -> int:
    """Requests that somebody waits for."""
    return len(llm._client._streams)


def run(main: Awaitable[object]) -> object:
    async def limited() -> object:
        return await asyncio.wait_for(main, DEADLINE)

    return asyncio.run(limited())


def free_blocks(llm: AsyncLLM) -> int:
    def count(core: EngineCore) -> int:
        while core.has_requests():
            core.step()
        return core.stats().num_free_blocks

    return llm._link.call(count)


async def collect(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


async def last(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    return (await collect(stream))[-1]


def test_many_streams_at_once_have_the_tokens_of_the_offline_engine(
    llm: AsyncLLM, expected: dict[str, list[int]]
) -> None:
    async def main() -> list[RequestOutput]:
        return await asyncio.gather(*(last(llm.generate(prompt, GREEDY)) for prompt in PROMPTS * 8))

    outputs = run(main())
    for output in outputs:
        assert output.finished
        assert output.outputs[0].token_ids == expected[str(output.prompt)][:12]
        assert output.outputs[0].finish_reason == "length"


def test_e9_deltas_put_together_are_the_whole_and_the_final_output(llm: AsyncLLM) -> None:
    async def main() -> tuple[list[RequestOutput], list[RequestOutput], list[RequestOutput]]:
        deltas, wholes, final = await asyncio.gather(
            *(collect(llm.generate("the hi", params)) for params in (DELTA, GREEDY, FINAL))
        )
        return deltas, wholes, final

    deltas, wholes, (final,) = run(main())
    assert "".join(output.outputs[0].text for output in deltas) == final.outputs[0].text == wholes[-1].outputs[0].text
    assert [token for output in deltas for token in output.outputs[0].token_ids] == final.outputs[0].token_ids
    for before, after in itertools.pairwise(wholes):
        assert after.outputs[0].text.startswith(before.outputs[0].text)
    assert [output.finished for output in deltas] == [False] * (len(deltas) - 1) + [True]


def test_a_slow_consumer_gets_everything_in_fewer_pieces_and_holds_up_nobody(
    llm: AsyncLLM, expected: dict[str, list[int]]
) -> None:
    async def slow() -> list[int]:
        tokens: list[int] = []
        params = dataclasses.replace(LONG, output_kind=RequestOutputKind.DELTA)
        async for output in llm.generate("hi", params):
            if not tokens:
                await asyncio.gather(*(last(llm.generate("he", LONG)) for _ in range(3)))  # these end meanwhile
            pieces.append(output.outputs[0].token_ids)
            tokens += output.outputs[0].token_ids
        return tokens

    pieces: list[Sequence[int]] = []
    assert run(slow()) == expected["hi"]
    assert len(pieces) < len(expected["hi"])


def test_calls_do_not_pile_up_in_an_event_loop_that_is_busy(
    llm: AsyncLLM, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_calls = 0

    async def main() -> RequestOutput:
        nonlocal num_calls
        stream = llm.generate("hi", LONG)
        await anext(stream)
        loop = asyncio.get_running_loop()
        call_soon = loop.call_soon_threadsafe

        def count(*arguments: object) -> object:
            nonlocal num_calls
            num_calls += 1
            return call_soon(*arguments)  # type: ignore[arg-type]

        with monkeypatch.context() as patched:
            patched.setattr(loop, "call_soon_threadsafe", count)
            while llm._link.call(lambda core: core.has_requests()):  # the loop stands still, the engine goes on
                pass
        return await last(stream)

    output = run(main())
    assert isinstance(output, RequestOutput)
    assert output.outputs[0].token_ids == expected["hi"]
    assert num_calls <= 1


def counted(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Engine ids that are aborted from now on."""
    aborted: list[str] = []
    core = llm._link.engine.core
    finish = core.finish_requests

    def count(request_ids: Sequence[str], reason: FinishReason) -> Sequence[str]:
        if reason is FinishReason.ABORT:
            aborted.extend(request_ids)
        return finish(request_ids, reason)

    monkeypatch.setattr(core, "finish_requests", count)
    return aborted


def test_req_04_completed_streams_are_not_aborted_and_each_abandoned_one_is_once(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    aborted = counted(llm, monkeypatch)

    async def abandon() -> None:
        async for _ in llm.generate("the hi", LONG):
            break

    async def main() -> None:
        await asyncio.gather(*(last(llm.generate(prompt, GREEDY)) for prompt in PROMPTS * 5))
        assert aborted == []
        await asyncio.gather(*(abandon() for _ in range(10)))
        await asyncio.sleep(0)  # generators that a `break` left are closed by the loop
        while num_streams(llm):
            await asyncio.sleep(0.01)

    run(main())
    assert free_blocks(llm) == 64
    assert len(aborted) == len(set(aborted)) == 10


def test_req_03_req_05_a_cancelled_task_ends_its_request_and_all_its_choices(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    aborted = counted(llm, monkeypatch)

    async def main() -> None:
        started = asyncio.Event()

        async def consume() -> None:
            async for _ in llm.generate("the hi", dataclasses.replace(LONG, n=4)):
                started.set()

        task = asyncio.create_task(consume())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert num_streams(llm) == 0

    run(main())
    assert free_blocks(llm) == 64
    assert len(aborted) == 4


def test_a_stream_that_is_cancelled_before_its_first_token_leaves_nothing(llm: AsyncLLM) -> None:
    async def main() -> None:
        for delay in (0, 0, 0.001, 0.002, 0.005):
            task = asyncio.create_task(collect(llm.generate("the hi", LONG)))
            await asyncio.sleep(delay)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    run(main())
    assert free_blocks(llm) == 64


def test_random_cancels_leave_the_other_streams_alone_and_give_all_blocks_back(
    llm: AsyncLLM, expected: dict[str, list[int]]
) -> None:
    random_numbers = random.Random(0)
    cancelled = 0

    async def consume(prompt: str, limit: int | None) -> None:
        nonlocal cancelled
        seen = 0
        stream = llm.generate(prompt, dataclasses.replace(LONG, output_kind=RequestOutputKind.DELTA))
        tokens: list[int] = []
        async for output in stream:
            tokens += output.outputs[0].token_ids
            seen += 1
            if limit is not None and seen >= limit:
                await stream.aclose()
                cancelled += 1
                return
        assert tokens == expected[prompt]

    async def main() -> None:
        limits = [random_numbers.choice([None, 1, 2, 5, 20]) for _ in range(200)]
        await asyncio.gather(*(consume(random_numbers.choice(PROMPTS), limit) for limit in limits))

    run(main())
    assert 40 < cancelled < 200
    assert num_streams(llm) == 0
    assert free_blocks(llm) == 64


def test_req_01_two_live_requests_may_have_one_label_and_abort_ends_both(
    llm: AsyncLLM, expected: dict[str, list[int]]
) -> None:
    async def main() -> None:
        both = await asyncio.gather(*(last(llm.generate(prompt, GREEDY, "same")) for prompt in ("hi", "he")))
        for output, prompt in zip(both, ("hi", "he"), strict=True):
            assert (output.request_id, output.outputs[0].token_ids) == ("same", expected[prompt][:12])
        again = await last(llm.generate("hi", GREEDY, "same"))
        assert again.outputs[0].token_ids == expected["hi"][:12]

        async def aborted(prompt: str) -> RequestOutput:
            found = None
            async for output in llm.generate(prompt, LONG, "same"):
                if found is None:
                    await llm.abort(["same", "unknown"])
                found = output
            assert found is not None
            return found

        ends = [output.outputs[0].finish_reason for output in await asyncio.gather(aborted("hi"), aborted("he"))]
        assert ends == ["abort", "abort"]
        await llm.abort("same")  # ended ones are ignored

    run(main())
    assert free_blocks(llm) == 64


def test_e12_choices_of_one_request_come_in_one_stream(llm: AsyncLLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)

    async def main() -> RequestOutput:
        return await last(llm.generate("hi", params))

    output = run(main())
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    assert len({tuple(choice.token_ids) for choice in output.outputs}) == 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate("", GREEDY), "empty"),
        (lambda llm: llm.generate([10**6], GREEDY), "outside the vocabulary"),
        (lambda llm: llm.generate("hi", SamplingParams(stop_token_ids=[10**6])), "stop_token_ids"),
        (lambda llm: llm.generate("hi", GREEDY, priority="high"), "priority"),
        (lambda llm: llm.generate("hi", GREEDY, scheduling={"dead_line": 1}), "deadline"),
        (lambda llm: llm.generate("hi", [GREEDY, GREEDY]), "sampling_params has 2 entries"),
        (lambda llm: llm.generate("hi", GREEDY, tokenization_kwargs={"x": 1}), "add_special_tokens"),
    ],
)
def test_a_bad_request_raises_and_nothing_of_it_is_left(
    llm: AsyncLLM, call: Callable[[AsyncLLM], AsyncIterator[RequestOutput]], message: str
) -> None:
    async def main() -> None:
        with pytest.raises(ValidationError, match=message):
            await collect(call(llm))
        assert (await last(llm.generate("hi", GREEDY))).finished

    run(main())
    assert num_streams(llm) == 0


def test_vllms_other_arguments_and_methods_refuse_by_name_and_at_once(llm: AsyncLLM) -> None:
    with pytest.raises(UnsupportedError, match=r"AsyncLLM\.generate: lora_request='x' is not available"):
        llm.generate("hi", GREEDY, lora_request="x")
    with pytest.raises(UserError, match=r"AsyncLLM\.chat has no argument 'tool'"):
        llm.chat([{"role": "user", "content": "hi"}], tool=1)
    with pytest.raises(UnsupportedError, match=r"AsyncLLM\.encode is not available"):
        llm.encode("hi")
    assert not hasattr(llm, "nothing_of_this_name")
    assert run(last(llm.generate("hi", GREEDY, lora_request=None)))


@pytest.mark.parametrize("label", ["", 3, "x" * 300])
def test_a_bad_label_is_refused_at_once(llm: AsyncLLM, label: object) -> None:
    with pytest.raises(ValidationError, match="request_id"):
        llm.generate("hi", GREEDY, label)  # type: ignore[arg-type]


def test_an_engine_refusal_reaches_the_one_consumer(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    core = llm._link.engine.core
    add, seen = core.add_request, threading.Event()

    def refuse_second_choice(request: object) -> None:
        if request.request_id.startswith("1_"):  # type: ignore[attr-defined]
            seen.set()
            raise ValidationError("not this one", parameter="prompt", value=None)
        add(request)  # type: ignore[arg-type]

    monkeypatch.setattr(core, "add_request", refuse_second_choice)

    async def main() -> None:
        good = asyncio.create_task(last(llm.generate("he", GREEDY)))
        with pytest.raises(ValidationError, match="not this one"):
            await collect(llm.generate("hi", dataclasses.replace(GREEDY, n=3)))
        assert (await good).finished

    run(main())
    assert seen.is_set()
    assert free_blocks(llm) == 64


def test_two_event_loops_share_one_engine(llm: AsyncLLM, expected: dict[str, list[int]]) -> None:
    found: dict[str, object] = {}

    def in_thread(prompt: str) -> None:
        found[prompt] = run(last(llm.generate(prompt, GREEDY)))

    threads = [threading.Thread(target=in_thread, args=(prompt,)) for prompt in ("hi", "he")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    for prompt in ("hi", "he"):
        output = found[prompt]
        assert isinstance(output, RequestOutput)
        assert output.outputs[0].token_ids == expected[prompt][:12]


def test_requests_of_a_loop_that_closed_are_ended(llm: AsyncLLM) -> None:
    async def leave() -> None:
        stream = llm.generate("hi", LONG)
        await anext(stream)
        lost.append(stream)  # still open when the loop closes

    lost: list[AsyncIterator[RequestOutput]] = []
    loop = asyncio.new_event_loop()
    loop.run_until_complete(asyncio.wait_for(leave(), DEADLINE))
    loop.close()
    run(wait_until_no_stream(llm))
    assert free_blocks(llm) == 64


async def wait_until_no_stream(llm: AsyncLLM) -> None:
    while num_streams(llm):
        await asyncio.sleep(0.01)


def test_metrics_and_the_prefix_cache_are_reached_between_steps(llm: AsyncLLM) -> None:
    async def main() -> None:
        await last(llm.generate("the hi the", GREEDY))
        assert await llm.reset_prefix_cache()
        names = {metric.name for metric in await llm.get_metrics()}
        assert any(name.endswith("num_requests_running") for name in names)

    run(main())


# ---- The end --------------------------------------------------------------------------------------------------------


def make(folder: Path) -> AsyncLLM:
    return AsyncLLM(folder, dtype="float32", max_model_len=128, overrides=OVERRIDES)


def test_shutdown_with_requests_running_ends_every_stream_with_an_error(tiny_llama_dir: Path) -> None:
    async def main() -> None:
        llm = make(tiny_llama_dir)
        streams = [llm.generate("hi", LONG) for _ in range(5)]
        for stream in streams:
            await anext(stream)
        llm.shutdown()
        for stream in streams:
            with pytest.raises(EngineDeadError, match="shut down"):
                async for _ in stream:
                    pass
        with pytest.raises(EngineDeadError, match="shut down"):
            await collect(llm.generate("hi", LONG))
        llm.shutdown()

    run(main())


def test_an_engine_that_dies_tells_every_consumer_and_every_later_call(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with make(tiny_llama_dir) as llm:
            streams = [llm.generate(prompt, LONG) for prompt in PROMPTS]
            for stream in streams:
                await anext(stream)

            def fail(output: object) -> None:
                raise RuntimeError("the device is gone")

            monkeypatch.setattr(llm._link.engine.core._executor._worker, "execute", fail)  # type: ignore[attr-defined]
            for stream in streams:
                with pytest.raises(EngineDeadError, match="the device is gone"):
                    async for _ in stream:
                        pass
            later = []
            for _ in range(2):
                with pytest.raises(EngineDeadError, match="the device is gone") as caught:
                    await collect(llm.generate("hi", LONG))
                later.append(caught.value)
            assert later[0] is not later[1]  # one for all would keep the frames of all
            assert later[0].__cause__ is later[1].__cause__ is not None
            with pytest.raises(EngineDeadError):
                await llm.get_metrics()

    run(main())


def test_a_start_that_fails_raises_in_the_caller_and_leaves_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    with pytest.raises(ModelLoadError):
        AsyncLLM(tmp_path / "nothing")
    with pytest.raises(UserError, match="maxmodellen"):
        AsyncLLM(tmp_path, maxmodellen=3)
    assert threading.active_count() == before


def test_one_that_is_forgotten_stops_its_thread(tiny_llama_dir: Path) -> None:
    llm = make(tiny_llama_dir)
    thread = llm._link._thread
    del llm
    thread.join(DEADLINE)
    assert not thread.is_alive()
