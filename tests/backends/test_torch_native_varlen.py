"""torch_native through torch's varlen_attn, which needs a GPU: here a fake that has its signature and checks its rules.

What is under test is what the backend gives it, and when it does without. The numbers are attention in float64.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenyard.interfaces import AttentionBackendContext, AttentionLayer, AttentionSpec
from tokenyard.testing import AttentionBackendContract
from tokenyard.testing.attention import AttentionCase, expect_attention, make_case
from tokenyard_backends.torch_native import varlen
from tokenyard_backends.torch_native.backend import TorchNativeBackend
from torch.nn.attention.varlen import varlen_attn

SIGNATURE = inspect.signature(varlen_attn)
SPEC = AttentionSpec(
    device_type="cuda", dtype="bfloat16", num_heads=6, num_kv_heads=2, head_dim=16, v_head_dim=16, block_size=16
)


@dataclass
class FakeVarlen:
    """What the documentation of varlen_attn says, on CPU tensors, and flaws that a build of it may have."""

    page_multiple: int = 1
    leaks_unwritten: bool = False
    leaks_before_window: bool = False
    window_is_one_too_wide: bool = False
    num_calls: int = 0
    windows: list[tuple[int, int]] = field(default_factory=list)

    @property
    def __signature__(self) -> inspect.Signature:
        return SIGNATURE

    def __call__(self, *args: object, **kwargs: object) -> torch.Tensor:
        bound = SIGNATURE.bind(*args, **kwargs)
        bound.apply_defaults()
        return self._attend(**bound.arguments)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor,
        max_q: int,
        max_k: int,
        return_aux: None,
        scale: float,
        window_size: tuple[int, int],
        enable_gqa: bool,
        seqused_k: torch.Tensor,
        block_table: torch.Tensor,
        num_splits: None,
    ) -> torch.Tensor:
        self.num_calls += 1
        self.windows.append(window_size)
        self._check(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, seqused_k, block_table, enable_gqa)
        left, right = window_size
        assert right == 0
        results = []
        for index, length in enumerate(seqused_k.tolist()):
            rows = query[cu_seq_q[index] : cu_seq_q[index + 1]]
            keys, values = (self._gathered(cache, block_table[index], length) for cache in (key, value))
            results.append(self._sequence(rows, keys, values, length, scale, left))
        return torch.cat(results).to(query.dtype)

    def _check(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor,
        max_q: int,
        max_k: int,
        seqused_k: torch.Tensor,
        block_table: torch.Tensor,
        enable_gqa: bool,
    ) -> None:
        if key.shape[1] % self.page_multiple:
            raise RuntimeError(f"Paged KV cache block size must be divisible by {self.page_multiple}\nC++ trace")
        for metadata in (cu_seq_q, cu_seq_k, seqused_k, block_table):
            assert metadata.dtype == torch.int32
            assert metadata.device == query.device
        assert query.dtype == key.dtype == value.dtype != torch.float32
        assert query.stride(-1) == key.stride(-1) == 1
        assert key.shape == value.shape
        assert enable_gqa == (query.shape[1] != key.shape[2])
        assert cu_seq_q[0] == cu_seq_k[0] == 0
        assert cu_seq_q[-1] == query.shape[0]
        assert torch.equal(cu_seq_k[1:], seqused_k.cumsum(0))
        assert (max_q, max_k) == (int(cu_seq_q.diff().max()), int(seqused_k.max()))
        assert 0 <= int(block_table.min()) <= int(block_table.max()) < key.shape[0]

    def _gathered(self, cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
        """Whole pages, in float64; behind the length zeros, unless that is the flaw."""
        rows = cache[table.long()].flatten(0, 1).double()
        if not self.leaks_unwritten:
            rows[length:] = 0
        return rows

    def _sequence(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, length: int, scale: float, left: int
    ) -> torch.Tensor:
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        positions = torch.arange(length - len(query), length)[:, None]
        keys = torch.arange(len(key))
        hidden = keys > positions
        if left >= 0:
            hidden |= keys < positions - left - int(self.window_is_one_too_wide)
            if not self.leaks_before_window:
                value = value.masked_fill(hidden.all(0)[:, None, None], 0)
        elif not self.leaks_unwritten:
            value = value.masked_fill((keys >= length)[:, None, None], 0)
        scores = torch.einsum("qhd,lhd->hql", query.double(), key) * scale
        return torch.einsum("hql,lhd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)


class TestTorchNativeOnAGPU(AttentionBackendContract):
    """The whole suite where torch's varlen_attn serves: float16 and bfloat16 pass through it, float32 does not."""

    overrides = ("attention=torch_native",)
    device_type = "cuda"
    same_bits = False

    @pytest.fixture(autouse=True)
    def _stand_in(self, use: Callable[[object], None]) -> None:
        use(FakeVarlen())


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], None]:
    """Puts something in the place of torch's varlen_attn."""
    return lambda function: monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", function)


def context_of(spec: AttentionSpec) -> AttentionBackendContext:
    return AttentionBackendContext(spec=spec, device=torch.device("cpu"), num_threads=1)


def spec_of(case: AttentionCase, **changes: object) -> AttentionSpec:
    _, block_size, kv_heads, size = case.kv_cache[0].shape
    found = replace(
        SPEC,
        dtype=str(case.query.dtype).removeprefix("torch."),
        num_heads=case.query.shape[1],
        num_kv_heads=kv_heads,
        head_dim=size,
        v_head_dim=case.value.shape[2],
        block_size=block_size,
    )
    return replace(found, **changes)  # type: ignore[arg-type]


def check(backend: TorchNativeBackend, case: AttentionCase, layer: AttentionLayer) -> None:
    """The backend's output is within what rounding may do."""
    expected = expect_attention(case, layer)
    out = torch.full_like(expected.out, torch.nan, dtype=case.query.dtype)
    cache = (case.kv_cache[0].clone(), case.kv_cache[1].clone())
    backend.forward(layer, case.query, case.key, case.value, cache, backend.plan(case.batch), out)
    assert ((out.double() - expected.out).abs() <= expected.out_limit).all()


lengths_strategy = st.lists(
    st.one_of(
        st.integers(1, 90).map(lambda context: (1, context)),
        st.tuples(st.integers(1, 40), st.integers(0, 50)).map(lambda pair: (pair[0], sum(pair))),
    ),
    min_size=1,
    max_size=5,
)


@given(
    lengths=lengths_strategy,
    heads=st.sampled_from([(1, 1), (3, 1), (6, 2), (8, 8)]),
    head_dim=st.sampled_from([16, 80]),
    block_size=st.sampled_from([1, 16, 32]),
    window=st.one_of(st.none(), st.integers(1, 60)),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    fused=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_any_step_goes_through_it_and_equals_float64(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
    fused: bool,
) -> None:
    case = make_case(
        lengths=lengths,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        fused=fused,
    )
    windows = frozenset() if window is None else frozenset({window})
    fake = FakeVarlen()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.attention.varlen, "varlen_attn", fake)
        backend = TorchNativeBackend(context_of(spec_of(case, sliding_windows=windows)))
        assert backend.description == "varlen_attn"
        num_trials = fake.num_calls
        check(backend, case, AttentionLayer(index=0, scale=0.2, sliding_window=window))
    assert (num_trials, fake.num_calls) == (2, 3) if windows else (1, 2)
    assert fake.windows[-1] == (-1 if window is None else window - 1, 0)


CASE = make_case(
    lengths=[(1, 40), (7, 23), (5, 5)], num_heads=6, num_kv_heads=2, head_dim=16, block_size=16, dtype=torch.bfloat16
)
WINDOWED = frozenset({9})


@pytest.mark.parametrize(
    ("fake", "description"),
    [
        (
            FakeVarlen(page_multiple=256),
            "gathered pages; not varlen_attn: RuntimeError: Paged KV cache block size must be divisible by 256",
        ),
        (
            FakeVarlen(leaks_unwritten=True),
            "gathered pages; not varlen_attn: what unwritten slots contain gets through",
        ),
    ],
)
def test_a_build_that_does_not_serve_the_cache_is_found_out_and_not_used(
    fake: FakeVarlen, description: str, use: Callable[[object], None]
) -> None:
    use(fake)
    backend = TorchNativeBackend(context_of(spec_of(CASE)))
    assert backend.description == description
    trials = fake.num_calls
    check(backend, CASE, AttentionLayer(index=0, scale=0.2))
    assert fake.num_calls == trials


@pytest.mark.parametrize(
    ("fake", "reason"),
    [
        (FakeVarlen(window_is_one_too_wide=True), "it is off by"),
        (FakeVarlen(leaks_before_window=True), "what unwritten slots contain gets through"),
    ],
)
def test_windows_that_are_not_ours_are_gathered_and_the_rest_is_not(
    fake: FakeVarlen, reason: str, use: Callable[[object], None]
) -> None:
    use(fake)
    backend = TorchNativeBackend(context_of(spec_of(CASE, sliding_windows=WINDOWED)))
    assert backend.description.startswith(f"varlen_attn; gathered pages for windows ({reason}")
    for window, num_calls in ((9, 2), (None, 3)):
        check(backend, CASE, AttentionLayer(index=0, scale=0.2, sliding_window=window))
        assert fake.num_calls == num_calls


def test_what_needs_scores_in_hand_is_gathered(use: Callable[[object], None]) -> None:
    use(fake := FakeVarlen())
    spec = spec_of(CASE, soft_caps=frozenset({20.0}), has_sinks=True)
    backend = TorchNativeBackend(context_of(spec))
    assert backend.description == "varlen_attn; gathered pages for soft caps, sinks"
    check(backend, CASE, AttentionLayer(index=0, scale=0.2, soft_cap=20.0))
    check(backend, CASE, AttentionLayer(index=0, scale=0.2, sinks=torch.linspace(-2, 3, 6)))
    assert fake.num_calls == 1  # the trial
    out, lse = torch.empty_like(CASE.query), torch.empty(CASE.query.shape[:2])
    cache = (CASE.kv_cache[0].clone(), CASE.kv_cache[1].clone())
    layer, plan = AttentionLayer(index=0, scale=0.2), backend.plan(CASE.batch)
    backend.forward(layer, CASE.query, CASE.key, CASE.value, cache, plan, out, lse)
    assert fake.num_calls == 1
    assert torch.isfinite(lse).all()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float32"}, "it has no float32"),
        ({"v_head_dim": 8}, "it has no heads of 16 with values of 8"),
        ({"head_dim": 512, "v_head_dim": 512}, "it has no heads of 512 with values of 512"),
    ],
)
def test_what_it_cannot_do_is_known_without_trying(
    changes: dict[str, object], reason: str, use: Callable[[object], None]
) -> None:
    use(fake := FakeVarlen())
    spec = replace(SPEC, **changes)  # type: ignore[arg-type]
    assert varlen.find_varlen(context_of(spec)) == (None, f"gathered pages; not varlen_attn: {reason}")
    assert fake.num_calls == 0


def test_a_release_that_takes_no_block_tables_is_not_called(use: Callable[[object], None]) -> None:
    def older(query: torch.Tensor, key: torch.Tensor, scale: float, window_size: tuple[int, int]) -> torch.Tensor:
        raise AssertionError("it was called")

    use(older)
    found, told = varlen.find_varlen(context_of(SPEC))
    assert found is None
    assert told.endswith("takes no block_table, enable_gqa, seqused_k")


def test_on_a_cpu_there_is_nothing_to_tell(use: Callable[[object], None]) -> None:
    use(fake := FakeVarlen())
    assert varlen.find_varlen(context_of(replace(SPEC, device_type="cpu"))) == (None, "")
    assert fake.num_calls == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch's own runs there")
def test_torchs_own_is_refused_by_name_where_it_does_not_run() -> None:
    """On CPU tensors it raises, as on a GPU that it does not know."""
    found, told = varlen.find_varlen(context_of(SPEC))
    assert found is None
    assert told.startswith("gathered pages; not varlen_attn: NotImplementedError: ")


def test_torchs_own_has_every_parameter_that_is_used() -> None:
    assert set(varlen._NEEDED) <= set(SIGNATURE.parameters)
