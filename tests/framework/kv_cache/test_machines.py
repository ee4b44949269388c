"""Random interleavings of everything a pool and a manager can be asked."""

from __future__ import annotations

from hypothesis import settings
from kv_machine import ManagerMachine, RadixMachine
from kv_pool_machine import PoolMachine

PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
ManagerMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=100, deadline=None)
RadixMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=100, deadline=None)


TestPoolMachine = PoolMachine.TestCase
TestManagerMachine = ManagerMachine.TestCase
TestRadixMachine = RadixMachine.TestCase
