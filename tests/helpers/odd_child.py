"""A child process for tests of `tokenyard.ipc.processes`: does what its argument says."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from tokenyard.ipc.child import begin_child, end_now
from tokenyard.ipc.processes import ChildProcess


def main() -> None:
    """`wait`, `deaf` (does not end when asked), `crash`, `segfault`, `parent` (has a child of its own) or `exit N`."""
    asked = threading.Event()
    told = begin_child(asked.set)
    task = told.arguments[0]
    print("ready", task, flush=True)
    if task == "wait":
        asked.wait()
    elif task == "deaf":
        time.sleep(600)
    elif task == "crash":
        raise RuntimeError("it went wrong here")
    elif task == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif task == "parent":
        child = ChildProcess("odd_child", "grandchild", arguments=["deaf"])
        print("grandchild", child.pid, flush=True)
        asked.wait()
        child.stop(0.1)
    elif task == "tell":
        print(":".join(sys.path), os.environ["ODD_SETTING"], os.environ["ODD_OTHER"], sep="|", flush=True)
    elif task == "exit":
        print("last words", end="", file=sys.stderr, flush=True)
        end_now(int(told.arguments[1]))
