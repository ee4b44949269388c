"""A tokenizer from a GGUF file's metadata: byte-level BPE, or SentencePiece's BPE with byte fallback."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tokenyard.errors import ModelLoadError
from tokenyard.model.gguf_metadata import Metadata
from tokenyard.model.gguf_pretokenizers import PRE_TOKENIZERS, PreTokenizer
from tokenyard.model.gguf_vocabulary import BYTE_LEVEL, TokenType, Vocabulary, read_vocabulary

if TYPE_CHECKING:
    from pathlib import Path

    from tokenyard.model.gguf_reader import GGUFHeader

# Implied merges: what the largest vocabularies in use need several times over, and little memory.
_MAX_MERGES, _MAX_MERGE_CHARACTERS = 2**20, 2**24
_SPACE = "▁"  # how SentencePiece spells one
_CONFIG_TOKENS = ("bos", "eos", "unk", "pad")
_TEMPLATE_KEY = "tokenizer.chat_template"
_PREFIX = "tokenizer.ggml."


def tokenizer_from_gguf(header: GGUFHeader) -> tuple[Tokenizer, dict[str, object]]:
    """(tokenizer, content of tokenizer_config.json); ModelLoadError for a kind that cannot be rebuilt exactly."""
    keys = Metadata(header)
    vocabulary = read_vocabulary(header)
    _refuse_unsupported(keys)
    if vocabulary.model == BYTE_LEVEL:
        steps = _pre_tokenizer(keys)
        tokenizer, adds_bos = _byte_level(vocabulary, steps, keys), steps.adds_bos
    else:
        tokenizer, adds_bos = _sentencepiece(vocabulary, keys), True
    _add_whole_tokens(tokenizer, vocabulary)
    config = _tokenizer_config(keys, vocabulary, adds_bos=adds_bos)
    _add_ends(tokenizer, vocabulary, config)
    if keys.has(_TEMPLATE_KEY):
        config["chat_template"] = keys.text(_TEMPLATE_KEY)
    return tokenizer, config


def merges_by_score(vocabulary: Vocabulary, path: Path) -> list[tuple[str, str]]:
    """The merges that a SentencePiece vocabulary implies, best first: every cut of a token into two tokens.

    A token of a higher score is made first, and of equal scores the one of the lower id, which is the order in which
    BPE learnt them. Control, byte and unused tokens are never made of text.
    """
    makes = {TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNDEFINED}
    usable = {token: index for index, token in enumerate(vocabulary.tokens) if vocabulary.types[index] in makes}
    merges: list[tuple[str, str]] = []
    num_characters = 0
    for token in sorted(usable, key=lambda token: (-vocabulary.scores[usable[token]], usable[token])):
        for at in range(len(token) - 1, 0, -1):
            left, right = token[:at], token[at:]
            if left in usable and right in usable:
                merges.append((left, right))
                num_characters += len(token)
        if len(merges) > _MAX_MERGES or num_characters > _MAX_MERGE_CHARACTERS:
            raise ModelLoadError(
                f"{path}: the vocabulary implies more than {_MAX_MERGES} merges or {_MAX_MERGE_CHARACTERS} characters "
                "of them, which no SentencePiece model does; is the file damaged?"
            )
    return merges


def _pre_tokenizer(keys: Metadata) -> PreTokenizer:
    name = keys.text(f"{_PREFIX}pre", "")
    if name not in PRE_TOKENIZERS:
        raise keys.refuse(f"the pre-tokenizer is {name!r}" if name else "no pre-tokenizer is named", PRE_TOKENIZERS)
    return PRE_TOKENIZERS[name]


def _refuse_unsupported(keys: Metadata) -> None:
    reasons = {
        "the tokenizer has a table of normalised characters": keys.has(f"{_PREFIX}precompiled_charsmap"),
        "the tokenizer removes extra whitespace": keys.flag(f"{_PREFIX}remove_extra_whitespaces", False),
    }
    for reason, holds in reasons.items():
        if holds:
            raise keys.refuse(reason)


def _byte_level(vocabulary: Vocabulary, steps: PreTokenizer, keys: Metadata) -> Tokenizer:
    model = models.BPE(vocabulary.ids, list(vocabulary.merges), ignore_merges=steps.whole_words)
    tokenizer = Tokenizer(model)
    sequence: list[pre_tokenizers.PreTokenizer] = []
    if steps.single_digits:
        sequence.append(pre_tokenizers.Digits(individual_digits=True))
    sequence += [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in steps.splits]
    adds_space = keys.flag(f"{_PREFIX}add_space_prefix", False)
    sequence.append(pre_tokenizers.ByteLevel(add_prefix_space=adds_space, use_regex=steps.gpt2_pattern))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(sequence)
    tokenizer.decoder = decoders.ByteLevel()
    if steps.nfc:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece(vocabulary: Vocabulary, keys: Metadata) -> Tokenizer:
    """SentencePiece's rules: spaces as `▁`, one more in front of every text, bytes for what has no token."""
    name = keys.text(f"{_PREFIX}pre", "default")
    if name != "default":
        raise keys.refuse(f"the pre-tokenizer of a SentencePiece vocabulary is {name!r}", ("default",))
    merges = list(vocabulary.merges) or merges_by_score(vocabulary, keys.path)
    unknown = vocabulary.tokens[vocabulary.special["unk"]]
    tokenizer = Tokenizer(
        models.BPE(vocabulary.ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True, ignore_merges=False)
    )
    adds_space = keys.flag(f"{_PREFIX}add_space_prefix", True)
    spelled = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spelled]) if adds_space else spelled
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if adds_space:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _add_whole_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """Control tokens become special tokens, user-defined ones plain added tokens; ids stay as they are."""
    control = vocabulary.of_type(TokenType.CONTROL, TokenType.UNKNOWN)
    added = vocabulary.of_type(TokenType.USER_DEFINED)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control if token])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in added if token])


def _tokenizer_config(keys: Metadata, vocabulary: Vocabulary, *, adds_bos: bool) -> dict[str, object]:
    config: dict[str, object] = {"clean_up_tokenization_spaces": False}
    for name in _CONFIG_TOKENS:
        if name not in vocabulary.special:
            continue
        index = vocabulary.special[name]
        if not vocabulary.tokens[index]:
            raise ModelLoadError(f"{keys.path}: the {name} token, {index}, is empty")
        config[f"{name}_token"] = vocabulary.tokens[index]
    for name, default in (("bos", adds_bos), ("eos", False)):
        key = f"{_PREFIX}add_{name}_token"
        adds = keys.flag(key, default)
        if adds and keys.has(key) and name not in vocabulary.special:
            raise ModelLoadError(f"{keys.path}: {key!r} is true, but no key says which token that is")
        config[f"add_{name}_token"] = adds and name in vocabulary.special
    return config


def _add_ends(tokenizer: Tokenizer, vocabulary: Vocabulary, config: dict[str, object]) -> None:
    """BOS before and EOS after a text, as the config says."""
    ends = {name: vocabulary.special[name] for name in ("bos", "eos") if config[f"add_{name}_token"]}
    before, after = [name for name in ends if name == "bos"], [name for name in ends if name == "eos"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        # under names of their own: a token's text may mean something else to a template
        special_tokens=[
            {"id": name, "ids": [index], "tokens": [vocabulary.tokens[index]]} for name, index in ends.items()
        ],
    )
