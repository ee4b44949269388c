"""What a process of a run may do, in the place of `tokenyard.experiments.run_job`; its seed says which.

It writes the files by hand, so that it need not wait for what a real run imports.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

from tokenyard.ipc.child import begin_child, end_now

KILLED, HANGS, FAILS = 13, 14, 15


def main() -> None:
    """Every other seed is done at once."""
    folder = Path(begin_child(end_now).arguments[0])
    plan = next(one for one in (folder, folder.parent) if (one / "experiment.json").exists())
    runs = json.loads((plan / "experiment.json").read_text())["runs"]
    run = runs[int(folder.name)] if plan != folder else runs[0]
    seed = int(run["overrides"][0].removeprefix("seed="))
    if seed == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    if seed == HANGS:
        (folder / "requests.csv").write_text("id\n")
        threading.Event().wait()
    if seed == FAILS:
        (folder / "error.txt").write_text("the server is gone\nand more\n")
        sys.exit(1)
    facts = {"config_hash": run["config_hash"]}
    result = {"metrics": {"pid": os.getpid()}, "facts": facts, "overrides": run["overrides"], "totals": {}}
    (folder / "result.json").write_text(json.dumps(result))
