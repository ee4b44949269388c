"""Contract: how every suite is told what to test, and what its rules share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache, wraps
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from hypothesis import HealthCheck, Phase, Verbosity, given, settings

from tokenyard.descriptors import kind_of
from tokenyard.errors import ConfigError, nearest
from tokenyard.interfaces.policy import PreemptMode
from tokenyard.launch.assemble import as_it_is
from tokenyard.launch.compose import load_engine_config
from tokenyard.launch.overrides import Given, parse_overrides
from tokenyard.plugins import load_catalogue
from tokenyard.request import FinishReason
from tokenyard.testing.contracts.shrinking import Shrinking
from tokenyard.testing.errors import ContractViolation
from tokenyard.testing.harness import EngineHarness
from tokenyard.testing.inputs import checked_overrides
from tokenyard.testing.parts import catalogue_with

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from tokenyard.catalogue import Catalogue
    from tokenyard.config import EngineConfig
    from tokenyard.descriptors import Descriptor
    from tokenyard.launch.assemble import Decorate


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a small engine. They change nothing but schedules, so a request's tokens are the same in all of them."""

    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    num_blocks: int = 12
    block_size: int = 4
    enable_prefix_caching: bool = True
    long_prefill_token_threshold: int = 0
    preempt_mode: str | None = None  # None = the config's
    num_host_blocks: int = 0  # for K/V that is swapped out; 0 = what the config says
    step_seconds: float | None = None  # that each step takes; None = none

    def with_blocks(self, num_blocks: int) -> Shape:
        return dataclasses.replace(self, num_blocks=num_blocks)

    def applied(self, config: EngineConfig) -> EngineConfig:
        """`config` with these sizes. A config without prefix caching stays without."""
        scheduler = dataclasses.replace(
            config.scheduler,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
        )
        if self.preempt_mode is not None:
            scheduler = dataclasses.replace(scheduler, preempt_mode=PreemptMode(self.preempt_mode).value)
        host_memory = self.num_host_blocks * self.block_size or config.kv_cache.host_memory  # a scripted token: a byte
        return dataclasses.replace(
            config,
            scheduler=scheduler,
            kv_cache=dataclasses.replace(
                config.kv_cache,
                num_blocks=self.num_blocks,
                block_size=self.block_size,
                enable_prefix_caching=self.enable_prefix_caching and config.kv_cache.enable_prefix_caching,
                host_memory=host_memory,
            ),
        )


Result: TypeAlias = tuple[tuple[int, ...], str | None]
"""A request's tokens, and why it ended."""

_NO_RESULT: Result = ((), None)
_WHOLE = (FinishReason.STOP, FinishReason.LENGTH)

AMPLE = Shape(max_num_seqs=64, max_num_batched_tokens=4096, num_blocks=200, block_size=16)
"""Nothing ever waits, nothing is preempted."""


class Contract:
    """Inherit a suite in a class whose name starts with `Test`, and say what is to be tested.

    - `overrides`: the part by its name, with its options, as on the command line; a list that is known only when a test
      runs may be set in a fixture (`self.overrides = [...]`).
    - `descriptors()`: descriptors of parts that are not installed as plugins; they join the catalogue. The one of the
      suite's kind is tested where the overrides choose none; a suite that names nothing to test is refused.
    - `max_examples`: random examples for each rule that uses them. The same ones in every run.
    - `simplifies`: whether to look for the simplest example that fails, which takes a while.

    Each test is one rule; its docstring starts with the rule's id. A rule that does not hold raises
    ContractViolation, whose message starts with the id of what was violated.
    """

    _kind: ClassVar[str]  # of the descriptors of what is tested
    _choice: ClassVar[str]  # the override that chooses one

    overrides: Sequence[str] = ()
    max_examples: int = 20
    simplifies: bool = True

    def descriptors(self) -> Sequence[Descriptor[Any]]:
        """Parts that the overrides name and that no installed plugin provides."""
        return ()

    def load(self, *overrides: str, descriptors: Sequence[Descriptor[Any]] = ()) -> Loaded:
        """The suite's config, with more overrides behind its own, and more parts."""
        parts, installed = self.descriptors(), load_catalogue()
        own = self._own_overrides(parts, installed.names("scheduler"))
        return _load((*own, *overrides), (*parts, *descriptors), installed)

    def _own_overrides(self, parts: Sequence[Descriptor[Any]], schedulers: Sequence[str]) -> list[str]:
        """The suite's overrides, one of which chooses what is tested. Raises ConfigError: the default is not meant."""
        overrides = checked_overrides(self.overrides)
        key = self._choice.partition("=")[0]
        parsed = parse_overrides([Given(override, f"override {override}") for override in overrides])
        values = [override.value for override in parsed if override.key == key]
        if any(value and not (self._kind == "policy" and value in schedulers) for value in values):
            return overrides
        names = [part.name for part in parts if kind_of(part) == self._kind]
        if len(names) == 1:
            return [*overrides, self._choice.replace("NAME", names[0])]
        misspelt = nearest("overrides", vars(type(self)))
        raise ConfigError(
            f"{type(self).__name__} does not say which {self._kind} it tests: set overrides = ['{self._choice}']"
            + (f" (it has '{misspelt}'; is that meant?)" if misspelt not in (None, "overrides") else "")
            + (f"; descriptors() gives {', '.join(names)}" if names else "")
        )

    def for_all(
        self, check: Callable[..., None], *examples: SearchStrategy[Any], max_examples: int | None = None
    ) -> None:
        """Call `check` with random examples of each kind; it raises at the simplest one that it fails on.

        The shortest, where it is a list. A violation that does not tell what led there is told with the example.
        """
        failing: dict[str, object] = {}

        @wraps(check)
        def noted(**examples: object) -> None:
            try:
                check(**examples)
            except ContractViolation:
                failing.update(examples)
                raise

        run = settings(
            max_examples=max_examples or self.max_examples,
            deadline=None,
            database=None,
            derandomize=True,
            report_multiple_bugs=False,
            verbosity=Verbosity.quiet,  # the violation tells the example
            phases=[Phase.generate, Phase.shrink] if self.simplifies else [Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        try:
            run(given(*examples)(noted))()
        except ContractViolation as violation:
            shrinking, told = Shrinking(check, violation), failing
            if self.simplifies:
                told = dict(shrinking.shorten(failing))
            raise shrinking.violation.with_trace(_told(told)) from violation.__cause__


class Loaded:
    """A config and what its names stand for; makes engines of several shapes quickly."""

    def __init__(self, config: EngineConfig, catalogue: Catalogue) -> None:
        self.config = config
        self.catalogue = catalogue

    def harness(
        self,
        shape: Shape | None = None,
        *,
        decorate: Decorate = as_it_is,
        group_windows: Sequence[int | None] = (None,),
        step_seconds: float | None = None,
    ) -> EngineHarness:
        if shape is not None:
            step_seconds = step_seconds or shape.step_seconds
            if shape.num_host_blocks and not self._can_swap:
                shape = dataclasses.replace(shape, num_host_blocks=0)
        return EngineHarness(
            config=self.config if shape is None else shape.applied(self.config),
            catalogue=self.catalogue,
            decorate=decorate,
            group_windows=group_windows,
            step_seconds=step_seconds,
        )

    @cached_property
    def _can_swap(self) -> bool:
        """Whether the parts take K/V to host memory; a launch refuses it otherwise."""
        try:
            EngineHarness(config=Shape(num_host_blocks=1).applied(self.config), catalogue=self.catalogue).close()
        except ConfigError:
            return False
        return True


@lru_cache(maxsize=32)  # composing a config takes longer than most rules do
def _load(overrides: tuple[str, ...], descriptors: tuple[Descriptor[Any], ...], installed: Catalogue) -> Loaded:
    config, catalogue = load_engine_config(overrides, catalogue=catalogue_with(*descriptors, installed=installed))
    return Loaded(config, catalogue)


def _told(examples: Mapping[str, object]) -> str:
    """What a check was given, a line each."""
    lines: list[object] = []
    for example in examples.values():
        lines.extend(example if isinstance(example, list) else [example])
    return "with:\n" + "\n".join(f"  {line}" for line in lines)


@contextmanager
def no_errors(rule: str) -> Iterator[None]:
    """What the part raises in a legal situation is a violation."""
    try:
        yield
    except ContractViolation:
        raise
    except Exception as error:
        raise ContractViolation(rule, f"{type(error).__name__}: {error}") from error


def seeded(seed: int) -> Random:
    """Random numbers for examples."""
    return Random(seed)  # noqa: S311 - nothing is kept secret with them


def expect(holds: bool, rule: str, what: str) -> None:
    """A rule that does not hold is a violation."""
    if not holds:
        raise ContractViolation(rule, what)


def check_same_tokens(rule: str, left: Mapping[str, Result], right: Mapping[str, Result], what: str) -> None:
    """Both runs gave each request the same tokens; where one ended it early (a policy may), the first of them."""
    for name in left.keys() | right.keys():
        (some, one), (others, other) = left.get(name, _NO_RESULT), right.get(name, _NO_RESULT)
        is_whole = one in _WHOLE and other in _WHOLE
        length = min(len(some), len(others))
        if some[:length] != others[:length] or (is_whole and (some, one) != (others, other)):
            raise ContractViolation(
                rule, f"{what}: '{name}' has {(some, one)} in one and {(others, other)} in the other"
            )


def check_equal(rule: str, left: Mapping[str, object], right: Mapping[str, object], what: str) -> None:
    """Both runs did the same to each request."""
    for name in left.keys() | right.keys():
        if left.get(name) != right.get(name):
            raise ContractViolation(
                rule, f"{what}: '{name}' has {left.get(name)} in one and {right.get(name)} in the other"
            )
