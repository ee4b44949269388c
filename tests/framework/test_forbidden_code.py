from __future__ import annotations

from pathlib import Path

import pytest
from forbidden_code import LOADER_FILE, violations, violations_below

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("folder", ["framework", "plugins", "backends", "benchmarks"])
def test_a2_a7_b3_b6_b8_b11_our_source_neither_unpickles_nor_evaluates_nor_loads_code(folder: str) -> None:
    """A6: and no code of ours opens a listener that other machines reach, but the API port."""
    # A benchmark measures transformers itself, and makes the models that it measures with.
    assert violations_below(ROOT / folder, may_load=folder == "benchmarks") == []


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
        "multiprocessing.Queue()",
        "multiprocessing.Pipe()",
        "ctx.Manager()",
        "connection.Listener(address)",
        "connection.Client(address)",
        "from multiprocessing.connection import Client\nClient(address)",
        "import multiprocessing.managers",
        "from multiprocessing.pool import Pool",
        "import _pickle",
        "import cPickle",
        "import torch\nimport torch.distributed\ntorch.load(path)",
        "from torch.distributed.rpc import rpc_sync",
        "import torch.distributed as dist\ndist.rpc.init_rpc('a')",
        "from torch import *",
        "import torch.distributed as dist\ndist.TCPStore(host, 1)",
        "TCPStore(host, 1)",
        "from torch.distributed import TCPStore as Store\nStore(host, 1)",
        "dist.init_process_group(init_method='tcp://10.0.0.1:5')",
        "socket.bind('tcp://*')",
        "socket.bind('tcp://*:5555')",
        "socket.bind('tcp://0.0.0.0:5555')",
        "socket.bind(f'tcp://{host}:{port}')",
        "socket.bind_to_random_port(address)",
        "socket.bind(('0.0.0.0', 80))",
        "socket.bind(('', 80))",
        "socket.bind(('::', 80))",
        "uvicorn.run(app, host='0.0.0.0')",
        "import pandas as pd\npd.read_pickle(path)",
        "frame.to_pickle(path)",
        "import numpy as np\nnp.load(path, None, True)",
        "import numpy\nnumpy.load(path, None, flag)",
        "np.load(path, allow_pickle=flag)",
        "import builtins\nbuiltins.exec(text)",
        "import builtins\nbuiltins.eval(text)",
        "from builtins import exec as run\nrun(text)",
        "import builtins\ngetattr(builtins, 'eval')(text)",
        "getattr(torch, 'load')(path)",
        "import torch as t\ngetattr(t, 'load')(path)",
        "getattr(module, 'send_pyobj')",
        "import importlib\nimportlib.import_module('pickle')",
        "from importlib import import_module as module_of\nmodule_of('pickle')",
        "importlib.import_module(name='multiprocessing.connection')",
        "importlib.__import__(name)",
        "__import__('json')",
    ],
)
def test_a2_a6_a7_a_planted_violation_is_found(planted: str) -> None:
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
        "import numpy as np\nnp.load(path)",
        "np.load(path, allow_pickle=False)",
        "getattr(torch, 'float32')",
        "importlib.import_module('json')",
        "socket.bind(address)",
        "socket.bind(('127.0.0.1', 0))",
        "socket.bind('ipc:///run/a.sock')",
        "allowed = 'an address; 0.0.0.0 for all of them'",
    ],
)
def test_what_only_looks_like_one_is_not(clean: str) -> None:
    assert violations(clean) == []


def test_b3_transformers_loaders_are_called_in_one_file(tmp_path: Path) -> None:
    source = "AutoModel.from_pretrained(folder)"
    assert violations(source, may_load=True) == []
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "other.py").write_text(source)
    (tmp_path / LOADER_FILE).write_text(source)
    (problem,) = violations_below(tmp_path)
    assert "other.py:1:" in problem
