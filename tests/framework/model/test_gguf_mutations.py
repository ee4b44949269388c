"""Damaged GGUF files: whatever is in one, it loads or is refused with one clear error, in bounded memory and time."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import gguf_mutations
import pytest
from gguf import GGMLQuantizationType
from gguf_files import BYTE, CONTROL, NORMAL, UNKNOWN, TinyVocabulary, byte_level_vocabulary, randomise, write_gguf_of
from gguf_mutations import damage, fields_of, load_everything
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

SIZES: dict[str, object] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "head_dim": 16,
}
MEBIBYTE = 2**20


def sentencepiece_vocabulary() -> TinyVocabulary:
    words = ["▁", "h", "i", "t", "e", "1", "2", "▁t", "he", "▁the", "hi"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    return TinyVocabulary(
        model="llama",
        pre="default",
        tokens=tokens,
        types=[UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(words)],
        scores=[-float(index) for index in range(len(tokens))],
        ids={"unknown": 0, "bos": 1, "eos": 2},
        flags={"add_bos_token": True, "add_space_prefix": True},
        template="{{ messages[0]['content'] }}",
    )


@pytest.fixture(scope="module")
def sound_files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One of each tokenizer and layout, quantised and not."""
    folder = tmp_path_factory.mktemp("sound")
    llama = randomise(LlamaForCausalLM(LlamaConfig.from_dict(SIZES)))
    qwen = randomise(Qwen3ForCausalLM(Qwen3Config.from_dict({**SIZES, "tie_word_embeddings": True})))
    return [
        write_gguf_of(
            folder / "llama.gguf",
            llama,
            architecture="llama",
            kind=GGMLQuantizationType.Q8_0,
            vocabulary=sentencepiece_vocabulary(),
        ),
        write_gguf_of(
            folder / "qwen3.gguf", qwen, architecture="qwen3", vocabulary=byte_level_vocabulary(320, pre="qwen2")
        ),
    ]


def test_the_sound_files_load_and_are_walked_to_their_end(sound_files: list[Path]) -> None:
    for path in sound_files:
        assert load_everything(path)
        content = path.read_bytes()
        fields = fields_of(content)
        assert {field.kind for field in fields} == set(gguf_mutations.FIELDS)
        ends = [field.at + field.num_bytes for field in fields]
        assert all(field.at in {24, 4, 8, 16, *ends} for field in fields)  # no gaps
        assert max(ends) < len(content)


@settings(max_examples=300, deadline=3000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), which=st.sampled_from([0, 1]))
def test_c1_a_damaged_file_loads_or_is_refused_with_one_error(
    sound_files: list[Path], tmp_path: Path, seed: int, which: int
) -> None:
    content = sound_files[which].read_bytes()
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(damage(content, fields_of(content), random.Random(seed)))
    load_everything(damaged)  # raises for every other outcome


@pytest.mark.parametrize("kind", gguf_mutations.FIELDS)
def test_c1_every_kind_of_field_is_checked(sound_files: list[Path], tmp_path: Path, kind: str) -> None:
    """Each nasty number in some fields of the kind, alone: most of them must be refused."""
    rng = random.Random(1)
    content = sound_files[0].read_bytes()
    fields = [field for field in fields_of(content) if field.kind == kind]
    damaged, outcomes = tmp_path / "damaged.gguf", []
    for field in rng.sample(fields, min(4, len(fields))):
        for value in gguf_mutations.NASTY[::2]:
            changed = bytearray(content)
            wrapped = value % 2 ** (8 * field.num_bytes) if field.num_bytes else 0
            changed[field.at : field.at + field.num_bytes] = wrapped.to_bytes(field.num_bytes, "little")
            damaged.write_bytes(changed)
            outcomes.append(load_everything(damaged))
    assert not all(outcomes)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the process's own size as Linux tells it")
def test_c1_damaged_files_never_take_more_than_200_mebibytes(sound_files: list[Path]) -> None:
    """In a process that may not grow: what asks for more fails as MemoryError, which is no clear error."""
    script = str(Path(gguf_mutations.__file__))
    command = [sys.executable, script, "250", str(200 * MEBIBYTE), *map(str, sound_files)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert result.returncode == 0, result.stderr[-2000:]
    loaded, grown, slowest = result.stdout.split()[-3:]
    assert 0 < int(loaded) < 400  # some damage does not matter, most does
    assert int(grown) < 200 * MEBIBYTE
    assert float(slowest) < 30


def test_the_check_of_a_damaged_file_can_fail(sound_files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Any other exception, and an error of many lines, come through."""
    from tokenyard.errors import ModelLoadError
    from tokenyard.model import files

    def many_lines(name: str) -> None:
        raise ModelLoadError("one\ntwo")

    def other(name: str) -> None:
        raise OverflowError

    monkeypatch.setattr(files, "resolve_model", many_lines)
    with pytest.raises(AssertionError, match="not one clear line"):
        load_everything(sound_files[0])
    monkeypatch.setattr(files, "resolve_model", other)
    with pytest.raises(OverflowError):
        load_everything(sound_files[0])
