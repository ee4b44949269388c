"""`tokenyard bench throughput` and `tokenyard bench latency`: a whole engine with its model, through LLM.generate."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from tokenyard.bench.report import machine
from tokenyard.bench.workload import Shape, prompts
from tokenyard.errors import CapacityError
from tokenyard.llm import LLM
from tokenyard.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from tokenyard.bench.settings import LatencyBench, ThroughputBench
    from tokenyard.catalogue import Catalogue
    from tokenyard.config import EngineConfig
    from tokenyard.outputs import RequestOutput

_WARM_UP = Shape(1, 8, 4)
_PERCENTILES = (10, 25, 50, 75, 90, 99)


def default_overrides(shapes: Sequence[Shape], given: Collection[str]) -> list[str]:
    """All requests of a shape run together unless the user says otherwise."""
    key, most = "scheduler.max_num_seqs", max(shape.num_requests for shape in shapes)
    return [] if key in given else [f"{key}={max(64, most)}"]


def run_throughput_bench(
    settings: ThroughputBench, config: EngineConfig, catalogue: Catalogue
) -> list[dict[str, object]]:
    """A row for each shape: medians over rounds, in each of which every shape runs once, on an empty prefix cache."""
    shapes, around = settings.parsed, machine()
    with LLM.from_parts(config, catalogue) as llm:
        _check_lengths(llm, shapes)
        _generate(llm, _WARM_UP, settings.seed)
        seconds: dict[Shape, list[float]] = {shape: [] for shape in shapes}
        for _ in range(settings.num_rounds):
            for shape in seconds:
                seconds[shape].append(_generate(llm, shape, settings.seed)[0])
        facts = {**_facts(llm, config), **around}
    return [{"benchmark": "throughput", **_rates(shape, seconds[shape]), **facts} for shape in seconds]


def run_latency_bench(settings: LatencyBench, config: EngineConfig, catalogue: Catalogue) -> dict[str, object]:
    """One batch again and again, each time on an empty prefix cache."""
    shape, around = settings.shape, machine()
    with LLM.from_parts(config, catalogue) as llm:
        _check_lengths(llm, [shape])
        for _ in range(settings.num_iters_warmup):
            _generate(llm, shape, settings.seed)
        runs = [_generate(llm, shape, settings.seed) for _ in range(settings.num_iters)]
        facts = _facts(llm, config)
    latencies = [seconds for seconds, _ in runs]
    outputs = [output for _, batch in runs for output in batch]
    return {
        "benchmark": "latency",
        "batch_size": shape.num_requests,
        "input_len": shape.input_len,
        "output_len": shape.output_len,
        "num_iters": settings.num_iters,
        "avg_latency_s": round(statistics.fmean(latencies), 4),
        "percentiles_s": {str(share): round(percentile(latencies, share), 4) for share in _PERCENTILES},
        "median_ttft_s": round(statistics.median(_ttft(output) for output in outputs), 4),
        "median_tpot_s": round(statistics.median(_tpot(output) for output in outputs), 5),
        **facts,
        **around,
    }


def percentile(values: Sequence[float], share: int) -> float:
    """The smallest value that `share` per cent of them do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * share // 100) - 1)]


def _generate(llm: LLM, shape: Shape, seed: int) -> tuple[float, list[RequestOutput]]:
    """Wall seconds and outputs of one shape; what it leaves in the prefix cache is forgotten first."""
    llm.reset_prefix_cache()
    tokens = prompts(shape, vocab_size=llm.model_config.vocab_size, seed=seed)
    params = SamplingParams(temperature=0.0, max_tokens=shape.output_len, ignore_eos=True)
    began = time.perf_counter()
    outputs = llm.generate(tokens, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    short = [output for output in outputs if len(output.outputs[0].token_ids) != shape.output_len]
    if short:
        made, reason = len(short[0].outputs[0].token_ids), short[0].outputs[0].finish_reason
        raise CapacityError(
            f"{shape}: a request ended after {made} of {shape.output_len} tokens ({reason}); "
            "give the K/V cache more room with kv_cache.memory or kv_cache.num_blocks"
        )
    return seconds, outputs


def _check_lengths(llm: LLM, shapes: Sequence[Shape]) -> None:
    limit = llm.model_config.max_model_len
    for shape in shapes:
        if shape.input_len + shape.output_len > limit:
            raise CapacityError(
                f"{shape}: {shape.input_len + shape.output_len} tokens a request, but the model takes {limit}; "
                "choose a smaller shape, or raise model.max_model_len if the model allows"
            )


def _rates(shape: Shape, rounds: Sequence[float]) -> dict[str, object]:
    seconds = statistics.median(rounds)
    num_output = shape.num_requests * shape.output_len
    return {
        "shape": str(shape),
        **asdict(shape),
        "output_tokens_per_s": round(num_output / seconds, 1),
        "total_tokens_per_s": round((num_output + shape.num_requests * shape.input_len) / seconds, 1),
        "requests_per_s": round(shape.num_requests / seconds, 3),
        "seconds": round(seconds, 4),
        "rounds_s": [round(one, 4) for one in rounds],
    }


def _facts(llm: LLM, config: EngineConfig) -> dict[str, object]:
    report = llm.engine.report
    policy = config.scheduler.policy
    return {
        "model": llm.model_config.model,
        "decoder": report.decoder,
        "dtype": report.dtype,
        "device": report.device,
        "attention": report.attention_backend,
        "engine": config.engine.name,
        "policy": None if policy is None else policy.name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _ttft(output: RequestOutput) -> float:
    """Seconds from arrival to the first token."""
    metrics = output.metrics
    if metrics is None or metrics.first_token_time is None:
        raise ValueError(f"request {output.request_id} has no first token")
    return metrics.first_token_time - metrics.arrival_time


def _tpot(output: RequestOutput) -> float:
    """Seconds for each token after the first; 0 when there is none."""
    metrics, count = output.metrics, len(output.outputs[0].token_ids)
    if metrics is None or metrics.first_token_time is None or metrics.finished_time is None or count < 2:
        return 0.0
    return (metrics.finished_time - metrics.first_token_time) / (count - 1)
