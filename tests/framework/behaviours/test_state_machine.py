"""Section 9 of the public engine behaviours under any interleaving that Hypothesis finds."""

from __future__ import annotations

from engine_machine import EngineMachine
from hypothesis import settings

TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
