"""AttentionRig: an attention backend with caches in its own layout, driven as a model runner does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import torch

from tokenyard.interfaces.attention import (
    AttentionBackend,
    AttentionBackendContext,
    AttentionBatch,
    AttentionLayer,
    AttentionSpec,
)
from tokenyard.testing.attention import AttentionCase, expect_attention
from tokenyard.testing.contracts.attention_steps import past_of
from tokenyard.testing.contracts.base import expect, no_errors
from tokenyard.testing.errors import ContractViolation

if TYPE_CHECKING:
    from tokenyard.descriptors import AttentionBackendDescriptor

MakeCache: TypeAlias = "Callable[[tuple[int, ...]], torch.Tensor]"
"""Memory of a shape, for a cache."""

_RAISES = "attention.raises"  # where nothing is compared; elsewhere the rule that is tested is named
_SENTINEL = 4096.0  # what `out` and `lse` hold before: no attention over standard normal values comes near it
_GUARD_ROWS = 16  # before and behind `out`; so many leave it aligned


class WrongNumbersError(ContractViolation):
    """A step raised, or its numbers are not the reference's: no other fault can be told apart from that."""


class Found(NamedTuple):
    """What a backend wrote."""

    out: torch.Tensor  # [T, H, DV]
    lse: torch.Tensor | None  # [T, H]


class AttentionRig:
    """A backend for some layers, each with a cache of its own."""

    def __init__(
        self,
        backend: AttentionBackend,
        spec: AttentionSpec,
        layers: Sequence[AttentionLayer],
        caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
        device: torch.device,
    ) -> None:
        self.backend = backend
        self.spec = spec
        self.layers = layers
        self.caches = caches
        self.device = device

    def fill(self, case: AttentionCase, layers: Iterable[int] | None = None) -> None:
        """Write the past of each sequence to the caches of some layers; None = all."""
        past = past_of(case, self.spec.block_size)
        if past is not None:
            plan = self.plan(past.batch)
            for layer in range(len(self.layers)) if layers is None else layers:
                self.run(past, layer, plan)

    def plan(self, batch: AttentionBatch) -> object:
        with unchanged("plan()", metadata_of(batch)), no_errors(_RAISES), torch.inference_mode():
            return self.backend.plan(batch)

    def run(self, case: AttentionCase, layer: int = 0, plan: object = None, *, with_lse: bool = False) -> Found:
        """One layer's forward; `plan` None = one of its own. What it may not touch is compared before and after."""
        plan = self.plan(case.batch) if plan is None else plan
        num_tokens, num_heads = case.query.shape[:2]
        out = _Guarded(num_tokens, (num_heads, case.value.shape[2]), case.query.dtype, self.device)
        lse = _Guarded(num_tokens, (num_heads,), torch.float32, self.device) if with_lse else None
        with unchanged("forward()", inputs_of(case)):
            self.forward(case, layer, plan, out.rows, None if lse is None else lse.rows)
        out.check("out")
        if lse is not None:
            lse.check("lse")
        return Found(out.rows, None if lse is None else lse.rows)

    def forward(
        self, case: AttentionCase, layer: int, plan: object, out: torch.Tensor, lse: torch.Tensor | None = None
    ) -> None:
        """The backend's, nothing else: what a graph records."""
        rows = (case.query, case.key, case.value)
        with no_errors(_RAISES), torch.inference_mode():
            self.backend.forward(self.layers[layer], *rows, self.caches[layer], plan, out, lse)

    def check(
        self,
        rule: str,
        case: AttentionCase,
        layer: int = 0,
        plan: object = None,
        *,
        with_lse: bool = False,
        what: str = "",
    ) -> Found:
        """Run a layer and compare it with the reference."""
        try:
            found = self.run(case, layer, plan, with_lse=with_lse)
        except ContractViolation as error:
            if error.rule != _RAISES:
                raise
            raise WrongNumbersError(rule, f"it raised {error.what}; {_sizes(case)}") from error
        compare(rule, found, case, self.layers[layer], what=what, causal=self.spec.causal)
        return found


def build(
    descriptor: AttentionBackendDescriptor[object], options: object, spec: AttentionSpec, device: torch.device
) -> AttentionBackend:
    """The backend as a worker makes it."""
    context = AttentionBackendContext(spec=spec, device=device, num_threads=torch.get_num_threads())
    with no_errors(_RAISES):
        backend = descriptor.factory(options, context)
    kind = type(backend).__name__
    expect(isinstance(backend, AttentionBackend), _RAISES, f"the factory made a {kind}")
    return backend


def compare(
    rule: str, found: Found, case: AttentionCase, layer: AttentionLayer, *, what: str = "", causal: bool = True
) -> None:
    """Every number lies within its limit of the reference; wrong logarithms are always told as `attention.lse`."""
    expected = expect_attention(case, layer, causal=causal)
    where = (what and f"{what}; ") + _told(layer)
    _compare(rule, f"out with {where}", found.out, expected.out, expected.out_limit, case)
    if found.lse is not None:
        _compare("attention.lse", f"lse with {where}", found.lse, expected.lse, expected.lse_limit, case)


def _compare(
    rule: str, what: str, found: torch.Tensor, expected: torch.Tensor, limit: torch.Tensor, case: AttentionCase
) -> None:
    wrong = ~((found.double() - expected).abs() <= limit)  # NaN is wrong
    if not wrong.any():
        return
    place = tuple(wrong.nonzero()[0].tolist())
    row = place[0]
    starts = np.cumsum([0, *case.batch.query_lens]).tolist()
    sequence = next(index for index, (low, high) in enumerate(pairwise(starts)) if low <= row < high)
    position = case.batch.context_lens[sequence] - starts[sequence + 1] + row
    raise WrongNumbersError(
        rule,
        f"{what}: position {position} of sequence {sequence} (of {len(starts) - 1}), head {place[1]}: "
        f"{float(found[place]):.6g} instead of {float(expected[place]):.6g}, which may be {float(limit[place]):.2g} "
        f"off; {int(wrong.sum())} of {wrong.numel()} numbers are wrong; {_sizes(case)}",
    )


def _sizes(case: AttentionCase) -> str:
    lengths = list(zip(case.batch.query_lens, case.batch.context_lens, strict=True))
    dtype = str(case.query.dtype).removeprefix("torch.")
    return f"lengths (query, K/V) {lengths}, query {list(case.query.shape)}, key {list(case.key.shape)}, {dtype}"


def _told(layer: AttentionLayer) -> str:
    sinks = "" if layer.sinks is None else ", sinks"
    return f"scale {layer.scale:.4g}, window {layer.sliding_window}, soft cap {layer.soft_cap}{sinks}"


class _Guarded:
    """Rows that must all be written, between rows that must not be."""

    def __init__(self, num_rows: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._whole = torch.full((num_rows + 2 * _GUARD_ROWS, *shape), _SENTINEL, dtype=dtype, device=device)
        self.rows = self._whole[_GUARD_ROWS : _GUARD_ROWS + num_rows]

    def check(self, name: str) -> None:
        """Raises ContractViolation."""
        outside = torch.cat((self._whole[:_GUARD_ROWS], self._whole[-_GUARD_ROWS:]))
        expect(bool((outside == _SENTINEL).all()), "attention.out_whole", f"memory beside {name} was written to")
        left = (self.rows == _SENTINEL).nonzero()
        expect(not len(left), "attention.out_whole", f"{name}{left[:1].tolist()} was not written")


def inputs_of(case: AttentionCase) -> Iterator[tuple[str, torch.Tensor]]:
    """What a forward is given, by name."""
    yield from (("query", case.query), ("key", case.key), ("value", case.value))
    yield from metadata_of(case.batch)


def metadata_of(batch: AttentionBatch) -> Iterator[tuple[str, torch.Tensor]]:
    """What a plan is given, by name; the host's table as a tensor over the same memory."""
    yield from (("query_start_loc", batch.query_start_loc), ("seq_lens", batch.seq_lens))
    yield from (("block_table", batch.block_table), ("slot_mapping", batch.slot_mapping))
    if batch.host_block_table is not None:
        yield "host_block_table", torch.from_numpy(batch.host_block_table)


@contextmanager
def unchanged(call: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[None]:
    """What the backend's `call` is given stays as it is."""
    before = [(name, tensor, tensor.clone()) for name, tensor in tensors]
    yield
    for name, tensor, copy in before:
        expect(_same_bits(tensor, copy), "attention.inputs_unchanged", f"{call} changed {name}")


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal, with NaN equal to itself."""
    return bool(((one == other) | ((one != one) & (other != other))).all())


def check_changed(rig: AttentionRig, before: Sequence[torch.Tensor], case: AttentionCase) -> None:
    """A step changed no more elements of the first layer's caches than its tokens have."""
    for name, old, new, rows in zip(("key", "value"), before, rig.caches[0], (case.key, case.value), strict=True):
        count = int((old != new).sum())
        what = f"{count} elements of the {name} cache changed in a step of {rows.numel()} new ones"
        expect(count <= rows.numel(), "attention.other_slots", what)
