"""The backend over stand-ins for xformers' operators."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import fake_xformers as fake
import pytest
import torch
from tokenyard.errors import PluginError
from tokenyard.interfaces import AttentionBackendContext, AttentionLayer, AttentionSpec
from tokenyard.platform import Platform
from tokenyard.testing.attention import AttentionCase, expect_attention, make_case
from tokenyard_backends.xformers import plan as planning
from tokenyard_backends.xformers import plugin
from tokenyard_backends.xformers.backend import XformersBackend
from tokenyard_backends.xformers.operators import Operators, load_operators

_GOOD = AttentionSpec(
    device_type="cuda",
    dtype="bfloat16",
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    v_head_dim=64,
    block_size=64,
)
_LAYER = AttentionLayer(index=0, scale=0.125)


def a_case(lengths: list[tuple[int, int]], **changes: Any) -> AttentionCase:
    sizes: dict[str, Any] = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 64,
        "block_size": 64,
        "dtype": torch.bfloat16,
    }
    return make_case(lengths=lengths, **(sizes | changes))


def a_backend(operators: Operators, spec: AttentionSpec = _GOOD) -> XformersBackend:
    assert XformersBackend.supports(spec) == []
    context = AttentionBackendContext(spec=spec, device=torch.device("cpu"), num_threads=1)
    return XformersBackend(context, operators)


def assert_right(backend: XformersBackend, case: AttentionCase, layer: AttentionLayer, plan: object = None) -> None:
    """Output and log-sum-exp, asked for together and apart."""
    expected = expect_attention(case, layer)
    plan = backend.plan(case.batch) if plan is None else plan
    for with_lse in (False, True):
        out = torch.full(case.query.shape, torch.nan, dtype=case.query.dtype)
        lse = torch.full(case.query.shape[:2], torch.nan) if with_lse else None
        cache = (case.kv_cache[0].clone(), case.kv_cache[1].clone())
        backend.forward(layer, case.query, case.key, case.value, cache, plan, out, lse)
        assert ((out - expected.out).abs() <= expected.out_limit).all()
        assert lse is None or ((lse - expected.lse).abs() <= expected.lse_limit).all()


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (6, 1), (1, 1)])
def test_a_mixed_batch_equals_float64(
    operators: Operators, heads: tuple[int, int], with_sinks: bool, window: int | None
) -> None:
    lengths = [(1, 1), (30, 200), (1, 64), (1, 129), (9, 9), (1, 65)]
    case = a_case(lengths, num_heads=heads[0], num_kv_heads=heads[1], fused=True)
    spec = replace(_GOOD, num_heads=heads[0], num_kv_heads=heads[1])
    sinks = torch.linspace(-2, 3, heads[0]) if with_sinks else None
    assert_right(a_backend(operators, spec), case, replace(_LAYER, sliding_window=window, sinks=sinks))


@pytest.mark.parametrize(
    "lengths",
    [
        [(1, 100)],
        [(1, 10), (1, 300)],
        [(1, 10), (1, 130), (1, 64)],
        [(40, 40), (3, 3)],
        [(40, 40), (3, 90)],
        [(7, 7), (1, 70)],
        [(1, 10), (2, 12), (1, 130), (1, 64)],  # as many sequences as decoding ones with their padding
    ],
)
def test_steps_of_one_kind_equal_float64(operators: Operators, lengths: list[tuple[int, int]]) -> None:
    assert_right(a_backend(operators), a_case(lengths), _LAYER)


def test_prompts_of_several_groups_equal_float64(operators: Operators, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_MAX_GATHERED_ROWS", 70)
    assert_right(a_backend(operators), a_case([(5, 60), (1, 9), (30, 30), (5, 41), (2, 200)]), _LAYER)


def test_a_plan_serves_layers_of_different_windows(operators: Operators) -> None:
    case, backend = a_case([(1, 200), (20, 90)]), a_backend(operators)
    plan = backend.plan(case.batch)
    for window in (5, None, 90, 5):
        assert_right(backend, case, replace(_LAYER, sliding_window=window), plan)


def test_layers_of_one_window_share_the_biases_of_a_step(operators: Operators) -> None:
    case, backend = a_case([(1, 200), (20, 90)]), a_backend(operators)
    plan = backend.plan(case.batch)
    assert plan.work(None) is plan.work(None)
    assert plan.work(None) is not plan.work(7)


def test_decoding_reads_the_cache_where_it_is_and_prompts_without_a_past_read_no_cache() -> None:
    operators = fake.fake_operators()
    case = a_case([(1, 100), (9, 9)])
    cache = (case.kv_cache[0].clone(), case.kv_cache[1].clone())
    backend = a_backend(operators)
    backend.forward(
        _LAYER, case.query, case.key, case.value, cache, backend.plan(case.batch), torch.empty_like(case.query)
    )
    (decoded,), (prompted,) = operators.paged.calls, operators.prompt.calls  # type: ignore[attr-defined]
    assert decoded.key.data_ptr() == cache[0].data_ptr()
    assert decoded.value.data_ptr() == cache[1].data_ptr()
    assert torch.equal(prompted.key[0, :, :, 0], case.key[1:])


def test_a_step_of_whole_prompts_copies_nothing() -> None:
    operators = fake.fake_operators()
    case = a_case([(3, 3), (9, 9)])
    backend, out = a_backend(operators), torch.empty_like(case.query)
    plan = backend.plan(case.batch)
    backend.forward(_LAYER, case.query, case.key, case.value, case.kv_cache, plan, out)
    (call,) = operators.prompt.calls  # type: ignore[attr-defined]
    assert [call.query.data_ptr(), call.key.data_ptr()] == [case.query.data_ptr(), case.key.data_ptr()]


def test_the_log_sum_exp_is_asked_for_only_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    apply = fake.StandIn.apply

    def spy(self: fake.StandIn, inp: object, needs_gradient: bool) -> object:
        asked.append(needs_gradient)
        return apply(self, inp, needs_gradient)

    monkeypatch.setattr(fake.StandIn, "apply", spy)
    case, backend = a_case([(1, 5), (2, 2)]), a_backend(fake.fake_operators())
    for layer in (_LAYER, replace(_LAYER, sinks=torch.zeros(4))):
        cache = (case.kv_cache[0].clone(), case.kv_cache[1].clone())
        plan, out = backend.plan(case.batch), torch.empty_like(case.query)
        backend.forward(layer, case.query, case.key, case.value, cache, plan, out)
    assert asked == [False, False, True, True]


def test_a_cache_whose_blocks_do_not_lie_one_after_the_other_is_refused_not_copied() -> None:
    case, backend = a_case([(1, 5)]), a_backend(fake.fake_operators())
    gapped = torch.zeros(4, 128, 2, 64, dtype=torch.bfloat16)[:, :64]
    plan, out = backend.plan(case.batch), torch.empty_like(case.query)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        backend.forward(_LAYER, case.query, case.key, case.value, (gapped, gapped), plan, out)


def test_a_foreign_plan_is_our_bug_and_says_so() -> None:
    case, backend = a_case([(1, 5)]), a_backend(fake.fake_operators())
    with pytest.raises(TypeError, match="plan must come from this backend"):
        backend.forward(_LAYER, case.query, case.key, case.value, case.kv_cache, object(), case.query)


def test_what_it_cannot_serve_is_refused_with_one_reason_each(monkeypatch: pytest.MonkeyPatch) -> None:
    assert XformersBackend.supports(replace(_GOOD, has_sinks=True, sliding_windows=frozenset({7}))) == []
    monkeypatch.setattr(torch.version, "hip", "7.0")
    bad = AttentionSpec(
        device_type="cpu",
        dtype="float32",
        num_heads=5,
        num_kv_heads=2,
        head_dim=96,
        v_head_dim=64,
        block_size=16,
        causal=False,
        soft_caps=frozenset({30.0}),
        kv_cache_dtype="fp8",
    )
    reasons = XformersBackend.supports(bad)
    words = [
        "cpu",
        "AMD's",
        "float32",
        "fp8",
        "causal",
        "2 KV heads",
        "head size 96",
        "64 differs",
        "16 is",
        "soft cap",
    ]
    assert len(reasons) == len(words)
    for word, reason in zip(words, reasons, strict=True):
        assert word in reason


@pytest.mark.parametrize(("head_dim", "block_size"), [(512, 64), (8, 64), (64, 32), (64, 96), (64, 0)])
def test_sizes_that_an_operator_cannot_take_are_refused(head_dim: int, block_size: int) -> None:
    spec = replace(_GOOD, head_dim=head_dim, v_head_dim=head_dim, block_size=block_size)
    assert len(XformersBackend.supports(spec)) == 1


class FakePlatform(Platform):
    """A machine with these packages and this GPU."""

    def __init__(self, capability: tuple[int, int] | None, **versions: str) -> None:
        self.compute_capability = capability
        self._versions = versions

    def package_version(self, distribution: str) -> str | None:
        return self._versions.get(distribution)

    def has_package(self, import_name: str) -> bool:
        return import_name in self._versions


@pytest.mark.parametrize("triton", ["3.6.0", "3.7.1", "3.8.0"])
@pytest.mark.parametrize("xformers", ["0.0.35", "0.0.35+cu128"])
def test_a_machine_that_has_all_it_needs_is_not_refused(xformers: str, triton: str) -> None:
    (descriptor,) = plugin.tokenyard_attention_backends()
    platform = FakePlatform((9, 0), xformers=xformers, triton=triton)
    assert descriptor.requires(platform) == []


def test_triton_of_another_distribution_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = FakePlatform((9, 0), xformers="0.0.35")
    monkeypatch.setattr(platform, "has_package", lambda name: name == "triton")
    (descriptor,) = plugin.tokenyard_attention_backends()
    assert descriptor.requires(platform) == []


@pytest.mark.parametrize(
    ("platform", "words"),
    [
        (FakePlatform(None), ["tokenyard[xformers]", "triton is not installed", "needs an NVIDIA GPU"]),
        (FakePlatform((7, 5), xformers="0.0.35", triton="3.6.0"), ["this one has 7.5"]),
        (FakePlatform((8, 0), xformers="0.0.34", triton="3.6.0"), ["0.0.34 is installed"]),
        (FakePlatform((8, 0), xformers="0.0.35.dev1147", triton="3.6.0"), ["0.0.35.dev1147 is installed"]),
        (FakePlatform((8, 0), xformers="0.0.35", triton="3.9.0"), ["triton 3.9.0 is installed"]),
        (FakePlatform((8, 0), xformers="0.0.35", triton="3.5.1"), ["triton 3.5.1 is installed"]),
        (FakePlatform((8, 0), xformers="0.0.35", triton="main"), ["triton main is installed"]),
    ],
)
def test_what_a_machine_lacks_is_told_with_one_reason_each(platform: Platform, words: list[str]) -> None:
    (descriptor,) = plugin.tokenyard_attention_backends()
    reasons = descriptor.requires(platform)
    assert len(reasons) == len(words)
    for word, reason in zip(words, reasons, strict=True):
        assert word in reason


def a_package(**changes: object) -> SimpleNamespace:
    found = fake.fake_operators()
    parts = {
        "attn_bias": found.masks,
        "Inputs": found.inputs,
        "triton_splitk": SimpleNamespace(FwOp=found.paged),
        "flash": SimpleNamespace(FwOp=found.prompt),
    }
    return SimpleNamespace(**(parts | changes))


def test_the_plugin_makes_the_backend_with_the_operators_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    driver = pytest.importorskip("triton.runtime", reason="Triton is not installed").driver
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_target=lambda: asked.append("target")))
    monkeypatch.setattr("importlib.import_module", lambda name: a_package())
    (descriptor,) = plugin.tokenyard_attention_backends()
    context = AttentionBackendContext(spec=_GOOD, device=torch.device("cpu"), num_threads=1)
    backend = descriptor.factory(descriptor.options_type(), context)
    assert isinstance(backend, XformersBackend)
    assert backend.description == "decode paged stand-in, prompts gathered for prompt stand-in"
    assert asked == ["target"]  # else the first step would wait for a C compiler
    assert_right(backend, a_case([(1, 70), (5, 8)]), _LAYER)


def test_a_torch_without_flash_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = fake.StandIn("none", fake.PROMPT_MASKS)
    monkeypatch.setattr(fake.StandIn, "is_available", lambda self: False)
    package = a_package(flash=SimpleNamespace(FwOp=prompt))
    monkeypatch.setattr("importlib.import_module", lambda name: package)
    with pytest.raises(PluginError, match="flash attention, which this build of torch has not"):
        load_operators()


def test_a_package_that_cannot_be_imported_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> ModuleType:
        raise ImportError("Requires Flash-Attention version >=2.7.1,\n<=2.8.4 but got 2.9")

    monkeypatch.setattr("importlib.import_module", fail)
    with pytest.raises(PluginError, match=r"cannot import its package: Requires .*>=2\.7\.1, <=2\.8\.4 but got 2\.9$"):
        load_operators()


def test_the_real_package_on_a_machine_without_a_gpu_is_refused_without_its_own_warning(package: ModuleType) -> None:
    code = (
        "from tokenyard_backends.xformers.operators import load_operators\n"
        "try:\n    load_operators()\nexcept Exception as error:\n    print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    if not torch.cuda.is_available():
        assert done.stdout.startswith("PluginError attention 'xformers' attends prompts by flash attention")
    assert "WARNING" not in done.stderr


def test_importing_the_plugin_imports_neither_torch_nor_xformers() -> None:
    code = (
        "import sys; from tokenyard_backends.xformers import plugin; "
        "list(plugin.tokenyard_attention_backends()); sys.exit(bool({'torch', 'xformers', 'triton'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
