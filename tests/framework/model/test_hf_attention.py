"""What transformers' attention hands on: rows as AttentionBackend.forward says they are laid out."""

from __future__ import annotations

import pytest
import torch
from tokenyard.model.hf_attention import RunningHandler


class Module(torch.nn.Module):
    layer_idx = 0


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (0, 3, 1, 2)], ids=["by head", "by token", "by element"])
@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_heads_of_a_row_lie_one_after_the_other(order: tuple[int, ...], num_kv_heads: int) -> None:
    def laid_out(heads: int) -> torch.Tensor:
        """[1, heads, 5, 8] whose memory is in this order."""
        whole = torch.randn(1, heads, 5, 8)
        back = [order.index(dimension) for dimension in range(4)]
        return whole.permute(order).contiguous().permute(back)

    given = (laid_out(4), laid_out(num_kv_heads), laid_out(num_kv_heads))
    seen: list[torch.Tensor] = []

    def attention(layer_index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        seen.extend((query, key, value))
        return query

    out = RunningHandler(attention, {0: 0}).attend(Module(), *given, None, 1.0, {})
    assert out.shape == (1, 5, 4, 8)
    for tensor, rows in zip(given, seen, strict=True):
        assert torch.equal(rows, tensor[0].transpose(0, 1))
        assert rows.stride(2) == 1
        assert rows.shape[1] == 1 or rows.stride(1) == rows.shape[2]


def test_rows_that_are_views_of_a_fused_projection_are_not_copied() -> None:
    fused = torch.randn(5, 12, 8)
    query, key, value = (part.transpose(0, 1).unsqueeze(0) for part in (fused[:, :4], fused[:, 4:8], fused[:, 8:]))
    seen: list[torch.Tensor] = []

    def attention(layer_index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        seen.extend((query, key, value))
        return query

    RunningHandler(attention, {0: 0}).attend(Module(), query, key, value, None, 1.0, {})
    assert [rows.data_ptr() for rows in seen] == [view.data_ptr() for view in (query, key, value)]
