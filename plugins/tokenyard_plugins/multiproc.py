"""`executor=multiproc`: a worker process for each rank; several ranks share the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenyard import ExecutorDescriptor, hookimpl
from tokenyard.errors import ConfigError

if TYPE_CHECKING:
    from tokenyard.interfaces import Executor, ExecutorContext


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiprocOptions:
    """Options of `executor=multiproc`."""

    collective_timeout: float = 60.0  # seconds that ranks wait for each other within a step


def _make(options: MultiprocOptions, context: ExecutorContext) -> Executor:
    from tokenyard.executor.multiproc import MultiprocExecutor  # only when chosen

    if not 1 <= options.collective_timeout <= 86400:
        raise ConfigError(
            f"executor.collective_timeout must be from 1 to 86400 seconds, got {options.collective_timeout:g}"
        )
    return MultiprocExecutor(context, collective_timeout=options.collective_timeout)


@hookimpl
def tokenyard_executors() -> Iterator[ExecutorDescriptor[MultiprocOptions]]:
    yield ExecutorDescriptor(
        name="multiproc",
        api_version=(1, 7),
        summary="a worker process a rank; executor.tensor_parallel_size ranks share the model",
        factory=_make,
        options_type=MultiprocOptions,
    )
