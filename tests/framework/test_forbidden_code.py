from __future__ import annotations

from pathlib import Path

import pytest
from forbidden_code import LOADER_FILE, violations, violations_below

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("folder", ["framework", "plugins", "backends"])
def test_a2_a7_b3_b6_b8_b11_our_source_neither_unpickles_nor_evaluates_nor_loads_code(folder: str) -> None:
    assert violations_below(ROOT / folder) == []


@pytest.mark.parametrize(
    "planted",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "def f():\n    import cloudpickle.fast",
        "importlib.import_module('dill')",
        "eval('1')",
        "exec(text)",
        "f = eval",
        "import torch\ntorch.load(path)",
        "import torch as t\nt.load(path, weights_only=False)",
        "from torch import load\nload(path)",
        "socket.send_pyobj(x)",
        "socket.recv_pyobj()",
        "import shelve",
        "import marshal",
        "from joblib import load",
        "import multiprocessing",
        "import multiprocessing as mp\nmp.Queue()",
        "from multiprocessing.connection import Listener",
        "from multiprocessing import get_context",
        "import torch\ntorch.multiprocessing.spawn(f)",
        "from torch import multiprocessing",
        "import torch.distributed.rpc",
        "from torch.distributed import rpc",
        "from concurrent.futures import ProcessPoolExecutor\nProcessPoolExecutor()",
        "import concurrent.futures\nconcurrent.futures.ProcessPoolExecutor()",
        "dist.all_gather_object(x, y)",
        "dist.gather_object(x)",
        "dist.scatter_object_list(x, y)",
        "dist.send_object_list(x)",
        "dist.recv_object_list(x)",
        "from torch.distributed import all_gather_object\nall_gather_object(x, y)",
        "pandas.read_pickle(path)",
        "import yaml\nyaml.load(text)",
        "dist.broadcast_object_list(x)",
        "AutoModel.from_pretrained(folder)",
        "AutoModel.from_config(config)",
        "load = AutoModel.from_pretrained",
        "getattr(AutoModel, 'from_pretrained')(folder)",
        "hydra.utils.instantiate(config)",
        "from hydra.utils import instantiate\ninstantiate(config)",
        "from hydra.utils import instantiate as make\nmake(config)",
        "np.load(path, allow_pickle=True)",
        "load(path, trust_remote_code=True)",
        "load(path, trust_remote_code=flag)",
        "subprocess.run(text, shell=True)",
        "import os\nos.system(text)",
        "from os import system\nsystem(text)",
        "tokenizer.encode(text, **request.options)",
        "assert x",
    ],
)
def test_a7_a_planted_violation_is_found(planted: str) -> None:
    assert violations(planted)


@pytest.mark.parametrize(
    "clean",
    [
        "import re\nre.compile('a')",
        "import json\njson.loads(text)",
        "model.eval()",
        "load(path, trust_remote_code=False)",
        "def from_config(cls): ...",
        "make(**options)",
        "catalogue.load(name)",
        "evaluate(x)",
        "import torch\ntorch.distributed.all_reduce(x)",
        "from concurrent.futures import ThreadPoolExecutor\nThreadPoolExecutor()",
        "import yaml\nyaml.safe_load(text)",
        "marshal = 3\nprint(marshal)",
    ],
)
def test_what_only_looks_like_one_is_not(clean: str) -> None:
    assert violations(clean) == []


def test_b3_transformers_loaders_are_called_in_one_file(tmp_path: Path) -> None:
    source = "AutoModel.from_pretrained(folder)"
    assert violations(source, LOADER_FILE) == []
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "other.py").write_text(source)
    assert "other.py:1:" in violations_below(tmp_path)[0]
