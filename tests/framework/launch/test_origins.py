"""Where each value comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenyard.launch.compose import compose_config
from tokenyard.launch.flags import Flagged
from tokenyard.launch.origins import leaves

if TYPE_CHECKING:
    from pathlib import Path

    from tokenyard.catalogue import Catalogue


def test_each_leaf_has_the_origin_of_its_value(catalogue: Catalogue, tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("kv_cache.num_blocks: 7\nkv_cache.block_size: 8\n")
    overrides: list[str | Flagged] = [
        "scheduler=wspt",
        Flagged("scheduler.max_num_seqs=4", "--max-num-seqs"),
        "kv_cache.block_size=32",
    ]
    origins = compose_config(overrides, config_file=file, catalogue=catalogue).origins
    expected = {
        "seed": "default",
        "engine.name": "configs/engine/sync.yaml",
        "scheduler.policy.name": "override scheduler=wspt",
        "scheduler.policy.aging": "plugin tokenyard-wspt (default)",
        "scheduler.policy.window.size": "plugin tokenyard-wspt (default)",
        "scheduler.max_num_batched_tokens": "default",
        "scheduler.max_num_seqs": "flag --max-num-seqs",
        "kv_cache.num_blocks": f"file {file}",
        "kv_cache.block_size": "override kv_cache.block_size=32",
        "model.name": "default",
    }
    assert {key: origins[key] for key in expected} == expected


def test_every_leaf_has_one(catalogue: Catalogue) -> None:
    composed = compose_config(["scheduler=whole", "observers=[recorder]"], catalogue=catalogue)
    assert list(composed.origins) == list(leaves(composed.values))
    assert all(composed.origins.values())
