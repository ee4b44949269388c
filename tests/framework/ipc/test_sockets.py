from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from tokenyard.errors import UserError
from tokenyard.ipc import sockets
from tokenyard.ipc.sockets import Channel, SocketFolder


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


def test_the_folder_is_its_owners_alone_and_short_and_goes_with_what_is_in_it() -> None:
    with SocketFolder() as folder:
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        assert len(folder.address("commands").removeprefix("ipc://").encode()) <= 100
        (folder.path / "x").touch()
        other = SocketFolder()
        assert other.path != folder.path
        other.remove()
    assert not folder.path.exists()
    folder.remove()


@pytest.mark.parametrize("name", ["", "a/b", "x" * 17])
def test_a_name_that_would_make_a_long_or_odd_path_is_refused(name: str) -> None:
    with SocketFolder() as folder, pytest.raises(ValueError, match="1 to 16 characters"):
        folder.address(name)


def test_prc_05_a_long_tmpdir_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    long = tmp_path / ("x" * 110)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with SocketFolder() as folder:
        assert long not in folder.path.parents
        Channel(context, folder.address("commands"), binds=True).close()


def test_a_machine_without_a_place_for_sockets_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "_bases", lambda: ["/" + "x" * 120, "/proc/nowhere"])
    with pytest.raises(UserError, match=r"too long for a socket; /proc/nowhere: .*; set TMPDIR to a folder"):
        SocketFolder()


def test_a_forked_process_does_not_remove_its_parents_folder() -> None:
    script = (
        "import os\nfrom tokenyard.ipc.sockets import SocketFolder\nfolder = SocketFolder()\n"
        "if not (pid := os.fork()):\n    folder.remove()\n    os._exit(0)\n"
        "os.waitpid(pid, 0)\nprint(folder.path.exists())\nfolder.remove()\nprint(folder.path.exists())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["True", "False"], done.stderr


def test_frames_arrive_whole_and_in_order_also_when_the_folder_has_gone(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    folder = SocketFolder()
    here, there = (Channel(context, folder.address("x"), binds=binds) for binds in (True, False))
    here.send(b"first")
    assert there.wait(10) == []
    assert there.receive() == b"first"
    folder.remove()
    frames = [os.urandom(size) for size in (0, 1, 300_000)]
    for frame in frames:
        there.send(frame)
    received = []
    while len(received) < 3:
        assert here.wait(10) == []
        while (one := here.receive()) is not None:
            received.append(one)
    assert received == frames
    assert here.receive() is None
    assert here.wait(0) is None
    for channel in (here, there):
        channel.close()
        channel.close()
        channel.send(b"nowhere")


def test_a1_a_third_who_connects_gets_and_gives_nothing(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with SocketFolder() as folder:
        here, there = (Channel(context, folder.address("x"), binds=binds) for binds in (True, False))
        there.send(b"hello")
        assert here.wait(10) == []
        assert here.receive() == b"hello"
        third = Channel(context, folder.address("x"), binds=False)
        third.send(b"intruder")
        here.send(b"secret")
        assert there.wait(10) == []
        assert there.receive() == b"secret"
        assert third.wait(0.2) is None
        assert here.receive() is None
        for channel in (here, there, third):
            channel.close()


def test_a_descriptor_that_is_readable_ends_a_wait(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    reader, writer = os.pipe()
    with SocketFolder() as folder:
        here = Channel(context, folder.address("x"), binds=True)
        os.close(writer)
        assert here.wait(None, [reader]) == [reader]
        here.close()
    os.close(reader)


def test_an_address_that_cannot_be_had_is_an_os_error(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with pytest.raises(OSError, match="no socket at"):
        Channel(context, "ipc:///nowhere/at/all", binds=True)
