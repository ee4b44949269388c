"""The contract suite over stand-ins for the operators: with stand-in masks, and with those of the real package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType

import fake_xformers as fake
import pytest
from tokenyard import AttentionBackendDescriptor
from tokenyard.config import NoOptions
from tokenyard.testing import AttentionBackendContract
from tokenyard_backends.xformers import plugin
from tokenyard_backends.xformers.backend import XformersBackend
from tokenyard_backends.xformers.operators import Operators


def descriptor_with(make_operators: Callable[[], Operators]) -> AttentionBackendDescriptor[NoOptions]:
    """The plugin's own, but for the operators and what it asks of the machine."""
    (descriptor,) = plugin.tokenyard_attention_backends()
    return replace(
        descriptor,
        name="xformers_stand_in",
        factory=lambda options, context: XformersBackend(context, make_operators()),
        requires=lambda platform: (),
    )


class Claims(AttentionBackendContract):
    device_type = "cuda"
    dtypes = ("bfloat16", "float16")
    head_dims = (16, 32, 64, 128, 256)
    v_head_dims = ()
    block_sizes = (64, 128)
    soft_caps = False
    longest_context = 300  # several pages


class TestOverStandInMasks(Claims):
    def descriptors(self) -> Sequence[AttentionBackendDescriptor[NoOptions]]:
        return [descriptor_with(fake.fake_operators)]


class TestOverThePackagesMasks(Claims):
    max_examples = 8

    @pytest.fixture(autouse=True)
    def _package(self, package: ModuleType) -> None:
        self.package = package

    def descriptors(self) -> Sequence[AttentionBackendDescriptor[NoOptions]]:
        return [descriptor_with(lambda: fake.operators_over(self.package))]
