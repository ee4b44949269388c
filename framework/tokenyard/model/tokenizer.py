"""The tokenizer: text and chats to token ids, ids to text. Imports neither torch nor transformers on the usual path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers

from tokenyard.errors import ModelLoadError, ValidationError
from tokenyard.model.chat_messages import Message, PlainValue, normalise_messages, plain_value
from tokenyard.model.chat_template import ChatTemplate, find_template, template_in_config
from tokenyard.model.control_guard import ControlGuard
from tokenyard.model.json_files import read_json_if_there
from tokenyard.model.text_stream import TextStream
from tokenyard.model.tokenizer_config import apply_config, special_token_names

if TYPE_CHECKING:
    from tokenyard.model.files import ModelFiles

TOKENIZER_FILE = "tokenizer.json"
MAX_TOKENIZER_BYTES = 256 * 2**20


class Tokenizer:
    """A model's tokenizer with its chat template. Immutable after construction; safe to share between threads."""

    def __init__(self, backend: tokenizers.Tokenizer, config: Mapping[str, object], template: str | None) -> None:
        backend.no_truncation()  # some files carry a training run's settings
        backend.no_padding()
        apply_config(backend, config)
        self._backend = backend
        self._special_tokens = special_token_names(config)
        self._template = ChatTemplate(template, self._special_tokens) if template is not None else None
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(index for index, token in added.items() if token.special)
        self.vocab_size = max(backend.get_vocab_size(), *(index + 1 for index in added), 0)

    @property
    def has_chat_template(self) -> bool:
        """Whether render_chat and encode_chat can be used."""
        return self._template is not None

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens, which decoding skips by default."""
        return self._special_ids

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text.

        `add_special_tokens` adds what the tokenizer adds by default (often a BOS). With `parse_special=False` a
        control token's name in the text is encoded as the text that it is.
        """
        _check_encodable(text)
        if not parse_special:
            return self._guard.encode_as_text(text, add_special_tokens=add_special_tokens)
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; ids above the vocabulary have no text."""
        if ids and min(ids) < 0:
            raise ValidationError(f"token id {min(ids)} is negative", parameter="ids", value=min(ids))
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        """A token as the vocabulary spells it; None for an id without one."""
        return self._backend.id_to_token(token_id) if token_id >= 0 else None

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it, or None."""
        return self._backend.token_to_id(token)

    def new_stream(self, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()) -> TextStream:
        """A decoder for one request's output. `prompt_ids` gives it the text before, whose end some decoders need."""

        def decode(ids: Sequence[int]) -> str:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

        skipped = self._special_ids if skip_special_tokens else frozenset[int]()
        return TextStream(decode, skipped_ids=skipped, prompt_ids=prompt_ids)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        **template_kwargs: object,
    ) -> str:
        """The prompt that the chat template makes of the messages."""
        variables = _variables(template_kwargs)
        return self._render(normalise_messages(messages), variables, add_generation_prompt)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        **template_kwargs: object,
    ) -> list[int]:
        """Token ids of the rendered chat; control tokens come from the template only, never from what it was given.

        A control token's name in a message (or in a template variable) is encoded as text. No BOS is added beyond the
        template's own, as in transformers: a template writes all that the model needs.
        """
        chat, variables = normalise_messages(messages), _variables(template_kwargs)
        marked_chat, marked_variables = self._guard.mark(chat), self._guard.mark(variables)
        if marked_chat == chat and marked_variables == variables and not self._guard.always_needed:
            return self.encode(self._render(chat, variables, add_generation_prompt), add_special_tokens=False)
        rendered = self._render(marked_chat, marked_variables, add_generation_prompt)
        _check_encodable(rendered)
        return self._guard.encode_marked(rendered)

    @cached_property
    def _guard(self) -> ControlGuard:
        return ControlGuard(self._backend)

    def _render(
        self, messages: Sequence[Message], variables: Mapping[str, PlainValue], add_generation_prompt: bool
    ) -> str:
        if self._template is None:
            raise ValidationError(
                "this model has no chat template; use completions (generate) with a prompt of your own",
                parameter="messages",
                value=None,
            )
        return self._template.render(messages, add_generation_prompt=add_generation_prompt, variables=variables)


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """The tokenizer of a model: tokenizer.json, a GGUF file's metadata, or what transformers can convert."""
    if files.format == "gguf":
        # numpy, which a folder's tokenizer does not need
        from tokenyard.model.gguf_reader import read_gguf
        from tokenyard.model.gguf_tokenizer import tokenizer_from_gguf

        backend, config = tokenizer_from_gguf(read_gguf(files.path))
        return Tokenizer(backend, config, template_in_config(config.get("chat_template"), files.path))
    folder = files.path
    config = {
        **read_json_if_there(folder / "special_tokens_map.json"),
        **read_json_if_there(folder / "tokenizer_config.json"),
    }
    path = folder / TOKENIZER_FILE
    backend = _from_file(path) if path.is_file() else _converted(folder)
    return Tokenizer(backend, config, find_template(folder, config))


def _from_file(path: Path) -> tokenizers.Tokenizer:
    if path.stat().st_size > MAX_TOKENIZER_BYTES:
        raise ModelLoadError(f"{path}: more than {MAX_TOKENIZER_BYTES} bytes, which no tokenizer needs")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"{path}: not a tokenizer ({error}); fetch the file again") from error


def _converted(folder: Path) -> tokenizers.Tokenizer:
    """Through transformers (seconds to import), for folders with a SentencePiece model or the like only."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        converted = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # whatever its many converters raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelLoadError(
            f"{folder}: no {TOKENIZER_FILE}, and transformers cannot make one of the other files ({reason}); add it"
        ) from error
    if not isinstance(converted, PreTrainedTokenizerFast):
        raise ModelLoadError(f"{folder}: no {TOKENIZER_FILE}, and {type(converted).__name__} cannot be turned into one")
    return converted.backend_tokenizer


def _variables(template_kwargs: Mapping[str, object]) -> dict[str, PlainValue]:
    return {name: plain_value(value, f"chat_template_kwargs.{name}") for name, value in template_kwargs.items()}


def _check_encodable(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValidationError(
            f"the text has a character that UTF-8 cannot encode, {text[error.start]!r} at position {error.start}; "
            "give text that was decoded from valid UTF-8",
            parameter="prompt",
            value=text[error.start],
        ) from error
