"""`python guarded_load.py FOLDER...`: load models, and note whatever the loading does that no loading may do.

Prints one JSON object, folder -> {"outcome": ..., "events": [...]}: the outcome is `loaded` or the error's type and
message, an event is an audit event of code from the model's folder, of a pickle, of a network or of another process.
Nothing here is an assert: it runs under python -O too.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

_CODE_SUFFIXES = (".py", ".pyc", ".so", ".pkl", ".bin", ".pt", ".pth")
_ALWAYS = ("socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.system", "os.exec", "pickle.find_class")


class Guard:
    """An audit hook, which a process can never take out again; it does nothing while `root` is None."""

    def __init__(self) -> None:
        self.root: str | None = None
        self.events: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.root is None or not self._is_forbidden(event, arguments):
            return
        self.events.append(f"{event} {arguments!r:.200}")
        raise PermissionError(f"forbidden while a model is loaded: {event}")

    def _is_forbidden(self, event: str, arguments: tuple[object, ...]) -> bool:
        if event in _ALWAYS or event.startswith(("os.posix_spawn", "os.fork")):
            return True
        if event == "open":
            return self._is_inside(arguments[0]) and str(arguments[0]).endswith(_CODE_SUFFIXES)
        if event == "import":
            return any(self._is_inside(argument) for argument in arguments[1:2])
        if event in ("exec", "compile"):
            code = arguments[0] if event == "exec" else arguments[1]
            return self._is_inside(getattr(code, "co_filename", code))
        return False

    def _is_inside(self, path: object) -> bool:
        return isinstance(path, str) and self.root is not None and path.startswith(self.root)


def load(folder: str) -> None:
    """All that an engine loads of a model."""
    import torch
    from tokenyard.model.files import resolve_model
    from tokenyard.model.loader import load_model
    from tokenyard.model.tokenizer import load_tokenizer

    files = resolve_model(folder)
    load_tokenizer(files)
    load_model(files, dtype=torch.float32, device=torch.device("cpu"))


def attempt(guard: Guard, folder: str) -> dict[str, object]:
    """What became of it."""
    from tokenyard.errors import ModelLoadError

    guard.events, guard.root = [], folder
    try:
        load(folder)
        outcome = "loaded"
    except ModelLoadError as error:
        outcome = f"ModelLoadError: {error}"
    except BaseException as error:  # SystemExit of a payload too
        outcome = f"{type(error).__name__}: {error}"
    finally:
        guard.root = None
    return {"outcome": outcome, "events": guard.events}


def main(folders: list[str]) -> None:
    # what they import and start on their own is theirs
    import torch  # noqa: F401
    import transformers.models.auto.modeling_auto  # noqa: F401

    guard = Guard()
    report = {folder: attempt(guard, folder) for folder in folders}
    report["python"] = {"outcome": f"optimize={sys.flags.optimize}", "events": []}
    print(json.dumps(report))


if __name__ == "__main__":
    sys.path.pop(0)  # the helpers' own folder
    main([str(Path(argument).resolve()) for argument in sys.argv[1:]])
