"""The keys of `tokenyard bench serve`, under the names of the flags of `vllm bench serve`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tokenyard.bench.keys import GROUP, MAX_PROMPT, MAX_SEED, about, in_range
from tokenyard.launch.convert import wrong

METRICS = ("ttft", "tpot", "itl", "e2el")
SLO_METRICS = ("ttft", "tpot", "e2el")
MAX_PROMPTS = 1_000_000
MAX_TIMEOUT = 7 * 24 * 3600.0
_ROUTES = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeBench:
    """`tokenyard bench serve`. Raises ConfigError on a value out of its range."""

    base_url: str | None = field(default=None, metadata=about("of the server; null = http://HOST:PORT"))
    host: str = field(default="127.0.0.1", metadata=about("where the server is"))
    port: int = field(default=8000, metadata=about("where the server is"))
    model: str | None = field(default=None, metadata=about("its name in requests; null = the first of /v1/models"))
    backend: Literal["openai", "openai-chat"] = field(
        default="openai", metadata=about("openai = completions, openai-chat = chats of one message")
    )
    endpoint: str | None = field(default=None, metadata=about("the route; null = that of the backend"))
    prompts: Literal["token_ids", "text"] | None = field(
        default=None, metadata=about("how prompts are sent; null = token_ids, which only completions take, else text")
    )
    tokenizer: str | None = field(
        default=None, metadata=about("writes prompts as text: a model as for `serve`; null = the server's /detokenize")
    )
    dataset_name: Literal["random"] = field(default="random", metadata=about("prompts of random tokens"))
    random_input_len: int = field(default=128, metadata=about("prompt tokens, without the prefix"))
    random_output_len: int = field(default=64, metadata=about("tokens asked for"))
    random_range_ratio: float = field(
        default=0.0, metadata=about("R: both lengths are drawn from (1-R) to (1+R) times what they are")
    )
    random_prefix_len: int = field(default=0, metadata=about("tokens that all prompts begin with"))
    vocab_size: int | None = field(
        default=None, metadata=about("prompts use lower token ids; null = the tokenizer's, else 32000")
    )
    num_prompts: int = field(default=32, metadata=about("requests, the warm-up not counted"))
    request_rate: float | Literal["inf"] = field(
        default="inf", metadata=about("requests a second that are sent whatever comes back; inf = all at once")
    )
    burstiness: float | Literal["inf"] = field(
        default=1.0, metadata=about("shape of the gamma law of the pauses: 1 = Poisson, below = bursts, inf = even")
    )
    max_concurrency: int | None = field(
        default=None, metadata=about("most requests at once: with request_rate=inf a closed loop; null = no limit")
    )
    seed: int = field(default=0, metadata=about("of lengths, prompts and pauses"))
    ignore_eos: bool = field(
        default=False, metadata=about("generate all tokens that are asked for, and check that they came")
    )
    temperature: float | None = field(default=0.0, metadata=about("of sampling; null = the server's default"))
    extra_body: Mapping[str, object] = field(
        default_factory=dict, metadata=about("further fields of each request, as JSON")
    )
    header: str | tuple[str, ...] = field(default=(), metadata=about("further headers of each request, NAME=VALUE"))
    num_warmups: int = field(default=1, metadata=about("untimed requests before"))
    check_deltas: bool = field(
        default=False,
        metadata=about("have chunks tell their token ids (return_token_ids) and check the usage against them"),
    )
    percentile_metrics: str | tuple[str, ...] = field(default=METRICS, metadata=about("what is shown"))
    metric_percentiles: float | tuple[float, ...] = field(default=(50.0, 90.0, 99.0), metadata=about("0 to 100"))
    goodput: str | tuple[str, ...] = field(
        default=(), metadata=about("what makes a request good, in ms, such as [ttft:500,tpot:50,e2el:2000]")
    )
    timeout: float = field(default=3600.0, metadata=about("seconds that a request may take"))
    ready_check_timeout_sec: float = field(default=0.0, metadata=about("seconds to wait for a server that starts"))
    insecure: bool = field(default=False, metadata=about("take any TLS certificate"))

    def __post_init__(self) -> None:
        in_range("port", self.port, "", 65535)
        in_range("random_input_len", self.random_input_len, "tokens", MAX_PROMPT)
        in_range("random_output_len", self.random_output_len, "tokens", MAX_PROMPT)
        in_range("random_prefix_len", self.random_prefix_len, "tokens", MAX_PROMPT, least=0)
        in_range("num_prompts", self.num_prompts, "requests", MAX_PROMPTS)
        in_range("num_warmups", self.num_warmups, "requests", MAX_PROMPTS, least=0)
        in_range("seed", self.seed, "", MAX_SEED, least=0)
        if self.vocab_size is not None:
            in_range("vocab_size", self.vocab_size, "token ids", 2**24)
        if self.max_concurrency is not None:
            in_range("max_concurrency", self.max_concurrency, "requests", MAX_PROMPTS)
        self._check_numbers()
        self._check_prompts()
        _ = self.slos, self.shown, self.percentiles, self.headers  # refuse what is wrong in them

    @property
    def url(self) -> str:
        """Of the server, as it was given."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}" if self.base_url is None else self.base_url

    @property
    def route(self) -> str:
        """The path that requests go to."""
        return _ROUTES[self.backend] if self.endpoint is None else self.endpoint

    @property
    def is_chat(self) -> bool:
        return self.backend == "openai-chat"

    @property
    def sends_text(self) -> bool:
        """Whether prompts are text, and not token ids."""
        return self.is_chat or self.prompts == "text" or (self.prompts is None and self.tokenizer is not None)

    @property
    def rate(self) -> float:
        """Requests a second, possibly infinite."""
        return float(self.request_rate)

    @property
    def shape(self) -> float:
        """Of the gamma law, possibly infinite."""
        return float(self.burstiness)

    @property
    def slos(self) -> dict[str, float]:
        """Seconds by metric that a good request takes at most."""
        return dict(_slo(text) for text in _words(self.goodput))

    @property
    def shown(self) -> tuple[str, ...]:
        """The metrics that people are shown, in the usual order."""
        words = _words(self.percentile_metrics)
        for word in words:
            if word not in METRICS:
                raise wrong(f"{GROUP}.percentile_metrics", word, f"of {', '.join(METRICS)}")
        return tuple(name for name in METRICS if name in words)

    @property
    def percentiles(self) -> tuple[float, ...]:
        """Each once, in order."""
        given = self.metric_percentiles if isinstance(self.metric_percentiles, tuple) else (self.metric_percentiles,)
        for share in given:
            if not 0 <= share <= 100:
                raise wrong(f"{GROUP}.metric_percentiles", share, "numbers from 0 to 100")
        return tuple(sorted(set(given)))

    @property
    def headers(self) -> dict[str, str]:
        """By name."""
        return dict(_header(text) for text in ((self.header,) if isinstance(self.header, str) else self.header))

    def _check_numbers(self) -> None:
        if not self.rate > 0:
            raise wrong(f"{GROUP}.request_rate", self.request_rate, "requests a second above 0, or inf")
        if not self.shape > 0:
            raise wrong(f"{GROUP}.burstiness", self.burstiness, "a number above 0, or inf")
        if not 0 <= self.random_range_ratio < 1:
            raise wrong(f"{GROUP}.random_range_ratio", self.random_range_ratio, "a number from 0 to below 1")
        if not 0 < self.timeout <= MAX_TIMEOUT:
            raise wrong(f"{GROUP}.timeout", self.timeout, f"seconds above 0, up to {MAX_TIMEOUT:.0f}")
        if not 0 <= self.ready_check_timeout_sec <= MAX_TIMEOUT:
            raise wrong(f"{GROUP}.ready_check_timeout_sec", self.ready_check_timeout_sec, "seconds from 0")
        if self.temperature is not None and not 0 <= self.temperature < math.inf:
            raise wrong(f"{GROUP}.temperature", self.temperature, "a number from 0, or null")

    def _check_prompts(self) -> None:
        if self.is_chat and self.prompts == "token_ids":
            raise wrong(f"{GROUP}.prompts", self.prompts, f"text with {GROUP}.backend=openai-chat")
        if self.tokenizer is not None and not self.sends_text:
            raise wrong(f"{GROUP}.tokenizer", self.tokenizer, f"null with {GROUP}.prompts=token_ids")
        if self.endpoint is not None and not self.endpoint.startswith("/"):
            raise wrong(f"{GROUP}.endpoint", self.endpoint, f"a path such as {_ROUTES[self.backend]}")


def _words(given: str | tuple[str, ...]) -> list[str]:
    """Also several in one text, with commas or spaces between."""
    texts = (given,) if isinstance(given, str) else given
    return [word for text in texts for word in text.replace(",", " ").split()]


def _slo(text: str) -> tuple[str, float]:
    name, _, number = text.partition(":")
    try:
        seconds = float(number) / 1000
    except ValueError:
        seconds = -1.0
    if name not in SLO_METRICS or not 0 <= seconds < math.inf:
        raise wrong(f"{GROUP}.goodput", text, f"METRIC:MILLISECONDS with {', '.join(SLO_METRICS)}")
    return name, seconds


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    is_token = bool(name) and all(character.isalnum() or character in "-_" for character in name) and name.isascii()
    if not (equals and is_token and value.isascii() and value.isprintable()):
        raise wrong(f"{GROUP}.header", text, "NAME=VALUE in printable ASCII")
    return name, value.strip()
