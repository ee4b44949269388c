"""The packaged traces are what their sources have, by the facts that were measured there."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from tokenyard.experiments.traces import FETCHABLE, PACKAGED
from tokenyard.interfaces.workload import Workload
from trace_workloads import preset


def lengths(workload: Workload) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Arrivals, prompt lengths, output lengths."""
    rows = [(one.arrival, one.num_prompt_tokens, one.num_output_tokens) for one in workload.requests()]
    arrivals, prompts, outputs = np.array(rows).T
    return arrivals, prompts, outputs


@pytest.mark.parametrize(
    ("name", "num_rows", "span", "rate", "variation", "prompts", "outputs"),
    [
        ("azure_conv", 19366, 3501.7, 5.530, 1.09, 22_361_870, 4_088_665),
        ("azure_code", 8819, 3435.9, 2.566, 13.15, 18_059_974, 245_896),
    ],
)
def test_an_azure_trace_has_its_counts_sums_and_burstiness(
    name: str, num_rows: int, span: float, rate: float, variation: float, prompts: int, outputs: int
) -> None:
    arrivals, prompt, output = lengths(preset(name))
    gaps = np.diff(arrivals)
    assert (len(arrivals), prompt.sum(), output.sum(), arrivals[0]) == (num_rows, prompts, outputs, 0)
    assert arrivals[-1] == pytest.approx(span, abs=0.05)
    assert (num_rows - 1) / arrivals[-1] == pytest.approx(rate, abs=0.001)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, abs=0.005)


def test_the_conversation_trace_has_its_percentiles() -> None:
    _, prompt, output = lengths(preset("azure_conv"))
    assert np.percentile(prompt, [50, 90, 99, 100]).tolist() == pytest.approx([1020, 2735, 4142, 14050], abs=1)
    assert np.percentile(output, [50, 90, 99, 100]).tolist() == pytest.approx([129, 424, 601, 1000], abs=1)


def test_the_first_2000_rows_of_the_conversation_trace_add_up() -> None:
    arrivals, prompt, output = lengths(preset("azure_conv", "workload.limit=2000"))
    assert (len(arrivals), prompt.sum(), output.sum()) == (2000, 2_209_565, 529_807)
    assert arrivals[-1] == pytest.approx(424.26, abs=0.005)


def test_all_seven_fractional_digits_of_a_time_count() -> None:
    first, second = list(preset("azure_conv", "workload.limit=2").requests())
    assert (first.arrival, second.arrival) == (0.0, 4.314579)


@pytest.mark.parametrize(
    ("name", "num_rows", "prompt", "output", "num_blocks"),
    [("mooncake_conversation", 4000, 13312.3, 347.1, 105_904), ("mooncake_synthetic", 2000, 12366.4, 191.5, 49_580)],
)
def test_a_mooncake_trace_has_its_means_and_blocks(
    name: str, num_rows: int, prompt: float, output: float, num_blocks: int
) -> None:
    requests = list(preset(name).requests())
    assert len(requests) == num_rows
    assert np.mean([one.num_prompt_tokens for one in requests]) == pytest.approx(prompt, abs=0.05)
    assert np.mean([one.num_output_tokens for one in requests]) == pytest.approx(output, abs=0.05)
    assert sum(len(one.content or ()) for one in requests) == num_blocks
    assert all(sum(part.num_tokens for part in one.content or ()) == one.num_prompt_tokens for one in requests)


def test_servegen_clients_have_their_mean_rates() -> None:
    rates = {14: 92.0, 27: 68.7, 12: 63.4, 17: 32.7, 26: 27.6, 18: 24.0, 13: 9.3}
    counts = Counter(one.client for one in preset("servegen").requests())
    for number, rate in rates.items():
        assert counts[f"m-small_chunk-{number}"] / 864 == pytest.approx(rate, rel=0.15)


@pytest.mark.parametrize(
    "name", ["azure_conv", "azure_code", "mooncake_conversation", "mooncake_synthetic", "servegen"]
)
def test_a_public_trace_says_its_licence_and_whom_to_cite(name: str) -> None:
    described = preset(name, "workload.limit=1").description
    assert any(licence in described for licence in ("CC-BY-4.0", "Apache-2.0"))
    assert "cite" in described


def test_every_public_trace_has_a_source_a_licence_and_a_bound() -> None:
    assert all(source.licence and source.citation for source in (*PACKAGED.values(), *FETCHABLE.values()))
    assert all(source.url.startswith("https://") and source.max_bytes > 0 for source in FETCHABLE.values())
    assert len({source.file for source in FETCHABLE.values()}) == len(FETCHABLE)
