"""What a process of a run may do, in the place of `tokenyard.experiments.run_job`; a run's overrides say which."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

from tokenyard.experiments.config_file import read_config, read_overrides
from tokenyard.experiments.facts import config_hash
from tokenyard.experiments.run_folder import RESULT, write_whole
from tokenyard.experiments.run_job import ERROR
from tokenyard.ipc.child import begin_child, end_now


def main() -> None:
    """By the seed: 13 is killed, 14 hangs with half a result, 15 fails with a word, all others are done at once."""
    folder = Path(begin_child(end_now).arguments[0])
    config, _ = read_config(folder)
    if config.seed == 13:
        os.kill(os.getpid(), signal.SIGKILL)
    if config.seed == 14:
        (folder / "requests.csv").write_text("id\n")
        threading.Event().wait()
    if config.seed == 15:
        (folder / ERROR).write_text("the server is gone\nand more\n")
        sys.exit(1)
    facts = {"config_hash": config_hash(config)}
    result = {"metrics": {"pid": os.getpid()}, "facts": facts, "overrides": read_overrides(folder), "totals": {}}
    write_whole(folder / RESULT, json.dumps(result))
