"""`latency=fitted`: its file, its line for people, and its warning."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from tokenyard.errors import ConfigError
from tokenyard.interfaces import LatencyModel, StepLoad
from tokenyard.latency_fit import Errors, Fit, FitFile, settings_of, write_fit
from tokenyard.launch.compose import load_engine_config
from tokenyard.launch.steering import make_steering
from tokenyard.testing import LatencyModelContract

FIT = Fit(
    per_step=0.01,
    token_knots=(0, 16),
    per_token=(1e-5, 1e-4),
    per_decode=1e-4,
    per_prefill=1e-4,
    per_decode_context_token=1e-7,
    per_prefill_pair=1e-8,
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fits") / "latency.json"
    settings = settings_of(load_engine_config([])[0])
    errors = Errors(num_steps=100, mean=0.034, median=0.02, total=-0.011)
    file = FitFile(
        format="tokenyard.latency_fit",
        version=1,
        created="2026-01-02T03:04:05+00:00",
        machine={"cpu": "some processor", "cores": 2, "device": "cpu", "dtype": "bfloat16"},
        settings=settings,
        most_tokens=1 << 20,
        fit=FIT,
        in_sample=errors,
        held_out=errors,
    )
    write_fit(path, file)
    return path


def model_of(*overrides: str) -> LatencyModel:
    model = make_steering(*load_engine_config(["latency=fitted", *overrides])).latency
    assert model is not None
    return model


class TestFitted(LatencyModelContract):
    @pytest.fixture(autouse=True)
    def _file(self, path: Path) -> None:
        self.overrides = ("latency=fitted", f"latency.path={path}")


def test_it_says_where_its_numbers_come_from_and_how_far_off_they_are(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        model = model_of(f"latency.path={path}")
    assert caplog.messages == []
    assert model.step_seconds(StepLoad(num_decodes=1)) == pytest.approx(0.01 + 1e-5 + 1e-4)
    for told in ("smollm2-135m", "some processor, cpu, bfloat16", "2026-01-02", "3.4% in-sample", "-1.1%"):
        assert told in model.calibration


def test_other_settings_than_those_of_the_file_are_warned_of(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        model_of(f"latency.path={path}", "model.name=another", "kv_cache.block_size=32")
    (message,) = caplog.messages
    assert "was measured with other settings: model.name=another (it was smollm2-135m)" in message
    assert "kv_cache.block_size=32 (it was 16)" in message


def test_without_a_file_or_with_another_one_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"latency=fitted needs latency\.path=FILE"):
        model_of()
    with pytest.raises(ConfigError, match=r"latency\.path is empty"):
        model_of("latency.path=''")
    (tmp_path / "other.json").write_text(json.dumps({"a": 1}))
    with pytest.raises(ConfigError, match="not a file of `tokenyard calibrate`"):
        model_of(f"latency.path={tmp_path}/other.json")
