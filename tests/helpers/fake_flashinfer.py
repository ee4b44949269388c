"""A module that stands in for `flashinfer` on a machine without a GPU.

Every call is bound to the signature of a real release (tests/fixtures/flashinfer/signatures.json), its arguments are
checked as that release's Python and C++ check them, and more strictly where a wrong argument would go unseen: a plan
that waits for the device, data types left to their defaults, sinks that the kernels do not read. Attention is computed
in float32 from exactly what a kernel gets: the buffers of the last plan.

Legend: N = sequences, T = query rows, P = pages of all sequences, H / HK = query / KV heads, D = head size.
"""

from __future__ import annotations

import inspect
import json
import math
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

RECORD = Path(__file__).parents[1] / "fixtures" / "flashinfer" / "signatures.json"
VERSIONS = tuple(json.loads(RECORD.read_text()))
_HALF = (torch.float16, torch.bfloat16)
_CUDA_CORE_GROUPS = (1, 2, 3, 4, 6, 8)  # of every release; the later ones have 16 too
_HEAD_DIMS = (64, 128, 256, 512)
_PLAN_BYTES = 1 << 20  # of an int workspace that is given; far more than a decoding plan takes


def recorded_signature(version: str, name: str) -> inspect.Signature:
    """Of `name`, such as "BatchDecodeWithPagedKVCacheWrapper.run", in a release."""
    rows = json.loads(RECORD.read_text())[version][name]
    return inspect.Signature(
        [
            inspect.Parameter(
                row["name"],
                getattr(inspect.Parameter, row["kind"]),
                default=row.get("default", inspect.Parameter.empty),
            )
            for row in rows
        ]
    )


@dataclass
class Calls:
    """What was called, in order: (class or function and method, arguments by name)."""

    version: str
    log: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    plan_error: Exception | None = None  # raised by the next plan

    def bind(self, name: str, *args: object, **kwargs: object) -> dict[str, Any]:
        """TypeError where the release would raise it; **kwargs of the signature come apart."""
        bound = recorded_signature(self.version, name).bind(*args, **kwargs).arguments
        bound |= bound.pop("kwargs", {})
        bound.pop("self", None)
        self.log.append((name, bound))
        return bound

    def named(self, name: str) -> list[dict[str, Any]]:
        return [arguments for called, arguments in self.log if called == name]


@dataclass
class Planned:
    """What the kernels of a plan read. The tensors are those that a CUDA graph would hold on to."""

    query_start: torch.Tensor  # [N + 1]
    page_start: torch.Tensor  # [N + 1]
    page_ids: torch.Tensor  # [P] or more
    last_page_len: torch.Tensor  # [N]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    causal: bool
    window_left: int
    soft_cap: float | None
    dtype: torch.dtype
    scale: float


class _Wrapper:
    """Common to both wrappers."""

    calls: Calls
    class_name: str
    backends: tuple[str, ...]

    def __init__(self, *args: object, **kwargs: object) -> None:
        given = self.calls.bind(f"{self.class_name}.__init__", self, *args, **kwargs)
        check_workspace(given["float_workspace_buffer"])
        require(not given["float_workspace_buffer"].any(), "the float workspace must be zeros before its first use")
        require(given["kv_layout"] == "NHD", f"kv_layout {given['kv_layout']}: the caches of these tests are NHD")
        require(given["backend"] in self.backends, f"backend {given['backend']}")
        self.device = given["float_workspace_buffer"].device
        self.use_cuda_graph = bool(given.get("use_cuda_graph", False))
        self.given = given
        self.planned: Planned | None = None

    def reset_workspace_buffer(self, *args: object, **kwargs: object) -> None:
        given = self.calls.bind(f"{self.class_name}.reset_workspace_buffer", self, *args, **kwargs)
        check_workspace(given["float_workspace_buffer"])
        check_workspace(given["int_workspace_buffer"])
        size = given["int_workspace_buffer"].numel()
        require(size >= _PLAN_BYTES, f"an int workspace of {size} bytes may be too small for a plan")

    def _checked(self, given: dict[str, Any], arrays: tuple[str, str, str]) -> None:
        """Raise what a plan of these arguments would end in."""
        if self.calls.plan_error is not None:
            error, self.calls.plan_error = self.calls.plan_error, None
            raise error
        page_start, page_ids, last_page_len = (given[name] for name in arrays)
        check_pages(page_start, page_ids, last_page_len, given["page_size"], self.device)
        for name in ("q_data_type", "kv_data_type", "o_data_type"):
            require(given.get(name) in _HALF, f"{name} must be given, float16 or bfloat16: {given.get(name)}")
            require(given[name] == given["q_data_type"], f"{name} differs from q_data_type")
        require(given["num_qo_heads"] % given["num_kv_heads"] == 0, "query heads must be a multiple of KV heads")
        require(isinstance(given.get("sm_scale"), float), f"sm_scale {given.get('sm_scale')} is not a float")
        require(given["window_left"] >= -1, f"window_left {given['window_left']}")
        cap = given["logits_soft_cap"]
        require(cap is None or cap > 0, f"logits_soft_cap {cap} would mean none")

    def run(self, *args: object, **kwargs: object) -> object:
        given = self.calls.bind(f"{self.class_name}.run", self, *args, **kwargs)
        planned = self.planned
        require(planned is not None, "plan info is not initialized")
        assert planned is not None
        query, out, lse = given["q"], given["out"], given.get("lse")
        require(given.get("sinks") is None, "these kernels do not read sinks")
        check_tensors(planned, query, given["paged_kv_cache"], out)
        require(given["return_lse"] == (lse is not None), "return_lse goes with lse")
        require(query.shape[0] == int(planned.query_start[-1]), "q.shape[0] does not match qo_indptr[-1]")
        result, result_lse = attend(planned, query, given["paged_kv_cache"])
        out.copy_(result)
        if lse is None:
            return out
        require(lse.dtype == torch.float32 and lse.shape == query.shape[:2], f"lse {lse.dtype} {tuple(lse.shape)}")
        lse.copy_(result_lse)
        return out, lse


class _DecodeWrapper(_Wrapper):
    class_name = "BatchDecodeWithPagedKVCacheWrapper"
    backends = ("auto", "fa2")

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        if self.use_cuda_graph:
            start, ids, last = (
                self.given[f"paged_kv_{name}_buffer"] for name in ("indptr", "indices", "last_page_len")
            )
            require(all(isinstance(buffer, torch.Tensor) for buffer in (start, ids, last)), "graphs need buffers")
            require(len(start) == len(last) + 1, "paged_kv_indptr_buffer must have batch_size + 1 elements")
            require(all(buffer.dtype == torch.int32 for buffer in (start, ids, last)), "buffers must be int32")

    def plan(self, *args: object, **kwargs: object) -> None:
        name = f"{self.class_name}.plan"
        recorded_signature(self.calls.version, f"{self.class_name}._plan_impl").bind(self, *args, **kwargs)
        given = self.calls.bind(name, self, *args, **kwargs)
        require("deprecated_positional_args" not in given, "all after page_size must be given by keyword")
        self._checked(given, ("indptr", "indices", "last_page_len"))
        group = given["num_qo_heads"] // given["num_kv_heads"]
        require(given["head_dim"] in _HEAD_DIMS, f"Unsupported head_dim: {given['head_dim']}")
        if not self.given["use_tensor_cores"]:
            require(group in _CUDA_CORE_GROUPS, f"Unsupported group_size: {group}")
        start, ids, last = given["indptr"], given["indices"], given["last_page_len"]
        if self.use_cuda_graph:
            start, ids, last = self._staged(start, ids, last)
        self.planned = Planned(
            query_start=torch.arange(len(last) + 1, dtype=torch.int32),
            page_start=start,
            page_ids=ids,
            last_page_len=last,
            num_heads=given["num_qo_heads"],
            num_kv_heads=given["num_kv_heads"],
            head_dim=given["head_dim"],
            page_size=given["page_size"],
            causal=False,
            window_left=given["window_left"],
            soft_cap=given["logits_soft_cap"],
            dtype=given["q_data_type"],
            scale=given["sm_scale"],
        )

    def _staged(self, start: torch.Tensor, ids: torch.Tensor, last: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Copy into the buffers that recorded launches read."""
        buffers = [self.given[f"paged_kv_{name}_buffer"] for name in ("indptr", "indices", "last_page_len")]
        require(len(last) == len(buffers[2]), "The batch size should be fixed in cudagraph mode")
        require(len(ids) <= len(buffers[1]), "The size of indices should be less than or equal to the allocated buffer")
        for buffer, values in zip(buffers, (start, ids, last), strict=True):
            buffer[: len(values)].copy_(values)
        return tuple(buffers)


class _PrefillWrapper(_Wrapper):
    class_name = "BatchPrefillWithPagedKVCacheWrapper"
    backends = ("auto", "fa2", "fa3")

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.lengths = torch.empty(32768, dtype=torch.int32)  # of each sequence: allocated here, written by each plan

    def plan(self, *args: object, **kwargs: object) -> None:
        given = self.calls.bind(f"{self.class_name}.plan", self, *args, **kwargs)
        self._checked(given, ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"))
        require(given["head_dim_qk"] in _HEAD_DIMS, f"Unsupported head_dim: {given['head_dim_qk']}")
        query_start, page_start = given["qo_indptr"], given["paged_kv_indptr"]
        require(query_start.dtype == torch.int32 and query_start.device.type == "cpu", "qo_indptr: int32 on the host")
        require(len(query_start) == len(page_start), "qo_indptr and paged_kv_indptr differ in length")
        require(bool((query_start.diff() >= 1).all()), "a sequence without query rows")
        self.lengths[: len(page_start) - 1].copy_(page_start.diff())
        self.planned = Planned(
            query_start=query_start.clone(),
            page_start=page_start.clone(),
            page_ids=given["paged_kv_indices"].clone(),
            last_page_len=given["paged_kv_last_page_len"].clone(),
            num_heads=given["num_qo_heads"],
            num_kv_heads=given["num_kv_heads"],
            head_dim=given["head_dim_qk"],
            page_size=given["page_size"],
            causal=given["causal"],
            window_left=given["window_left"],
            soft_cap=given["logits_soft_cap"],
            dtype=given["q_data_type"],
            scale=given["sm_scale"],
        )


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(f"flashinfer: {message}")


def check_workspace(buffer: torch.Tensor) -> None:
    require(buffer.dtype == torch.uint8 and buffer.dim() == 1, "a workspace is a flat uint8 tensor")
    require(buffer.data_ptr() % 16 == 0, "a workspace must be 16-byte aligned")


def check_pages(
    page_start: torch.Tensor, page_ids: torch.Tensor, last_page_len: torch.Tensor, page_size: int, device: torch.device
) -> None:
    """Compressed rows that hold together; the host's arrays on the host, so that no plan waits for the device."""
    for name, array in (("indptr", page_start), ("indices", page_ids), ("last_page_len", last_page_len)):
        require(array.dtype == torch.int32 and array.dim() == 1, f"{name} must be a flat int32 tensor: {array.dtype}")
    require(page_start.device.type == last_page_len.device.type == "cpu", "indptr, last_page_len belong on the host")
    require(page_ids.device == device, f"indices belong on {device}")
    require(len(page_start) == len(last_page_len) + 1, "indptr must have batch_size + 1 elements")
    require(int(page_start[0]) == 0 and bool((page_start.diff() >= 1).all()), f"indptr {page_start.tolist()}")
    require(int(page_start[-1]) == len(page_ids), f"{len(page_ids)} indices, indptr ends at {int(page_start[-1])}")
    require(bool(((last_page_len >= 1) & (last_page_len <= page_size)).all()), f"last page {last_page_len.tolist()}")


def check_tensors(
    planned: Planned, query: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor
) -> None:
    """What run() gets, against what was planned."""
    heads = (planned.num_heads, planned.head_dim)
    require(query.dtype == planned.dtype, f"The dtype of q {query.dtype} does not match {planned.dtype}")
    require(query.shape[1:] == heads and query.stride(2) == 1, f"q {tuple(query.shape)} {query.stride()}")
    require(query.stride(0) * query.element_size() % 16 == 0, "q rows must be 16-byte aligned")
    require(isinstance(cache, tuple) and len(cache) == 2, "the cache is a tuple of keys and values")
    for pages in cache:
        shape = (planned.page_size, planned.num_kv_heads, planned.head_dim)
        require(pages.dim() == 4 and pages.shape[1:] == shape, f"cache {tuple(pages.shape)}, planned {shape}")
        require(pages.dtype == planned.dtype, f"The dtype of k {pages.dtype} does not match {planned.dtype}")
        require(pages.stride() == cache[0].stride() and pages.stride(3) == 1, "strides of keys and values differ")
    require(out.shape == query.shape and out.dtype == planned.dtype and out.is_contiguous(), "out like q, contiguous")


def attend(
    planned: Planned, query: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [T, H, D] and base-2 log-sum-exp [T, H] in float32."""
    outs, logs = [], []
    for index in range(len(planned.last_page_len)):
        first, last = planned.page_start[index : index + 2].tolist()
        ids = planned.page_ids[first:last].long()
        require(bool(((ids >= 0) & (ids < len(cache[0]))).all()), f"page ids {ids.tolist()} are not of the cache")
        length = (last - first - 1) * planned.page_size + int(planned.last_page_len[index])
        key, value = (pages[ids].flatten(0, 1)[:length].float() for pages in cache)  # [length, HK, D]
        low, high = planned.query_start[index : index + 2].tolist()
        out, log = attend_sequence(planned, query[low:high].float(), key, value)
        outs.append(out)
        logs.append(log)
    return torch.cat(outs), torch.cat(logs)


def attend_sequence(
    planned: Planned, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions are counted from the end of the sequence's queries and keys."""
    group = planned.num_heads // planned.num_kv_heads
    scores = torch.einsum("qhd,lhd->hql", query, key.repeat_interleave(group, 1)) * planned.scale
    if planned.soft_cap is not None:
        scores = planned.soft_cap * torch.tanh(scores / planned.soft_cap)
    positions = torch.arange(len(key) - len(query), len(key))[:, None]
    keys = torch.arange(len(key))
    if planned.causal:
        require(len(key) >= len(query), "fewer keys than causal queries")
        scores = scores.masked_fill(keys > positions, -math.inf)
    if planned.window_left >= 0:
        scores = scores.masked_fill(keys < positions - planned.window_left, -math.inf)
    log = scores.logsumexp(-1)  # [H, Q]
    out = torch.einsum("hql,lhd->qhd", (scores - log[..., None]).exp(), value.repeat_interleave(group, 1))
    return out, log.T / math.log(2)


def fake_flashinfer(version: str) -> tuple[types.ModuleType, Calls]:
    """The module to put at `sys.modules["flashinfer"]`, and what is called of it."""
    calls = Calls(version)
    module = types.ModuleType("flashinfer")

    def merge_state_in_place(*args: object, **kwargs: object) -> None:
        given = calls.bind("merge_state_in_place", *args, **kwargs)
        out, lse, other, other_lse = (given[name] for name in ("v", "s", "v_other", "s_other"))
        require(out.dtype == other.dtype and out.shape == other.shape, "v and v_other differ")
        require(lse.dtype == other_lse.dtype == torch.float32, "log-sum-exps are float32")
        require(lse.shape == other_lse.shape == out.shape[:2], "log-sum-exps do not fit the outputs")
        merged = torch.logaddexp2(lse, other_lse)
        weights = torch.stack((lse, other_lse)).sub(merged).exp2()[..., None]
        out.copy_(weights[0] * out.float() + weights[1] * other.float())
        lse.copy_(merged)

    vars(module).update(
        __version__=version,
        BatchDecodeWithPagedKVCacheWrapper=type("Decode", (_DecodeWrapper,), {"calls": calls}),
        BatchPrefillWithPagedKVCacheWrapper=type("Prefill", (_PrefillWrapper,), {"calls": calls}),
        merge_state_in_place=merge_state_in_place,
    )
    return module, calls
