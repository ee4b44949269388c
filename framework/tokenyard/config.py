"""EngineConfig: everything an engine is launched with, as frozen dataclasses.

Defaults live here and nowhere else; the Hydra groups of `tokenyard.configs` only name components. A group's dataclass
holds what the core itself reads; `options` holds the chosen component's own typed options, taken from the same group
(for a policy: from `scheduler.policy`). Hydra's DictConfig ends in `tokenyard.launch`, which builds these once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias


@dataclass(frozen=True, slots=True)
class NoOptions:
    """The options type of a component that has none."""


NO_OPTIONS = NoOptions()

DEFAULT_MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Group `model`: which model, and how it is loaded."""

    name: str = "smollm2-135m"  # the default model's name, a folder, a .gguf file, or a Hub id
    revision: str | None = None  # of a Hub id: a branch, tag or commit; None = what the cache has of main, else main
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto = the checkpoint's own
    max_model_len: int | None = None  # prompt + output tokens; None = the model's own limit, -1 = what the memory holds
    seed: int | None = None  # of unseeded sampling; None = the top-level seed
    quantization: None = None  # none is available yet
    max_logprobs: int = DEFAULT_MAX_LOGPROBS  # most that a request may ask for of a position; -1 = no limit


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Group `scheduler`: the mechanism's limits; `policy` names what steers it."""

    name: str = "batch"
    max_num_seqs: int = 64  # requests running at once
    max_num_batched_tokens: int = 2048  # tokens of one step, prefill and decode together
    enable_chunked_prefill: bool = True  # a long prompt may be computed over several steps
    long_prefill_token_threshold: int = 0  # longest prefill chunk of one request in a step; 0 = the whole budget
    preempt_mode: Literal["recompute", "swap", "pause"] = "recompute"  # what becomes of the K/V of who loses its turn
    predictor: str = "max_tokens"  # of output lengths, for policies that ask; or {name: NAME, OPTION: VALUE}
    predictor_options: object = NO_OPTIONS
    shadow: str | None = None  # a policy that is asked beside the one that decides, and reported on
    shadow_options: object = NO_OPTIONS
    policy: PolicyConfig | None = None  # None for a scheduler that takes no policy
    options: object = NO_OPTIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """Group `scheduler`, node `policy`."""

    name: str = "fcfs"
    options: object = NO_OPTIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheConfig:
    """Group `kv_cache`. `num_blocks` wins over `memory`, which wins over the share of free memory."""

    name: str = "paged"
    block_size: int = 16  # tokens per block
    num_blocks: int | None = None  # usable blocks; None = as many as the memory holds
    memory: str | int | None = None  # of each rank: bytes, or "512MiB"; None: CPU a quarter of free RAM, at most 4 GiB
    gpu_memory_utilization: float = 0.92  # share of a GPU's memory for weights, activations and K/V
    enable_prefix_caching: bool = True  # share the K/V of equal beginnings
    eviction: str = "lru"  # the rule by which cached blocks go; or {name: NAME, OPTION: VALUE}
    eviction_options: object = NO_OPTIONS
    retention_share: float = 0.5  # of the blocks, that requests with the hint retention=high may keep at most
    host_memory: str | int | None = None  # of each rank, for K/V that is swapped out: bytes, or "1GiB"; None = none
    options: object = NO_OPTIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyConfig:
    """Group `latency`: how long a step is expected to take, for policies that ask; `none` = nobody says."""

    name: str = "none"
    options: object = NO_OPTIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig:
    """Group `trace`: a record of every decision, to be looked at and replayed."""

    path: str | None = None  # of a new file, JSON Lines; None = no record
    chrome: str | None = None  # of a new file for chrome://tracing or ui.perfetto.dev; None = none


ArrivalMode: TypeAlias = Literal["trace", "sequential", "all_at_once", "closed_loop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadConfig:
    """Group `workload`: the requests of a simulation or an experiment; nothing else reads it."""

    name: str = "none"
    limit: int | None = None  # requests at most; None = all that there are
    time_scale: float = 1.0  # arrival times are multiplied by it: 0.5 = twice the load
    arrivals: ArrivalMode = "trace"  # at their own times, each when the last has ended, all at once, so many at a time
    concurrency: int | None = None  # requests at a time, of arrivals=closed_loop alone
    clients: int | Mapping[str, object] | None = None  # for requests without one: 10, or {number: 10, zipf: 1, seed: 0}
    options: object = NO_OPTIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class SLOConfig:
    """Node `experiment.slo`: what a good request meets, with its unit: "500ms", "2s". A number alone is refused."""

    ttft: str | float | None = None  # arrival to first token; None = any
    tpot: str | float | None = None  # per output token after the first
    e2e: str | float | None = None  # arrival to last token


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentConfig:
    """Group `experiment`: what a workload is run on, and what its results are judged by."""

    target: str | None = None  # URL of a server of OpenAI's API to send the workload to; None = an engine of our own
    slo: SLOConfig = field(default_factory=SLOConfig)  # what a good request meets, each with its unit: ttft=500ms
    client_weights: Mapping[str, float] = field(default_factory=dict)  # shares that fairness is judged by; others 1
    sinks: tuple[Literal["mlflow", "tensorboard", "wandb"], ...] = ()  # where metrics of runs go besides
    dir: str | None = None  # of `tokenyard experiment`: where runs go; None = experiments/DATE/TIME
    jobs: int | None = None  # runs at a time; None = as many as there are cores, of live ones 1
    keep_steps: bool = True  # write each step of a run down too: pictures of a run over time need it


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Group `attention`: a backend by name, or `auto` = the first that runs here."""

    name: str = "auto"
    options: object = NO_OPTIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorConfig:
    """Group `executor`."""

    name: str = "inproc"
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto = a GPU where there is one
    tensor_parallel_size: int = 1  # ranks that share the model; more than one needs executor=multiproc
    num_threads: int | None = None  # CPU threads of a rank; None = OMP_NUM_THREADS, else its share of the cores
    enforce_eager: bool = False  # never record CUDA graphs
    # Numbers of decoding requests for which a GPU records a CUDA graph, a step being padded to the next one; None = 1,
    # 2, 4, every 8th up to 256, every 16th up to 512, as far as max_num_seqs goes. Steps of more run without.
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    options: object = NO_OPTIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    """Group `engine`: the engine loop."""

    name: str = "sync"
    process: Literal["auto", "in", "own"] = "auto"  # of loop and model; own = another one; auto = own for a server
    log_stats: bool = True  # a step's outputs carry the scheduler's counters and gauges
    options: object = NO_OPTIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverConfig:
    """One entry of `observers`: an observer by name with its options."""

    name: str
    options: object = NO_OPTIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsProcessorConfig:
    """One entry of `logits_processors`: a logits processor by name with its options."""

    name: str
    options: object = NO_OPTIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginsConfig:
    """Group `plugins`: which installed plugins may be loaded. Built-in ones can be disabled but need no allowing."""

    allow: tuple[str, ...] | None = None  # None = all; [] = no third-party plugin; else entry points or distributions
    disabled: tuple[str, ...] = ()  # entry points or distributions that are not even imported
    strict: bool = False  # any plugin that is broken or in conflict is an error, chosen or not
    budget_us: float | None = None  # microseconds of a step that all plugins together may take; more is warned of


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Group `server`: the HTTP front end of `tokenyard serve`; without a server nothing reads it. Times in seconds."""

    host: str = "127.0.0.1"  # name or address to listen on
    port: int = 8000  # 0 = one that is free
    uds: str | None = None  # path of a Unix domain socket to listen on instead of host and port
    root_path: str = ""  # the prefix under which a proxy serves this
    served_model_name: str | tuple[str, ...] = ()  # what requests may name, the first one in answers; [] = model.name
    response_role: str = "assistant"  # of chat answers
    chat_template: str | None = None  # a file, or the text itself; None = the model's own
    default_chat_template_kwargs: Mapping[str, object] = field(default_factory=dict)  # a request's own win
    trust_request_chat_template: bool = False  # whether a request may bring a template
    ssl_keyfile: str | None = None  # the private key of ssl_certfile, PEM
    ssl_certfile: str | None = None  # PEM; serve HTTPS with it
    ssl_ca_certs: str | None = None  # clients must then have a certificate that these sign
    allowed_origins: tuple[str, ...] = ()  # of browsers (CORS); ["*"] = all
    allowed_hosts: tuple[str, ...] = ()  # accepted Host headers; [] = all
    protect_metrics: bool = True  # /metrics needs an API key too, where there is one
    salt_by_api_key: bool = False  # keys never share prefix-cache blocks
    shutdown_timeout: float = 0.0  # after SIGTERM, running requests may go on for so long; 0 = they are aborted at once
    max_num_queued_reqs: int | None = None  # unfinished requests, running ones included, n counted n times; None = all
    max_num_queued_tokens: int | None = None  # prompt tokens whose prefill has not begun; None = no limit
    request_timeout: float | None = None  # of requests that name none; None = as long as it takes
    slow_reader_timeout: float = 30.0  # a stream whose client takes nothing for so long is aborted
    stall_timeout: float = 60.0  # without a step while there is work, /readyz answers 503
    restart_engine: bool = False  # start a dead engine again, at most 3 times in 10 minutes; else the server ends
    max_n: int = 16  # most choices of a prompt
    max_prompts: int = 1024  # most prompts of a completion request; of several, also most prompts times n
    max_body_bytes: int = 8 * 2**20  # longest body of a request
    log_requests: bool = False  # a line for each request, without its text
    log_stats_interval: float = 10.0  # of the line about running and waiting requests; 0 = none
    timeline_size: int = 1024  # requests whose timeline /debug/requests/ID still knows; 0 = none
    otlp_traces_endpoint: str | None = None  # where spans go, such as http://127.0.0.1:4318/v1/traces; None = nowhere

    @property
    def served_model_names(self) -> tuple[str, ...]:
        """`served_model_name`, which may be one text."""
        names = self.served_model_name
        return (names,) if isinstance(names, str) else names


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """A whole engine. `plugins` says what may be loaded, the other groups what is used."""

    engine: LoopConfig = field(default_factory=LoopConfig)
    scheduler: SchedulerConfig = field(default_factory=lambda: SchedulerConfig(policy=PolicyConfig()))
    kv_cache: KVCacheConfig = field(default_factory=KVCacheConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    executor: ExecutorConfig = field(default_factory=ExecutorConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    plugins: PluginsConfig = field(default_factory=PluginsConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    latency: LatencyConfig = field(default_factory=LatencyConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    experiment: ExperimentConfig = field(default_factory=ExperimentConfig)
    observers: tuple[ObserverConfig, ...] = ()
    logits_processors: tuple[LogitsProcessorConfig, ...] = ()  # in the order in which they run
    seed: int = 0  # the default of model.seed, workloads and policies
