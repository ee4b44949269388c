"""The option `cascade`: a prefix that all sequences share is read once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import fake_flashinfer as fake
import pytest
import torch
from flashinfer_backends import DECODE, GOOD, PREFILL, a_case, assert_right, backend_for, spec_of, table_of
from tokenyard.interfaces import AttentionLayer
from tokenyard.testing.attention import make_batch


class SharedPrefix:
    """Sequences over one prefix of `num_shared` blocks, and a case's worth of tensors for them."""

    def __init__(self, lengths: list[tuple[int, int]], num_shared: int) -> None:
        case = a_case(lengths)
        tables = [row[: -(-length // 16)].tolist() for row, (_, length) in zip(table_of(case), lengths, strict=True)]
        keys, values = [list(case.keys), list(case.values)]
        for index, table in enumerate(tables):
            table[:num_shared] = tables[0][:num_shared]
            for rows in (keys, values):
                rows[index] = torch.cat((rows[0][: num_shared * 16], rows[index][num_shared * 16 :]))
        self.case = replace(case, batch=make_batch(lengths, tables, 16), keys=keys, values=values)


@pytest.mark.parametrize("lengths", [[(1, 100), (1, 81), (1, 160)], [(1, 100), (9, 90), (40, 120)]])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_a_shared_prefix_is_read_once_and_gives_the_same(
    calls: fake.Calls, lengths: list[tuple[int, int]], with_sinks: bool
) -> None:
    case = SharedPrefix(lengths, 4).case
    backend = backend_for(spec_of(case), cascade=True, cascade_min_blocks=4)
    layer = AttentionLayer(index=0, scale=0.1, soft_cap=9.0, sinks=torch.ones(4) if with_sinks else None)
    plan = backend.plan(case.batch)
    for index in range(2):
        assert_right(backend, case, replace(layer, index=index), plan)
    assert len(calls.named("merge_state_in_place")) == 2
    plans = calls.named(f"{DECODE}.plan") + calls.named(f"{PREFILL}.plan")
    assert len(plans) == 2  # prefix and rest, once a step
    (prefix,) = [given for given in plans if given.get("causal") is False]
    assert prefix["paged_kv_indices"].tolist() == table_of(case)[0, :4].tolist()
    assert prefix["qo_indptr"].tolist() == [0, len(case.query)]


def test_cascades_are_not_recorded_in_graphs(calls: fake.Calls) -> None:
    """A graph would hold the number of shared blocks of the step that it was recorded in."""
    assert backend_for(GOOD).can_capture
    assert not backend_for(GOOD, cascade=True).can_capture


@pytest.mark.parametrize(
    ("options", "layer"),
    [
        ({"cascade_min_blocks": 1}, AttentionLayer(index=0, scale=0.1)),
        ({"cascade": True, "cascade_min_blocks": 5}, AttentionLayer(index=0, scale=0.1)),
        ({"cascade": True, "cascade_min_blocks": 4}, AttentionLayer(index=0, scale=0.1, sliding_window=90)),
    ],
    ids=["not asked for", "too few shared blocks", "a window"],
)
def test_a_shared_prefix_is_read_with_the_rest(
    calls: fake.Calls, options: dict[str, Any], layer: AttentionLayer
) -> None:
    case = SharedPrefix([(1, 100), (1, 81)], 4).case
    assert_right(backend_for(spec_of(case), **options), case, layer)
    assert not calls.named("merge_state_in_place")


def test_a_windowed_layer_beside_a_cascade_reads_its_own_pages(calls: fake.Calls) -> None:
    case = SharedPrefix([(1, 100), (1, 81)], 4).case
    backend = backend_for(spec_of(case), cascade=True, cascade_min_blocks=1)
    plan = backend.plan(case.batch)
    for window in (None, 60, None):
        assert_right(backend, case, AttentionLayer(index=0, scale=0.1, sliding_window=window), plan)
