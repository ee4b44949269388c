"""Public traces by name: those that ship, and those that are fetched; with their licences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenyard.errors import ConfigError, did_you_mean
from tokenyard.paths import cache_dir

PACKAGED_PREFIX, FETCHED_PREFIX = "packaged:", "fetched:"
_DATA = Path(__file__).resolve().parent.parent / "data" / "traces"
_AZURE_COMMIT = "b469a113cedca53ddc3bdea71a143dc4b7d8700c"
_AZURE = f"https://raw.githubusercontent.com/Azure/AzurePublicDataset/{_AZURE_COMMIT}/data"
_AZURE_2024 = "https://azurepublicdatasettraces.blob.core.windows.net/azurellminfererencetrace"
_MOONCAKE_COMMIT = "3b5a594133958449a1feaf1c9e0fc1b553e34a28"
_MOONCAKE = f"https://raw.githubusercontent.com/kvcache-ai/Mooncake/{_MOONCAKE_COMMIT}/FAST25-release/traces"
_BURSTGPT_COMMIT = "5d93d820d9b6bee4e26914df003e5713538164ae"
_BURSTGPT = f"https://media.githubusercontent.com/media/HPMLL/BurstGPT/{_BURSTGPT_COMMIT}/data"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A public trace, and what its licence asks to be said of it."""

    name: str
    title: str
    licence: str
    citation: str
    format_name: str
    file: str  # in the folder of packaged data, or of fetched traces
    url: str = ""  # where the file is fetched; "" for one that ships alone
    sha256: str | None = None  # of the fetched file; None = nobody has told us
    max_bytes: int = 0  # that are fetched

    @property
    def attribution(self) -> str:
        """One line: what, under which licence, whom to cite."""
        return f"{self.name}: {self.title} ({self.licence}; cite {self.citation})"


_SPLITWISE = "Patel et al., Splitwise, ISCA 2024"
_DYNAMO = "Stojkovic et al., DynamoLLM, HPCA 2025"
_FAST = "Qin et al., Mooncake, FAST 2025"
_SERVEGEN = "Xiang et al., ServeGen, arXiv 2505.09999"
_BURST = "Wang et al., BurstGPT, arXiv 2401.17644"
_CC, _APACHE = "CC-BY-4.0", "Apache-2.0"

_PACKAGED = (
    Source(
        name="azure2023_conv",
        title="Azure LLM inference trace 2023, conversation, whole",
        licence=_CC,
        citation=_SPLITWISE,
        format_name="azure",
        file="azure2023_conv.csv.gz",
    ),
    Source(
        name="azure2023_code",
        title="Azure LLM inference trace 2023, code, whole",
        licence=_CC,
        citation=_SPLITWISE,
        format_name="azure",
        file="azure2023_code.csv.gz",
    ),
    Source(
        name="mooncake_conversation",
        title="Mooncake conversation trace, first 4,000 of 12,031 requests",
        licence=_APACHE,
        citation=_FAST,
        format_name="mooncake",
        file="mooncake_conversation_first4000.jsonl.gz",
    ),
    Source(
        name="mooncake_synthetic",
        title="Mooncake synthetic trace, first 2,000 of 3,993 requests",
        licence=_APACHE,
        citation=_FAST,
        format_name="mooncake",
        file="mooncake_synthetic_first2000.jsonl.gz",
    ),
    Source(
        name="servegen_m_small",
        title="ServeGen m-small, 13 clients, day 3 of 14",
        licence=_APACHE,
        citation=_SERVEGEN,
        format_name="servegen",
        file="servegen_day3",
    ),
)
_FETCHABLE = (
    Source(
        name="azure2023_conv",
        title="Azure LLM inference trace 2023, conversation, one hour",
        licence=_CC,
        citation=_SPLITWISE,
        format_name="azure",
        file="AzureLLMInferenceTrace_conv.csv",
        url=f"{_AZURE}/AzureLLMInferenceTrace_conv.csv",
        sha256="2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8",
        max_bytes=2**20,
    ),
    Source(
        name="azure2023_code",
        title="Azure LLM inference trace 2023, code, one hour",
        licence=_CC,
        citation=_SPLITWISE,
        format_name="azure",
        file="AzureLLMInferenceTrace_code.csv",
        url=f"{_AZURE}/AzureLLMInferenceTrace_code.csv",
        sha256="54e9a6d2a4bd06ba1e060304b900abbc74cbea53de96506e60fe5bb4f2277fb6",
        max_bytes=2**20,
    ),
    Source(
        name="azure2024_conv",
        title="Azure LLM inference trace 2024, conversation, one week",
        licence=_CC,
        citation=_DYNAMO,
        format_name="azure",
        file="AzureLLMInferenceTrace_conv_1week.csv",
        url=f"{_AZURE_2024}/AzureLLMInferenceTrace_conv_1week.csv",
        max_bytes=2**32,
    ),
    Source(
        name="azure2024_code",
        title="Azure LLM inference trace 2024, code, one week",
        licence=_CC,
        citation=_DYNAMO,
        format_name="azure",
        file="AzureLLMInferenceTrace_code_1week.csv",
        url=f"{_AZURE_2024}/AzureLLMInferenceTrace_code_1week.csv",
        max_bytes=2**32,
    ),
    Source(
        name="mooncake_conversation",
        title="Mooncake conversation trace, 12,031 requests",
        licence=_APACHE,
        citation=_FAST,
        format_name="mooncake",
        file="conversation_trace.jsonl",
        url=f"{_MOONCAKE}/conversation_trace.jsonl",
        max_bytes=2**26,
    ),
    Source(
        name="mooncake_toolagent",
        title="Mooncake tool and agent trace, 23,608 requests",
        licence=_APACHE,
        citation=_FAST,
        format_name="mooncake",
        file="toolagent_trace.jsonl",
        url=f"{_MOONCAKE}/toolagent_trace.jsonl",
        max_bytes=2**26,
    ),
    Source(
        name="burstgpt",
        title="BurstGPT, the first two months, with failures",
        licence=_CC,
        citation=_BURST,
        format_name="burstgpt",
        file="BurstGPT_1.csv",
        url=f"{_BURSTGPT}/BurstGPT_1.csv",
        sha256="4bb3783693d0a435686fbfc885615d2349bd067239079fa4b749f2e679e12122",
        max_bytes=2**26,
    ),
    Source(
        name="burstgpt_2",
        title="BurstGPT, the second two months, with failures",
        licence=_CC,
        citation=_BURST,
        format_name="burstgpt",
        file="BurstGPT_2.csv",
        url=f"{_BURSTGPT}/BurstGPT_2.csv",
        sha256="44bf5942b03fca42c01a226a545ad3a750ec62688faecd67b6831c56a8928bf7",
        max_bytes=2**28,
    ),
)
PACKAGED: Mapping[str, Source] = {source.name: source for source in _PACKAGED}
FETCHABLE: Mapping[str, Source] = {source.name: source for source in _FETCHABLE}


def find_source(path: str) -> tuple[Path, Source | None]:
    """The place of a `workload.path`: a path of the user's, or a public trace by name. Raises ConfigError."""
    if path.startswith(PACKAGED_PREFIX):
        source = _named(path.removeprefix(PACKAGED_PREFIX), PACKAGED, path)
        return _DATA / source.file, source
    if path.startswith(FETCHED_PREFIX):
        source = _named(path.removeprefix(FETCHED_PREFIX), FETCHABLE, path)
        place = fetched_dir() / source.file
        if not place.is_file():
            raise ConfigError(f"workload.path={path}: not fetched yet; run `tokenyard fetch-trace {source.name}` first")
        return place, source
    if not path.strip():
        raise ConfigError("workload.path is empty; give a trace's path, packaged:NAME or fetched:NAME")
    return (Path(path).expanduser() if path.startswith("~/") else Path(path)), None


def fetched_dir() -> Path:
    """Where `tokenyard fetch-trace` puts files."""
    return cache_dir() / "traces"


def _named(name: str, sources: Mapping[str, Source], path: str) -> Source:
    if name not in sources:
        raise ConfigError(
            f"workload.path={path}: unknown trace{did_you_mean(name, sources)}; there is: {', '.join(sources)}"
        )
    return sources[name]
