"""Dequantisation: exact for any bytes, near what was quantised, the same in pieces, right beyond 2**31 values."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf_files import quantise
from gguf_reference import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenyard.errors import ModelLoadError
from tokenyard.model import gguf_weights
from tokenyard.model.files import resolve_model
from tokenyard.model.gguf_blocks import BLOCK_DECODERS
from tokenyard.model.gguf_weights import SUPPORTED_TYPES, dequantise_rows, is_dequantised, row_slices
from tokenyard.model.weights import open_weights

QUANTISED = tuple(BLOCK_DECODERS)
BITS = {"Q8_0": 8, "Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q4_K": 4, "Q5_K": 5, "Q6_K": 6}
# Where the half-precision scales of a block are.
SCALES_AT = {
    "Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2],
    "Q6_K": [208],
}  # fmt: skip


def sizes(type_name: str) -> tuple[int, int]:
    """(values, bytes) of a block."""
    numbers, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    return int(numbers), int(num_bytes)


def random_blocks(type_name: str, count: int, seed: int, *, finite: bool = True) -> np.ndarray:
    """[count, bytes of a block]: any bytes, with scales that are finite unless asked otherwise."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (count, sizes(type_name)[1]), dtype=np.uint8)
    for at in SCALES_AT[type_name] if finite else []:
        scales = rng.uniform(-200, 200, count).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(count, 2)
    return blocks


@pytest.mark.parametrize("type_name", QUANTISED)
def test_any_bytes_dequantise_to_what_the_format_says(type_name: str) -> None:
    blocks = random_blocks(type_name, 60, seed=3)
    result = torch.zeros(60, sizes(type_name)[0])
    dequantise_rows(blocks, type_name, result)
    expected = np.stack([reference(type_name, block) for block in blocks])
    assert np.array_equal(result.numpy(), expected.astype(np.float32))


@pytest.mark.parametrize("type_name", QUANTISED)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_decoder_of_single_blocks_is_the_format(type_name: str, data: st.DataObject) -> None:
    """What a load is checked with, against the reference of the tests; inf and nan included."""
    block = np.frombuffer(data.draw(st.binary(min_size=sizes(type_name)[1], max_size=sizes(type_name)[1])), np.uint8)
    with np.errstate(all="ignore"):
        expected = reference(type_name, block.copy())
    assert np.array_equal(np.array(BLOCK_DECODERS[type_name](block.tobytes())), expected, equal_nan=True)


@pytest.mark.parametrize("type_name", QUANTISED)
def test_quantising_and_dequantising_stays_within_a_step(type_name: str) -> None:
    """A step is the range of a block, by the number of values that its bits can tell apart."""
    numbers = sizes(type_name)[0]
    values = np.random.default_rng(1).normal(size=(64, numbers)).astype(np.float32)
    result = torch.zeros(64, numbers)
    dequantise_rows(quantise(values, GGMLQuantizationType[type_name]).view(np.uint8), type_name, result)
    largest = np.abs(values).max(1, keepdims=True)
    steps = 2 * largest / (2 ** BITS[type_name] - 1)
    assert (np.abs(result.numpy() - values) <= 1.05 * steps).all()
    assert np.abs(result.numpy() - values).max() > 0


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16"])
def test_plain_types_are_exact(type_name: str) -> None:
    values = np.random.default_rng(2).normal(size=(8, 40)).astype(np.float32)
    rounded = {"F16": torch.float16, "BF16": torch.bfloat16}.get(type_name, torch.float32)
    expected = torch.from_numpy(values).to(rounded).float()
    packed = gguf.quantize(values, GGMLQuantizationType[type_name])
    result = torch.zeros(8, 40)
    dequantise_rows(packed.view(np.uint8).reshape(8, -1), type_name, result)
    assert torch.equal(result, expected)


@pytest.mark.parametrize("type_name", QUANTISED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_c5_pieces_are_the_whole(type_name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = sizes(type_name)[0]
    rows = random_blocks(type_name, 77 * 2, seed=4).reshape(77, -1)
    whole, pieces = torch.zeros(77, 2 * numbers, dtype=dtype), torch.zeros(77, 2 * numbers, dtype=dtype)
    dequantise_rows(rows, type_name, whole)
    monkeypatch.setattr(gguf_weights, "_CHUNK_VALUES", 9 * numbers)
    slices = list(row_slices(77, 2 * numbers))
    for part in slices:
        dequantise_rows(rows[part], type_name, pieces[part])
    assert len(slices) == 20
    assert torch.equal(whole.nan_to_num(), pieces.nan_to_num())


@pytest.mark.parametrize(("rows", "columns"), [(2**31 + 5, 1), (3, 2**31 + 32), (2**20 + 1, 4096), (1, 1), (7, 3)])
def test_c5_slices_cover_every_row_once_beyond_two_billion_values(rows: int, columns: int) -> None:
    end = 0
    for part in row_slices(rows, columns):
        assert part.start == end
        assert (part.stop - part.start) * columns <= max(2**22, columns)
        end = part.stop
    assert end == rows


def test_c5_the_last_rows_of_a_tensor_of_more_than_two_billion_values_are_where_they_belong(
    tmp_path: Path,
) -> None:
    """A sparse file and a buffer that is never touched elsewhere: only the first and the last slice are worked on."""
    columns, num_rows = 4096, 2**31 // 4096 + 3
    row_bytes = columns // 32 * 34
    path = tmp_path / "sparse"
    first, last = (random_blocks("Q8_0", columns // 32, seed=seed).tobytes() for seed in (1, 2))
    with path.open("wb") as file:
        file.write(first)
        file.seek((num_rows - 1) * row_bytes)
        file.write(last)
    rows = np.memmap(path, mode="r", dtype=np.uint8).reshape(num_rows, row_bytes)
    result = torch.from_numpy(np.zeros((num_rows, columns), np.uint16)).view(torch.bfloat16)  # no page is touched yet
    assert result.numel() > 2**31
    slices = list(row_slices(num_rows, columns))
    for part in (slices[0], slices[-1]):
        dequantise_rows(rows[part], "Q8_0", result[part])
    for row, packed in ((0, first), (-1, last)):
        expected = torch.zeros(1, columns)
        dequantise_rows(np.frombuffer(packed, np.uint8).reshape(1, -1), "Q8_0", expected)
        assert torch.equal(result[row], expected[0].bfloat16())
    assert not result[1:3].any()
    assert is_dequantised(rows, "Q8_0", result)


def test_c5_a_tensor_that_was_not_filled_to_its_end_fails_the_load(
    make_gguf_of_type: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a truncated index would leave behind: the last rows are never written."""
    files = resolve_model(str(make_gguf_of_type))
    with open_weights(files) as weights:
        weights.get("model.embed_tokens.weight", torch.float32)
        monkeypatch.setattr(gguf_weights, "row_slices", lambda rows, columns: iter([slice(0, rows - 1)]))
        with pytest.raises(ModelLoadError, match=r"token_embd\.weight.*Q8_0.*does not dequantise"):
            weights.get("model.embed_tokens.weight", torch.float32)


def test_c5_a_wrong_dequantiser_fails_the_load(make_gguf_of_type: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_weights, "dequantize", lambda rows, kind: np.flip(gguf.dequantize(rows, kind), 1).copy())
    with (
        open_weights(resolve_model(str(make_gguf_of_type))) as weights,
        pytest.raises(ModelLoadError, match="does not dequantise"),
    ):
        weights.get("model.embed_tokens.weight", torch.float32)


@pytest.fixture
def make_gguf_of_type(tmp_path: Path) -> Path:
    """A tiny file of Q8_0 matrices."""
    from gguf_files import randomise, write_gguf_of
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    model = randomise(LlamaForCausalLM(config))
    return write_gguf_of(tmp_path / "q8.gguf", model, architecture="llama", kind=GGMLQuantizationType.Q8_0)


@pytest.mark.parametrize(
    "type_name", [kind.name for kind in GGMLQuantizationType if kind.name not in {*SUPPORTED_TYPES, "Q8_1", "Q8_K"}]
)
def test_other_types_are_refused_by_name_with_the_tensor(make_gguf_of_type: Path, type_name: str) -> None:
    """The type's number in the tensor's info is changed; where its blocks fit at all, it is refused by its name."""
    content = bytearray(make_gguf_of_type.read_bytes())
    name = b"blk.0.attn_q.weight"
    at = content.index(name) + len(name) + 4 + 2 * 8
    assert struct.unpack_from("<I", content, at)[0] == GGMLQuantizationType.Q8_0
    struct.pack_into("<I", content, at, GGMLQuantizationType[type_name])
    make_gguf_of_type.write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"blk\.0\.attn_q\.weight") as caught:
        open_weights(resolve_model(str(make_gguf_of_type)))
    assert type_name in str(caught.value) or "blocks" in str(caught.value) or "outside" in str(caught.value)
