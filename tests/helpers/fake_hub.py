"""The Hugging Face Hub without a network: a model put into a local cache, and a server that answers as the Hub does."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import pytest
from tokenyard.errors import ModelLoadError
from tokenyard.model.files import resolve_model

SECRET = "hf_canaryCANARYcanary"
"""A token that must be seen nowhere but in the requests to the server."""


def place_in_cache(folder: Path, repo_id: str, cache_dir: Path, revision: str = "main") -> str:
    """Lay a model's folder out in a cache of huggingface_hub's; returns the commit."""
    files = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
    commit = commit_of(files)
    storage = cache_dir / f"models--{repo_id.replace('/', '--')}"
    snapshot = storage / "snapshots" / commit
    for part in (storage / "blobs", snapshot, (storage / "refs" / revision).parent):
        part.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        blob = storage / "blobs" / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        link = snapshot / name
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(blob, snapshot))
    (storage / "refs" / revision).write_text(commit)
    return commit


def commit_of(files: dict[str, bytes]) -> str:
    """40 hexadecimal digits that stand for these files."""
    digest = hashlib.sha1()
    for name in sorted(files):
        digest.update(name.encode() + b"\0" + hashlib.sha1(files[name]).digest())
    return digest.hexdigest()


class Seen(NamedTuple):
    """A request as it came in."""

    method: str
    path: str
    token: str | None
    first_byte: int = 0


@dataclass
class FakeHub:
    """What the server knows, and how it is to misbehave. Change it at any time."""

    url: str = ""
    commits: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)  # repository -> commit -> files
    refs: dict[str, dict[str, str]] = field(default_factory=dict)  # repository -> branch -> commit
    token: str | None = None  # the only one that may read anything; None = everybody may
    gated: bool = False  # files are for the token's owner, information is for everybody
    status: int | None = None  # answer everything with it
    break_after: int | None = None  # bytes of a weight file's body, then the connection ends
    before_file: Callable[[str], None] = lambda name: None
    seen: list[Seen] = field(default_factory=list)

    def add(self, repo_id: str, folder: Path, branch: str = "main") -> str:
        """A new commit with a folder's files, to which the branch moves; returns it."""
        files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        commit = commit_of(files)
        self.commits.setdefault(repo_id, {})[commit] = files
        self.refs.setdefault(repo_id, {})[branch] = commit
        return commit

    def fetched(self) -> list[str]:
        """Names of the files whose content was asked for, in order."""
        return [seen.path.rsplit("/", 1)[1] for seen in self.seen if seen.method == "GET" and "/resolve/" in seen.path]


class _RefusalError(Exception):
    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, *arguments: object) -> None:
        """Nobody reads it."""

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        authorization = self.headers.get("Authorization")
        token = authorization.removeprefix("Bearer ") if authorization else None
        self.hub.seen.append(Seen(self.command, path, token, self._first_byte()))
        try:
            if self.hub.status is not None:
                raise _RefusalError(self.hub.status)
            if path.startswith("/api/models/"):
                self._send(json.dumps(self._api(path.removeprefix("/api/models/"), token)).encode())
            else:
                self._file(path.lstrip("/"), token)
        except _RefusalError as failure:
            headers = {"X-Error-Code": failure.code, "X-Error-Message": failure.message}
            self._send(b"{}", status=failure.status, headers={key: text for key, text in headers.items() if text})

    def _api(self, path: str, token: str | None) -> object:
        repo_id, rest = "/".join(path.split("/")[:2]), path.split("/")[2:]
        self._check_access(repo_id, token, is_file=False)
        commit, files = self._commit(repo_id, "/".join(rest[1:]) or "main")
        if rest[:1] == ["tree"]:
            return [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in files.items()
            ]
        return {"id": repo_id, "modelId": repo_id, "sha": commit, "siblings": [{"rfilename": name} for name in files]}

    def _file(self, path: str, token: str | None) -> None:
        if path.count("/") < 4:
            raise _RefusalError(404)
        owner, repository, _, revision, name = path.split("/", 4)
        repo_id = f"{owner}/{repository}"
        self._check_access(repo_id, token, is_file=True)
        commit, files = self._commit(repo_id, revision)
        if name not in files:
            raise _RefusalError(404, "EntryNotFound")
        self.hub.before_file(name)
        content = files[name]
        etag = hashlib.sha1(content).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        start = self._first_byte()
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        is_weights = name.endswith(".safetensors") and self.command == "GET"
        self._send(content[start:], 206 if start else 200, headers, self.hub.break_after if is_weights else None)

    def _first_byte(self) -> int:
        return int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])

    def _check_access(self, repo_id: str, token: str | None, *, is_file: bool) -> None:
        if repo_id not in self.hub.commits:
            raise _RefusalError(404 if token else 401, "RepoNotFound", "Repository not found")
        if self.hub.token is not None and token != self.hub.token and (is_file or not self.hub.gated):
            raise _RefusalError(403, "GatedRepo") if self.hub.gated else _RefusalError(401, "RepoNotFound")

    def _commit(self, repo_id: str, revision: str) -> tuple[str, dict[str, bytes]]:
        commit = self.hub.refs[repo_id].get(revision, revision)
        if commit not in self.hub.commits[repo_id]:
            raise _RefusalError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit, self.hub.commits[repo_id][commit]

    def _send(
        self, body: bytes, status: int = 200, headers: dict[str, str] | None = None, cut: int | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            self.close_connection = True


@contextmanager
def run_fake_hub() -> Iterator[FakeHub]:
    """A server on this machine, with `url` set."""
    hub = FakeHub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def environment(cache_dir: Path, url: str | None) -> dict[str, str]:
    """The environment of a process that sees this cache and this server; without one it is offline."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))}
    own = {"HF_HUB_CACHE": str(cache_dir), "HF_HOME": str(cache_dir.parent / "home"), "NO_PROXY": "127.0.0.1"}
    return {**kept, **own, **({"HF_HUB_OFFLINE": "1"} if url is None else {"HF_ENDPOINT": url})}


def use_in_process(monkeypatch: pytest.MonkeyPatch, cache_dir: Path, url: str | None) -> None:
    """The same for huggingface_hub in this process, which read its variables when it was imported."""
    from huggingface_hub import constants

    endpoint = url or "http://127.0.0.1:9"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache_dir))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache_dir / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", url is None)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def refusal(name: str, **options: object) -> str:
    """The error of `resolve_model(name, ...)`: one line, without SECRET."""
    with pytest.raises(ModelLoadError) as caught:
        resolve_model(name, **options)  # type: ignore[arg-type]
    message = str(caught.value)
    if "\n" in message or SECRET in message:
        pytest.fail(f"the message of {name!r} has more than one line, or the secret")
    return message
