"""--config FILE."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from omegaconf import OmegaConf
from tokenyard.errors import ConfigError, UserError
from tokenyard.launch.compose import compose_config

if TYPE_CHECKING:
    from pathlib import Path

    from tokenyard.catalogue import Catalogue


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "my.yaml"


@pytest.mark.parametrize(
    "text",
    [
        "scheduler: wspt\nscheduler.policy.aging: 7\nmodel: {name: '/a=b, ${seed}'}\n",
        "scheduler: {policy: {name: wspt, aging: 7}}\nmodel.name: '/a=b, ${seed}'\n",
        '- scheduler=wspt\n- scheduler.policy.aging=7\n- model.name="/a=b, ${seed}"\n',
    ],
)
def test_a_file_is_a_mapping_with_nested_or_dotted_keys_or_a_list_of_overrides(
    text: str, file: Path, catalogue: Catalogue
) -> None:
    file.write_text(text)
    composed = compose_config([], config_file=file, catalogue=catalogue)
    policy = composed.engine_config.scheduler.policy
    assert policy is not None
    assert (policy.name, policy.options.aging) == ("wspt", 7.0)  # type: ignore[attr-defined]
    assert composed.engine_config.model.name == "/a=b, 0"
    assert composed.origins["scheduler.policy.aging"] == f"file {file}"


def test_what_is_printed_can_be_read_again(file: Path, catalogue: Catalogue) -> None:
    overrides = [
        "scheduler=wspt",
        "+scheduler.policy.weights.a=1",
        "observers=[{name:recorder,lanes:3}]",
        "attention=auto",
    ]
    composed = compose_config(overrides, catalogue=catalogue)
    file.write_text(OmegaConf.to_yaml(OmegaConf.create(dict(composed.values))))
    assert compose_config([], config_file=file, catalogue=catalogue).engine_config == composed.engine_config


def test_an_override_beats_the_file(file: Path, catalogue: Catalogue) -> None:
    file.write_text("scheduler.max_num_seqs: 3\nkv_cache.num_blocks: 5\n")
    config = compose_config(["scheduler.max_num_seqs=4"], config_file=file, catalogue=catalogue).engine_config
    assert (config.scheduler.max_num_seqs, config.kv_cache.num_blocks) == (4, 5)


def test_a_file_decides_which_plugins_are_loaded(file: Path) -> None:
    file.write_text("plugins: {disabled: [fcfs]}\n")
    with pytest.raises(UserError, match="blocked"):
        compose_config([], config_file=file)


def test_an_empty_file_changes_nothing(file: Path, catalogue: Catalogue) -> None:
    file.touch()
    assert (
        compose_config([], config_file=file, catalogue=catalogue).values
        == compose_config([], catalogue=catalogue).values
    )


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("scheduler: [", ("not valid YAML",)),
        ("a: 1\na: 2", ("not valid YAML",)),
        ("scheduler.max_num_seqs: many", ("must be a whole number", "(from file")),
        ("scheduler: {max_num_seq: 3}", ("did you mean 'scheduler.max_num_seqs'", "(from file")),
        ("speculative: {tokens: 3}", ("not available", "(from file")),
        ("server: {port: -3}", ("server.port", "(from file")),
        ("max-num-seqs: 3", ("a flag's name",)),
        ("3: 4", ("3 is not a config key",)),
        ("- 3", ("an override such as",)),
        ("model: {_target_: x}", ("_target_", "refused")),
    ],
)
def test_a_mistake_in_a_file_is_one_line_that_names_it(
    text: str, pieces: tuple[str, ...], file: Path, catalogue: Catalogue
) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        compose_config([], config_file=file, catalogue=catalogue)
    assert [piece for piece in pieces if piece not in str(caught.value)] == [], str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path, catalogue: Catalogue) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match=str(path)):
            compose_config([], config_file=path, catalogue=catalogue)
