"""`workload=trace`: requests as somebody has recorded them, in one of the formats of public traces."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tokenyard import ComponentDescriptor, hookimpl
from tokenyard.errors import ConfigError

if TYPE_CHECKING:
    from tokenyard.interfaces import Workload, WorkloadContext


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """Options of `workload=trace`."""

    path: str  # a file, plain or gzipped; a folder of format servegen; packaged:NAME; fetched:NAME
    format: str | None = None  # azure, mooncake, servegen, burstgpt or jsonl; None = what the file looks like
    # Rows without prompt or output tokens are an error, or left out and counted. Those of format burstgpt without
    # output are requests that failed, and always left out.
    zero_length: Literal["refuse", "skip"] = "refuse"
    max_request_tokens: int | None = None  # prompt and output together; longer requests are left out and counted
    tokens_per_hash: int = 512  # prompt tokens that one of a row's hash_ids stands for
    rate_scale: float | None = None  # format servegen: rates are multiplied by it, since a cluster's are high; None = 1

    def __post_init__(self) -> None:
        for name, value, least in (
            ("max_request_tokens", self.max_request_tokens, 2),
            ("tokens_per_hash", self.tokens_per_hash, 1),
        ):
            if value is not None and not least <= value < 2**31:
                raise ConfigError(f"workload.{name}={value} is not valid: it must be from {least} to 2**31 - 1")
        if self.rate_scale is not None and not 0 < self.rate_scale < math.inf:  # also refuses NaN
            raise ConfigError(f"workload.rate_scale={self.rate_scale} is not valid: it must be a number above 0")


def _make(options: TraceOptions, context: WorkloadContext) -> Workload:
    from tokenyard.experiments.traces import ReadOptions, open_trace  # numpy, which listing plugins can do without

    return open_trace(
        options.path,
        format_name=options.format,
        options=ReadOptions(
            zero_length=options.zero_length,
            max_request_tokens=options.max_request_tokens,
            tokens_per_hash=options.tokens_per_hash,
        ),
        rate_scale=options.rate_scale,
        context=context,
    )


@hookimpl
def tokenyard_components() -> Iterator[ComponentDescriptor[TraceOptions]]:
    yield ComponentDescriptor(
        component_kind="workload",
        name="trace",
        api_version=(1, 7),
        summary="recorded requests: formats azure, mooncake, servegen, burstgpt and jsonl, plain or gzipped",
        options_type=TraceOptions,
        factory=_make,
    )
