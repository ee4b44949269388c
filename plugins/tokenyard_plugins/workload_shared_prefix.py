"""`workload=shared_prefix`: groups of requests that begin with the same tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tokenyard import ComponentDescriptor, hookimpl
from tokenyard.interfaces import Segment, Workload, WorkloadRequest

from tokenyard_plugins._generated.arrival_options import ArrivalOptions, check_count
from tokenyard_plugins._generated.length_options import LengthOptions, check_lengths

if TYPE_CHECKING:
    from tokenyard.interfaces import WorkloadContext

_MOST_GROUPS, _MOST_REQUESTS = 10**5, 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixOptions(ArrivalOptions):
    """Options of `workload=shared_prefix`."""

    num_groups: int = 8
    group_size: int = 16  # requests of a group
    prefix: int | LengthOptions = 1024  # tokens that a group shares
    suffix: int | LengthOptions = 128  # tokens of a prompt that are its own
    output: int | LengthOptions = 128  # tokens
    order: Literal["interleaved", "shuffled", "grouped"] = "shuffled"  # a group each in turn; any; one after another

    def __post_init__(self) -> None:
        ArrivalOptions.__post_init__(self)  # super() does not know a class with slots
        check_count("num_groups", self.num_groups, _MOST_GROUPS)
        check_count("group_size", self.group_size, _MOST_REQUESTS)
        check_count("num_groups * group_size", self.num_groups * self.group_size, _MOST_REQUESTS)
        check_lengths(prefix=self.prefix, suffix=self.suffix, output=self.output)


class SharedPrefixWorkload(Workload):
    """With prefixes of P tokens, suffixes of U and groups of n, at most (n - 1) P / (n (P + U)) of tokens are hits."""

    has_content = True

    def __init__(self, options: SharedPrefixOptions, context: WorkloadContext) -> None:
        self._options, self._seed = options, context.seed

    @property
    def description(self) -> str:
        from tokenyard_plugins._generated.lengths import make_lengths

        options = self._options
        prefix, suffix = make_lengths(options.prefix).mean, make_lengths(options.suffix).mean
        return (
            f"{options.num_groups} groups of {options.group_size} generated requests, {options.rate:g} per second, "
            f"with {prefix:.0f} shared and {suffix:.0f} own prompt tokens on average, seed {self._seed}"
        )

    def requests(self) -> Iterator[WorkloadRequest]:
        from tokenyard_plugins._generated.arrival_times import arrival_times  # numpy only when chosen
        from tokenyard_plugins._generated.draws import generator
        from tokenyard_plugins._generated.lengths import length_stream

        options, seed = self._options, self._seed
        prefixes = list(itertools.islice(length_stream(options.prefix, generator(seed, "prefix")), options.num_groups))
        rows = zip(
            self._groups(),
            arrival_times(options, generator(seed, "arrivals")),
            length_stream(options.suffix, generator(seed, "suffix")),
            length_stream(options.output, generator(seed, "output")),
            strict=False,  # the groups end it
        )
        for number, (group, arrival, suffix, output) in enumerate(rows):
            content = (Segment(group, prefixes[group]), Segment(options.num_groups + number, suffix))
            yield WorkloadRequest(
                arrival=arrival,
                num_prompt_tokens=prefixes[group] + suffix,
                num_output_tokens=output,
                content=content,
            )

    def _groups(self) -> Iterator[int]:
        """The group of each request."""
        from tokenyard_plugins._generated.draws import generator, shuffled

        groups, size, order = self._options.num_groups, self._options.group_size, self._options.order
        if order == "shuffled":
            return shuffled(groups, size, generator(self._seed, "order"))
        numbers = range(groups * size)
        return (number % groups if order == "interleaved" else number // size for number in numbers)


@hookimpl
def tokenyard_components() -> Iterator[ComponentDescriptor[SharedPrefixOptions]]:
    yield ComponentDescriptor(
        component_kind="workload",
        name="shared_prefix",
        api_version=(1, 7),
        summary="groups of requests that begin with the same tokens",
        options_type=SharedPrefixOptions,
        factory=SharedPrefixWorkload,
    )
