"""Which files make a model, and a Hub repository's in one folder: everything from one commit, the weights last."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from tokenyard.errors import ModelLoadError
from tokenyard.model import hub
from tokenyard.model.json_files import plain_file_name, read_json

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "spm.model",
    "sentencepiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    INDEX_FILE,
    *_VOCABULARIES,
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""All that is fetched besides weights: never code, never pickles."""
_PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
_MOST_SHOWN = 5


def find_snapshot(
    hub_id: hub.HubId,
    *,
    revision: str | None,
    token: hub.Token,
    on_progress: hub.Progress,
    weights: bool,
    check: Callable[[Path], object],
) -> hub.Snapshot:
    """The repository's files in the local cache; fetched when the cache lacks some, else without any network.

    A branch or tag that the cache knows stays at the commit it knows. The small files come first and `check` sees their
    folder, so that a model that cannot be run is refused before its weights are fetched; with `weights=False` they are
    all. The commit is resolved once, and the weights are those of that commit.
    """
    if hub_id.file is not None:
        return _find_file(hub_id.repository, hub_id.file, revision, token, on_progress)
    found = hub.cached(hub_id.repository, SMALL_FILES, revision)
    lacks = ["everything"] if found is None else missing_files(found.folder, weights=weights)
    if found is not None and not lacks:
        return found
    on_progress(f"fetching {hub_id.repository} from the Hub into {hub.cache_folder()}")
    found = hub.fetch(hub_id.repository, SMALL_FILES, revision=revision, token=token, lacks=lacks)
    if not (found.folder / "config.json").is_file():
        raise _no_config(hub_id.repository, hub.file_names(hub_id.repository, found, token))
    check(found.folder)
    if weights:
        _fetch_weights(hub_id.repository, found, token, on_progress)
    return found


def find_cached(name: str, revision: str | None) -> hub.Snapshot | None:
    """A complete model of the cache; never looks on the network."""
    found = hub.cached(name, SMALL_FILES, revision)
    return found if found is not None and not missing_files(found.folder, weights=True) else None


def missing_files(folder: Path, *, weights: bool) -> list[str]:
    """What a snapshot lacks to be a model."""
    lacks = [] if (folder / "config.json").is_file() else ["config.json"]
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        lacks.append(_VOCABULARIES[0])
    if weights:
        lacks += [name for name in weight_files(folder) if not (folder / name).is_file()]
    return lacks


def weight_files(folder: Path) -> list[str]:
    """The names of the safetensors files that a folder's index assigns weights to, or of the only one."""
    index = folder / INDEX_FILE
    if not index.is_file():
        return [SINGLE_FILE]
    weight_map = read_weight_map(index)
    return sorted({plain_file_name(name, named_by=index) for name in weight_map.values()})


def read_weight_map(index: Path) -> dict[str, object]:
    """An index's map of parameter names to file names (yet unchecked). A parameter that it names twice is an error."""
    weight_map = read_json(index, unique_keys=True).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index}: no 'weight_map' of parameter names to files; fetch the model again")
    return weight_map


def no_weights(where: object, names: Iterable[str]) -> ModelLoadError:
    """The error for a model without safetensors; `names` are the files that there are."""
    pickles = sorted(name for name in names if Path(name).suffix in _PICKLES)
    if pickles:
        return ModelLoadError(
            f"{where}: the weights are only there as {pickles[0]}, a pickle, which can run code and is never read; "
            f"convert them to {SINGLE_FILE}"
        )
    return ModelLoadError(f"{where}: there is neither {SINGLE_FILE} nor {INDEX_FILE}; fetch the model again")


def _fetch_weights(repository: str, found: hub.Snapshot, token: hub.Token, on_progress: hub.Progress) -> None:
    names = weight_files(found.folder)
    on_progress(f"fetching the weights: {len(names)} file(s){_size(found.folder)}")
    hub.fetch(repository, names, revision=found.commit, token=token, lacks=names)
    absent = [name for name in names if not (found.folder / name).is_file()]
    if absent == [SINGLE_FILE]:
        raise no_weights(f"model '{repository}'", hub.file_names(repository, found, token))
    if absent:
        raise ModelLoadError(f"model '{repository}': its index names {absent[0]}, which the repository does not have")
    on_progress(f"fetched {repository}, commit {found.commit[:12]}")


def _find_file(
    repository: str, file: str, revision: str | None, token: hub.Token, on_progress: hub.Progress
) -> hub.Snapshot:
    found = hub.cached(repository, [file], revision)
    if found is not None and (found.folder / file).is_file():
        return found
    on_progress(f"fetching {file} of {repository} from the Hub into {hub.cache_folder()}")
    found = hub.fetch(repository, [file], revision=revision, token=token, lacks=[file])
    if not (found.folder / file).is_file():
        raise ModelLoadError(
            f"model '{repository}': it has no file {file!r}{_others(hub.file_names(repository, found, token))}"
        )
    return found


def _no_config(repository: str, names: list[str]) -> ModelLoadError:
    others = _others(names)
    advice = others and f"{others}; give one as {repository}:FILE"
    return ModelLoadError(f"model '{repository}': the repository has no config.json{advice}")


def _others(names: list[str]) -> str:
    files = [name for name in names if name.lower().endswith(".gguf") and "/" not in name]
    return f"; its .gguf files: {', '.join(files[:_MOST_SHOWN])}" if files else ""


def _size(folder: Path) -> str:
    index = folder / INDEX_FILE
    metadata = read_json(index).get("metadata") if index.is_file() else None
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return f", {size / 1e9:.1f} GB" if isinstance(size, int | float) else ""
