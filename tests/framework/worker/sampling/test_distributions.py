"""What is drawn how often, by chi-square tests with fixed seeds, and that these would catch a wrong sampler."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
import pytest
from sampling_reference import Row, distribution, edited_logits, float32, is_close_call, limited, softmax
from sampling_rows import draws, p_value, params_of
from tokenyard.arrays import IntArray
from tokenyard.worker.sampling.draws import Streams

COUNT = 20_000
LEAST = 1e-4  # p of a right sampler; each test is made with one fixed set of seeds
VALUES = {
    "temperature": 0.7,
    "top_k": 9,
    "top_p": 0.8,
    "min_p": 0.08,
    "repetition_penalty": 1.6,
    "presence_penalty": 0.9,
    "frequency_penalty": 0.4,
}
ALL = [{}, *({name: value} for name, value in VALUES.items())]
PAIRS = [dict(pair) for pair in itertools.combinations(VALUES.items(), 2)]
LOGITS = [float32(x) for x in np.random.default_rng(5).normal(0, 1.2, 24)]
BY_LOGIT = sorted(range(24), key=lambda token: -LOGITS[token])


def row_of(**params: float) -> Row:
    """Likely tokens stand in prompt and output, some of them in both, some several times."""
    first, second, third, fourth, fifth = BY_LOGIT[:5]
    return Row(
        logits=LOGITS,
        params=params_of(params),
        prompt=[first, third, fourth, fourth, BY_LOGIT[-1]],
        output=[second, third, third, third, fifth, BY_LOGIT[7]],
    )


@pytest.mark.parametrize("params", [*ALL, *PAIRS, VALUES], ids=lambda params: "-".join(params) or "plain")
def test_tokens_are_drawn_as_often_as_they_are_likely(params: dict[str, float]) -> None:
    row = row_of(**params)
    assert not is_close_call(row)
    assert p_value(draws(row, COUNT), distribution(row)) > LEAST


def test_tokens_are_drawn_as_often_as_they_are_likely_with_seeds_one_after_the_other() -> None:
    row = row_of(temperature=0.7)
    tokens = [
        draws(dataclasses.replace(row, params=dataclasses.replace(row.params, seed=seed)), 1)[0]
        for seed in range(COUNT // 10)
    ]
    assert p_value(tokens, distribution(row)) > LEAST


def of_distribution(probabilities: list[float]) -> list[int]:
    """Draws that are right for these probabilities."""
    numbers = np.random.default_rng(0).random(COUNT)
    found: list[int] = np.searchsorted(np.cumsum(probabilities), numbers * sum(probabilities), side="right").tolist()
    return found


def one_more(wanted: list[float], row: Row) -> list[float]:
    """`wanted` with the most likely token that is not in it."""
    probabilities = softmax(edited_logits(row), row.params.temperature)
    token = max((token for token in range(24) if not wanted[token]), key=probabilities.__getitem__)
    whole = sum(p for p, w in zip(probabilities, wanted, strict=True) if w) + probabilities[token]
    let_in = [*map(bool, wanted)]
    let_in[token] = True
    return [p / whole if is_in else 0.0 for p, is_in in zip(probabilities, let_in, strict=True)]


def one_less(wanted: list[float]) -> list[float]:
    least = min(p for p in wanted if p)
    return [p / (1 - least) if p != least else 0.0 for p in wanted]


def temperature_last(row: Row) -> list[int]:
    kept = limited(softmax(edited_logits(row)), row.params)
    weights = [p ** (1 / row.params.temperature) for p in kept]
    return of_distribution([weight / sum(weights) for weight in weights])


def top_p_before_top_k(row: Row) -> list[int]:
    first = dataclasses.replace(row.params, top_k=0)
    second = dataclasses.replace(row.params, top_p=1.0)
    return of_distribution(limited(limited(softmax(edited_logits(row)), first), second))


def always_divided(row: Row) -> list[int]:
    seen = {*row.prompt, *row.output}
    factor = row.params.repetition_penalty
    return of_distribution(softmax([x / factor if token in seen else x for token, x in enumerate(row.logits)]))


def prompt_counts(row: Row) -> list[int]:
    return draws(dataclasses.replace(row, prompt=[], output=[*row.prompt, *row.output]), COUNT)


def prompt_does_not_count(row: Row) -> list[int]:
    return of_distribution(softmax(edited_logits(dataclasses.replace(row, prompt=[]))))


def counted_once(row: Row) -> list[int]:
    return draws(dataclasses.replace(row, output=[*dict.fromkeys(row.output)]), COUNT)


def with_params(**wrong: float) -> Callable[[Row], list[int]]:
    def wrong_draws(row: Row) -> list[int]:
        return draws(
            dataclasses.replace(row, params=params_of({"temperature": row.params.temperature, **wrong})), COUNT
        )

    return wrong_draws


WRONG: dict[str, tuple[dict[str, float], Callable[[Row], list[int]]]] = {
    "top_p lets one more in": ({"top_p": 0.8}, lambda row: of_distribution(one_more(distribution(row), row))),
    "top_p lets one less in": ({"top_p": 0.8}, lambda row: of_distribution(one_less(distribution(row)))),
    "top_k lets one more in": ({"top_k": 9}, with_params(top_k=10)),
    "top_k lets one less in": ({"top_k": 9}, with_params(top_k=8)),
    "min_p of all and not of the most likely": ({"min_p": 0.08}, with_params(min_p=0.08 / 0.2)),
    "min_p ignored": ({"min_p": 0.08}, with_params(min_p=0.0)),
    "temperature a little off": ({"temperature": 0.7}, with_params(temperature=0.75)),
    "temperature after top_p": ({"temperature": 0.7, "top_p": 0.8}, temperature_last),
    "top_p before top_k": ({"top_p": 0.8, "top_k": 9}, top_p_before_top_k),
    "repetition divides negative logits": ({"repetition_penalty": 1.6}, always_divided),
    "repetition leaves the prompt out": ({"repetition_penalty": 1.6}, prompt_does_not_count),
    "presence counts the prompt": ({"presence_penalty": 0.9}, prompt_counts),
    "presence as often as it occurs": (
        {"presence_penalty": 0.4},
        with_params(presence_penalty=0, frequency_penalty=0.4),
    ),
    "frequency counts the prompt": ({"frequency_penalty": 0.4}, prompt_counts),
    "frequency once": ({"frequency_penalty": 0.4}, counted_once),
    "penalties the wrong way round": ({"presence_penalty": 0.9}, with_params(presence_penalty=-0.9)),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_chi_square_test_rejects_a_wrong_sampler(name: str) -> None:
    params, wrong = WRONG[name]
    row = row_of(**params)
    assert p_value(wrong(row), distribution(row)) < LEAST


@pytest.mark.parametrize(
    "bias",
    [lambda u: u**1.1, lambda u: np.floor(u * 64) / 64, lambda u: u * 0.99, lambda u: np.roll(u, 1) * 0.5 + u * 0.5],
    ids=["skewed", "coarse", "short", "averaged"],
)
def test_the_chi_square_test_rejects_a_biased_draw(
    bias: Callable[[np.ndarray], np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Streams.uniforms

    def uniforms(self: Streams, positions: IntArray) -> np.ndarray:
        return bias(right(self, positions))

    monkeypatch.setattr(Streams, "uniforms", uniforms)
    row = row_of()
    assert p_value(draws(row, COUNT), distribution(row)) < LEAST


def test_the_chi_square_test_itself_is_even() -> None:
    """Of right draws, about a tenth has p below 0.1, whatever is rare or impossible."""
    probabilities = [0.4, 0.3, 0.2, 0.0999, 0.0001, 0.0]
    generator = np.random.default_rng(0)
    values = [p_value(generator.choice(6, 2000, p=probabilities).tolist(), probabilities) for _ in range(400)]
    assert 20 <= sum(value < 0.1 for value in values) <= 60
    assert p_value([5, *[0] * 100], probabilities) == 0.0
