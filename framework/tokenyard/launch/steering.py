"""What steers a scheduler: its policy, and the plugins that policies ask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenyard.config import SchedulerConfig
from tokenyard.descriptors import ComponentDescriptor, PolicyDescriptor
from tokenyard.errors import ConfigError
from tokenyard.interfaces import latency, predictor
from tokenyard.interfaces.latency import LatencyModel, LatencyModelContext
from tokenyard.interfaces.policy import PolicyContext, PreemptMode, RequestView, SchedulingPolicy
from tokenyard.interfaces.predictor import ORACLES, OutputLengthPredictor, PredictorContext
from tokenyard.launch.chosen import chosen
from tokenyard.launch.schema import NO_LATENCY
from tokenyard.parts import make_part

if TYPE_CHECKING:
    from tokenyard.catalogue import Catalogue
    from tokenyard.config import EngineConfig

MakePredictor = Callable[[Callable[[RequestView], int]], OutputLengthPredictor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Steering:
    """As `SchedulerContext` takes it."""

    policy: SchedulingPolicy | None
    shadow: SchedulingPolicy | None
    latency: LatencyModel | None
    make_predictor: MakePredictor | None


def make_steering(config: EngineConfig, catalogue: Catalogue) -> Steering:
    """What the config names, made before a model is loaded: a mistake in it costs no time. Raises PluginError."""
    scheduler = config.scheduler
    acting = scheduler.policy
    return Steering(
        policy=None if acting is None else make_policy(acting.name, acting.options, config, catalogue),
        shadow=None if scheduler.shadow is None else _shadow(scheduler.shadow, config, catalogue),
        latency=make_latency_model(config, catalogue),
        make_predictor=_predictor_maker(config, catalogue),
    )


def make_policy(name: str, options: object, config: EngineConfig, catalogue: Catalogue) -> SchedulingPolicy:
    """A policy for the config's scheduler, whether the one that acts or another."""
    scheduler = config.scheduler
    context = PolicyContext(
        seed=config.seed,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        preempt_mode=PreemptMode(scheduler.preempt_mode),
        has_latency=config.latency.name != NO_LATENCY,
        max_chunk_tokens=_max_chunk_tokens(scheduler),
    )
    return make_part(
        chosen(catalogue, "policy", name, PolicyDescriptor),
        SchedulingPolicy,
        lambda part: part.factory(options, context),
    )


def _shadow(name: str, config: EngineConfig, catalogue: Catalogue) -> SchedulingPolicy:
    try:
        return make_policy(name, config.scheduler.shadow_options, config, catalogue)
    except ConfigError as error:  # a policy knows its own keys, not that it is to be a shadow
        raise ConfigError(f"scheduler.shadow={name}: {error}") from error


def _max_chunk_tokens(scheduler: SchedulerConfig) -> int | None:
    if not scheduler.enable_chunked_prefill:
        return None
    return scheduler.long_prefill_token_threshold or scheduler.max_num_batched_tokens


def make_latency_model(config: EngineConfig, catalogue: Catalogue) -> LatencyModel | None:
    """The one that the config names; None where that is nobody. Raises PluginError and ConfigError."""
    if config.latency.name == NO_LATENCY:
        return None
    context = LatencyModelContext(max_num_batched_tokens=config.scheduler.max_num_batched_tokens, config=config)
    return make_part(
        chosen(catalogue, latency.COMPONENT_KIND, config.latency.name, ComponentDescriptor),
        LatencyModel,
        lambda part: part.factory(config.latency.options, context),
    )


def _predictor_maker(config: EngineConfig, catalogue: Catalogue) -> MakePredictor | None:
    """None where the default one is not there: nearly always nobody asks."""
    name, kind = config.scheduler.predictor, predictor.COMPONENT_KIND
    if name == SchedulerConfig().predictor and name not in catalogue.names(kind):
        return None
    descriptor = chosen(catalogue, kind, name, ComponentDescriptor)

    def make(true_output_tokens: Callable[[RequestView], int]) -> OutputLengthPredictor:
        context = PredictorContext(seed=config.seed, true_output_tokens=true_output_tokens if name in ORACLES else None)
        return make_part(
            descriptor, OutputLengthPredictor, lambda part: part.factory(config.scheduler.predictor_options, context)
        )

    return make
