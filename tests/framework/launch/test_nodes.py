"""Generated nodes in Hydra's ConfigStore."""

from __future__ import annotations

from hydra.core.config_store import ConfigStore
from tokenyard.catalogue import Catalogue
from tokenyard.launch.nodes import generated_nodes, store_nodes


def test_storing_again_forgets_the_earlier_nodes_and_keeps_those_of_others(catalogue: Catalogue) -> None:
    store = ConfigStore()
    saved, store.repo = store.repo, {}
    try:
        store.store(group="scheduler", name="whole", node={"theirs": 1})
        store_nodes(store, generated_nodes(catalogue, lambda path: False))
        assert {"wspt.yaml", "fcfs.yaml", "whole.yaml"} <= set(store.repo["scheduler"])
        fewer = Catalogue([entry for entry in catalogue.entries() if entry.name != "wspt"])
        store_nodes(store, generated_nodes(fewer, lambda path: path == "scheduler/fcfs"))
        assert "wspt.yaml" not in store.repo["scheduler"]
        assert "fcfs.yaml" not in store.repo["scheduler"]
        assert store.repo["scheduler"]["whole.yaml"].node == {"theirs": 1}
    finally:
        store.repo = saved


def test_a_node_holds_only_plain_data(catalogue: Catalogue) -> None:
    for node in generated_nodes(catalogue, lambda path: False):
        pending: list[object] = [node.values]
        while pending:
            item = pending.pop()
            assert item is None or type(item) in (dict, list, str, int, float, bool)
            if isinstance(item, dict | list):
                pending.extend(item.values() if isinstance(item, dict) else item)
