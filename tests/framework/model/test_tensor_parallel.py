"""A model in parts: each rank reads and computes its share, and together they compute what one rank does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import family_models
import pytest
import torch
from family_models import CASES, prompt_of
from lone_logits import logits_of
from thread_ranks import run_ranks
from tokenyard.errors import ConfigError, ModelLoadError
from tokenyard.model.decoder import FastDecoder
from tokenyard.model.decoder_config import parse_decoder_config
from tokenyard.model.files import resolve_model
from tokenyard.model.loader import load_model
from tokenyard.model.ranks import ONE_RANK, RankGroup
from tokenyard.model.tensor_parallel import allowed_sizes, check_tensor_parallel_size
from tokenyard.model.weights import open_weights

CPU = torch.device("cpu")
TOKENS = torch.tensor(prompt_of(40, seed=3))
MakeFolder = Callable[[str], Path]


@pytest.fixture(scope="module")
def family_model(tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path) -> MakeFolder:
    """A function that gives the folder of a case, written when it is first asked for."""
    folders: dict[str, Path] = {}

    def folder_of(case: str) -> Path:
        if case not in folders:
            folders[case] = family_models.write_model(tmp_path_factory.mktemp("family"), case, tiny_llama_dir)
        return folders[case]

    return folder_of


def sizes_of(folder: Path) -> list[int]:
    return allowed_sizes(parse_decoder_config(resolve_model(str(folder)).config))


def logits_in_parts(path: Path, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What the leader has; the others have none."""

    def work(ranks: RankGroup) -> torch.Tensor:
        return logits_of(load_model(resolve_model(str(path)), dtype=dtype, device=CPU, ranks=ranks), TOKENS)

    leaders, *others = run_ranks(size, work)
    assert all(found.shape == (len(TOKENS), 0) for found in others)
    return leaders


def logits_in_one(path: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return logits_of(load_model(resolve_model(str(path)), dtype=dtype, device=CPU), TOKENS)


SHARED = [case for case, (_, extra) in CASES.items() if extra.get("num_key_value_heads", 2) != 1]


@pytest.mark.parametrize("case", SHARED)
def test_several_ranks_compute_the_logits_of_one(case: str, family_model: MakeFolder) -> None:
    """Biases, head norms, windows, tied embeddings, a vocabulary of 272 on 3 ranks: every family in every shape."""
    folder = family_model(case)
    expected = logits_in_one(folder)
    sizes = [size for size in sizes_of(folder) if size > 1]
    assert sizes
    for size in sizes:
        found = logits_in_parts(folder, size)
        assert found.shape == expected.shape
        assert found.is_contiguous()
        assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_in_bfloat16_the_ranks_differ_from_one_by_roundings_alone(family_model: MakeFolder) -> None:
    folder = family_model("qwen3")
    expected, found = (run(folder, torch.bfloat16) for run in (logits_in_one, lambda f, t: logits_in_parts(f, 2, t)))
    assert (found - expected).abs().max() <= 2e-2 * expected.abs().max()


def test_a_gguf_file_is_shared_like_the_folder_with_its_weights(tiny_gguf: Path, tiny_llama_dir: Path) -> None:
    """Its rows of Q and K are in another order, and only whole heads keep theirs."""
    assert torch.equal(logits_in_parts(tiny_gguf, 2), logits_in_parts(tiny_llama_dir, 2))


class WatchedWeights:
    """What was read, with the whole shape and the part."""

    def __init__(self, path: Path) -> None:
        self._source = open_weights(resolve_model(str(path)))
        self.whole: set[str] = set()
        self.parts: dict[str, tuple[int, slice]] = {}

    def names(self) -> frozenset[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def get(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        self.whole.add(name)
        return self._source.get(name, dtype)

    def get_part(self, name: str, dtype: torch.dtype, axis: int, part: slice) -> torch.Tensor:
        self.parts[name] = (axis, part)
        return self._source.get_part(name, dtype, axis, part)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_its_part_of_every_matrix_and_nothing_else(rank: int, family_model: MakeFolder) -> None:
    folder = family_model("llama with biases")
    config = parse_decoder_config(resolve_model(str(folder)).config)

    def work(ranks: RankGroup) -> WatchedWeights:
        watched = WatchedWeights(folder)
        FastDecoder(config, watched, dtype=torch.float32, device=CPU, ranks=ranks)
        return watched

    watched = run_ranks(2, work)[rank]
    assert watched.whole | set(watched.parts) == watched.names()
    assert all(len(watched.shape(name)) == 1 for name in watched.whole)
    prefix = "model.layers.1"
    expected: Mapping[str, tuple[int, slice]] = {
        "model.embed_tokens.weight": (0, slice(136 * rank, 136 * (rank + 1))),
        "lm_head.weight": (0, slice(136 * rank, 136 * (rank + 1))),
        f"{prefix}.self_attn.q_proj.weight": (0, slice(24 * rank, 24 * (rank + 1))),
        f"{prefix}.self_attn.k_proj.bias": (0, slice(12 * rank, 12 * (rank + 1))),
        f"{prefix}.self_attn.o_proj.weight": (-1, slice(24 * rank, 24 * (rank + 1))),
        f"{prefix}.mlp.up_proj.weight": (0, slice(48 * rank, 48 * (rank + 1))),
        f"{prefix}.mlp.down_proj.weight": (-1, slice(48 * rank, 48 * (rank + 1))),
    }
    assert {name: watched.parts[name] for name in expected} == expected


@pytest.mark.parametrize("path", ["tiny_llama_dir", "tiny_gguf"])
def test_a_part_of_a_tensor_is_that_part(path: str, request: pytest.FixtureRequest) -> None:
    with open_weights(resolve_model(str(request.getfixturevalue(path)))) as weights:
        for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"):
            whole = weights.get(name, torch.float32)
            assert weights.shape(name) == tuple(whole.shape)
            assert torch.equal(weights.get_part(name, torch.float32, 0, slice(16, 48)), whole[16:48])
            assert torch.equal(weights.get_part(name, torch.float32, -1, slice(5, 9)), whole[:, 5:9])
            assert weights.get_part(name, torch.bfloat16, 0, slice(0, 2)).dtype == torch.bfloat16
        for read in (
            lambda: weights.shape("model.nor.weight"),
            lambda: weights.get_part("model.nor.weight", torch.float32, 0, slice(1)),
        ):
            with pytest.raises(ModelLoadError, match=r"did you mean 'model.norm.weight'"):
                read()


def test_a_tensor_of_another_shape_is_told_with_its_whole_shape(make_llama: Callable[..., Path]) -> None:
    folder = make_llama()
    config = dict(resolve_model(str(folder)).config)
    config["intermediate_size"] = 192

    def work(ranks: RankGroup) -> None:
        with open_weights(resolve_model(str(folder))) as weights:
            FastDecoder(parse_decoder_config(config), weights, dtype=torch.float32, device=CPU, ranks=ranks)

    with pytest.raises(ModelLoadError, match=r"gate_proj.weight' has the shape \[96, 64\].* asks for \[192, 64\]"):
        run_ranks(2, work)


@pytest.mark.parametrize(
    ("case", "size", "message"),
    [
        ("llama", 4, "has 2 K/V heads and an intermediate size of 96, which do not both divide by it; allowed: 1, 2"),
        ("llama, tied, 9 heads on 3", 2, "has 3 K/V heads .*; allowed: 1, 3"),
        ("qwen2, tied, one KV head", 2, "has 1 K/V heads .*; allowed: 1"),
    ],
)
def test_a_size_that_does_not_divide_is_refused_with_the_allowed_ones(
    case: str, size: int, message: str, family_model: MakeFolder
) -> None:
    files = resolve_model(str(family_model(case)))
    with pytest.raises(ConfigError, match=rf"executor.tensor_parallel_size={size}: .*{message}$"):
        check_tensor_parallel_size(files, size)
    check_tensor_parallel_size(files, 1)


def test_a_model_of_the_adapter_is_refused_with_the_reason(make_llama: Callable[..., Path]) -> None:
    folder = make_llama()
    config_file = folder / "config.json"
    config_file.write_text(config_file.read_text().replace('"silu"', '"gelu"'))
    with pytest.raises(ConfigError, match=r"hidden_act 'gelu' is not silu.*; allowed: 1$"):
        check_tensor_parallel_size(resolve_model(str(folder)), 2)


@pytest.mark.parametrize(
    ("size", "total", "parts"),
    [
        (1, 7, [(0, 7)]),
        (2, 8, [(0, 4), (4, 8)]),
        (3, 7, [(0, 3), (3, 6), (6, 7)]),
        (4, 5, [(0, 2), (2, 4), (4, 5), (5, 5)]),
    ],
)
def test_the_parts_of_the_ranks_cover_all_once(size: int, total: int, parts: list[tuple[int, int]]) -> None:
    spans = run_ranks(size, lambda ranks: ranks.span(total)) if size > 1 else [ONE_RANK.span(total)]
    assert [(span.start, span.stop) for span in spans] == parts
