"""DeviceStream: how arrays come to a worker's device and back, without the host waiting for what runs there.

A GPU works through a queue, its stream, while the host goes on. What the host writes for it lies in page-locked memory,
from which the device copies when it gets there; what it sends back is there once an event in the queue has passed.
torch keeps page-locked memory that a copy still needs from being used again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np
import torch

from tokenyard.worker.device import zeros
from tokenyard.worker.packing import Packing

if TYPE_CHECKING:
    from collections.abc import Sequence


class Download(Protocol):
    """Tensors on their way to the host. May be asked from any thread."""

    def is_done(self) -> bool:
        """Whether `arrays` would return at once."""

    def arrays(self) -> list[np.ndarray]:
        """Wait for them."""


class DeviceStream(ABC):
    """Used from the worker's thread, but for the downloads."""

    is_async: ClassVar[bool]  # whether the host runs ahead of the device

    @abstractmethod
    def upload(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """The arrays on the device, contiguous; they may be written to again only where `is_async`."""

    @abstractmethod
    def refill(self, buffer: torch.Tensor, packing: Packing, arrays: Sequence[np.ndarray]) -> None:
        """Write the arrays into a buffer on the device that holds a `packing` of such arrays."""

    @abstractmethod
    def download(self, tensors: Sequence[torch.Tensor]) -> Download:
        """Start to copy tensors to the host as they are at this point of the queue."""

    @abstractmethod
    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8 on the host for `copy`, contents arbitrary."""

    @abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy between bytes on the device and bytes of `host_memory`; both keep until it is done."""


class Event(Protocol):
    """A point in a device's queue. May be asked from any thread."""

    def is_past(self) -> bool: ...

    def wait(self) -> None: ...


class _Here:
    """What never left the host."""

    def __init__(self, arrays: list[np.ndarray]) -> None:
        self._arrays = arrays

    def is_done(self) -> bool:
        return True

    def arrays(self) -> list[np.ndarray]:
        return self._arrays


class HostStream(DeviceStream):
    """A CPU: host and device are one, nothing is copied."""

    is_async = False

    def upload(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]

    def refill(self, buffer: torch.Tensor, packing: Packing, arrays: Sequence[np.ndarray]) -> None:
        for place, array in zip(packing.arrays(buffer), arrays, strict=True):
            place[...] = array

    def download(self, tensors: Sequence[torch.Tensor]) -> Download:
        return _Here([tensor.numpy() for tensor in tensors])

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        return zeros((num_bytes,), "uint8", torch.device("cpu"))  # pages that nobody writes cost nothing

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)


class QueueCalls(ABC):
    """The calls to a device that `QueuedStream` makes, and all that it takes to stand in for one."""

    @abstractmethod
    def page_locked(self, num_bytes: int) -> torch.Tensor:
        """Host memory [num_bytes] uint8, contents arbitrary, not used again before copies out of it are done."""

    @abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy between host and device of as many bytes as `source` has."""

    @abstractmethod
    def mark(self) -> Event:
        """The point in the queue behind all that was queued so far."""


class CudaCalls(QueueCalls):
    """The current CUDA stream."""

    def page_locked(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def mark(self) -> Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return _CudaEvent(event)


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def is_past(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self._event.synchronize()


class QueuedStream(DeviceStream):
    """A device that works behind the host: one copy for each upload or download, however many arrays it has."""

    is_async = True

    def __init__(self, device: torch.device, calls: QueueCalls) -> None:
        self._device = device
        self._calls = calls

    def upload(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        packing = Packing.of(arrays)
        buffer = self._buffer(packing)
        self.refill(buffer, packing, arrays)
        return packing.tensors(buffer)

    def refill(self, buffer: torch.Tensor, packing: Packing, arrays: Sequence[np.ndarray]) -> None:
        staged = self._calls.page_locked(packing.num_bytes)
        for place, array in zip(packing.arrays(staged), arrays, strict=True):
            place[...] = array
        self._calls.copy(buffer[: packing.num_bytes], staged)

    def download(self, tensors: Sequence[torch.Tensor]) -> Download:
        packing = Packing.of(tensors)
        buffer = self._buffer(packing)
        for place, tensor in zip(packing.tensors(buffer), tensors, strict=True):
            place.copy_(tensor)
        arrived = self._calls.page_locked(packing.num_bytes)
        self._calls.copy(arrived, buffer)
        return _Arriving(packing, arrived, self._calls.mark())

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        return self._calls.page_locked(num_bytes)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._calls.copy(target, source)

    def _buffer(self, packing: Packing) -> torch.Tensor:
        return torch.empty(packing.num_bytes, dtype=torch.uint8, device=self._device)


class _Arriving:
    def __init__(self, packing: Packing, arrived: torch.Tensor, event: Event) -> None:
        self._packing = packing
        self._arrived = arrived
        self._event = event

    def is_done(self) -> bool:
        return self._event.is_past()

    def arrays(self) -> list[np.ndarray]:
        self._event.wait()
        return self._packing.arrays(self._arrived)
