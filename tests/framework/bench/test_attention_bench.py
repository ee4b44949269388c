"""`tokenyard bench attention`: what it makes the backends compute is right, and what it says of them adds up."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_command import json_of, output_of, refused
from hypothesis import given
from hypothesis import strategies as st
from tokenyard.bench import attention
from tokenyard.bench.attention import Report, busy_text, run_attention_bench
from tokenyard.bench.attention_inputs import make_inputs
from tokenyard.bench.attention_lane import TOLERANCE, Lane, write_caches
from tokenyard.bench.attention_shapes import AttentionShape, parse_attention_shape
from tokenyard.bench.device_time import ReadSpeed, last_level_cache, seconds_on
from tokenyard.bench.settings import AttentionBench
from tokenyard.catalogue import Catalogue
from tokenyard.cli import run
from tokenyard.config import AttentionConfig, EngineConfig, KVCacheConfig, ModelConfig
from tokenyard.descriptors import AttentionBackendDescriptor, Descriptor
from tokenyard.errors import CapacityError, ConfigError, PluginError
from tokenyard.interfaces import (
    AttentionBackend,
    AttentionBackendContext,
    AttentionBatch,
    AttentionLayer,
    AttentionSpec,
)
from tokenyard_backends.torch_native.backend import TorchNativeBackend

CatalogueWith = Callable[..., Catalogue]
CPU = torch.device("cpu")
SMALL = ("bench.shapes=[3x40,5+9]", "bench.seconds=0.2", "bench.backends=torch_native")
ROW = {
    *("shape", "backend", "description", "mode", "median_us", "min_us", "plan_us", "num_samples", "read_gb_per_s"),
    *("floor_us", "times_floor", "gflop_per_s", "error", "num_layers", "may_be_cached", "vs_torch_native"),
}
FACTS = {
    *("benchmark", "num_heads", "num_kv_heads", "head_dim", "dtype", "block_size", "sliding_window", "device"),
    *("cache_mib", "threads", "tokenyard", "torch", "python", "load", "rows", "skipped", "failures"),
}

shapes = st.builds(
    lambda sequences, query, cached: AttentionShape(sequences, query, query + cached),
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(0, 30),
)
windows = st.none() | st.integers(1, 45)


def spec_of(**changes: Any) -> AttentionSpec:
    spec = AttentionSpec(
        device_type="cpu", dtype="float32", num_heads=6, num_kv_heads=2, head_dim=8, v_head_dim=8, block_size=4
    )
    return dataclasses.replace(spec, **changes)


def native(spec: AttentionSpec) -> TorchNativeBackend:
    return TorchNativeBackend(AttentionBackendContext(spec=spec, device=CPU, num_threads=1))


def descriptor(
    name: str, factory: Callable[[AttentionBackendContext], AttentionBackend], **others: Any
) -> Descriptor[Any]:
    return AttentionBackendDescriptor(
        name=name,
        api_version=(1, 7),
        factory=lambda options, context: factory(context),
        **{"supports": lambda spec: [], **others},
    )


class Doubled(TorchNativeBackend):
    """Wrong: everything twice as large."""

    def forward(self, *arguments: Any, **keywords: Any) -> None:
        super().forward(*arguments, **keywords)
        arguments[6].mul_(2)


class Forgetful(TorchNativeBackend):
    """Wrong: it never reads what is in the cache."""

    def forward(self, layer: AttentionLayer, query: Any, key: Any, value: Any, *others: Any) -> None:
        super().forward(layer, query, key, value, *others)
        others[2].copy_(value.repeat_interleave(query.shape[1] // value.shape[1], 1))


class Raises(TorchNativeBackend):
    """Cannot do what it says."""

    def forward(self, *arguments: Any, **keywords: Any) -> None:
        raise RuntimeError("no kernel\nfor this")


class Blank(TorchNativeBackend):
    """Writes nothing at all."""

    def forward(self, *arguments: Any, **keywords: Any) -> None:
        return None


def report_of(catalogue: Catalogue, config: EngineConfig | None = None, **settings: Any) -> Report:
    config = config or EngineConfig(model=ModelConfig(dtype="float32"))
    return run_attention_bench(AttentionBench(**{"shapes": "2x20", "seconds": 0.05, **settings}), config, catalogue)


# ---- Shapes ---------------------------------------------------------------------------------------------------------


@given(shapes)
def test_a_shape_reads_what_it_writes(shape: AttentionShape) -> None:
    assert parse_attention_shape(str(shape)) == shape


def test_shapes_are_written_as_the_docs_say() -> None:
    assert parse_attention_shape("32x512") == AttentionShape(32, 1, 512)
    assert parse_attention_shape("256+256") == AttentionShape(1, 256, 512)
    assert parse_attention_shape("4x256+0") == AttentionShape(4, 256, 256)


@given(shapes, windows)
def test_what_a_shape_reads_and_computes_is_counted_pair_by_pair(shape: AttentionShape, window: int | None) -> None:
    seen = [
        (query, key)
        for query in range(shape.context_len - shape.query_len, shape.context_len)
        for key in range(query + 1)
        if window is None or key > query - window
    ]
    assert shape.num_pairs(window) == shape.num_sequences * len(seen)
    assert shape.num_read(window) == shape.num_sequences * len({key for _, key in seen})


@pytest.mark.parametrize(
    "text", ["", "32", "x512", "0x512", "32x0", "0+4", "32x512x2", "-1x3", "٣x1", "4000000x5000000"]
)
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"bench\.shapes: "):
        parse_attention_shape(text)


# ---- What is computed -----------------------------------------------------------------------------------------------


@given(shapes, st.sampled_from([1, 4, 16]), windows)
def test_a_right_backend_is_found_right_in_every_layer(
    shape: AttentionShape, block_size: int, window: int | None
) -> None:
    spec = spec_of(block_size=block_size)
    inputs, backend = make_inputs(shape, spec, CPU), native(spec)
    caches = write_caches(backend, spec, inputs, 3, CPU)
    for turn in range(3):
        lane = Lane(backend, spec, inputs, [caches[turn], *caches], window)
        assert lane.check() < TOLERANCE["float32"]


def test_no_two_sequences_share_a_block_and_none_has_block_zero() -> None:
    inputs = make_inputs(AttentionShape(5, 3, 17), spec_of(), CPU)
    table = inputs.batch.host_block_table
    assert table is not None
    assert sorted(table.flatten().tolist()) == list(range(1, inputs.num_blocks))
    assert torch.equal(inputs.batch.block_table, torch.from_numpy(table))


def test_the_step_and_what_is_before_it_write_each_token_once() -> None:
    shape = AttentionShape(3, 4, 23)
    inputs = make_inputs(shape, spec_of(), CPU)
    steps = [*inputs.past(), (inputs.batch, inputs.new_key, inputs.new_value)]
    slots = list(itertools.chain.from_iterable(batch.slot_mapping.tolist() for batch, _, _ in steps))
    assert len(slots) == len(set(slots)) == shape.num_sequences * shape.context_len
    assert all(len(key) == len(value) == batch.num_tokens for batch, key, value in steps)
    assert all(slot >= inputs.block_size for slot in slots)


@pytest.mark.parametrize("wrong", [Doubled, Forgetful, Blank])
def test_a_wrong_backend_is_named_and_not_timed(wrong: type[TorchNativeBackend], catalogue_with: CatalogueWith) -> None:
    report = report_of(catalogue_with(descriptor("wrong", wrong)), backends=("wrong", "torch_native"))
    assert [row["backend"] for row in report.rows] == ["torch_native"]
    (failure,) = report.failures
    assert failure.startswith("wrong at 2x20, eager, is wrong")


def test_a_backend_that_raises_is_named_and_the_others_are_measured(catalogue_with: CatalogueWith) -> None:
    report = report_of(catalogue_with(descriptor("raises", Raises)), backends=("raises", "torch_native"))
    assert [row["backend"] for row in report.rows] == ["torch_native"]
    assert report.failures == ["raises at 2x20, eager, failed: RuntimeError: no kernel for this"]


def test_layers_take_turns_so_that_none_is_found_in_the_cache() -> None:
    seen: list[int] = []

    class Watched(TorchNativeBackend):
        def forward(self, layer: AttentionLayer, *arguments: Any, **keywords: Any) -> None:
            seen.append(arguments[3][0].data_ptr())
            super().forward(layer, *arguments, **keywords)

    spec = spec_of()
    inputs = make_inputs(AttentionShape(2, 1, 9), spec, CPU)
    backend = Watched(AttentionBackendContext(spec=spec, device=CPU, num_threads=1))
    caches = write_caches(backend, spec, inputs, 4, CPU)
    lane = Lane(backend, spec, inputs, caches, None)
    lane.calls_a_round = 3
    seen.clear()
    for _ in range(4):
        lane.run()
    addresses = [cache[0].data_ptr() for cache in caches]
    assert seen == addresses * 3
    assert lane.timing().num_samples == 12
    assert lane.timing().min_us <= lane.timing().median_us


def test_a_slow_backend_gets_fewer_calls_a_round() -> None:
    spec = spec_of()
    inputs = make_inputs(AttentionShape(2, 1, 9), spec, CPU)
    lane = Lane(native(spec), spec, inputs, write_caches(native(spec), spec, inputs, 6, CPU), None)
    lane.fit(3600)
    assert lane.calls_a_round == 6
    lane.fit(1e-9)
    assert lane.calls_a_round == 1


# ---- CUDA graphs, without a GPU: who is asked what, and when ---------------------------------------------------------


class Recorded(TorchNativeBackend):
    """Notes its calls. What runs while a graph is recorded runs again, and only then, when it is replayed."""

    can_capture = True

    def __init__(self, context: AttentionBackendContext) -> None:
        super().__init__(context)
        self.calls: list[str] = []
        self.graph: list[Callable[[], None]] | None = None

    def plan_capture(self, batch: AttentionBatch) -> object:
        self.calls.append("plan_capture")
        return self.plan(batch)

    def update_capture(self, plan: object, batch: AttentionBatch) -> None:
        self.calls.append("update_capture")

    def forward(self, *arguments: Any, **keywords: Any) -> None:
        def call() -> None:
            TorchNativeBackend.forward(self, *arguments, **keywords)

        if self.graph is None:
            self.calls.append("forward")
            call()
        else:
            self.graph.append(call)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """A backend, and a stand-in for the parts of torch.cuda that record it."""
    backend = Recorded(AttentionBackendContext(spec=spec_of(), device=CPU, num_threads=1))

    class Graph:
        def __init__(self) -> None:
            self.calls: list[Callable[[], None]] = []

        def replay(self) -> None:
            for call in self.calls:
                call()

    @contextlib.contextmanager
    def record(graph: Graph) -> Iterator[None]:
        backend.calls.append("record")
        backend.graph = graph.calls
        yield
        backend.graph = None

    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", record)
    return backend


def test_a_graph_is_warmed_up_recorded_and_brought_up_to_date_before_each_replay(recorded: Recorded) -> None:
    spec = spec_of()
    inputs = make_inputs(AttentionShape(3, 1, 21), spec, CPU)
    caches = write_caches(recorded, spec, inputs, 2, CPU)
    recorded.calls.clear()
    lane = Lane(recorded, spec, inputs, caches, None, is_graph=True)
    assert lane.check() < TOLERANCE["float32"]
    assert recorded.calls == ["plan_capture", "forward", "forward", "record", "update_capture"]
    lane.run()
    lane.run()
    assert recorded.calls[5:] == ["update_capture"] * 2
    assert lane.timing().num_samples == 2


# ---- What is said ---------------------------------------------------------------------------------------------------


def test_a_row_has_every_figure_and_they_fit_together(capsys: pytest.CaptureFixture[str]) -> None:
    report: dict[str, Any] = json_of(capsys, "attention", *SMALL, "kv_cache.block_size=8", "model.dtype=float32")
    assert set(report) == FACTS
    assert (report["benchmark"], report["dtype"], report["block_size"]) == ("attention", "float32", 8)
    assert [row["shape"] for row in report["rows"]] == ["3x40", "5+9"]
    for row, num_tokens in zip(report["rows"], (120, 14), strict=True):
        assert set(row) == ROW
        assert row["floor_us"] == pytest.approx(
            num_tokens * 3 * 64 * 2 * 4 / row["read_gb_per_s"] / 1e3, rel=0.1, abs=0.1
        )
        assert (row["vs_torch_native"], row["may_be_cached"]) == (1.0, True)
        assert row["error"] < TOLERANCE["float32"]
    decode, row = report["rows"]
    assert decode["times_floor"] * decode["floor_us"] == pytest.approx(decode["median_us"], rel=0.6)
    assert row["times_floor"] is None  # arithmetic is the bound
    pairs = sum(range(10, 15))
    assert row["gflop_per_s"] == pytest.approx(4 * pairs * 9 * 64 / row["median_us"] / 1e3, abs=0.1)


def test_people_get_a_table_and_the_facts_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = output_of(capsys, "attention", *SMALL)
    header, first, second = out.splitlines()
    assert header.split()[:3] == ["shape", "backend", "mode"]
    assert len(header.split()) == len(first.split()) == len(second.split())
    at = header.split().index("times_floor")
    assert float(first.split()[at]) > 0
    assert second.split()[at] == "-"
    assert "9/3 heads of 64, dtype bfloat16, block_size 16, device cpu" in err


def test_backends_that_cannot_run_are_told_with_their_reasons(catalogue_with: CatalogueWith) -> None:
    catalogue = catalogue_with(
        descriptor("tpu_only", native_factory, requires=lambda platform: ["it needs a TPU"]),
        descriptor("picky", native_factory, supports=lambda spec: [f"heads of {spec.head_dim} are ugly"]),
        descriptor("broken", _fails),
    )
    report = report_of(catalogue)
    told = {one.name: one.reasons for one in report.skipped}
    assert told["tpu_only"] == ("it needs a TPU",)
    assert told["picky"] == ("heads of 64 are ugly",)
    assert "broken" in told["broken"][0]
    measured = {row["backend"] for row in report.rows}
    assert "torch_native" in measured
    assert measured.isdisjoint(told)


def native_factory(context: AttentionBackendContext) -> AttentionBackend:
    return TorchNativeBackend(context)


def _fails(context: AttentionBackendContext) -> AttentionBackend:
    raise OSError("no such library")


def test_a_backend_that_is_named_must_run(catalogue_with: CatalogueWith) -> None:
    catalogue = catalogue_with(descriptor("tpu_only", native_factory, requires=lambda platform: ["it needs a TPU"]))
    with pytest.raises(PluginError, match="attention 'tpu_only' cannot be measured here: it needs a TPU"):
        report_of(catalogue, backends=("torch_native", "tpu_only"))
    with pytest.raises(PluginError, match="tpu_only"):
        report_of(catalogue, EngineConfig(attention=AttentionConfig(name="tpu_only")))


def test_where_nothing_runs_every_reason_is_told(catalogue_with: CatalogueWith) -> None:
    catalogue = Catalogue([entry for entry in catalogue_with().entries() if entry.kind != "attention"])
    with pytest.raises(PluginError, match="none is installed"):
        report_of(catalogue)


def test_options_reach_the_backend_that_the_config_names(catalogue_with: CatalogueWith) -> None:
    @dataclasses.dataclass(frozen=True)
    class Options:
        speed: int

    seen: list[object] = []

    def factory(options: object, context: AttentionBackendContext) -> AttentionBackend:
        seen.append(options)
        return TorchNativeBackend(context)

    picky = AttentionBackendDescriptor(
        name="picky", api_version=(1, 7), factory=factory, supports=lambda spec: [], options_type=Options
    )
    catalogue = catalogue_with(picky)
    named = EngineConfig(attention=AttentionConfig(name="picky", options=Options(3)))
    rows = report_of(catalogue, named).rows
    assert ([row["backend"] for row in rows], seen) == (["picky"], [Options(3)])
    assert rows[0]["vs_torch_native"] is None
    told = {one.name: one.reasons for one in report_of(catalogue).skipped}
    assert "its options need values" in told["picky"][0]
    with pytest.raises(ConfigError, match="attention=picky is not among"):
        report_of(catalogue, named, backends="torch_native")


def test_caches_that_do_not_fit_are_refused_with_the_numbers(catalogue_with: CatalogueWith) -> None:
    config = EngineConfig(kv_cache=KVCacheConfig(memory="1MiB"))
    with pytest.raises(CapacityError, match=r"8x2048: .* 1 MiB are allowed.*kv_cache\.memory"):
        report_of(catalogue_with(), config, shapes="8x2048", backends="torch_native")


def test_more_memory_gives_more_layers_up_to_what_the_processor_caches(catalogue_with: CatalogueWith) -> None:
    layers = []
    for memory in ("4MiB", "8MiB"):
        config = EngineConfig(kv_cache=KVCacheConfig(memory=memory))
        (row,) = report_of(catalogue_with(), config, shapes="8x256", backends="torch_native").rows
        layers.append(row["num_layers"])
    cache = 129 * 16 * 3 * 2 * 64 * 2  # block 0 is there too
    wanted = -(-attention.CACHES_IN_LAYERS * last_level_cache(CPU) // (128 * 16 * 3 * 2 * 64 * 2))
    assert layers == [min(wanted, 64, size // cache) for size in (4 * 2**20, 8 * 2**20)]


def test_a_failure_is_told_behind_the_table_and_in_the_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "TOLERANCE", {"float32": 0.0, "bfloat16": 0.0})
    assert run(["bench", "attention", "--json", *SMALL]) == 1
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert report["rows"] == []
    assert len(report["failures"]) == 2
    assert "error: torch_native at 3x40, eager, is wrong" in captured.err


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["bench.shapes=32y512"], ["'32y512' is no shape", "32x512", "256+256"]),
        (["bench.shapes=[]"], ["bench.shapes", "at least one"]),
        (["bench.backends=[]"], ["bench.backends", "at least one"]),
        (["bench.backends=torch_natve"], ["torch_natve", "did you mean 'torch_native'"]),
        (["bench.num_heads=10"], ["bench.num_heads", "a multiple of bench.num_kv_heads=3", "got 10"]),
        (["bench.num_kv_heads=0"], ["bench.num_kv_heads", "1 to 1024"]),
        (["bench.head_dim=0"], ["bench.head_dim must be a whole number, 1 to 1024, got 0"]),
        (["bench.head_dimm=8"], ["unknown key 'bench.head_dimm'; did you mean 'bench.head_dim'?"]),
        (["bench.typo=4"], ["unknown key 'bench.typo'; keys of this benchmark: "]),  # none is near
        (["attention=TORCH_SDPA"], ["did you mean 'torch_native'?"]),
        (["bench.sliding_window=0"], ["bench.sliding_window", "got 0"]),
        (["bench.seconds=0"], ["bench.seconds", "above 0"]),
        (["bench.seconds=fast"], ["bench.seconds", "'fast'"]),
        (["bench.rounds=3"], ["unknown key 'bench.rounds'", "seconds"]),
        (["smollm2-135m"], ["`tokenyard bench attention` runs no model"]),
        (["--batch-size", "8"], ["--batch-size is for latency, not for attention"]),
        (["attention=nope"], ["nope", "torch_native"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_mistake_is_one_line_that_names_it(
    capsys: pytest.CaptureFixture[str], arguments: Sequence[str], parts: Sequence[str]
) -> None:
    line = refused(capsys, "bench", "attention", *arguments)
    for part in parts:
        assert part in line


def test_keys_that_change_nothing_are_told(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    output_of(capsys, "attention", *SMALL, "engine=overlap", "kv_cache.block_size=8", "model.dtype=float32")
    (message,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert message.endswith("this changes nothing: engine")


def row_of(backend: str, median_us: float, min_us: float, mode: str = "eager") -> dict[str, object]:
    return {"shape": "2x20", "backend": backend, "mode": mode, "median_us": median_us, "min_us": min_us}


def test_rows_of_a_busy_machine_are_named_and_no_others() -> None:
    quiet, slow, graph = row_of("fast", 12.9, 10.0), row_of("slow", 26.0, 10.0), row_of("fast", 14.0, 10.0, "graph")
    text = busy_text([quiet, slow, graph])
    assert text is not None
    assert "2x20 slow (2.6), 2x20 fast graph (1.4); " in text
    assert "vs_torch_native" in text
    assert "2x20 fast (" not in text
    assert busy_text([quiet]) is None
    assert busy_text([]) is None


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_busy_machine_is_told_on_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: Sequence[str]
) -> None:
    monkeypatch.setattr(attention, "BUSY", 0.0)
    out, err = output_of(capsys, "attention", *flags, *SMALL)
    (line,) = [line for line in err.splitlines() if line.startswith("WARNING: the machine was busy: ")]
    assert "3x40 torch_native" in line
    assert "5+9 torch_native" in line
    assert "busy" not in out


# ---- Time -----------------------------------------------------------------------------------------------------------


def test_the_read_speed_is_that_of_the_median_and_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    speed, times = ReadSpeed(CPU), iter([4.0, 1.0, 2.0, 8.0])
    monkeypatch.setattr("tokenyard.bench.device_time.seconds_on", lambda device, call: next(times))
    for _ in range(3):
        speed.measure()
    first = speed.bytes_per_second()
    speed.measure()
    assert first == 4 * speed.bytes_per_second() >= 2**28 / 2


def test_time_is_that_of_the_call() -> None:
    calls: list[int] = []
    assert seconds_on(CPU, lambda: calls.append(1)) >= 0
    assert calls == [1]
