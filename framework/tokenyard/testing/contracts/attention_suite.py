"""What the rules of AttentionBackendContract share: what is claimed, random steps, and rigs for them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch
from hypothesis import strategies as st

from tokenyard.descriptors import AttentionBackendDescriptor
from tokenyard.interfaces.attention import AttentionLayer
from tokenyard.testing.contracts.attention_rig import AttentionRig, MakeCache, WrongNumbersError, build
from tokenyard.testing.contracts.attention_steps import StepShape
from tokenyard.testing.contracts.base import Contract, expect, no_errors
from tokenyard.testing.errors import ContractViolation

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from tokenyard.interfaces.attention import AttentionBackend, AttentionSpec
    from tokenyard.testing.attention import AttentionCase

HEAD_DIMS = (64, 80, 96, 128, 256)
GROUP_SIZES = (1, 3, 4, 8)
BLOCK_SIZES = (1, 16, 32, 64, 128)
DTYPES = ("float32", "bfloat16", "float16")
V_HEAD_DIMS = ((96, 64),)

ODD: Sequence[dict[str, object]] = (
    {"head_dim": 0},
    {"head_dim": 7, "v_head_dim": 5},
    {"head_dim": 10_000},
    {"block_size": 7},
    {"block_size": 10**9},
    {"causal": False},
    {"kv_cache_dtype": "fp8"},
    {"kv_cache_dtype": "float32"},
    {"device_type": "nowhere"},
    {"sliding_windows": frozenset((1, 10**9))},
    {"soft_caps": frozenset((1e-3,))},
)
"""What a spec may say besides; a backend may refuse it."""

IMPOSSIBLE: Sequence[dict[str, object]] = (
    {"dtype": "no_such_type"},
    {"dtype": "int8"},
    {"kv_cache_dtype": "no_such_type"},
    {"block_size": 0},
    {"block_size": -16},
    {"num_heads": 7, "num_kv_heads": 2},
)
"""What no backend can serve."""

_NUMBERS = ("attention.reference", "attention.sizes", "attention.batch_sizes")  # rules about plain steps themselves
_TELLING = ((1, 9), (5, 5), (3, 20))  # lengths with which a wrong number shows: one token's attention is its value
_SCALE = 1.3  # times 1 / sqrt(head size): not what a backend might take by itself
_SCALE_STEP = 0.1  # more with each layer
_MOST_SEQUENCES = 5


class Features(NamedTuple):
    """What a layer has besides plain attention."""

    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False

    @property
    def rule(self) -> str:
        """Which rule is about the numbers of such a layer."""
        if self.sinks:
            return "attention.sinks"
        if self.soft_cap is not None:
            return "attention.soft_cap"
        return "attention.reference" if self.window is None else "attention.window"

    def plainer(self) -> Sequence[Features]:
        """A plain layer, one for each thing that this one has, then all of them together."""
        window, soft_cap, sinks = self
        return (Features(), Features(window=window), Features(soft_cap=soft_cap), Features(sinks=sinks), self)

    def layer(self, shape: StepShape, device: torch.device, index: int = 0) -> AttentionLayer:
        sinks = torch.linspace(-2, 3, shape.num_heads).to(device, shape.torch_dtype) if self.sinks else None
        return AttentionLayer(
            index=index,
            scale=(_SCALE + _SCALE_STEP * index) / math.sqrt(shape.head_dim),
            sliding_window=self.window,
            soft_cap=self.soft_cap,
            sinks=sinks,
        )


PLAIN = Features()


class AttentionSuite(Contract):
    """The attributes are described in AttentionBackendContract."""

    _kind = "attention"
    _choice = "attention=NAME"

    device: str = "cpu"
    device_type: str | None = None
    dtypes: Sequence[str] = DTYPES
    head_dims: Sequence[int] = HEAD_DIMS
    v_head_dims: Sequence[tuple[int, int]] = V_HEAD_DIMS
    group_sizes: Sequence[int] = GROUP_SIZES
    block_sizes: Sequence[int] = BLOCK_SIZES
    windows: bool = True
    soft_caps: bool = True
    sinks: bool = True
    same_bits: bool = False
    longest_query: int = 40
    longest_context: int = 150

    # ---- What is tested -------------------------------------------------------------------------------------------

    @property
    def _torch_device(self) -> torch.device:
        return torch.device(self.device)

    @cached_property  # composing a config takes longer than most examples do
    def _part(self) -> tuple[AttentionBackendDescriptor[object], object]:
        """The backend's, and its options."""
        loaded = self.load()
        descriptor = loaded.catalogue.get(self._kind, loaded.config.attention.name).descriptor
        if not isinstance(descriptor, AttentionBackendDescriptor):
            raise TypeError(f"'{descriptor.name}' is described by {type(descriptor).__name__}")
        return descriptor, loaded.config.attention.options

    def _supports(self, spec: AttentionSpec) -> list[str]:
        """The reasons, which are sentences, the same each time."""
        descriptor, _ = self._part
        with no_errors("attention.reasons"):
            reasons, again = (descriptor.supports(dataclasses.replace(spec)) for _ in range(2))
        is_list = isinstance(reasons, Sequence) and not isinstance(reasons, str)
        sound = is_list and all(isinstance(reason, str) and reason.strip() for reason in reasons)
        expect(sound, "attention.reasons", f"supports() gives sentences, but gave {reasons!r} for {spec}")
        same = list(reasons) == list(again)
        expect(same, "attention.reasons", f"supports() gave {reasons}, then {again} for equal specs: {spec}")
        return list(reasons)

    def _spec(self, shape: StepShape, *features: Features, causal: bool = True) -> AttentionSpec:
        layers = [each.layer(shape, self._torch_device) for each in features or (PLAIN,)]
        return shape.spec(self.device_type or self._torch_device.type, layers, causal=causal)

    def _rig(
        self,
        shape: StepShape,
        *features: Features,
        num_blocks: int,
        poison: float = 0.0,
        make_cache: MakeCache | None = None,
        causal: bool = True,
    ) -> AttentionRig:
        """A backend for layers with these features, over caches of the value `poison`."""
        features = features or (PLAIN,)
        spec = self._spec(shape, *features, causal=causal)
        if reasons := self._supports(spec):
            raise ContractViolation("attention.claims", f"supports() refuses what is claimed: {reasons}; {spec}")
        descriptor, options = self._part
        backend = build(descriptor, options, spec, self._torch_device)

        def filled(size: tuple[int, ...]) -> torch.Tensor:
            return torch.full(size, poison, dtype=shape.torch_dtype, device=self._torch_device)

        make = make_cache or filled
        layout = checked_layout(backend, spec, num_blocks)
        caches = [(make(layout[0]), make(layout[1])) for _ in features]
        layers = [each.layer(shape, self._torch_device, index) for index, each in enumerate(features)]
        return AttentionRig(backend, spec, layers, caches, self._torch_device)

    # ---- Examples -------------------------------------------------------------------------------------------------

    def _heads(self) -> list[tuple[int, int]]:
        """Head sizes of keys and values that are claimed."""
        return [*((size, size) for size in self.head_dims), *self.v_head_dims]

    def _shapes(self, lengths: SearchStrategy[Sequence[tuple[int, int]]] | None = None) -> SearchStrategy[StepShape]:
        """Steps of sizes that are claimed."""

        def shape(heads: tuple[int, int], **values: object) -> StepShape:
            return StepShape(head_dim=heads[0], v_head_dim=heads[1], **values)  # type: ignore[arg-type]  # of builds

        return st.builds(
            shape,
            st.sampled_from(self._heads()),
            lengths=self._lengths() if lengths is None else lengths,
            dtype=st.sampled_from(list(self.dtypes)),
            num_kv_heads=st.integers(1, 3),
            group_size=st.sampled_from(list(self.group_sizes)),
            block_size=st.sampled_from(list(self.block_sizes)),
            seed=st.integers(0, 999),
        )

    def _lengths(self) -> SearchStrategy[Sequence[tuple[int, int]]]:
        """Decoding sequences, and pieces of prompts with and without a past."""
        decoding = st.integers(1, self.longest_context).map(lambda length: (1, length))
        pasts = st.one_of(st.just(0), st.integers(0, max(0, self.longest_context - self.longest_query)))
        prompts = st.builds(lambda count, past: (count, count + past), st.integers(1, self.longest_query), pasts)
        return st.lists(st.one_of(decoding, prompts), min_size=1, max_size=_MOST_SEQUENCES)

    def _features(self) -> SearchStrategy[Features]:
        """What a layer may have of what is claimed."""
        windows = st.one_of(st.none(), self._window_sizes()) if self.windows else st.none()
        caps = st.sampled_from([None, 0.5, 30.0]) if self.soft_caps else st.none()
        return st.builds(Features, windows, caps, st.booleans() if self.sinks else st.just(False))

    def _window_sizes(self) -> SearchStrategy[int]:
        """One token, some, more than any context."""
        return st.one_of(st.just(1), st.integers(2, self.longest_context), st.just(2 * self.longest_context))

    def _first_shape(self, lengths: Sequence[tuple[int, int]], **values: object) -> StepShape:
        """The first of each list of what is claimed; two KV heads."""
        chosen: dict[str, object] = {
            "dtype": self.dtypes[0],
            "head_dim": self.head_dims[0],
            "v_head_dim": self.head_dims[0],
            "group_size": self.group_sizes[0],
            "block_size": self.block_sizes[0],
            "num_kv_heads": 2,
            **values,
        }
        return StepShape(lengths=lengths, **chosen)  # type: ignore[arg-type]  # names and types of its fields

    def _usable(self, shape: StepShape, features: Features) -> Features:
        """These features or, where the backend has them but not together, the window alone."""
        return PLAIN._replace(window=features.window) if self._supports(self._spec(shape, features)) else features

    def _need(self, is_claimed: bool, name: str) -> None:
        """Skip a rule about something that the suite's class does not claim."""
        if not is_claimed:
            pytest.skip(f"not claimed: {type(self).__name__}.{name} says no")

    # ---- Claims ---------------------------------------------------------------------------------------------------

    def _claimed_shapes(self) -> Iterator[StepShape]:
        """Every combination of sizes and data types."""
        for dtype, heads, group, block in itertools.product(
            self.dtypes, self._heads(), self.group_sizes, self.block_sizes
        ):
            yield self._first_shape(
                [(1, 1)], dtype=dtype, head_dim=heads[0], v_head_dim=heads[1], group_size=group, block_size=block
            )

    def _unclaimed(self) -> Iterator[tuple[str, AttentionSpec]]:
        """One thing each that the suite knows and that is not claimed, and the attribute to claim it in."""
        shape = self._first_shape([(1, 1)])
        rows: list[tuple[str, Sequence[object], Sequence[object], Callable[[object], dict[str, object]]]] = [
            ("dtypes", DTYPES, self.dtypes, lambda one: {"dtype": one}),
            ("head_dims", HEAD_DIMS, self.head_dims, lambda one: {"head_dim": one, "v_head_dim": one}),
            ("group_sizes", GROUP_SIZES, self.group_sizes, lambda one: {"group_size": one}),
            ("block_sizes", BLOCK_SIZES, self.block_sizes, lambda one: {"block_size": one}),
        ]
        for name, known, claimed, changes in rows:
            for one in known:
                if one not in claimed:
                    yield name, self._spec(dataclasses.replace(shape, **changes(one)))  # type: ignore[arg-type]
        if not self.v_head_dims:
            smaller = dataclasses.replace(shape, v_head_dim=max(1, shape.head_dim // 2))
            yield "v_head_dims", self._spec(smaller)
        kinds = {"windows": Features(window=5), "soft_caps": Features(soft_cap=30.0), "sinks": Features(sinks=True)}
        for name, is_claimed in (("windows", self.windows), ("soft_caps", self.soft_caps), ("sinks", self.sinks)):
            if not is_claimed:
                yield name, self._spec(shape, kinds[name])

    def _claimed_features(self) -> Iterator[Features]:
        yield PLAIN
        if self.windows:
            yield Features(window=5)
        if self.soft_caps:
            yield Features(soft_cap=30.0)
        if self.sinks:
            yield Features(sinks=True)

    # ---- Shared ---------------------------------------------------------------------------------------------------

    def _check_accepted(self, spec: AttentionSpec) -> None:
        reasons = self._supports(spec)
        expect(not reasons, "attention.claims", f"supports() refuses what is claimed: {reasons}; {spec}")

    def _check(
        self,
        rule: str,
        shape: StepShape,
        features: Features = PLAIN,
        *,
        poison: float = 0.0,
        fused: bool = False,
        tail: Sequence[int] = (0,),
        with_lse: bool = False,
        what: str = "",
    ) -> None:
        """One layer's step over a past that was written before it."""
        with self._judged(rule, shape, features):
            rig, case = self._filled(shape, features, poison=poison, fused=fused, tail=tail)
            rig.check(rule, case, with_lse=with_lse, what=what)

    @contextmanager
    def _judged(self, rule: str, shape: StepShape, *features: Features) -> Iterator[None]:
        """Where numbers are wrong, ask plainer steps of the shape first: what is wrong there is another rule's."""
        try:
            yield
        except WrongNumbersError:
            if rule not in _NUMBERS:
                plainer = {each: None for one in features or (PLAIN,) for each in one.plainer() if each.rule != rule}
                for one, lengths in itertools.product(plainer, (_TELLING, shape.lengths)):
                    rig, case = self._filled(dataclasses.replace(shape, lengths=lengths), one)
                    rig.check(one.rule, case, what=f"until it is right, {rule} cannot be judged")
            raise

    def _check_each_feature(self, *, fused: bool = False) -> None:
        """What it writes and leaves alone, which every run looks at; wrong numbers are another rule's."""
        lengths = [(1, 5), (3, 3), (1, self.longest_context), (8, 30)]  # 13 rows, no multiple of anything
        for features in self._claimed_features():
            for block_size in (self._middle_block(), self.block_sizes[-1]):
                shape = self._first_shape(lengths, block_size=block_size)
                rule = "attention.strided_rows" if fused else features.rule
                with self._judged(rule, shape, features):
                    rig, case = self._filled(shape, features, fused=fused)
                    rig.check(rule, case, with_lse=rig.backend.has_lse)

    def _filled(
        self,
        shape: StepShape,
        *features: Features,
        poison: float = 0.0,
        fused: bool = False,
        tail: Sequence[int] = (0,),
    ) -> tuple[AttentionRig, AttentionCase]:
        case = shape.case(self._torch_device, fused=fused, tail=tail)
        rig = self._rig(shape, *features, num_blocks=len(case.kv_cache[0]), poison=poison)
        rig.fill(case)
        return rig, case

    def _world(self, shape: StepShape, *features: Features) -> tuple[AttentionRig, AttentionCase]:
        """Whole prompts to take parts of, and a rig whose caches are empty."""
        world = shape.case(self._torch_device)
        return self._rig(shape, *features, num_blocks=len(world.kv_cache[0])), world

    def _with_window(self, shape: StepShape, features: Features) -> Features:
        """With its window, where there may be one together with the rest."""
        can = self.windows and not self._supports(self._spec(shape, features))
        return features if can else features._replace(window=None)

    def _middle_block(self) -> int:
        return self.block_sizes[len(self.block_sizes) // 2]


def checked_layout(
    backend: AttentionBackend, spec: AttentionSpec, num_blocks: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the two caches, which hold as many elements as the engine counts."""
    with no_errors("attention.layout"):
        layout = backend.kv_cache_layout(spec, num_blocks)
    slots = num_blocks * spec.block_size * spec.num_kv_heads
    shapes = (tuple(layout.key_shape), tuple(layout.value_shape))
    for name, shape, size in zip(("key", "value"), shapes, (spec.head_dim, spec.v_head_dim), strict=True):
        expect(
            math.prod(shape) == slots * size,
            "attention.layout",
            f"the {name} cache of {num_blocks} blocks has shape {shape}: {math.prod(shape)} elements, not the "
            f"{slots * size} that the engine counts for {spec}",
        )
    return shapes
