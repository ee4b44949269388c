"""MultiprocExecutor: processes that start together, work in order, tell what goes wrong, and leave nothing behind."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from rank_runs import are_gone, config_of, impossible_step, run_step, run_steps, running, step, wait_until
from tokenyard import LLM, SamplingParams
from tokenyard.errors import CapacityError, ConfigError, EngineDeadError, ModelLoadError, UnsupportedError
from tokenyard.executor.multiproc import MultiprocExecutor
from tokenyard.interfaces import ExecutorContext, GrammarOutput, KVCachePlan
from tokenyard.testing import ExecutorContract

GREEDY = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


class OnTinyModel(ExecutorContract):
    """The suite, on a tiny Llama."""

    num_ranks = 1

    @pytest.fixture(autouse=True)
    def _on_a_tiny_model(self, tiny_llama_dir: Path) -> None:
        self.overrides = [
            "executor=multiproc",
            f"executor.tensor_parallel_size={self.num_ranks}",
            f"model.name={tiny_llama_dir}",
            "model.dtype=float32",
            "attention=torch_native",
            "kv_cache.memory=16MiB",
        ]


@pytest.mark.slow
class TestContractWithOneRank(OnTinyModel):
    """ExecutorContract."""


@pytest.mark.slow
class TestContractWithTwoRanks(OnTinyModel):
    """ExecutorContract."""

    num_ranks = 2


@pytest.fixture(scope="module", autouse=True)
def sockets() -> Iterator[Path]:
    """Where folders of sockets go, with a path that is short enough for them."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        tempfile.tempdir = folder
        yield Path(folder)
        tempfile.tempdir = before


@pytest.fixture(autouse=True)
def _leaves_nothing(sockets: Path) -> Iterator[None]:
    """2.3 #1, #19: no process and no folder of sockets. Nobody here makes shared memory with a name."""
    yield
    assert wait_until(lambda: not our_children())
    assert list(sockets.iterdir()) == []


def our_children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if "multiproc_main" in _command(child)]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@pytest.fixture(scope="class", params=[1, 2], ids=["one rank", "two ranks"])
def executor(request: pytest.FixtureRequest, tiny_llama_dir: Path) -> Iterator[MultiprocExecutor]:
    """Shared by tests that harm nobody."""
    with running(tiny_llama_dir, request.param) as made:
        yield made


# Nothing ends here


@pytest.mark.usefixtures("executor")
class TestUnharmed:
    """With an executor that all of these share."""

    @pytest.fixture(autouse=True)
    def _leaves_nothing(self) -> None:
        """The processes stay for the others."""

    def test_published_functions_run_on_every_rank_and_nothing_else_does(self, executor: MultiprocExecutor) -> None:
        assert executor.collective_rpc("device_name") == ["cpu"] * len(executor.pids)
        for name in ("load", "__init__", "_ready", "execute"):
            with pytest.raises(ConfigError, match=f"no function '{name}'; it has: device_name, memory_allocated"):
                executor.collective_rpc(name)
        executor.check_health()

    def test_a_call_that_fails_harms_nobody(self, executor: MultiprocExecutor) -> None:
        with pytest.raises(EngineDeadError, match=r"TypeError: .*device_name"):
            executor.collective_rpc("device_name", ("too", "many"))
        assert executor.collective_rpc("memory_allocated") == [0] * len(executor.pids)

    def test_each_rank_is_a_process_of_its_own_and_no_folder_is_left(
        self, executor: MultiprocExecutor, sockets: Path
    ) -> None:
        assert len({os.getpid(), *executor.pids}) == 1 + len(executor.pids)
        names = [psutil.Process(pid).environ().get("HF_HUB_OFFLINE") for pid in executor.pids]
        assert names == ["1"] * len(executor.pids)
        assert list(sockets.iterdir()) == []

    def test_a_step_is_executed_once_and_sampled_once(self, executor: MultiprocExecutor) -> None:
        with pytest.raises(RuntimeError, match="without a step"):
            executor.sample_tokens()
        executed = executor.execute_model(step(0))
        with pytest.raises(RuntimeError, match="before sample_tokens"):
            executor.execute_model(step(1))
        with pytest.raises(UnsupportedError, match="structured outputs"):
            executor.sample_tokens(GrammarOutput(slots=(0,), bitmask=b""))
        sampled = executor.sample_tokens()
        executed.result()
        assert sampled.result() is sampled.result()
        assert (executed.ready_at, sampled.ready_at) == (None, None)

    def test_steps_in_flight_are_run_in_order_and_calls_fit_between(self, executor: MultiprocExecutor) -> None:
        futures = []
        for number in range(20):
            executor.execute_model(step(number))
            futures.append(executor.sample_tokens())
            if number == 10:
                assert executor.collective_rpc("device_name") == ["cpu"] * len(executor.pids)
        together = [future.result() for future in futures]
        assert [result.step for result in together] == list(range(20))
        one_by_one = [run_step(executor, step(number)) for number in range(20)]
        assert [result.token_ids.tolist() for result in together] == one_by_one

    def test_a1_a_pickle_on_a_workers_socket_is_dropped(self, executor: MultiprocExecutor, tmp_path: Path) -> None:
        """2.3 #21 too: raw bytes are dropped, and the worker lives."""
        written = tmp_path / "written"
        ranks = executor._ranks
        assert ranks is not None
        for frame in (pickle.dumps(Writer(written)), b"", b"\xc1" * 100, bytes(1000)):
            for rank in ranks._ranks:
                rank.channel.send(frame)
        assert executor.collective_rpc("device_name") == ["cpu"] * len(executor.pids)
        assert not written.exists()

    def test_a3_a6_only_ranks_listen_and_only_on_loopback(self, executor: MultiprocExecutor) -> None:
        """FileStore instead of a TCPStore; gloo is bound to the loopback interface; with one rank nobody listens."""
        listeners = [
            connection
            for pid in executor.pids
            for connection in psutil.Process(pid).net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        assert {connection.laddr.ip for connection in listeners} == ({"127.0.0.1"} if len(executor.pids) > 1 else set())

    def test_in_a_forked_process_it_is_refused(
        self, executor: MultiprocExecutor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(EngineDeadError, match="forked process"):
            executor.execute_model(step(0))


class Writer:
    """Unpickled, it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.path,)


# Starts that fail


def test_a_size_that_does_not_divide_is_refused_before_a_process_is_started(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenyard.executor.multiproc.RankProcesses", lambda count: pytest.fail("started"))
    with (
        pytest.raises(ConfigError, match=r"executor.tensor_parallel_size=3: .* allowed: 1, 2$"),
        running(tiny_llama_dir, 3),
    ):
        pass


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_a_rank_finds_wrong_with_the_model_is_raised_as_it_was(
    num_ranks: int, make_llama: Callable[..., Path]
) -> None:
    """2.3 #19: a truncated file is one line, and the children are gone."""
    folder = make_llama()
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    who = "rank [01]: " if num_ranks > 1 else ""
    with (
        pytest.raises(ModelLoadError, match=f"^{who}.*not a complete safetensors file") as caught,
        running(folder, num_ranks),
    ):
        pass
    assert "\n" not in str(caught.value)


def test_a_rank_that_dies_while_it_starts_is_told(tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if "site-packages" not in entry])
    with (
        pytest.raises(EngineDeadError, match="the worker process ended with exit code 1") as caught,
        running(tiny_llama_dir, 1),
    ):
        pass
    assert any("Error" in line for line in caught.value.last_log_lines)


def test_20_a_cache_that_a_rank_cannot_map_is_told_with_what_would_fit(tiny_llama_dir: Path) -> None:
    """2.3 #20: one line, with a number to try."""
    rank = 1
    with running(tiny_llama_dir, 2, allocates=False) as executor:
        pid = executor.pids[rank]
        size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize() + (512 << 20)
        resource.prlimit(pid, resource.RLIMIT_AS, (size, size))
        with pytest.raises(
            CapacityError, match=rf"^rank {rank}: a K/V cache of \d+ blocks .* try kv_cache.num_blocks=(\d+)"
        ) as caught:
            executor.allocate_kv_cache(KVCachePlan(num_blocks=10**7, block_size=4))
    assert "\n" not in str(caught.value)
    fitting = int(str(caught.value).partition("num_blocks=")[2].split(",")[0])
    assert 10**4 < fitting < 10**7


# Deaths


@pytest.mark.parametrize("rank", [0, 1])
def test_1_a_killed_worker_ends_requests_and_is_named(tiny_llama_dir: Path, rank: int) -> None:
    """2.3 #1: SIGKILL while decoding; pids, sockets and shared memory are gone afterwards."""
    with running(tiny_llama_dir, 2) as executor:
        pids = executor.pids
        run_step(executor, step(0))
        os.kill(pids[rank], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=f"process of rank {rank} was killed by SIGKILL") as caught:
            run_steps(executor, 100)
        assert caught.value.signal == "SIGKILL"
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            executor.check_health()
        executor.execute_model(step(100))
        with pytest.raises(EngineDeadError, match="SIGKILL"):  # and so does every later step
            executor.sample_tokens().result()
    assert are_gone(pids)


def test_the_death_of_an_idle_worker_is_noticed_by_check_health(tiny_llama_dir: Path) -> None:
    with running(tiny_llama_dir, 1) as executor:
        executor.check_health()
        os.kill(executor.pids[0], signal.SIGTERM)  # is left to the parent
        os.kill(executor.pids[0], signal.SIGINT)
        assert executor.collective_rpc("device_name") == ["cpu"]
        os.kill(executor.pids[0], signal.SIGKILL)

        def is_noticed() -> bool:
            try:
                executor.check_health()
            except EngineDeadError as error:
                return "the worker process was killed by SIGKILL" in str(error)
            return False

        assert wait_until(is_noticed)


@pytest.mark.slow
def test_9_a_rank_that_is_stuck_is_named_after_the_configured_time(tiny_llama_dir: Path) -> None:
    """2.3 #9: a rank does not come to an operation of all; not torch's 30 minutes, and it is killed at the end."""
    with running(tiny_llama_dir, 2, collective_timeout=2.0) as executor:
        pids = executor.pids
        run_step(executor, step(0))
        os.kill(pids[1], signal.SIGSTOP)
        with pytest.raises(
            EngineDeadError, match=r"^rank 0: waited 2 s \(executor.collective_timeout\) for rank 1, which"
        ):
            run_step(executor, step(1))
    assert are_gone(pids)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_4_what_a_step_raises_comes_out_of_its_result_and_of_every_later_one(
    tiny_llama_dir: Path, num_ranks: int
) -> None:
    """2.3 #4, for a worker."""
    who = "rank [01]: " if num_ranks > 1 else ""
    with running(tiny_llama_dir, num_ranks) as executor:
        assert len(run_step(executor, step(0))) == 1
        futures = []
        for number in (1, 2):
            executor.execute_model(impossible_step(number))
            futures.append(executor.sample_tokens())
        for future in futures:
            with pytest.raises(EngineDeadError, match=f"^{who}RuntimeError: slot 3 has no block"):
                future.result()
        with pytest.raises(EngineDeadError, match="slot 3 has no block"):
            executor.check_health()


def test_before_initialize_and_after_shutdown_nothing_runs(tiny_llama_dir: Path) -> None:
    with running(tiny_llama_dir, 1) as executor:
        pids = executor.pids
        executor.execute_model(step(0))
        future = executor.sample_tokens()
        executor.shutdown()
        executor.shutdown()
        assert are_gone(pids)
        with pytest.raises(EngineDeadError, match="shut down before this step was done"):
            future.result()
    for other in (executor, MultiprocExecutor(ExecutorContext())):
        with pytest.raises(EngineDeadError, match="not running"):
            other.check_health()
        with pytest.raises(RuntimeError, match="not running"):
            other.execute_model(step(0))


def test_in_an_engine_a_killed_rank_ends_the_generation_with_its_name(tiny_llama_dir: Path) -> None:
    """2.3 #1, and `LLM.generate` never hangs."""
    overrides = ["executor=multiproc", "executor.tensor_parallel_size=2", "kv_cache.memory=16MiB"]
    with LLM(tiny_llama_dir, attention="torch_native", overrides=overrides) as llm:
        llm.generate(["hello"], GREEDY, use_tqdm=False)
        _, victim = sorted(child.pid for child in our_children())
        os.kill(victim, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(EngineDeadError, match=r"rank [01] was killed by SIGKILL"):
                llm.generate(["hello"] * 4, GREEDY, use_tqdm=False)


def test_the_config_is_checked_in_every_process_by_the_same_rules(tiny_llama_dir: Path) -> None:
    config = config_of(tiny_llama_dir, 1)
    executor = MultiprocExecutor(ExecutorContext())
    broken = replace(config, model=replace(config.model, seed=-5))
    with pytest.raises(ConfigError, match=r"model.seed"):
        executor.initialize(broken)
    executor.shutdown()


@pytest.mark.parametrize("victim", ["rank", pytest.param("engine", marks=pytest.mark.slow)])
def test_3_with_an_engine_in_a_process_of_its_own_nobody_outlives_the_others(tiny_llama_dir: Path, victim: str) -> None:
    """2.3 #1 and #3: an idle engine notices the end of a rank by itself, and ranks end with their engine."""
    overrides = ["engine.process=own", "executor=multiproc", "executor.tensor_parallel_size=2", "kv_cache.memory=16MiB"]
    with LLM(tiny_llama_dir, attention="torch_native", overrides=overrides) as llm:
        llm.generate(["hello"], GREEDY, use_tqdm=False)
        ranks = our_children()
        (engine,) = {rank.ppid() for rank in ranks}
        os.kill(ranks[1].pid if victim == "rank" else engine, signal.SIGKILL)
        assert wait_until(lambda: not any(is_running(process) for process in ranks))
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            llm.generate(["hello"], GREEDY, use_tqdm=False)


def is_running(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
