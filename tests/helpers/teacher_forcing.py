"""Judging bfloat16 by teacher-forced logits: equal tokens mean little there, since near ties fall either way.

The float32 model's own greedy tokens are fed to each model, so that all see the same context at every position. What a
bfloat16 model of ours differs from float32 is then held against what transformers' bfloat16 differs from it: rounding
is random and of one size, so the two are alike, and any mistake in a model shows as much more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

# Both round what each matrix gives to 8 bits, transformers the sum of the layers and the scores of eager attention as
# well; over tens of rows of logits the ratio of two such errors varies by a tenth or two. Measured over all families
# and two prompts: 0.69 to 0.99. A smaller bound would fail by chance, and mistakes give several times as much.
BOUND = 1.25
_TOO_ROUGH = 0.5  # of the logits' size: above it rounding hides mistakes and the comparison proves nothing


class Differences(NamedTuple):
    """Root mean squares of logits minus float32 logits, relative to those of the float32 logits."""

    ours: float
    transformers: float

    def check(self) -> None:
        """Ours are within `BOUND` of transformers'."""
        assert 0 < self.transformers < _TOO_ROUGH, self
        assert 0 < self.ours <= BOUND * self.transformers, self


@torch.inference_mode()
def bfloat16_differences(
    folder: Path, prompt: Sequence[int], count: int, ours: Callable[[torch.Tensor], torch.Tensor]
) -> Differences:
    """`ours` gives the bfloat16 logits [T, V] of tokens [T]: a prompt and `count` tokens that float32 goes on with."""
    exact_model = _load(folder, torch.float32)
    tokens = torch.tensor(list(prompt))
    for _ in range(count):
        tokens = torch.cat((tokens, _logits(exact_model, tokens)[-1:].argmax(-1)))
    exact = _logits(exact_model, tokens)
    size = _root_mean_square(exact - exact.mean(-1, keepdim=True))
    rounded = _logits(_load(folder, torch.bfloat16), tokens)
    return Differences(*(_root_mean_square(logits - exact) / size for logits in (ours(tokens), rounded)))


def _load(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    )
    return model


def _logits(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(tokens[None], use_cache=False).logits[0]
    return logits.float()


def _root_mean_square(values: torch.Tensor) -> float:
    return float(values.double().square().mean().sqrt())
