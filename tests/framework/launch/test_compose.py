"""Overrides into EngineConfig, through real Hydra."""

from __future__ import annotations

import logging
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobRuntime
from hydra.version import VersionBase
from omegaconf import OmegaConf
from tokenyard.catalogue import Catalogue
from tokenyard.config import EngineConfig, PluginsConfig, PolicyConfig
from tokenyard.errors import ConfigError, PluginError, UserError
from tokenyard.launch.compose import (
    compose_config,
    engine_config_from,
    load_engine_config,
    load_engine_config_from,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def test_without_overrides_it_is_the_default_of_the_dataclasses(catalogue: Catalogue) -> None:
    config, used = load_engine_config([], catalogue=catalogue)
    assert config == EngineConfig()
    assert used is catalogue


def test_the_installed_built_in_plugins_serve_the_default_config() -> None:
    config, used = load_engine_config([])
    assert config == EngineConfig()
    assert used.names("policy")


def test_a_generated_node_has_the_mechanisms_and_the_plugins_defaults(catalogue: Catalogue) -> None:
    composed = compose_config(["scheduler=wspt"], catalogue=catalogue)
    assert composed.values["scheduler"] == {
        "name": "batch",
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "enable_chunked_prefill": True,
        "long_prefill_token_threshold": 0,
        "preempt_mode": "recompute",
        "predictor": "max_tokens",
        "shadow": None,
        "policy": {
            "name": "wspt",
            "aging": 2.0,
            "window": {"size": 4, "unit": "requests"},
            "weights": {},
            "tiers": ["gold"],
        },
    }


def test_a_policys_options_become_its_own_dataclass(catalogue: Catalogue) -> None:
    overrides = [
        "scheduler=wspt",
        "scheduler.policy.aging=3",
        "scheduler.policy.window.unit=tokens",
        "+scheduler.policy.weights.gold=1.5",
        "scheduler.policy.tiers=[a,b]",
    ]
    policy = load_engine_config(overrides, catalogue=catalogue)[0].scheduler.policy
    assert policy is not None
    options_type = catalogue.get("policy", "wspt").descriptor.options_type
    window_type = type(options_type().window)  # type: ignore[attr-defined]
    assert policy == PolicyConfig(
        name="wspt",
        options=options_type(
            aging=3.0,  # type: ignore[call-arg]
            window=window_type(unit="tokens"),
            weights={"gold": 1.5},
            tiers=("a", "b"),
        ),
    )


def test_a_whole_scheduler_takes_its_options_flat_and_no_policy(catalogue: Catalogue) -> None:
    config, _ = load_engine_config(["scheduler=whole", "scheduler.lanes=3"], catalogue=catalogue)
    assert config.scheduler.name == "whole"
    assert config.scheduler.policy is None
    assert config.scheduler.options.lanes == 3  # type: ignore[attr-defined]


def test_observers_are_names_or_mappings_with_options(catalogue: Catalogue) -> None:
    config, _ = load_engine_config(["observers=[recorder,{name:recorder,lanes:7}]"], catalogue=catalogue)
    assert [observer.options.lanes for observer in config.observers] == [2, 7]  # type: ignore[attr-defined]


def test_of_two_choices_in_one_group_the_later_holds(catalogue: Catalogue) -> None:
    config, _ = load_engine_config(["scheduler=whole", "scheduler=wspt"], catalogue=catalogue)
    assert config.scheduler.policy is not None


def test_interpolations_work(catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENYARD_TEST_MODEL", "/models/x")
    overrides = ["seed=7", "model.seed=${seed}", "model.name=${oc.env:TOKENYARD_TEST_MODEL}"]
    model = load_engine_config(overrides, catalogue=catalogue)[0].model
    assert (model.seed, model.name) == (7, "/models/x")


REFUSED = {
    # override(s), separated by " ;; ": pieces of the one-line error
    "scheduler=wpst": ("unknown scheduler 'wpst'", "available:", "'wspt'", "tokenyard plugins"),
    "scheduler=broken": ("installed but broken", "no module named 'nothing'"),
    "attention=trition": ("unknown attention 'trition'", "torch_native", "'auto'"),
    "kv_cache=clashing": ("tokenyard-wspt", "kv_cache.block_size", "rename"),
    "scheduler.max_num_seq=4": ("unknown key 'scheduler.max_num_seq'", "did you mean 'scheduler.max_num_seqs'?"),
    "max_num_seqs=4": ("did you mean 'scheduler.max_num_seqs'?",),
    "scheduler.block_size=4": ("did you mean 'kv_cache.block_size'?",),
    "schedular=fcfs": ("unknown key 'schedular'", "did you mean 'scheduler'?"),
    "scheduler=wspt ;; scheduler.policy.agin=3": ("did you mean 'scheduler.policy.aging'?",),
    "scheduler=wspt ;; scheduler.policy.window.unit=lots": ("window.unit", "one of 'tokens', 'requests'", "'lots'"),
    "scheduler=whole ;; scheduler.policy.aging=3": ("scheduler 'whole' takes no policy",),
    "scheduler=whole ;; +scheduler.policy.name=wspt": ("chosen with its options", "write scheduler=wspt"),
    "scheduler.policy.name=wspt": ("chosen with its options", "write scheduler=wspt"),
    "kv_cache.name=other": ("chosen with its options", "write kv_cache=other"),
    "executor.num_threads=100000": ("executor.num_threads", "at most 1024"),
    "executor.cudagraph_capture_sizes=[1,65]": ("from 1 to scheduler.max_num_seqs (64)", "[1, 65]"),
    "executor.cudagraph_capture_sizes=[0,1]": ("from 1 to", "[0, 1]"),
    "executor.cudagraph_capture_sizes=[]": ("at least one", "[]"),
    "executor.cudagraph_capture_sizes=[1] ;; executor.enforce_eager=true": ("no effect", "leave out one"),
    "scheduler.max_num_seqs=99999999 ;; scheduler.max_num_batched_tokens=99999999": ("max_num_seqs", "at most 65536"),
    "scheduler.enable_chunked_prefill=false ;; scheduler.long_prefill_token_threshold=5": ("no effect",),
    "scheduler=needy": ("scheduler.policy.url has no value", "text"),
    "scheduler.max_num_seqs=yes": ("scheduler.max_num_seqs must be a whole number", "'yes'"),
    'scheduler.max_num_seqs="8"': ("must be a whole number", "'8'"),
    "scheduler.max_num_seqs=8.0": ("must be a whole number", "write 8"),
    "scheduler.max_num_seqs=true": ("must be a whole number, got true",),
    "scheduler.max_num_seqs=": ("nothing after '='",),
    "scheduler.max_num_seqs=0": ("at least 1",),
    "scheduler.enable_chunked_prefill=1": ("must be true or false, got 1",),
    "scheduler.max_num_batched_tokens=63": ("(63)", "(64)", "max_num_seqs"),
    "scheduler.long_prefill_token_threshold=-1": ("at least 0", "-1"),
    "kv_cache.block_size=0": ("at least 1",),
    "kv_cache.num_blocks=0": ("at least 1", "null"),
    "kv_cache.num_blocks=10000000000000000000000": ("kv_cache.num_blocks", "at most 1073741824"),
    "kv_cache.block_size=10000000000000000000000": ("kv_cache.block_size", "at most 16777216"),
    "model.max_model_len=10000000000000000000000": ("model.max_model_len", "at most 16777216"),
    "kv_cache.memory=lots": ("kv_cache.memory", "512MiB"),
    "kv_cache.memory=0": ("kv_cache.memory",),
    "kv_cache.gpu_memory_utilization=0": ("above 0 and up to 1",),
    "kv_cache.gpu_memory_utilization=1.01": ("above 0 and up to 1",),
    "kv_cache.gpu_memory_utilization=nan": ("above 0 and up to 1",),
    "model.max_model_len=0": ("at least 2", "null"),
    "model.dtype=int4": ("one of 'auto', 'float32', 'bfloat16', 'float16'",),
    "model.name=null": ("model.name must be text",),
    "model.name=123": ("model.name must be text", "quote"),
    "model.name=": ("model.name must be",),
    "model.name=???": ("model.name has no value",),
    "executor.num_threads=0": ("at least 1",),
    "seed=-1": ("0 to 2**63 - 1",),
    "seed=9223372036854775808": ("0 to 2**63 - 1",),
    "model.seed=-1": ("model.seed", "0 to 2**63 - 1"),
    "model.max_model_len=4096 ;; scheduler.enable_chunked_prefill=false": ("(2048)", "(4096)", "chunked"),
    "model.max_model_len=10 ;; scheduler.long_prefill_token_threshold=11": ("(11)", "(10)"),
    "model.quantization=awq": ("not available in this version", "'awq'"),
    "executor.tensor_parallel_size=2": ("executor.tensor_parallel_size=2", "executor=inproc", "executor=multiproc"),
    "executor.tensor_parallel_size=0": ("executor.tensor_parallel_size", "at least 1"),
    "executor=multiproc ;; executor.tensor_parallel_size=65": ("executor.tensor_parallel_size", "at most 64"),
    "executor.collective_timeout=5": ("unknown key 'executor.collective_timeout'",),
    "scheduler.preempt_mode=swapp": ("scheduler.preempt_mode", "'recompute', 'swap', 'pause'", "got 'swapp'"),
    "speculative.tokens=2": ("'speculative.tokens' is not available in this version",),
    "bench=x": ("'bench' is no key of the config", "`tokenyard bench`"),
    "bench.num_requests=4": ("'bench.num_requests' is no key of the config", "`tokenyard bench`"),
    "~model.name": ("deleted",),
    "+scheduler.foo=1": ("unknown key 'scheduler.foo'",),
    "+foo=1": ("unknown key 'foo'",),
    "+model.name=x": ("without '+'",),
    "seed=1,2": ("several values",),
    "scheduler=range(1,3)": ("several values",),
    "hydra.run.dir=x": ("Hydra's own settings",),
    "scheduler@other=fcfs": ("without '@'",),
    "scheduler=null": ("a component's name is needed",),
    "scheduler={max_num_seqs:3}": ("a component's name is needed",),
    "scheduler.policy=wspt": ("scheduler.policy must be a mapping",),
    "plugins=[typo]": ("plugins.allow=",),
    "plugins.disabled=fcfs": ("plugins.disabled=[...]",),
    "model=qwen": ("model.name=",),
    "scheduler": ("KEY=VALUE",),
    "=x": ("no key",),
    "+model._target_=os.system": ("'model._target_' is refused",),
    "observers=[{name:recorder,_target_:os.system}]": ("_target_' is refused",),
    "observers=recorder": ("a list of names",),
    "observers=[typo]": ("unknown observer 'typo'", "recorder"),
    "observers=[{name:recorder,lane:3}]": ("observers[0].lane", "observers[0].lanes"),
    "model.seed=${seeed}": ("model.seed", "seeed"),
    "model.name=${oc.env:TOKENYARD_NOT_SET}": ("model.name", "TOKENYARD_NOT_SET"),
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_a_mistake_is_one_clear_line(overrides: str, catalogue: Catalogue) -> None:
    with pytest.raises(UserError) as caught:
        compose_config(overrides.split(" ;; "), catalogue=catalogue)
    message = str(caught.value)
    assert [piece for piece in REFUSED[overrides] if piece not in message] == [], message
    assert "\n" not in message
    assert caught.value.exit_code == 2


def test_hyd_01_a_parse_error_prints_the_form_for_the_shell(catalogue: Catalogue) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_config(["model.name=/ckpt/epoch=3.gguf"], catalogue=catalogue)
    assert "'model.name=\"/ckpt/epoch=3.gguf\"'" in str(caught.value)
    assert "--model" in str(caught.value)


def test_hyd_01_the_printed_form_works(catalogue: Catalogue) -> None:
    config, _ = load_engine_config(['model.name="/ckpt/epoch=3.gguf"'], catalogue=catalogue)
    assert config.model.name == "/ckpt/epoch=3.gguf"


@pytest.mark.parametrize(
    "override", ["scheduler.preempt_mode=recompute", "kv_cache.eviction=lru", "engine.process=auto"]
)
def test_a_default_may_be_written_out(override: str, catalogue: Catalogue) -> None:
    assert load_engine_config([override], catalogue=catalogue)[0] == EngineConfig()


def test_plg_03_an_allowed_plugin_that_is_not_installed_is_an_error_with_the_known_names() -> None:
    with pytest.raises(PluginError, match=r"typo.*fcfs"):
        compose_config(["plugins.allow=[typo]"])


def test_plg_03_an_empty_list_allows_no_third_party_plugin_and_null_all() -> None:
    nothing = compose_config(["plugins.allow=[]"])
    assert {entry.provider.distribution for entry in nothing.catalogue.entries()} == {"tokenyard"}
    assert nothing.engine_config.plugins == PluginsConfig(allow=())
    assert compose_config(["plugins.allow=null"]).engine_config.plugins.allow is None


def test_a_blocked_plugin_that_is_chosen_is_explained() -> None:
    with pytest.raises(PluginError, match=r"fcfs.*blocked by plugins\.disabled"):
        compose_config(["plugins.disabled=[fcfs]"])


def test_composing_again_with_other_plugins_forgets_the_first(catalogue: Catalogue) -> None:
    compose_config(["scheduler=wspt"], catalogue=catalogue)
    fewer = Catalogue([entry for entry in catalogue.entries() if entry.name != "wspt"])
    with pytest.raises(PluginError, match="unknown scheduler 'wspt'"):
        compose_config(["scheduler=wspt"], catalogue=fewer)
    assert compose_config(["scheduler=wspt"], catalogue=catalogue).values


@pytest.fixture
def running_application(tmp_path: Path) -> Iterator[None]:
    """As inside @hydra.main: Hydra is initialised on somebody else's configs, who use group names of ours."""
    (tmp_path / "config.yaml").write_text("x: 1\n")
    store = ConfigStore.instance()
    saved = store.repo
    store.repo = dict(saved)
    store.store(group="scheduler", name="cosine", node={"lr": 0.1})
    with initialize_config_dir(str(tmp_path), job_name="theirs", version_base="1.2"):
        yield
    store.repo = saved


@pytest.mark.usefixtures("running_application")
@pytest.mark.parametrize("override", ["scheduler=wspt", "scheduler=wpst"])
def test_a_running_hydra_application_is_not_disturbed(override: str, catalogue: Catalogue) -> None:
    before = (GlobalHydra.instance(), GlobalHydra.instance().hydra, ConfigStore.instance().repo)
    version, job = VersionBase.instance().getbase(), JobRuntime().get("name")
    if override == "scheduler=wspt":
        compose_config([override], catalogue=catalogue)
    else:
        with pytest.raises(PluginError):
            compose_config([override], catalogue=catalogue)
    after = (GlobalHydra.instance(), GlobalHydra.instance().hydra, ConfigStore.instance().repo)
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert (VersionBase.instance().getbase(), JobRuntime().get("name")) == (version, job)
    assert set(ConfigStore.instance().repo["scheduler"]) == {"cosine.yaml"}
    assert compose("config", overrides=["+scheduler=cosine"]) == {"x": 1, "scheduler": {"lr": 0.1}}


def test_nothing_is_left_behind(catalogue: Catalogue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    handlers = list(logging.getLogger().handlers)
    compose_config([], catalogue=catalogue)
    assert not GlobalHydra.instance().is_initialized()
    assert Path.cwd() == tmp_path
    assert os.listdir(tmp_path) == []
    assert logging.getLogger().handlers == handlers


def test_composing_imports_no_torch(
    run_python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    compose = "from tokenyard.launch.compose import compose_config; compose_config([])"
    code = f"import sys; {compose}; print('torch' in sys.modules)"
    result = run_python("-c", code, cwd=tmp_path)
    assert result.stdout == "False\n", result.stderr


def test_a_config_with_keys_of_the_callers_own_is_accepted(catalogue: Catalogue) -> None:
    config = OmegaConf.create(
        {
            "seed": 3,
            "scheduler": {"name": "batch", "max_num_seqs": 2, "policy": {"name": "wspt"}},
            "model": {"seed": "${seed}", "max_model_len": "${prompt_length}"},
            "prompts": ["${not.there}"],
            "prompt_length": 99,
            "thing": {"_target_": "some.Class"},
        }
    )
    built = engine_config_from(config, catalogue)
    assert (built.scheduler.max_num_seqs, built.model.seed, built.model.max_model_len) == (2, 3, 99)
    assert built.kv_cache == EngineConfig().kv_cache


def test_a_plain_dict_is_a_config_too() -> None:
    built, catalogue = load_engine_config_from({"kv_cache": {"num_blocks": 9}, "plugins": {"allow": []}})
    assert built.kv_cache.num_blocks == 9
    assert catalogue.names("policy")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"schedular": {"max_num_seqs": 2}}, "did you mean 'scheduler'"),
        ({"KV_Cache": {}}, "did you mean 'kv_cache'"),
        ({"speculative": {"tokens": 1}}, "not available in this version"),
        ({"scheduler": "fcfs"}, "must be a mapping"),
        ({"scheduler": {"max_num_seq": 2}}, "did you mean 'scheduler.max_num_seqs'"),
        ({"scheduler": {"policy": {"name": "wspt", "agin": 2}}}, "did you mean 'scheduler.policy.aging'"),
        ({"seed": "???"}, "seed has no value"),
        ({"model": {"name": "${nope}"}}, "nope"),
        ({"model": {"_target_": "x"}}, "_target_"),
    ],
)
def test_a_mistake_in_a_callers_own_config_is_refused(
    config: dict[str, object], message: str, catalogue: Catalogue
) -> None:
    with pytest.raises(ConfigError) as caught:
        engine_config_from(config, catalogue)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_composed_values_build_the_same_config_again(catalogue: Catalogue) -> None:
    composed = compose_config(["scheduler=wspt", "kv_cache.memory=1GiB"], catalogue=catalogue)
    assert engine_config_from(composed.values, catalogue) == composed.engine_config
