"""`workload=synthetic`: requests of drawn lengths at drawn times."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenyard import ComponentDescriptor, hookimpl
from tokenyard.interfaces import Workload, WorkloadRequest

from tokenyard_plugins._generated.arrival_options import ArrivalOptions, check_count, check_deadline
from tokenyard_plugins._generated.length_options import LengthOptions, check_lengths, check_shares

if TYPE_CHECKING:
    from tokenyard.interfaces import WorkloadContext


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticOptions(ArrivalOptions):
    """Options of `workload=synthetic`."""

    num_requests: int = 1000
    prompt: int | LengthOptions = 512  # tokens
    output: int | LengthOptions = 128  # tokens
    priorities: tuple[float, ...] = ()  # how often there is priority 0, 1, 2, ...; () = all have priority 0
    deadline: float | None = None  # seconds after its arrival at which a request is aborted; None = never

    def __post_init__(self) -> None:
        ArrivalOptions.__post_init__(self)  # super() does not know a class with slots
        check_count("num_requests", self.num_requests)
        check_lengths(prompt=self.prompt, output=self.output)
        check_deadline(self.deadline)
        if self.priorities:
            check_shares("priorities", self.priorities)


class SyntheticWorkload(Workload):
    """Times, prompts, outputs and priorities are drawn independently: options of one change none of the others."""

    def __init__(self, options: SyntheticOptions, context: WorkloadContext) -> None:
        self._options, self._seed = options, context.seed

    @property
    def description(self) -> str:
        from tokenyard_plugins._generated.lengths import make_lengths

        options = self._options
        prompt, output = make_lengths(options.prompt).mean, make_lengths(options.output).mean
        return (
            f"{options.num_requests} generated requests, {options.rate:g} per second, of {prompt:.0f} prompt and "
            f"{output:.0f} output tokens on average, seed {self._seed}"
        )

    def requests(self) -> Iterator[WorkloadRequest]:
        from tokenyard_plugins._generated.arrival_times import arrival_times  # numpy only when chosen
        from tokenyard_plugins._generated.draws import generator
        from tokenyard_plugins._generated.lengths import length_stream, priority_stream

        options, seed = self._options, self._seed
        rows = zip(
            arrival_times(options, generator(seed, "arrivals")),
            length_stream(options.prompt, generator(seed, "prompt")),
            length_stream(options.output, generator(seed, "output")),
            priority_stream(options.priorities, generator(seed, "priority")),
            strict=False,  # none of them ends
        )
        for arrival, prompt, output, priority in itertools.islice(rows, options.num_requests):
            yield WorkloadRequest(
                arrival=arrival,
                num_prompt_tokens=prompt,
                num_output_tokens=output,
                priority=priority,
                deadline=options.deadline,
            )


@hookimpl
def tokenyard_components() -> Iterator[ComponentDescriptor[SyntheticOptions]]:
    yield ComponentDescriptor(
        component_kind="workload",
        name="synthetic",
        api_version=(1, 7),
        summary="requests of drawn lengths at drawn times",
        options_type=SyntheticOptions,
        factory=SyntheticWorkload,
    )
