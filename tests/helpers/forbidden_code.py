"""What our own source must not do, found in its syntax tree: unpickle, evaluate, load a model author's code."""

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
        # code of a model's author
        *("get_class_from_dynamic_module", "load_custom_generate", "register_for_auto_class"),
        # Hydra's own way to call what a config names
        "instantiate",
    }
)
_LOADERS = frozenset({"from_pretrained", "from_config"})
_QUALIFIED = frozenset(
    {"torch.load", "os.system", "os.popen", "torch.jit.load", "torch.hub.load", "builtins.eval", "yaml.load"}
)
_TRUE_KEYWORDS = frozenset({"trust_remote_code", "allow_pickle", "shell"})
_REQUEST_NAMES = frozenset({"request", "params", "sampling_params"})
LOADER_FILE = "hf_calls.py"  # the one file that may call transformers' loaders


def violations(source: str, file_name: str = "x.py") -> list[str]:
    """Each as `LINE: what`."""
    tree = ast.parse(source)
    names = dict(_imported(tree))
    return [f"{line}: {what}" for line, what in _found(tree, names, file_name)]


def violations_below(folder: Path) -> list[str]:
    """Of all Python files below a folder, as `PATH:LINE: what`."""
    return [
        f"{path}:{problem}"
        for path in sorted(folder.rglob("*.py"))
        for problem in violations(path.read_text(encoding="utf-8"), path.name)
    ]


def _imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Local name -> what it stands for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((name.asname or name.name.split(".")[0], name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((name.asname or name.name, f"{node.module}.{name.name}") for name in node.names)


def _found(tree: ast.AST, names: dict[str, str], file_name: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((node.lineno, f"imports {name}") for name in _modules(node) if _is_forbidden_module(name))
        elif isinstance(node, ast.Assert):
            yield node.lineno, "assert, which is gone under python -O"
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load):
            if (problem := _reference(node, names, file_name)) is not None:
                yield node.lineno, problem
        elif isinstance(node, ast.Call):
            yield from ((node.lineno, problem) for problem in _call(node, file_name))


def _modules(node: ast.Import | ast.ImportFrom) -> list[str]:
    """What may be a module: of `from a import b` both `a` and `a.b`."""
    if isinstance(node, ast.Import):
        return [name.name for name in node.names]
    return [node.module or "", *(f"{node.module}.{name.name}" for name in node.names)]


def _is_forbidden_module(name: str) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:count]) in _MODULES for count in range(1, len(parts) + 1))


def _reference(node: ast.Attribute | ast.Name, names: dict[str, str], file_name: str) -> str | None:
    qualified = _qualified(node, names)
    if isinstance(node, ast.Name):
        is_forbidden = node.id in _BUILTINS or qualified in _QUALIFIED or _last(qualified) in _METHODS
        is_forbidden = is_forbidden or (qualified != node.id and _is_forbidden_module(qualified))
        return f"uses {qualified}" if is_forbidden else None
    if node.attr in _METHODS or qualified in _QUALIFIED or _is_forbidden_module(qualified):
        return f"uses {qualified}"
    if node.attr in _LOADERS and file_name != LOADER_FILE:
        return f"uses {node.attr} outside {LOADER_FILE}"
    return None


def _call(node: ast.Call, file_name: str) -> Iterator[str]:
    for keyword in node.keywords:
        is_true = not (isinstance(keyword.value, ast.Constant) and not keyword.value.value)
        if keyword.arg in _TRUE_KEYWORDS and is_true:
            yield f"passes {keyword.arg}={ast.unparse(keyword.value)}"
        if keyword.arg is None and _is_request_field(keyword.value):
            yield f"spreads a request's field: **{ast.unparse(keyword.value)}"
    for argument in node.args:
        text = argument.value if isinstance(argument, ast.Constant) else None
        function = _last(ast.unparse(node.func))
        by_name = function == "getattr" and text in _LOADERS | _METHODS and file_name != LOADER_FILE
        is_module = function in ("import_module", "getattr") and isinstance(text, str) and _is_forbidden_module(text)
        if by_name or is_module:
            yield f"reaches {text!r} by its name"


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
