"""group_layers: which layers share a block table, and how little that wastes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenyard.interfaces import AttentionLayer
from tokenyard.worker.kv_groups import KVGroups, group_layers

LONG = 10**6


def grouped(windows: list[int | None], max_model_len: int = LONG) -> KVGroups:
    layers = [AttentionLayer(index=index, sliding_window=window) for index, window in enumerate(windows)]
    return group_layers(layers, max_model_len)


@pytest.mark.parametrize("window", [None, 4096])
def test_one_window_for_all_layers_is_one_group_without_padding(window: int | None) -> None:
    groups = grouped([window] * 30)
    assert [(group.window, group.layers) for group in groups.groups] == [(window, tuple(range(30)))]
    assert groups.num_tensors == 30


@pytest.mark.parametrize(
    ("num_full", "num_windowed", "num_groups", "num_tensors"),
    [
        (13, 13, 2, 13),
        (4, 22, 7, 4),  # the common divisor 2 would make 13 groups
        (5, 29, 7, 5),  # the common divisor 1 would make 34 groups
        (21, 7, 4, 7),
        (21, 10, 3, 11),
        (1, 5, 6, 1),
        (24, 8, 4, 8),
        (1, 30, 31, 1),  # any larger size would pad the only full layer, which keeps every token
    ],
)
def test_groups_are_few_and_padding_is_at_most_an_eighth(
    num_full: int, num_windowed: int, num_groups: int, num_tensors: int
) -> None:
    groups = grouped([None] * num_full + [512] * num_windowed)
    assert (len(groups.groups), groups.num_tensors) == (num_groups, num_tensors)


def test_a_window_that_no_request_outgrows_is_full_attention() -> None:
    assert [group.window for group in grouped([128, None, 64], max_model_len=128).groups] == [None, None, 64]
    assert len(grouped([128, None, 4096], max_model_len=128).groups) == 1


@given(
    windows=st.lists(st.sampled_from([None, 8, 16, 99]), min_size=1, max_size=60),
    max_model_len=st.sampled_from([16, LONG]),
)
def test_every_layer_has_a_group_of_its_window_and_a_tensor_for_itself_there(
    windows: list[int | None], max_model_len: int
) -> None:
    groups = grouped(windows, max_model_len)
    layers = groups.assign([AttentionLayer(index=i, sliding_window=window) for i, window in enumerate(windows)])
    assert [layer.index for layer in layers] == list(range(len(windows)))
    assert [layer.sliding_window for layer in layers] == windows
    tensors = groups.tensor_of()
    places = {(layer.group, tensor) for layer, tensor in zip(layers, tensors, strict=True)}
    assert len(places) == len(windows)
    assert max(tensors) < groups.num_tensors
    for layer in layers:
        window = layer.sliding_window
        assert groups.groups[layer.group].window == (None if window is None or window >= max_model_len else window)
        assert layer.index in groups.groups[layer.group].layers
    for window in {group.window for group in groups.groups}:
        num_layers = [len(group.layers) for group in groups.groups if group.window == window]
        assert (len(num_layers) * groups.num_tensors - sum(num_layers)) * 8 <= sum(num_layers)
