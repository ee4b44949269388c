"""Operators that stand in for those of xformers on a machine without a GPU, over its own masks or over stand-ins.

Every call is bound to the signature of the real release (tests/fixtures/xformers/signatures.json), and inputs are
checked as the release's operators check them. Attention is computed in float32 from the materialised bias and from
exactly those cache rows that the kernels read: a page that belongs to somebody else, NaN in a tile of keys, and a
window one key too wide all show.

    python tests/helpers/fake_xformers.py

writes the signatures of the release that is installed.

Legend: N = sequences, T = query rows, L = K/V rows, H / HK = query / KV heads, G = H / HK, D = head size, P = pages.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from tokenyard_backends.xformers.operators import Operators

RECORD = Path(__file__).parents[1] / "fixtures" / "xformers" / "signatures.json"
VERSION = "0.0.35"
PAGED_MASKS = ("PagedBlockDiagonalPaddedKeysMask", "PagedBlockDiagonalGappyKeysMask")
PROMPT_MASKS = ("BlockDiagonalCausalFromBottomRightMask", "BlockDiagonalCausalLocalAttentionFromBottomRightMask")
_CALLED = (
    "Inputs",
    "triton_splitk.FwOp.apply",
    "flash.FwOp.apply",
    "flash.FwOp.is_available",
    "attn_bias.BlockDiagonalMask.from_seqlens",
    "attn_bias.BlockDiagonalMask.make_causal_from_bottomright",
    "attn_bias.BlockDiagonalMask.make_local_attention_from_bottomright",
    "attn_bias.BlockDiagonalGappyKeysMask.from_seqlens",
    "attn_bias.BlockDiagonalGappyKeysMask.make_paged",
    "attn_bias.PagedBlockDiagonalPaddedKeysMask.from_seqlens",
)
_DTYPES = (torch.float16, torch.bfloat16)
_PAGED_HEAD_DIMS = (16, 32, 64, 128, 256, 512)
_KEY_TILE = 64
_NO_GPU = ("device=cpu", "bf16 is only supported on A100+", "operator wasn't built")


def real_package() -> ModuleType:
    """`xformers.ops.fmha`; ImportError where it is not installed."""
    return importlib.import_module("xformers.ops.fmha")


def signatures_of(package: ModuleType) -> dict[str, list[dict[str, str]]]:
    """Name, kind and default of each parameter of what is called."""
    found = {}
    for path in _CALLED:
        target: Any = package
        for name in path.split("."):
            target = getattr(target, name)
        found[path] = [
            {"name": parameter.name, "kind": parameter.kind.name}
            | ({} if parameter.default is inspect.Parameter.empty else {"default": repr(parameter.default)})
            for parameter in inspect.signature(target).parameters.values()
        ]
    return found


def recorded() -> dict[str, list[dict[str, str]]]:
    """What `signatures_of` gave for the real release."""
    found: dict[str, list[dict[str, str]]] = json.loads(RECORD.read_text())
    return found


def bound(path: str, *args: object, **kwargs: object) -> dict[str, Any]:
    """Arguments by name; TypeError where the release would raise it."""
    return recorded_signature(path).bind(*args, **kwargs).arguments


@cache
def recorded_signature(path: str) -> inspect.Signature:
    parameters = [
        inspect.Parameter(
            row["name"],
            getattr(inspect.Parameter, row["kind"]),
            default=row.get("default", inspect.Parameter.empty),
        )
        for row in recorded()[path]
    ]
    return inspect.Signature(parameters)


def require(is_right: object, message: str) -> None:
    if not is_right:
        raise AssertionError(message)


@dataclass
class FakeBias:
    """A bias of the class `name`: block i of queries sees keys[i], all of them or causally from its last row on."""

    name: str
    query_lens: Sequence[int]
    keys: Sequence[tuple[int, int]]  # [N] first key and the one after the last
    device: torch.device
    is_causal: bool = False
    window: int | None = None
    block_tables: torch.Tensor | None = None
    page_size: int = 0

    def make_causal_from_bottomright(self, *args: object, **kwargs: object) -> FakeBias:
        bound("attn_bias.BlockDiagonalMask.make_causal_from_bottomright", self, *args, **kwargs)
        return replace(self, name=PROMPT_MASKS[0], is_causal=True)

    def make_local_attention_from_bottomright(self, *args: object, **kwargs: object) -> FakeBias:
        given = bound("attn_bias.BlockDiagonalMask.make_local_attention_from_bottomright", self, *args, **kwargs)
        require(given["window_size"] > 0, f"Expected `window_size > 0`, but window_size={given['window_size']}")
        return replace(self, name=PROMPT_MASKS[1], is_causal=True, window=given["window_size"])

    def make_paged(self, *args: object, **kwargs: object) -> FakeBias:
        given = bound("attn_bias.BlockDiagonalGappyKeysMask.make_paged", self, *args, **kwargs)
        pages, size, room = given["block_tables"], given["page_size"], given["notional_padding"]
        require(room % size == 0, "Notional padding should be divisible by the page size")
        require(room == pages.shape[1] * size, "the room of a sequence is not that of its pages")
        for index, (start, end) in enumerate(self.keys):
            require(index * room <= start <= end <= (index + 1) * room, f"keys {start}:{end} of sequence {index}")
        require(given["paged_type"] == PAGED_MASKS[1], f"paged_type {given['paged_type']}")
        return replace(self, name=PAGED_MASKS[1], block_tables=pages, page_size=size)

    def materialize(self, shape: tuple[int, int]) -> torch.Tensor:
        """[T, L] 0 where a query sees a key, -inf elsewhere; of a paged bias as if pages lay in their order."""
        mask = torch.full(shape, -torch.inf)
        row = 0
        for count, (start, end) in zip(self.query_lens, self.keys, strict=True):
            queries = torch.arange(end - count, end)[:, None] if self.is_causal else torch.full((count, 1), end)
            keys = torch.arange(start, end)
            sees = keys <= queries
            if self.window is not None:
                sees &= keys > queries - self.window
            mask[row : row + count, start:end] = torch.where(sees, 0.0, -torch.inf)
            row += count
        return mask


def fake_masks() -> Any:
    """In place of the module `attn_bias`."""

    def block_diagonal(*args: object, **kwargs: object) -> FakeBias:
        given = bound("attn_bias.BlockDiagonalMask.from_seqlens", *args, **kwargs)
        ends = torch.tensor(given["kv_seqlen"]).cumsum(0).tolist()
        require(all(k >= q for q, k in zip(given["q_seqlen"], given["kv_seqlen"], strict=True)), "num_keys too few")
        keys = [(end - length, end) for end, length in zip(ends, given["kv_seqlen"], strict=True)]
        return FakeBias("BlockDiagonalMask", given["q_seqlen"], keys, given["device"])

    def gappy(*args: object, **kwargs: object) -> FakeBias:
        given = bound("attn_bias.BlockDiagonalGappyKeysMask.from_seqlens", *args, **kwargs)
        starts, lengths = given["kv_seqstarts"], given["kv_seqlen"]
        require(len(starts) == len(lengths) + 1, "len(seqstarts) should be len(seqlens) + 1")
        keys = [(start, start + length) for start, length in zip(starts, lengths, strict=False)]
        return FakeBias("BlockDiagonalGappyKeysMask", given["q_seqlen"], keys, given["device"])

    def paged(*args: object, **kwargs: object) -> FakeBias:
        given = bound("attn_bias.PagedBlockDiagonalPaddedKeysMask.from_seqlens", *args, **kwargs)
        pages, size = given["block_tables"], given["page_size"]
        room = pages.shape[1] * size
        require(all(length <= room for length in given["kv_seqlen"]), f"Seqlens {given['kv_seqlen']} Padding {room}")
        keys = [(index * room, index * room + length) for index, length in enumerate(given["kv_seqlen"])]
        return FakeBias(PAGED_MASKS[0], given["q_seqlen"], keys, given["device"], block_tables=pages, page_size=size)

    return SimpleNamespace(
        BlockDiagonalMask=SimpleNamespace(from_seqlens=block_diagonal),
        BlockDiagonalGappyKeysMask=SimpleNamespace(from_seqlens=gappy),
        PagedBlockDiagonalPaddedKeysMask=SimpleNamespace(from_seqlens=paged),
        PagedBlockDiagonalGappyKeysMask=PAGED_MASKS[1],
    )


def fake_inputs(*args: object, **kwargs: object) -> Any:
    return SimpleNamespace(**bound("Inputs", *args, **kwargs))


@dataclass
class StandIn:
    """An operator. `check` says what the real one would not take of inputs that passed the checks here."""

    NAME: str
    masks: Sequence[str]
    check: Callable[[Any], list[str]] = lambda inputs: []
    calls: list[Any] = field(default_factory=list)

    def is_available(self) -> bool:
        return True

    def apply(self, *args: object, **kwargs: object) -> tuple[torch.Tensor, Any]:
        path = "triton_splitk.FwOp.apply" if self.masks == PAGED_MASKS else "flash.FwOp.apply"
        given = bound(path, *args, **kwargs)
        inputs = given["inp"]
        self.calls.append(inputs)
        check_tensors(inputs)
        name = mask_name(inputs.attn_bias)
        require(name in self.masks, f"attn_bias type is {name}")
        reasons = self.check(inputs)
        require(not reasons, f"{self.NAME} is not supported because: {reasons}")
        key, value, sees = read_keys(inputs)
        out, lse = attend(inputs.query[0], key, value, sees, inputs.scale)
        return out.unsqueeze(0), SimpleNamespace(lse=lse.unsqueeze(0)) if given["needs_gradient"] else None


def mask_name(bias: Any) -> str:
    return bias.name if isinstance(bias, FakeBias) else type(bias).__name__


def check_tensors(inputs: Any) -> None:
    query, key, value = inputs.query, inputs.key, inputs.value
    require(query.dim() == 5 and query.shape[0] == 1, f"query {tuple(query.shape)} is not [1, T, HK, G, D]")
    require(key.shape == value.shape == (1, key.shape[1], *query.shape[2:]), f"key {tuple(key.shape)}")
    require(query.dtype in _DTYPES, f"dtype={query.dtype}")
    require(key.dtype == value.dtype == query.dtype, "Query/Key/Value should all have the same dtype")
    require(query.shape[4] in _PAGED_HEAD_DIMS and query.shape[4] <= 256, f"Embed dim {query.shape[4]} not supported")
    require(inputs.scale is not None, "the scale is left to xformers")
    for name, rows in (("query", query), ("key", key), ("value", value)):
        require(rows.stride(-1) == 1, f"{name}.stride(-1) > 1")
        require(rows.stride(1) % 8 == 0 and rows.stride(2) % 8 == 0, f"{name}.stride() = {rows.stride()}")
    for name, rows in (("key", key), ("value", value)):
        require(rows.shape[3] == 1 or rows.stride(3) == 0, f"{name} is repeated, not expanded")
    if inputs.attn_bias.__class__ is FakeBias:
        require(inputs.attn_bias.device == query.device, "Attention bias and Query should be on the same device")
        require(sum(inputs.attn_bias.query_lens) == query.shape[1], "Expected another number of queries")


def read_keys(inputs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K and V rows [L, HK, D] that a kernel reads, and what each query row sees of them [T, L]."""
    bias, num_queries = inputs.attn_bias, inputs.query.shape[1]
    key, value = inputs.key[0, :, :, 0], inputs.value[0, :, :, 0]
    if mask_name(bias) not in PAGED_MASKS:
        return key, value, bias.materialize((num_queries, len(key))) == 0
    pages, size = bias.block_tables, bias.page_size
    require(pages.dtype == torch.int32, f"block_tables are {pages.dtype}")
    require(size % _KEY_TILE == 0, f"For paged attention, page size should be divisible by the block size: {size}")
    require(len(key) % size == 0, "For paged attention, key.shape[1] should be divisible by the page size")
    rows, sees = paged_rows(bias, num_queries)
    is_read = sees.any(0).view(-1, _KEY_TILE).int().flip(1).cummax(1).values.flip(1).flatten().bool()
    key, value = (torch.where(is_read[:, None, None], each[torch.where(is_read, rows, 0)], 0) for each in (key, value))
    return key, value, sees


def paged_rows(bias: Any, num_queries: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The cache rows [N * P * page size] of a bias's pages, and what each query row sees of them [T, the same]."""
    pages, size = bias.block_tables, bias.page_size
    # The real biases write a mask page by page to where pages lie: one that is named twice would be overwritten.
    ordered = torch.arange(pages.numel(), dtype=torch.int32).view(pages.shape)
    sees = replace(bias, block_tables=ordered).materialize((num_queries, pages.numel() * size)) == 0
    return (pages.long()[..., None] * size + torch.arange(size)).flatten(), sees


def attend(
    query: torch.Tensor,  # [T, HK, G, D]
    key: torch.Tensor,  # [L, HK, D]
    value: torch.Tensor,  # [L, HK, D]
    sees: torch.Tensor,  # [T, L]
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, HK, G, D] in the data type of the query, [HK, G, T] float32; of a row that sees nothing 0 and -inf."""
    scores = torch.einsum("tkgd,lkd->kgtl", query.float(), key.float()) * scale
    scores = torch.where(sees, scores, -torch.inf)
    lse = scores.logsumexp(3)
    weights = torch.where(sees, (scores - lse[..., None]).exp(), 0)
    return torch.einsum("kgtl,lkd->tkgd", weights, value.float()).to(query.dtype), lse


def fake_operators() -> Operators:
    """Nothing of xformers is needed."""
    return Operators(
        masks=fake_masks(),
        inputs=fake_inputs,
        paged=StandIn("paged stand-in", PAGED_MASKS),
        prompt=StandIn("prompt stand-in", PROMPT_MASKS),
    )


def operators_over(package: ModuleType) -> Operators:
    """Stand-ins for the operators alone: masks, inputs and their checks are those of the real package."""

    def check_with(operator: Any) -> Callable[[Any], list[str]]:
        def check(inputs: Any) -> list[str]:
            inputs.validate_inputs()
            return [why for why in operator.not_supported_reasons(inputs) if not why.startswith(_NO_GPU)]

        return check

    return Operators(
        masks=package.attn_bias,
        inputs=package.Inputs,
        paged=StandIn("paged stand-in", PAGED_MASKS, check_with(package.triton_splitk.FwOp)),
        prompt=StandIn("prompt stand-in", PROMPT_MASKS, check_with(package.flash.FwOp)),
    )


if __name__ == "__main__":
    RECORD.write_text(json.dumps(signatures_of(real_package()), indent=1) + "\n")
