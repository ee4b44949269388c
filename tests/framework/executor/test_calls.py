"""A thread of one's own: what it does not survive."""

from __future__ import annotations

import os

import pytest
from tokenyard.errors import EngineDeadError
from tokenyard.executor.calls import OwnThread


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # this process has threads: that is what it is about
def test_in_a_forked_process_a_call_is_refused_instead_of_waited_for_in_vain() -> None:
    calls = OwnThread("executor")
    assert calls.submit(lambda: 5).result() == 5
    child = os.fork()
    if child == 0:
        try:
            calls.submit(lambda: 5)
        except EngineDeadError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    calls.shutdown()
