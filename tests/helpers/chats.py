"""Chats and templates for the tests of tokenizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenyard.errors import ValidationError
from tokenyard.model.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, object]]
MakeTokenizer = Callable[..., Tokenizer]

# The reasoning switch as Qwen3 has it: without thinking, the prompt already holds an empty thought.
THINKING = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)


def said(role: str, content: object) -> dict[str, object]:
    return {"role": role, "content": content}


def user(content: object) -> list[dict[str, object]]:
    return [said("user", content)]


def refusal(call: Callable[..., object], *args: object, **kwargs: object) -> ValidationError:
    """The error that a call raises, of one line."""
    with pytest.raises(ValidationError) as caught:
        call(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return caught.value


def sentencepiece_like() -> Tokenizer:
    """Byte fallback, metaspace, a BOS by default: the style of Llama 2."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ("▁", "h", "i", "▁hi", "ab", "▁a", "a", "b", "▁ab", "</", "s", ">"):
        vocabulary.setdefault(piece, len(vocabulary))
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b"), ("h", "i")]
    vocabulary.setdefault("hi", len(vocabulary))
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "unk_token": "<unk>"}
    return Tokenizer(
        backend, config, "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    )
