"""What our own source must not do, found in its syntax tree.

That is to unpickle, to evaluate, to load a model author's code, and to listen where other machines can connect: only
the API port may, at the address that its config names.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

_MODULES = frozenset(
    {
        *("pickle", "_pickle", "cPickle", "pickletools", "dill", "cloudpickle", "marshal", "shelve", "joblib"),
        *("jsonpickle", "multiprocess", "loky"),
        # its connections, queues, pools and managers pickle, and so do those of torch
        *("multiprocessing", "torch.multiprocessing", "torch.distributed.rpc", "xmlrpc"),
    }
)
_BUILTINS = frozenset({"eval", "exec", "compile", "__import__"})
_METHODS = frozenset(
    {
        # pickles on a socket
        *("send_pyobj", "recv_pyobj", "broadcast_object_list", "all_gather_object", "gather_object"),
        *("scatter_object_list", "send_object_list", "recv_object_list", "ProcessPoolExecutor"),
        *("read_pickle", "to_pickle", "unsafe_load", "full_load"),
        # of multiprocessing, wherever they were imported from
        *("SyncManager", "BaseManager", "Manager"),
        # listen on all interfaces, or leave to their caller where
        *("TCPStore", "bind_to_random_port"),
        # code of a model's author
        *("get_class_from_dynamic_module", "load_custom_generate", "register_for_auto_class"),
        # Hydra's own way to call what a config names
        "instantiate",
    }
)
_LOADERS = frozenset({"from_pretrained", "from_config"})
_QUALIFIED = frozenset(
    {
        *("torch.load", "torch.jit.load", "torch.hub.load", "yaml.load", "os.system", "os.popen"),
        *("importlib.__import__", *(f"builtins.{name}" for name in _BUILTINS)),
        *("connection.Listener", "connection.Client", "connection.Pipe"),
    }
)
_NUMPY_LOAD = frozenset({"numpy.load", "np.load"})  # its third argument is allow_pickle
_TRUE_KEYWORDS = frozenset({"trust_remote_code", "allow_pickle", "shell"})
_REQUEST_NAMES = frozenset({"request", "params", "sampling_params"})
_EVERY_INTERFACE = frozenset({"0.0.0.0", "[::]"})
LOADER_FILE = "hf_calls.py"  # the one file that may call transformers' loaders


def violations(source: str, *, may_load: bool = False) -> list[str]:
    """Each as `LINE: what`. `may_load`: transformers' loaders may be called."""
    tree = ast.parse(source)
    names = dict(_imported(tree))
    forbidden_names = _METHODS if may_load else _METHODS | _LOADERS
    return [f"{line}: {what}" for line, what in _found(tree, names, forbidden_names)]


def violations_below(folder: Path, *, may_load: bool = False) -> list[str]:
    """Of all Python files below a folder, as `PATH:LINE: what`."""
    return [
        f"{path}:{problem}"
        for path in sorted(folder.rglob("*.py"))
        for problem in violations(path.read_text(encoding="utf-8"), may_load=may_load or path.name == LOADER_FILE)
    ]


def _imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Local name -> what it stands for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((name.asname, name.name) for name in node.names if name.asname)  # else it stands for itself
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((name.asname or name.name, f"{node.module}.{name.name}") for name in node.names)


def _found(tree: ast.AST, names: dict[str, str], forbidden_names: frozenset[str]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((node.lineno, f"imports {name}") for name in _modules(node) if _is_forbidden_module(name))
        elif isinstance(node, ast.Assert):
            yield node.lineno, "assert, which is gone under python -O"
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load):
            qualified = _qualified(node, names)
            if _is_forbidden(qualified, forbidden_names) or qualified in _BUILTINS:
                yield node.lineno, f"uses {qualified}"
        elif isinstance(node, ast.Call):
            yield from ((node.lineno, problem) for problem in _call(node, names, forbidden_names))
        elif isinstance(node, ast.Constant) and _is_address(node.value):
            yield node.lineno, f"names a listener that is not loopback or ipc: {node.value!r}"


def _modules(node: ast.Import | ast.ImportFrom) -> list[str]:
    """What may be a module: of `from a import b` both `a` and `a.b`. What `*` brings nobody can tell."""
    if isinstance(node, ast.Import):
        return [name.name for name in node.names]
    return [node.module or "", *(f"{node.module}.{name.name}" for name in node.names)]


def _is_forbidden_module(name: str) -> bool:
    parts = name.split(".")
    return parts[-1] == "*" or any(".".join(parts[:count]) in _MODULES for count in range(1, len(parts) + 1))


def _is_forbidden(qualified: str, forbidden_names: frozenset[str]) -> bool:
    """Whether a dotted name, or its last part wherever it comes from, is one that is not to be used.

    A name without a dot is a variable of ours, unless it was imported; `_imported` has then put its module before it.
    """
    is_module = "." in qualified and _is_forbidden_module(qualified)
    return is_module or qualified in _QUALIFIED or _last(qualified) in forbidden_names


def _call(node: ast.Call, names: dict[str, str], forbidden_names: frozenset[str]) -> Iterator[str]:
    for keyword in node.keywords:
        is_true = not (isinstance(keyword.value, ast.Constant) and not keyword.value.value)
        if keyword.arg in _TRUE_KEYWORDS and is_true:
            yield f"passes {keyword.arg}={ast.unparse(keyword.value)}"
        if keyword.arg is None and _is_request_field(keyword.value):
            yield f"spreads a request's field: **{ast.unparse(keyword.value)}"
    function = _qualified(node.func, names)
    if function in _NUMPY_LOAD and len(node.args) > 2:
        yield f"passes allow_pickle={ast.unparse(node.args[2])}"
    if _last(function) == "bind" and any(map(_is_address_of_every_interface, node.args)):
        yield "listens on all interfaces"
    if _last(function) in ("import_module", "getattr"):
        yield from _reached_by_name(node, names, forbidden_names)


def _reached_by_name(node: ast.Call, names: dict[str, str], forbidden_names: frozenset[str]) -> Iterator[str]:
    """`getattr(torch, "load")` is `torch.load`, and `import_module("pickle")` imports it."""
    whose = f"{_qualified(node.args[0], names)}." if len(node.args) > 1 else ""
    for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
        text = argument.value if isinstance(argument, ast.Constant) else None
        if isinstance(text, str) and (
            _is_forbidden_module(text) or text in _BUILTINS or _is_forbidden(f"{whose}{text}", forbidden_names)
        ):
            yield f"reaches {text!r} by its name"


def _is_address(value: object) -> bool:
    return isinstance(value, str) and ("tcp://" in value or value in _EVERY_INTERFACE)


def _is_address_of_every_interface(argument: ast.expr) -> bool:
    host = argument.elts[0] if isinstance(argument, ast.Tuple) and argument.elts else None
    return isinstance(host, ast.Constant) and host.value in ("", None, "::")  # others are found anywhere


def _is_request_field(value: ast.expr) -> bool:
    return isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name) and value.value.id in _REQUEST_NAMES


def _qualified(node: ast.expr, names: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return f"{_qualified(node.value, names)}.{node.attr}"
    return "?"


def _last(qualified: str) -> str:
    return qualified.rsplit(".", 1)[-1]
