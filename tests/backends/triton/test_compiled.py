"""What the kernels become on GPUs, compiled here without one: no spills, memory that the chips have, tensor cores.

The backend's own forward launches them, for every entry of its tables; a stand-in for the driver keeps the binaries.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import pytest
import torch
import triton_dry_run
from tokenyard.interfaces import AttentionBackendContext, AttentionBatch, AttentionLayer, AttentionSpec
from tokenyard.testing.attention import make_batch
from tokenyard_backends.triton.backend import TritonBackend
from tokenyard_backends.triton.plugin import TritonOptions
from tokenyard_backends.triton.tiles import tiles_for
from triton_dry_run import Launch

KIB = 1024
# Shared memory that one program may have, by compute capability.
SHARED_MEMORY = {80: 163 * KIB, 86: 99 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB, 120: 99 * KIB}
REGISTERS = 65536  # of a multiprocessor
FLOAT32_STACK = 32  # bytes a thread that may spill; seen: 8 to 24 in a few of the kernels for prompts, none in others
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Model:
    """The shape of a model's attention."""

    head_dim: int = 128
    v_head_dim: int | None = None
    num_kv_heads: int = 8
    group: int = 4
    block_size: int = 16
    dtype: str = "bfloat16"

    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            device_type="cuda",
            dtype=self.dtype,
            num_heads=self.num_kv_heads * self.group,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim or self.head_dim,
            block_size=self.block_size,
        )


@dataclass(frozen=True)
class Kind:
    """What a layer asks for."""

    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    with_lse: bool = False


PLAIN = Kind()
KINDS = {
    "plain": PLAIN,
    "soft cap": Kind(soft_cap=50.0),
    "window and sinks": Kind(window=400, has_sinks=True),
    "everything": Kind(window=4096, soft_cap=30.0, has_sinks=True, with_lse=True),
}
LENGTHS = [(1, 700), (1, 20), (40, 40), (5, 300)]


def launches_of(
    arch: int,
    model: Model,
    kind: Kind = PLAIN,
    lengths: list[tuple[int, int]] = LENGTHS,
    split_tokens: int = 256,
    shift: int = 0,
) -> list[Launch]:
    """One layer's forward on a GPU of this architecture; the step's arrays begin `shift` elements off 16 bytes."""
    spec = model.spec()
    assert TritonBackend.supports(spec) == []
    tiles = tiles_for(divmod(arch, 10), spec.dtype, spec.head_dim, spec.v_head_dim)
    # Tensors on the CPU stand in for those on a GPU: alignments and strides are the same.
    context = AttentionBackendContext(spec=spec, device=torch.device("cpu"), num_threads=1)
    backend = TritonBackend(TritonOptions(split_tokens=split_tokens), context, tiles)
    tables = [[0] * -(-length // spec.block_size) for _, length in lengths]
    batch = shifted(make_batch(lengths, tables, spec.block_size), shift)
    sizes = [spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.num_kv_heads * spec.v_head_dim]
    fused = torch.empty(batch.num_tokens, sum(sizes), dtype=DTYPES[spec.dtype])
    query, key, value = (
        part.view(len(part), -1, size)
        for part, size in zip(fused.split(sizes, 1), (spec.head_dim, spec.head_dim, spec.v_head_dim), strict=True)
    )
    layout = backend.kv_cache_layout(spec, 4)
    cache = (fused.new_empty(layout.key_shape), fused.new_empty(layout.value_shape))
    out = fused.new_empty(batch.num_tokens, spec.num_heads, spec.v_head_dim)
    layer = AttentionLayer(
        index=0,
        scale=0.1,
        sliding_window=kind.window,
        soft_cap=kind.soft_cap,
        sinks=fused.new_empty(spec.num_heads) if kind.has_sinks else None,
    )
    lse = torch.empty(out.shape[:2]) if kind.with_lse else None
    with triton_dry_run.dry_run(arch) as launches:
        backend.forward(layer, query, key, value, cache, backend.plan(batch), out, lse)
    return launches


def shifted(batch: AttentionBatch, shift: int) -> AttentionBatch:
    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.new_zeros(tensor.numel() + shift)[shift:].view(tensor.shape).copy_(tensor)

    names = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
    return replace(batch, **{name: moved(getattr(batch, name)) for name in names})


def check(arch: int, model: Model, kind: Kind = PLAIN) -> None:
    """What every binary must keep to."""
    launches = launches_of(arch, model, kind)
    assert [launch.name for launch in launches] == ["write_kv_kernel", "decode_kernel", "merge_kernel", "prompt_kernel"]
    for launch in launches:
        about = f"{launch.name}: {launch.usage}, {launch.num_threads} threads, {launch.shared_memory} bytes shared"
        assert launch.spilled <= (FLOAT32_STACK if model.dtype == "float32" else 0), about
        assert launch.shared_memory <= SHARED_MEMORY[89 if arch == 80 else arch], about  # they share a table
        assert launch.registers * launch.num_threads <= REGISTERS, about
    assert uses_warpgroups(launches[-1]) == (arch == 90 and model.dtype != "float32")


def uses_warpgroups(launch: Launch) -> bool:
    return "wgmma.mma_async" in launch.ptx


@pytest.fixture(autouse=True, scope="module")
def _compiler(tmp_path_factory: pytest.TempPathFactory) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # else it warns that the default will change
        yield


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(
    "model", [Model(), Model(head_dim=64, num_kv_heads=3, group=3), Model(dtype="float32")], ids=str
)
def test_the_kernels_of_common_models_compile_without_spills(arch: int, model: Model) -> None:
    check(arch, model)


def test_loads_and_copies_are_of_16_bytes() -> None:
    """Which hangs on what the launcher finds divisible by 16."""
    write, decode, _, prompt = launches_of(80, Model())
    assert "ld.global.v4.b32" in write.ptx
    assert "st.global.v4.b32" in write.ptx
    for launch in (decode, prompt):
        assert re.search(r"cp\.async\.cg\.shared\.global .*, 0x10,", launch.ptx)


def test_float32_is_not_multiplied_as_tf32() -> None:
    _, decode, _, prompt = launches_of(80, Model(head_dim=64, dtype="float32"))
    for launch in (decode, prompt):
        assert "tf32" not in launch.ptx
        assert "fma.rn.f32" in launch.ptx


def test_steps_and_layers_that_differ_in_numbers_alone_share_their_binaries() -> None:
    """Windows, lengths, and where in memory a step's arrays begin; else requests would wait for a compiler again."""
    model = Model(head_dim=64)
    few, many = (
        launches_of(90, model, Kind(window=window), lengths, split_tokens=16, shift=shift)
        for window, lengths, shift in ((48, [(1, 33), (4, 50)], 0), (1001, [(1, 700), (1, 5), (30, 500)], 1))
    )
    assert [launch.kernel.hash for launch in few] == [launch.kernel.hash for launch in many]


def test_how_many_rows_decode_beside_a_prompt_changes_no_binary() -> None:
    """The tiles of prompts lie behind the decoding rows in one buffer: their address must not tell how many."""
    hashes: dict[str, set[str]] = {}
    for num_rows in range(5):
        for launch in launches_of(90, Model(head_dim=64), lengths=[(1, 700)] * num_rows + [(40, 40)]):
            hashes.setdefault(launch.name, set()).add(launch.kernel.hash)
    assert {name: len(found) for name, found in hashes.items()} == dict.fromkeys(hashes, 1)
    assert hashes.keys() == {kernel.__name__ for kernel in triton_dry_run.KERNELS}


@pytest.mark.parametrize(
    ("lengths", "grids"),
    [
        ([(1, 256), (1, 3)], {"write": (2, 1, 1), "decode": (2, 8, 1)}),
        ([(1, 257), (1, 3)], {"write": (2, 1, 1), "decode": (2, 8, 2), "merge": (2, 32, 1)}),
        ([(1, 10**6)], {"write": (1, 1, 1), "decode": (1, 8, 32), "merge": (1, 32, 1)}),
        ([(33, 50), (2, 9)], {"write": (35, 1, 1), "prompt": (3, 8, 1)}),
        ([(33, 50), (1, 9)], {"write": (34, 1, 1), "decode": (1, 8, 1), "prompt": (2, 8, 1)}),
    ],
)
def test_a_step_launches_what_it_needs(lengths: list[tuple[int, int]], grids: dict[str, tuple[int, int, int]]) -> None:
    launches = launches_of(90, Model(), lengths=lengths)
    assert {launch.name.split("_")[0]: launch.grid for launch in launches} == grids


HEAD_DIMS = [(16, None), (32, None), (64, None), (80, None), (96, None), (128, None), (192, 128), (256, None)]
# The code of both types of 16 bits differs in the names of instructions alone.
DTYPES_AND_KINDS = [("bfloat16", name) for name in KINDS] + [
    (dtype, name) for dtype in ("float16", "float32") for name in ("plain", "everything")
]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "kind"), DTYPES_AND_KINDS)
@pytest.mark.parametrize(("head_dim", "v_head_dim"), HEAD_DIMS)
@pytest.mark.parametrize("arch", [80, 90])
def test_every_entry_of_the_tables_compiles_without_spills(
    arch: int, head_dim: int, v_head_dim: int | None, dtype: str, kind: str
) -> None:
    check(arch, Model(head_dim=head_dim, v_head_dim=v_head_dim, dtype=dtype), KINDS[kind])


@pytest.mark.slow
@pytest.mark.parametrize(("group", "block_size"), [(1, 1), (3, 24), (7, 64), (8, 128), (20, 16)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("arch", [80, 90])
def test_no_head_group_or_block_size_makes_them_spill(arch: int, head_dim: int, group: int, block_size: int) -> None:
    model = Model(head_dim=head_dim, group=group, num_kv_heads=2, block_size=block_size)
    for kind in (PLAIN, KINDS["everything"]):
        check(arch, model, kind)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("arch", [86, 89, 100, 120])
def test_other_chips_take_the_same_tiles(arch: int, head_dim: int) -> None:
    check(arch, Model(head_dim=head_dim))
