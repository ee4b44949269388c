"""The fast decoder over torch_native's paged cache: what a request generates is its own business."""

from __future__ import annotations

import pytest
import torch
from tokenyard.interfaces import AttentionBackendContext, AttentionSpec
from tokenyard.model.causal_lm import CausalLM, PagedAttention
from tokenyard.model.decoder import FastDecoder
from tokenyard.model.decoder_config import DecoderConfig, parse_decoder_config
from tokenyard.model.decoder_weights import expected_names
from tokenyard.model.linear import Linear
from tokenyard.testing.attention import make_batch
from tokenyard_backends.torch_native.backend import TorchNativeBackend

BLOCK = 16
CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 160,
    "hidden_size": 96,
    "intermediate_size": 1280,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


class RandomWeights:
    """Weights of CONFIG's shapes, drawn by name."""

    def __init__(self, config: DecoderConfig) -> None:
        self._config = config

    def names(self) -> frozenset[str]:
        return expected_names(self._config)

    def get(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        config = self._config
        hidden, keys = config.hidden_size, config.num_kv_heads * config.head_dim
        shapes = {
            "norm": (hidden,),
            "k_proj": (keys, hidden),
            "v_proj": (keys, hidden),
            "gate": (config.intermediate_size, hidden),
            "up_proj": (config.intermediate_size, hidden),
            "down": (hidden, config.intermediate_size),
            "embed": (config.vocab_size, hidden),
            "lm_head": (config.vocab_size, hidden),
        }
        shape = next((shape for part, shape in shapes.items() if part in name), (hidden, hidden))
        random = torch.Generator().manual_seed(sum(name.encode()))
        return (torch.randn(*shape, generator=random) * (0.15 if len(shape) > 1 else 1)).to(dtype)


class Runner:
    """Greedy generation: `step` takes each named request's next tokens, whole or in part."""

    def __init__(self, model: CausalLM, dtype: torch.dtype) -> None:
        shape = model.shape
        spec = AttentionSpec(
            device_type="cpu",
            dtype=str(dtype).removeprefix("torch."),
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            v_head_dim=shape.v_head_dim,
            block_size=BLOCK,
        )
        self.backend = TorchNativeBackend(AttentionBackendContext(spec=spec, device=torch.device("cpu"), num_threads=1))
        layout = self.backend.kv_cache_layout(spec, 40)
        caches = [
            (
                torch.full(layout.key_shape, torch.nan, dtype=dtype),
                torch.full(layout.value_shape, torch.nan, dtype=dtype),
            )
            for _ in shape.layers
        ]
        self.attention = PagedAttention(self.backend, shape.layers, caches)
        self.model = model
        self.tokens: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.logits: dict[str, list[torch.Tensor]] = {}
        self.blocks: dict[str, list[int]] = {}
        self.free = list(range(0, 40, 3)) + list(range(1, 40, 3)) + list(range(2, 40, 3))

    def add(self, name: str, prompt: list[int]) -> None:
        self.tokens[name], self.computed[name], self.logits[name] = list(prompt), 0, []
        self.blocks[name] = [self.free.pop() for _ in range(5)]

    @torch.inference_mode()
    def step(self, **scheduled: int) -> None:
        """Run `scheduled[name]` tokens of each request; a request whose last token ran gets the next one."""
        positions = {name: range(self.computed[name], self.computed[name] + n) for name, n in scheduled.items()}
        lengths = [positions[name].stop for name in scheduled]
        tables = [self.blocks[name][: -(-length // BLOCK)] for name, length in zip(scheduled, lengths, strict=True)]
        batch = make_batch(list(zip(scheduled.values(), lengths, strict=True)), tables, BLOCK)
        self.attention.begin_step([self.backend.plan(batch)])
        logits = self.model.forward(
            torch.tensor([self.tokens[name][p] for name in scheduled for p in positions[name]]),
            torch.tensor([p for name in scheduled for p in positions[name]]),
            batch.query_start_loc[1:].long() - 1,
            self.attention,
        )
        for name, row, length in zip(scheduled, logits, lengths, strict=True):
            self.computed[name] = length
            if length == len(self.tokens[name]):
                self.logits[name].append(row)
                self.tokens[name].append(int(row.argmax()))


@pytest.fixture(scope="module")
def model() -> FastDecoder:
    config = parse_decoder_config(CONFIG)
    return FastDecoder(config, RandomWeights(config), dtype=torch.float32, device=torch.device("cpu"))


PROMPTS = {
    "a": [5, 9, 100, 3, 77],
    "b": [(7 * i + 3) % 160 for i in range(45)],
    "c": [(11 * i) % 160 for i in range(17)],
}


def generate_alone(model: FastDecoder, name: str, steps: int) -> Runner:
    runner = Runner(model, torch.float32)
    runner.add(name, PROMPTS[name])
    runner.step(**{name: len(PROMPTS[name])})
    for _ in range(steps - 1):
        runner.step(**{name: 1})
    return runner


def test_tokens_and_logits_are_the_same_alone_and_among_batch_mates(model: FastDecoder) -> None:
    together = Runner(model, torch.float32)
    for name, prompt in PROMPTS.items():
        together.add(name, prompt)
    together.step(a=5)
    together.step(a=1, b=45)
    for _ in range(3):
        together.step(b=1, a=1)
    together.step(a=1, c=17, b=1)
    for _ in range(12):
        together.step(c=1, a=1, b=1)
    for name in PROMPTS:
        alone = generate_alone(model, name, len(together.logits[name]))
        assert alone.tokens[name] == together.tokens[name]
        assert len(set(alone.tokens[name][len(PROMPTS[name]) :])) > 3
        left, right = torch.stack(alone.logits[name]), torch.stack(together.logits[name])
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)
        if Linear(torch.randn(8, 8)).is_packed and torch.get_num_threads() in (1, 2, 4, 8):
            # Other numbers of threads cut a row of silu's input where torch does not compute the rest in the same way.
            assert torch.equal(left, right)


@pytest.mark.parametrize("chunks", [[16, 16, 13], [1, 44], [44, 1], [15, 2, 1, 27]], ids=str)
def test_a_prompt_in_chunks_generates_what_the_whole_prompt_does(chunks: list[int], model: FastDecoder) -> None:
    whole = generate_alone(model, "b", 6)
    parts = Runner(model, torch.float32)
    parts.add("b", PROMPTS["b"])
    for chunk in [*chunks, 1, 1, 1, 1, 1]:
        parts.step(b=chunk)
    assert parts.tokens["b"] == whole.tokens["b"]
    torch.testing.assert_close(torch.stack(parts.logits["b"]), torch.stack(whole.logits["b"]), rtol=1e-4, atol=1e-4)
