"""ModelRunner over K/V groups: what left a window is never read, and rows keep to their own blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import window_models
from tokenyard.arrays import IntArray
from tokenyard.errors import LogitsProcessorError
from tokenyard.interfaces import AttentionBackendContext, AttentionSpec, RowLogitsProcessor
from tokenyard.model.files import resolve_model
from tokenyard.model.loader import load_model
from tokenyard.runner_output import ModelRunnerOutput
from tokenyard.sampling_params import SamplingParams
from tokenyard.scheduler_output import BlockTableUpdate, RequestStart, SchedulerOutput, Slot
from tokenyard.worker.input_batch import InputBatch
from tokenyard.worker.kv_groups import KVGroups, group_layers
from tokenyard.worker.model_runner import ModelRunner
from tokenyard.worker.sampler import Sampler
from tokenyard_backends.torch_native.backend import TorchNativeBackend
from window_models import MAX_MODEL_LEN, prompt_of, transformers_greedy

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0)
NUM_BLOCKS = 1000


class Loop:
    """A scheduler as plain as it can be. Blocks that left a window are filled with NaN and given to others."""

    def __init__(
        self,
        folder: Path,
        block_size: int,
        processors: Callable[[RequestStart], RowLogitsProcessor | None] = lambda start: None,
    ) -> None:
        self.block_size = block_size
        model = load_model(resolve_model(str(folder)), dtype=torch.float32, device=CPU)
        self.groups: KVGroups = group_layers(model.shape.layers, MAX_MODEL_LEN)
        spec = AttentionSpec(
            device_type="cpu",
            dtype="float32",
            num_heads=model.shape.num_heads,
            num_kv_heads=model.shape.num_kv_heads,
            head_dim=model.shape.head_dim,
            v_head_dim=model.shape.v_head_dim,
            block_size=block_size,
        )
        backend = TorchNativeBackend(AttentionBackendContext(spec=spec, device=CPU, num_threads=1))
        shape = backend.kv_cache_layout(spec, NUM_BLOCKS).key_shape
        self.tensors = [
            (torch.full(shape, torch.nan), torch.full(shape, torch.nan)) for _ in self.groups.groups[0].layers
        ]
        self.runner = ModelRunner(
            model=model,
            backend=backend,
            layers=self.groups.assign(model.shape.layers),
            kv_caches=[self.tensors[place] for place in self.groups.tensor_of()],
            batch=InputBatch(
                num_slots=1,
                max_model_len=MAX_MODEL_LEN,
                block_size=block_size,
                num_groups=len(self.groups.groups),
                processors=processors,
            ),
            sampler=Sampler(CPU),
            device=CPU,
            seed=0,
        )
        self.free = list(range(NUM_BLOCKS - 1, 0, -1))
        self.tables: list[list[list[int]]] = []  # [slot][group]
        self.tokens: list[list[int]] = []
        self.computed: list[int] = []
        self.waiting: dict[int, RequestStart] = {}
        self.num_freed = 0

    def add(self, prompt: list[int], params: SamplingParams = GREEDY) -> None:
        slot = len(self.tokens)
        self.tokens.append(list(prompt))
        self.computed.append(0)
        self.tables.append([self._take(-(-len(prompt) // self.block_size)) for _ in self.groups.groups])
        self.waiting[slot] = RequestStart(
            request_id=f"r{slot}",
            slot=Slot(slot, 1),
            token_ids=np.array(prompt, dtype=np.int32),
            num_prompt_tokens=len(prompt),
            num_computed_tokens=0,
            block_ids=tuple(np.array(table, dtype=np.int32) for table in self.tables[slot]),
            params=params,
        )

    def step(self, scheduled: dict[int, int], wants: Sequence[bool] | None = None) -> ModelRunnerOutput:
        """Compute `scheduled[slot]` more tokens of each request; `wants` says which rows want prompt logprobs."""
        updates = [update for slot, count in scheduled.items() for update in self._grow(slot, count)]
        before = [self.computed[slot] for slot in scheduled]
        after = [done + count for done, count in zip(before, scheduled.values(), strict=True)]
        output = SchedulerOutput(
            step=0,
            new=tuple(start for slot in scheduled if (start := self.waiting.pop(slot, None)) is not None),
            slots=np.array(list(scheduled), dtype=np.int32),
            generations=np.ones(len(scheduled), dtype=np.int32),
            num_computed_tokens=np.array(before, dtype=np.int32),
            num_scheduled_tokens=np.array(list(scheduled.values()), dtype=np.int32),
            samples=np.array([done == len(self.tokens[slot]) for slot, done in zip(scheduled, after, strict=True)]),
            wants_prompt_logprobs=None if wants is None else np.array(wants),
            block_table_updates=updates,
        )
        self.runner.execute(output)
        result = self.runner.sample().result()
        sampled = iter(result.token_ids.tolist())
        for slot, done, count in zip(scheduled, after, result.num_sampled.tolist(), strict=True):
            self.tokens[slot] += [next(sampled) for _ in range(count)]
            self.computed[slot] = done
            self._leave_window(slot)
        return result

    def run(self, budget: int, num_tokens: int, prompts: list[list[int]]) -> list[list[int]]:
        """All prompts at once under a token budget; the outputs."""
        for prompt in prompts:
            self.add(prompt)
        while any(len(tokens) < len(prompt) + num_tokens for tokens, prompt in zip(self.tokens, prompts, strict=True)):
            left, scheduled = budget, {}
            for slot, prompt in enumerate(prompts):
                wanted = min(len(self.tokens[slot]) - self.computed[slot], left)
                if wanted and len(self.tokens[slot]) < len(prompt) + num_tokens:
                    scheduled[slot] = wanted
                    left -= wanted
            assert not self.step(scheduled).errors
        return [tokens[len(prompt) :] for tokens, prompt in zip(self.tokens, prompts, strict=True)]

    def _take(self, count: int) -> list[int]:
        return [self.free.pop() for _ in range(count)]

    def _grow(self, slot: int, count: int) -> list[BlockTableUpdate]:
        updates = []
        for group, table in enumerate(self.tables[slot]):
            missing = -(-(self.computed[slot] + count) // self.block_size) - len(table)
            if missing > 0:
                new = self._take(missing)
                updates.append(BlockTableUpdate(Slot(slot, 1), group, len(table), np.array(new, dtype=np.int32)))
                table += new
        return updates

    def _leave_window(self, slot: int) -> None:
        """As the K/V manager does: the worker is not told, so its table keeps naming the blocks."""
        for group, table in zip(self.groups.groups, self.tables[slot], strict=True):
            first = max(0, self.computed[slot] - (group.window or MAX_MODEL_LEN) + 1) // self.block_size
            for index in range(first):
                if table[index]:
                    for pair in self.tensors:
                        for cache in pair:
                            cache[table[index]] = torch.nan
                    self.free.insert(len(self.free) // 2, table[index])
                    table[index] = 0
                    self.num_freed += 1


@pytest.mark.parametrize("family", window_models.FAMILIES)
@pytest.mark.parametrize(("block_size", "budget"), [(1, 100), (4, 5), (16, 100), (16, 13)])
def test_blocks_that_left_the_window_may_hold_anything(
    family: str, block_size: int, budget: int, window_model: Callable[[str], Path]
) -> None:
    """Greedy tokens are transformers' although each such block is overwritten at once."""
    folder = window_model(family)
    prompts = [prompt_of(length, seed=length) for length in (3, 40, 17, 8)]
    loop = Loop(folder, block_size)
    assert loop.run(budget, 10, prompts) == [transformers_greedy(folder, prompt, 10) for prompt in prompts]
    assert loop.num_freed > 0


def test_errors_of_one_row_name_its_request_and_leave_the_others_alone(window_model: Callable[[str], Path]) -> None:
    """Also a row whose request ended while the step ran: nobody waits for its error any more."""
    folder = window_model("mistral")
    loop = Loop(folder, 4)
    prompts = [prompt_of(6, 1), prompt_of(9, 2)]
    for prompt in prompts:
        loop.add(prompt)
    loop.step({0: 6, 1: 9})
    for group in range(len(loop.groups.groups)):
        for cache in loop.tensors[0]:
            cache[loop.tables[0][group][0]] = torch.inf
    output = SchedulerOutput(
        step=1,
        slots=np.array([0, 1], dtype=np.int32),
        generations=np.ones(2, dtype=np.int32),
        num_computed_tokens=np.array([6, 9], dtype=np.int32),
        num_scheduled_tokens=np.ones(2, dtype=np.int32),
        samples=np.ones(2, dtype=np.bool_),
    )
    loop.runner.execute(output)
    result = loop.runner.sample().result()
    assert list(result.errors) == ["r0"]
    assert result.num_sampled.tolist() == [0, 1]
    assert result.token_ids.tolist() == transformers_greedy(folder, prompts[1], 2)[1:]


ASKS = SamplingParams(temperature=0, logprobs=1)


def test_a_processor_sees_its_own_output_so_far_and_changes_its_own_row_alone(
    window_model: Callable[[str], Path],
) -> None:
    folder = window_model("mistral")
    seen: list[list[int]] = []

    def forbid(logits: torch.Tensor, output: IntArray) -> None:
        seen.append(output.tolist())
        logits[int(logits.argmax())] = -torch.inf

    prompts = [prompt_of(6, 1), prompt_of(9, 2)]
    loop = Loop(folder, 4, lambda start: forbid if start.slot.index == 0 else None)
    outputs = loop.run(100, 4, prompts)
    plain = Loop(folder, 4).run(100, 4, prompts)
    assert outputs[1] == plain[1]
    assert outputs[0][0] != plain[0][0]
    assert seen == [outputs[0][:count] for count in range(4)]


@pytest.mark.parametrize("is_at_start", [True, False])
def test_a_processor_that_fails_ends_its_row_alone_and_the_others_keep_their_logprobs(
    is_at_start: bool, window_model: Callable[[str], Path]
) -> None:
    folder = window_model("mistral")

    def fail(logits: torch.Tensor, output: IntArray) -> None:
        logits.fill_(torch.nan)  # what it leaves behind is nobody's
        raise LogitsProcessorError("wrong argument")

    def processors(start: RequestStart) -> RowLogitsProcessor | None:
        if start.slot.index != 1:
            return None
        if is_at_start:
            raise LogitsProcessorError("wrong argument")
        return fail

    prompts = [prompt_of(6, 1), prompt_of(9, 2), prompt_of(5, 3)]
    loop, plain = Loop(folder, 4, processors), Loop(folder, 4)
    for prompt in prompts:
        loop.add(prompt, ASKS)
    plain.add(prompts[0], ASKS)
    plain.add(prompts[2], ASKS)
    assert not loop.step({0: 6, 1: 4}).errors  # in mid-prompt there is nothing to process
    result, expected = loop.step({0: 1, 1: 5, 2: 5}), (plain.step({0: 6}), plain.step({0: 1, 1: 5}))[1]
    assert result.errors == {"r1": "wrong argument"}
    assert result.num_sampled.tolist() == [1, 0, 1]
    assert result.token_ids.tolist() == expected.token_ids.tolist()
    assert result.logprobs is not None
    assert expected.logprobs is not None
    assert result.logprobs.rows.tolist() == [0, 1]
    assert result.logprobs.token_ids.tolist() == expected.logprobs.token_ids.tolist()
    assert np.allclose(result.logprobs.logprobs, expected.logprobs.logprobs, atol=1e-4)


def test_damage_that_shows_in_a_prompt_ends_that_request_before_it_samples(window_model: Callable[[str], Path]) -> None:
    folder = window_model("mistral")
    loop = Loop(folder, 4)
    for seed in (1, 2):
        loop.add(prompt_of(9, seed), SamplingParams(temperature=0, prompt_logprobs=1))
    assert [chunk.request_id for chunk in loop.step({0: 4, 1: 4}, [True, True]).prompt_logprobs] == ["r0", "r1"]
    for cache in loop.tensors[0]:
        cache[loop.tables[0][0][0]] = torch.inf
    result = loop.step({0: 5, 1: 5}, [True, True])
    assert list(result.errors) == ["r0"]
    assert result.num_sampled.tolist() == [0, 1]
    assert [(chunk.request_id, chunk.start, len(chunk.logprobs.rows)) for chunk in result.prompt_logprobs] == [
        ("r1", 5, 4)
    ]


def test_a_request_in_the_slot_of_an_ended_one_is_sampled_by_its_own_parameters(
    window_model: Callable[[str], Path],
) -> None:
    loop = Loop(window_model("mistral"), 4)
    prompt = prompt_of(6, 1)
    loop.add(prompt)
    loop.step({0: 6})
    loop.step({0: 1})  # the columns of a steady batch are made
    loop.tokens[0], loop.computed[0] = list(prompt), 0
    loop.waiting[0] = RequestStart(
        request_id="next",
        slot=Slot(0, 2),
        token_ids=np.array(prompt, dtype=np.int32),
        num_prompt_tokens=len(prompt),
        num_computed_tokens=0,
        block_ids=tuple(np.array(table, dtype=np.int32) for table in loop.tables[0]),
        params=SamplingParams(temperature=0, allowed_token_ids=[5]),
    )
    assert loop.step({0: 6}).token_ids.tolist() == [5]
