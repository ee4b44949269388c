"""profile.json: what the tables of a profile are, and where they come from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from tokenyard.errors import ConfigError
from tokenyard.experiments.profiles import MANIFEST

if TYPE_CHECKING:
    from collections.abc import Sequence

_LONGEST = 1 << 20  # bytes of a manifest

Count = Annotated[int, msgspec.Meta(ge=1, le=100_000)]
Amount = Annotated[float, msgspec.Meta(ge=0)]


class AllReduce(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What it costs to sum the activations of all ranks; a layer does it twice."""

    seconds: Amount  # of one, whatever its size
    bytes_per_second: Annotated[float, msgspec.Meta(gt=0)]  # of one rank's activations


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one model on one device."""

    format: Literal["llmservingsim", "vidur", "frontier", "splitwise"]
    model: str
    device: str
    files: dict[str, str]  # by their part, such as attention: names of files in the folder
    measured: str  # with which kernels, in which engine
    source: str
    licence: str
    error: str = ""  # of the model that is made of it, against real runs
    num_layers: Count | None = None  # where the tables are of one layer
    tensor_parallel: Count = 1
    all_reduce: AllReduce | None = None


def read_manifest(folder: Path) -> Manifest:
    """Raises ConfigError."""
    path = folder / MANIFEST
    try:
        with path.open("rb") as file:
            content = file.read(_LONGEST + 1)
        if len(content) > _LONGEST:
            raise ConfigError(f"{path}: larger than {_LONGEST} bytes; a manifest is a few lines")
        return msgspec.json.decode(content, type=Manifest)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def layers_of(manifest: Manifest, folder: Path) -> int:
    """Raises ConfigError where the manifest does not say."""
    if manifest.num_layers is None:
        raise ConfigError(f"{folder / MANIFEST}: num_layers is missing: the tables are of one layer")
    return manifest.num_layers


def refuse(manifest: Manifest, folder: Path, names: Sequence[str]) -> None:
    """Raises ConfigError for what the format has no use for."""
    for name, is_given in (
        ("num_layers", manifest.num_layers is not None),
        ("all_reduce", manifest.all_reduce is not None),
    ):
        if name in names and is_given:
            raise ConfigError(f"{folder / MANIFEST}: format {manifest.format} has no use for {name}; leave it out")


def table_paths(manifest: Manifest, folder: Path, parts: Sequence[str]) -> list[Path]:
    """The files of a profile, in the order of `parts`. Raises ConfigError for missing, unknown and foreign ones."""
    where = folder / MANIFEST
    if set(manifest.files) != set(parts):
        raise ConfigError(
            f"{where}: files names {', '.join(sorted(manifest.files)) or 'nothing'}; format {manifest.format} "
            f"has {', '.join(parts)}"
        )
    paths = []
    for part in parts:
        name = manifest.files[part]
        if Path(name).name != name or name in ("", ".", ".."):
            raise ConfigError(f"{where}: files.{part} is {name!r}; it must be the name of a file in the same folder")
        paths.append(folder / name)
    return paths
