"""What a front end sends to the engine, and how a request ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from tokenyard.config import NO_OPTIONS
from tokenyard.errors import ValidationError

if TYPE_CHECKING:
    from tokenyard.arrays import IntArray
    from tokenyard.interfaces.kv_cache import ExtraKey
    from tokenyard.sampling_params import SamplingParams


class FinishReason(str, Enum):
    """Why a request ended; the values are those of the OpenAI API plus `abort` and `error`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """Parameters of a request that pools hidden states instead of sampling. No model serves it yet."""

    task: str = "embed"


class ServiceLevel(NamedTuple):
    """What a client wants at most, in seconds; None = does not say."""

    ttft: float | None = None  # arrival to first token
    tpot: float | None = None  # per output token after the first
    e2e: float | None = None  # arrival to last token


Retention: TypeAlias = Literal["low", "normal", "high"]
"""How long the content of a request is worth keeping in the prefix cache (since API 1.6)."""

RETENTION_LEVELS: tuple[Retention, ...] = ("low", "normal", "high")
"""What is evicted first comes first."""

HINT_KEYS = ("deadline", "client", "session", "slo", "retention")
"""What users may hint at with every policy; all other keys are the active policy's own (since API 1.3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingHints:
    """What a client tells the scheduler of a request (since API 1.3); `tokenyard.scheduling_hints` reads and checks it.

    `metadata` is an instance of the active policy's `PolicyDescriptor.metadata_type`.
    """

    deadline: float | None = None  # seconds after arrival
    client_id: str | None = None
    session_id: str | None = None
    service_level: ServiceLevel | None = None
    retention: Retention = "normal"  # since API 1.6
    metadata: object = NO_OPTIONS

    def metadata_values(self) -> dict[str, object]:
        """The metadata by name, as a policy sees it."""
        named = fields(self.metadata)  # type: ignore[arg-type]  # a dataclass, by contract
        return {one.name: getattr(self.metadata, one.name) for one in named}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCoreRequest:
    """One request as it crosses from a front end into EngineCore. Times are engine-clock seconds."""

    request_id: str
    prompt_token_ids: IntArray  # [num_prompt_tokens], never empty
    params: SamplingParams | PoolingParams
    arrival_time: float
    stop_token_ids: tuple[int, ...] = ()  # EOS ids of the model (empty under ignore_eos) plus the user's own
    eos_token_ids: tuple[int, ...] = ()  # the subset of stop_token_ids that is EOS: these give stop_reason None
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()  # params.bad_words, tokenized (since API 1.3)
    priority: int = 0  # lower = more urgent, everywhere
    client_id: str | None = None
    session_id: str | None = None
    parent_id: str | None = None  # n > 1: the request that this one is a child of
    deadline: float | None = None  # engine-clock seconds
    service_level: ServiceLevel | None = None
    skip_prefix_cache: bool = False  # compute every prompt token, as prompt logprobs need; the cache is still filled
    cache_salt: str | None = None  # tenants with different salts never share prefix-cache blocks
    lora_name: str | None = None
    extra_keys: tuple[ExtraKey, ...] = ()  # content that token ids do not tell, in order of position
    metadata: Mapping[str, object] = field(default_factory=dict)  # of the active policy's metadata_type, by field name
    retention: Retention = "normal"  # how long its content is worth keeping in the prefix cache (since API 1.6)
    # The length of its output, where a workload knows it. Only an oracle is told (interfaces/predictor.py, API 1.6).
    true_output_tokens: int | None = None


_MAX_TOKENS = 2**63 - 1  # what crosses processes as a 64-bit number


def check_true_output_tokens(told: object) -> int | None:
    """`EngineCoreRequest.true_output_tokens`, when it can be one; raises ValidationError."""
    if told is None or (isinstance(told, int) and not isinstance(told, bool) and 1 <= told <= _MAX_TOKENS):
        return told
    raise ValidationError(
        f"true_output_tokens={told!r:.100} is not valid: it must be a whole number of tokens, at least 1, or None",
        parameter="true_output_tokens",
        value=told,
    )
