"""Repositories of the Hugging Face Hub: their files in huggingface_hub's cache, fetched where they are not there yet.

Everything about the network is here. huggingface_hub knows the cache's layout, HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE,
HF_ENDPOINT and HF_TOKEN; its errors leave this module as one line each.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from tokenyard.errors import ModelLoadError

if TYPE_CHECKING:
    from huggingface_hub.utils.tqdm import tqdm

Token: TypeAlias = str | bool | None
"""A secret; None = HF_TOKEN or the stored one where there is one, True = it must be there, False = none is sent."""

Progress: TypeAlias = Callable[[str], None]
"""Told a line of text for each stage."""

_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9][A-Za-z0-9_.-]{0,95}")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}")
_GGUF_NAME = re.compile(r"[A-Za-z0-9._-]{1,123}\.gguf", re.IGNORECASE)
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]{0,127}")
_TOKEN = re.compile(r"[!-~]{1,1024}")
_LONGEST_REASON = 300  # characters
_OUT_OF_SPACE = "No space left on device"


class HubId(NamedTuple):
    """`OWNER/NAME`, or `OWNER/NAME:FILE.gguf` for one file of a repository of GGUF files."""

    repository: str
    file: str | None = None


class Snapshot(NamedTuple):
    """One commit of a repository, as far as its files were fetched."""

    folder: Path
    commit: str


def parse_hub_id(name: str) -> HubId | None:
    """The Hub id in a model's name; None when it is none. Raises ModelLoadError when what follows the colon is odd."""
    repository, colon, file = name.partition(":")
    if not _REPOSITORY.fullmatch(repository) or "--" in repository or ".." in repository:
        return None
    if not colon:
        return None if repository.lower().endswith(".gguf") else HubId(repository)
    if not _GGUF_NAME.fullmatch(file):
        raise ModelLoadError(
            f"model {name!r}: after the colon stands the name of a .gguf file, such as model-Q8_0.gguf"
        )
    return HubId(repository, file)


def is_plain_name(name: str) -> bool:
    """Whether it may be a repository without an owner, as the oldest ones are called."""
    return bool(_PLAIN_NAME.fullmatch(name)) and "--" not in name and ".." not in name


def check_revision(revision: str) -> None:
    """Raise ModelLoadError for what is no branch, tag or commit; it becomes part of a path in the cache."""
    if not _REVISION.fullmatch(revision) or ".." in revision or "//" in revision or revision.endswith(("/", ".lock")):
        raise ModelLoadError(
            f"revision {revision[:200]!r} is not the name of a branch or tag, nor a commit; leave it out for main"
        )


def cached(repository: str, names: Sequence[str], revision: str | None) -> Snapshot | None:
    """What the cache has of a revision; None when it has nothing, or is known to lack one of `names`. No network."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return _download(repository, names, revision, token=False, local_files_only=True)
    except (LocalEntryNotFoundError, OSError):
        return None


def fetch(
    repository: str,
    names: Sequence[str],
    *,
    revision: str | None,
    token: Token = None,
    lacks: Sequence[str] = (),
) -> Snapshot:
    """Those of the files `names` that the repository has, at the commit that `revision` is now; None = main.

    Names are taken as they are and lie at the repository's top. What is in the cache is not fetched again, and a
    download that broke off goes on where it stopped. `lacks` is for the message when there is no network.
    """
    given = _checked_token(token)
    _refuse_offline(repository, lacks)
    try:
        return _download(repository, names, revision, token=given, local_files_only=False)
    except Exception as error:  # the errors of a whole HTTP client, its cache and its transports
        raise _one_clear_line(error, repository, revision) from error


def file_names(repository: str, snapshot: Snapshot, token: Token = None) -> list[str]:
    """The files that the repository has at that commit; for messages, so an empty list when it cannot be told."""
    from huggingface_hub import HfApi

    try:
        return sorted(HfApi().list_repo_files(repository, revision=snapshot.commit, token=_checked_token(token)))
    except Exception:  # as in `fetch`; the message does without the names
        return []


def cache_folder() -> str:
    """Where huggingface_hub keeps what it fetched."""
    from huggingface_hub import constants

    return constants.HF_HUB_CACHE


def _download(
    repository: str, names: Sequence[str], revision: str | None, *, token: Token, local_files_only: bool
) -> Snapshot:
    # 0.1 s to import, which local models do not need
    from huggingface_hub import snapshot_download

    folder = snapshot_download(
        repository,
        revision=revision,
        allow_patterns=list(names),  # without a wildcard in any: exactly these, at the top
        token=token,
        local_files_only=local_files_only,
        library_name="tokenyard",
        tqdm_class=_bar_class(),
    )
    return Snapshot(Path(folder), Path(folder).name)


def _bar_class() -> type[tqdm]:
    """huggingface_hub's own bar, which shows nothing where nobody watches."""
    from huggingface_hub.utils.tqdm import tqdm

    class TerminalBar(tqdm):
        def __init__(self, *args: object, **kwargs: object) -> None:
            disable = kwargs.pop("disable", None) or None  # None: unless there is a terminal
            super().__init__(*args, disable=disable, **kwargs)  # type: ignore[no-untyped-call]

    return TerminalBar


def _checked_token(token: Token) -> Token:
    """A token with characters that no header may have would be quoted in the HTTP client's error."""
    from huggingface_hub import get_token

    text = token if isinstance(token, str) else None if token is False else get_token()
    if token is True and not text:
        raise ModelLoadError("hf_token=True: no token is stored here; log in with `hf auth login`, or set HF_TOKEN")
    if text is not None and not _TOKEN.fullmatch(text):
        raise ModelLoadError(
            "the Hub token (not shown) has characters that no token has, or is empty; check hf_token and HF_TOKEN"
        )
    return token


def _refuse_offline(repository: str, lacks: Sequence[str]) -> None:
    from huggingface_hub.constants import is_offline_mode

    if is_offline_mode():
        missing = f" (missing: {', '.join(lacks)})" if lacks else ""
        raise ModelLoadError(
            f"model '{repository}' is not complete in {cache_folder()}{missing}, and HF_HUB_OFFLINE is set: unset it, "
            f"or fetch the model where there is a network (hf download {repository}) and copy that folder"
        )


def _one_clear_line(error: Exception, repository: str, revision: str | None) -> ModelLoadError:
    from huggingface_hub import constants, errors

    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # why the network was of no help
    where = f"model '{repository}'"
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelLoadError(f"{where}: the repository has no revision '{revision}'; give a branch, a tag or a commit")
    if isinstance(error, errors.GatedRepoError):
        return ModelLoadError(
            f"{where}: access is restricted; accept its conditions at {constants.ENDPOINT}/{repository} and give a "
            "token of that account (HF_TOKEN or LLM(hf_token=...))"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelLoadError(
            f"{where}: no folder of that name here, and no such repository on the Hub; check the name, or give a token "
            "that may read it if it is private (HF_TOKEN or LLM(hf_token=...))"
        )
    if isinstance(error, errors.HfHubHTTPError):
        return ModelLoadError(f"{where}: {_http_reason(error.response.status_code)}")
    return ModelLoadError(f"{where}: {_local_reason(error)}")


def _http_reason(status: int) -> str:
    from huggingface_hub import constants

    if status in (401, 403):
        return (
            f"the Hub refuses the token ({status}); give one that may read this model (HF_TOKEN or LLM(hf_token=...))"
        )
    if status == 429:
        return "the Hub takes no more requests for now (429); wait some minutes, or give a token (HF_TOKEN)"
    return f"{constants.ENDPOINT} answers with HTTP status {status}; try again later"


def _local_reason(error: Exception) -> str:
    """A download that broke off: the disk, the network, or what nobody thought of."""
    from huggingface_hub import constants, errors

    text = " ".join(str(error).split()) or type(error).__name__
    if (isinstance(error, OSError) and error.errno == errno.ENOSPC) or _OUT_OF_SPACE in text:
        return f"no space left in {cache_folder()}; free some, or name another folder with HF_HUB_CACHE"
    if isinstance(error, PermissionError):
        return f"{cache_folder()} cannot be written to; name another folder with HF_HUB_CACHE"
    if isinstance(error, errors.HFValidationError):
        return f"not the name of a repository ({text[:_LONGEST_REASON]})"
    return (
        f"not in the cache, and fetching it from {constants.ENDPOINT} failed ({type(error).__name__}: "
        f"{text[:_LONGEST_REASON]}); check the network and start again: what was fetched is kept"
    )
