"""Steps: a plain scheduler that gives a ModelRunner steps before it has seen the tokens of earlier ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from tokenyard.interfaces import AttentionBackendContext, AttentionSpec, RowLogitsProcessor
from tokenyard.model.files import resolve_model
from tokenyard.model.loader import load_model
from tokenyard.model.ranks import ONE_RANK, RankGroup
from tokenyard.runner_output import ModelRunnerOutput
from tokenyard.sampling_params import SamplingParams
from tokenyard.scheduler_output import RequestStart, SchedulerOutput, Slot
from tokenyard.worker.input_batch import InputBatch
from tokenyard.worker.kv_groups import group_layers
from tokenyard.worker.model_runner import ModelRunner
from tokenyard.worker.sampled_step import SampledStep
from tokenyard.worker.sampler import Sampler
from tokenyard.worker.stream import DeviceStream
from tokenyard_backends.torch_native.backend import TorchNativeBackend

CPU = torch.device("cpu")
MAX_MODEL_LEN = 64
GREEDY = SamplingParams(temperature=0)


class Steps:
    """Each request has the slot and the blocks of its number, for as long as it may become."""

    def __init__(
        self,
        folder: Path,
        *,
        stream: DeviceStream | None = None,
        backend_type: type[TorchNativeBackend] = TorchNativeBackend,
        max_requests: int = 12,
        num_slots: int = 12,
        block_size: int = 4,
        processors: Callable[[RequestStart], RowLogitsProcessor | None] = lambda start: None,
        ranks: RankGroup = ONE_RANK,
    ) -> None:
        model = load_model(resolve_model(str(folder)), dtype=torch.float32, device=CPU, ranks=ranks)
        groups = group_layers(model.shape.layers, MAX_MODEL_LEN)
        spec = AttentionSpec(
            device_type="cpu",
            dtype="float32",
            num_heads=model.shape.num_heads,
            num_kv_heads=model.shape.num_kv_heads,
            head_dim=model.shape.head_dim,
            v_head_dim=model.shape.v_head_dim,
            block_size=block_size,
        )
        backend = backend_type(AttentionBackendContext(spec=spec, device=CPU, num_threads=1))
        self._num_groups = len(groups.groups)
        self._blocks = MAX_MODEL_LEN // block_size
        layout = backend.kv_cache_layout(spec, 1 + max_requests * self._num_groups * self._blocks)
        self.caches = [
            (torch.full(layout.key_shape, torch.nan), torch.full(layout.value_shape, torch.nan))
            for _ in range(groups.num_tensors)
        ]
        for pair in self.caches:
            for cache in pair:
                cache[0] = 0  # the null block is never read for a request; padded rows have theirs there
        self.runner = ModelRunner(
            model=model,
            backend=backend,
            layers=groups.assign(model.shape.layers),
            kv_caches=[self.caches[place] for place in groups.tensor_of()],
            batch=InputBatch(
                num_slots=1,
                max_model_len=MAX_MODEL_LEN,
                block_size=block_size,
                num_groups=self._num_groups,
                processors=processors,
            ),
            sampler=Sampler(CPU),
            device=CPU,
            seed=0,
            ranks=ranks,
            stream=stream,
            num_slots=num_slots,
        )
        self._starts: dict[int, RequestStart] = {}
        self._computed: list[int] = []
        self._known: list[int] = []  # tokens, those in flight included
        self.history: list[list[int]] = []  # tokens of each row, by step

    def blocks_of(self, request: int, group: int) -> np.ndarray:
        first = 1 + (request * self._num_groups + group) * self._blocks
        return np.arange(first, first + self._blocks, dtype=np.int32)

    def add(self, prompt: Sequence[int], params: SamplingParams = GREEDY) -> int:
        request = len(self._computed)
        self._starts[request] = RequestStart(
            request_id=f"r{request}",
            slot=Slot(request, 1),
            token_ids=np.array(prompt, dtype=np.int32),
            num_prompt_tokens=len(prompt),
            num_computed_tokens=0,
            block_ids=tuple(self.blocks_of(request, group) for group in range(self._num_groups)),
            params=params,
        )
        self._computed.append(0)
        self._known.append(len(prompt))
        return request

    def execute(self, counts: Mapping[int, int], wants: Sequence[bool] | None = None) -> None:
        """`counts[request]` more tokens of each."""
        requests = list(counts)
        before = np.array([self._computed[request] for request in requests], dtype=np.int32)
        scheduled = np.array(list(counts.values()), dtype=np.int32)
        samples = before + scheduled == [self._known[request] for request in requests]
        output = SchedulerOutput(
            step=len(self.history),
            new=tuple(start for request in requests if (start := self._starts.pop(request, None)) is not None),
            slots=np.array(requests, dtype=np.int64),
            generations=np.ones(len(requests), dtype=np.int32),
            num_computed_tokens=before,
            num_scheduled_tokens=scheduled,
            samples=samples,
            wants_prompt_logprobs=None if wants is None else np.array(wants),
        )
        self.history.append(scheduled.tolist())
        for request, count, is_sampled in zip(requests, scheduled.tolist(), samples.tolist(), strict=True):
            self._computed[request] += count
            self._known[request] += int(is_sampled)
        self.runner.execute(output)

    def step(self, counts: Mapping[int, int], wants: Sequence[bool] | None = None) -> SampledStep:
        self.execute(counts, wants)
        return self.runner.sample()

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        *,
        depth: int = 1,
        params: Sequence[SamplingParams] | None = None,
        chunk: int = MAX_MODEL_LEN,
    ) -> list[list[int]]:
        """All prompts at once, in chunks, with up to `depth` steps in flight; the sampled tokens."""
        requests = [
            self.add(prompt, GREEDY if params is None else params[index]) for index, prompt in enumerate(prompts)
        ]
        found: dict[int, list[int]] = {request: [] for request in requests}
        in_flight: deque[tuple[list[int], SampledStep]] = deque()
        goals = {request: len(prompt) + num_tokens for request, prompt in zip(requests, prompts, strict=True)}
        while True:
            counts = {
                request: min(chunk, self._known[request] - self._computed[request])
                for request in requests
                if self._known[request] < goals[request]
            }
            if counts:
                in_flight.append((list(counts), self.step(counts)))
            if in_flight and (len(in_flight) >= depth or not counts):
                rows, step = in_flight.popleft()
                take(step.result(), rows, found)
            if not counts and not in_flight:
                return [found[request] for request in requests]


def take(result: ModelRunnerOutput, rows: Sequence[int], found: Mapping[int, list[int]]) -> None:
    """Sort a step's tokens by request."""
    assert not result.errors
    tokens = iter(result.token_ids.tolist())
    for request, count in zip(rows, result.num_sampled.tolist(), strict=True):
        found[request] += [next(tokens) for _ in range(count)]
