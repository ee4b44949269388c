"""The tokenizer: text and chats to token ids, ids to text. Imports neither torch nor transformers on the usual path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from tokenyard.errors import ModelLoadError, ValidationError
from tokenyard.model.byte_stream import ByteStream
from tokenyard.model.chat_messages import Message, PlainValue, normalise_messages
from tokenyard.model.chat_template import (
    DEFAULT,
    FOR_TOOLS,
    MAX_TEMPLATE_BYTES,
    ChatTemplate,
    OpenEnd,
    find_templates,
    templates_in_config,
)
from tokenyard.model.control_guard import ControlGuard
from tokenyard.model.encoding import encode
from tokenyard.model.json_files import read_json_if_there
from tokenyard.model.template_renderer import TemplateRenderer
from tokenyard.model.template_variables import check_template_kwargs, check_tools
from tokenyard.model.text_bounds import TextBound, text_bound
from tokenyard.model.text_stream import TextStream
from tokenyard.model.token_bytes import TokenBytes
from tokenyard.model.tokenizer_config import apply_config, special_token_names, with_added_tokens
from tokenyard.model.tokenizer_conversion import convert_tokenizer
from tokenyard.model.tokenizer_file import library_errors, read_tokenizer_file, vocabulary_size

if TYPE_CHECKING:
    import tokenizers

    from tokenyard.model.files import ModelFiles

TOKENIZER_FILE = "tokenizer.json"

Conversation: TypeAlias = Sequence[Mapping[str, object]]


_QUICK = 2**17  # characters, which are encoded in a tenth of a second or so


class Tokenizer:
    """A model's tokenizer with its chat templates. Immutable after construction; safe to share between threads.

    `template` is the chat template, or several by name: `default`, and `tool_use` for chats with tools. Rendering one
    starts a process, which `close` or the end of this object ends. `origin` begins the messages of ModelLoadError.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: Mapping[str, object],
        template: str | Mapping[str, str] | None,
        *,
        origin: str = "the tokenizer",
    ) -> None:
        backend.no_truncation()  # some files carry a training run's settings
        backend.no_padding()
        with library_errors(lambda reason: ModelLoadError(f"{origin}: its settings do not hold ({reason})")):
            apply_config(backend, config)
        self._backend = backend
        self._vocab_size = vocabulary_size(backend, origin)
        self._special_tokens = special_token_names(config)
        self._renderer = TemplateRenderer()
        sources = {DEFAULT: template} if isinstance(template, str) else template or {}
        self._templates = {name: self._as_template(source) for name, source in sources.items()}
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(index for index, token in added.items() if token.special)
        self._token_bytes = TokenBytes(backend, self._special_ids)

    @property
    def vocab_size(self) -> int:
        """The highest id and 1. A model may have fewer or more embeddings than that."""
        return self._vocab_size

    @property
    def has_chat_template(self) -> bool:
        """Whether render_chat and encode_chat can be used."""
        return DEFAULT in self._templates

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens, which decoding skips by default."""
        return self._special_ids

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        parse_special: bool = True,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Token ids of a text.

        `add_special_tokens` adds what the tokenizer adds by default (often a BOS). With `parse_special=False` a
        control token's name in the text is encoded as the text that it is. A text that is too long for `max_tokens`
        whatever it says is a ValidationError, which costs no time; others may have more tokens than that.
        """
        self._check(text, max_tokens)
        with library_errors(_cannot_encode):
            if not parse_special:
                return self._guard.encode_as_text(text, add_special_tokens=add_special_tokens)
            return encode(self._backend, text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; ids above the vocabulary have no text."""
        if ids and min(ids) < 0:
            raise ValidationError(f"token id {min(ids)} is negative", parameter="ids", value=min(ids))
        known = [index for index in ids if index < self._vocab_size]
        return self._backend.decode(known, skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        """A token as the vocabulary spells it; None for an id without one."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < self._vocab_size else None

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it, or None."""
        return self._backend.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds in the middle of a text, perhaps part of a character; empty for an id without a token.

        A special token has its name. Decoders whose text of a token depends on its neighbours: the token's text alone.
        """
        piece = self._token_bytes.piece(token_id)
        return b"" if piece is None else piece.data

    def new_stream(self, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()) -> ByteStream | TextStream:
        """A decoder for one request's output. `prompt_ids` gives it the text before, whose end some decoders need."""
        if self._token_bytes.spelling is not None:
            return ByteStream(self._token_bytes, skip_special_tokens=skip_special_tokens, prompt_ids=prompt_ids)

        def decode(ids: Sequence[int]) -> str:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

        skipped = self._special_ids if skip_special_tokens else frozenset[int]()
        return TextStream(decode, skipped_ids=skipped, prompt_ids=prompt_ids)

    def render_chat(
        self,
        messages: Conversation,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt that the chat template makes of the messages.

        `continue_final_message` ends it within the last message, for the model to go on with that one. `chat_template`
        takes the place of the model's own, `tools` are handed to it, and `chat_template_kwargs` are more variables
        that it reads. ValidationError for what the template refuses or has no use for.
        """
        chat = normalise_messages(messages)
        template = self._choose_template(chat_template, with_tools=bool(tools))
        given = _Given(chat, *_check_given(template, tools, chat_template_kwargs))
        return _render(template, given, add_generation_prompt, continue_final_message)

    def encode_chat(
        self,
        messages: Conversation,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Token ids of the rendered chat; control tokens come from the template only, never from what it was given.

        Arguments as in `render_chat`, `max_tokens` as in `encode`. A control token's name in a message (or in a
        template variable) is encoded as text. No BOS is added beyond the template's own, as in transformers: a template
        writes all that the model needs.
        """
        chat = normalise_messages(messages)
        template = self._choose_template(chat_template, with_tools=bool(tools))
        given = _Given(chat, *_check_given(template, tools, chat_template_kwargs))
        mark = self._guard.mark
        marked = _Given(mark(given.messages), mark(given.tools), mark(given.variables))
        rendered = _render(template, marked, add_generation_prompt, continue_final_message)
        if marked == given and not self._guard.always_needed:
            return self.encode(rendered, add_special_tokens=False, max_tokens=max_tokens)
        self._check(self._guard.unmark(rendered), max_tokens)
        with library_errors(_cannot_encode):
            return self._guard.encode_marked(rendered)

    def chat_variables(self, chat_template: str | None = None) -> frozenset[str]:
        """The variables that the chat template, or the one given, reads. ValidationError when there is none to read."""
        return self._choose_template(chat_template, with_tools=False).names

    def apply_chat_template(
        self,
        conversation: Conversation,
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        **chat_template_kwargs: object,
    ) -> str | list[int]:
        """`encode_chat`, or `render_chat` with `tokenize=False`, under the name and defaults that transformers has."""
        convert = self.encode_chat if tokenize else self.render_chat
        return convert(
            conversation,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs or None,
        )

    def close(self) -> None:
        """End the process that renders chat templates; another chat starts a new one."""
        self._renderer.close()

    @cached_property
    def _token_bytes(self) -> TokenBytes:
        return TokenBytes(self._backend, self._special_ids)

    @cached_property
    def _text_bound(self) -> TextBound:
        return text_bound(self._backend)

    @cached_property
    def _guard(self) -> ControlGuard:
        return ControlGuard(self._backend)

    def _check(self, text: str, max_tokens: int | None) -> None:
        _check_encodable(text)
        if max_tokens is None or len(text) <= _QUICK:  # and its tokens are counted, which says more
            return
        per_token, size = self._text_bound.bytes_per_token, self._text_bound.size(text)
        if size > max_tokens * per_token:
            raise ValidationError(
                f"the prompt is text of {size} bytes; model.max_model_len leaves room for {max_tokens} tokens, which "
                f"are at most {max_tokens * per_token} bytes ({per_token} a token): shorten it, or raise the limit if "
                "the model allows",
                parameter="prompt",
                value=size,
            )

    def _as_template(self, source: str) -> ChatTemplate:
        return ChatTemplate(source, self._special_tokens, self._renderer)

    def _choose_template(self, given: str | None, *, with_tools: bool) -> ChatTemplate:
        if given is not None:
            if not isinstance(given, str) or len(given) > MAX_TEMPLATE_BYTES:
                raise ValidationError(
                    f"chat_template must be the text of a template, of at most {MAX_TEMPLATE_BYTES} characters",
                    parameter="chat_template",
                    value=None,
                )
            return self._as_template(given)
        for name in (FOR_TOOLS, DEFAULT) if with_tools else (DEFAULT,):
            if name in self._templates:
                return self._templates[name]
        raise ValidationError(
            "this model has no chat template; use completions (generate) with a prompt of your own, or give a "
            "chat_template",
            parameter="messages",
            value=None,
        )


class _Given(NamedTuple):
    """What a template is given, as JSON values."""

    messages: list[Message]
    tools: PlainValue
    variables: dict[str, PlainValue]


def _check_given(
    template: ChatTemplate, tools: Sequence[Mapping[str, object]] | None, kwargs: Mapping[str, object] | None
) -> tuple[PlainValue, dict[str, PlainValue]]:
    if tools is None and kwargs is None:
        return None, {}
    return check_tools(tools, template.names), check_template_kwargs(kwargs, template.names)


def _render(template: ChatTemplate, given: _Given, add_generation_prompt: bool, continue_final_message: bool) -> str:
    if not continue_final_message:
        return template.render(*given, add_generation_prompt=add_generation_prompt)
    if add_generation_prompt:
        raise ValidationError(
            "continue_final_message goes on with the last message and add_generation_prompt begins a new one; "
            "set add_generation_prompt=False",
            parameter="continue_final_message",
            value=True,
        )
    end = OpenEnd()
    rendered = template.render(end.put(given.messages), given.tools, given.variables, add_generation_prompt=False)
    return end.cut(rendered, given.messages[-1])


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """The tokenizer of a model: tokenizer.json, a GGUF file's metadata, or what transformers can convert."""
    if files.format == "gguf":
        # numpy, which a folder's tokenizer does not need
        from tokenyard.model.gguf_reader import read_gguf
        from tokenyard.model.gguf_tokenizer import tokenizer_from_gguf

        backend, config = tokenizer_from_gguf(read_gguf(files.path))
        templates = templates_in_config(config.get("chat_template"), files.path)
        return Tokenizer(backend, config, templates, origin=str(files.path))
    folder = files.path
    config = {
        **read_json_if_there(folder / "special_tokens_map.json"),
        **read_json_if_there(folder / "tokenizer_config.json"),
    }
    path = folder / TOKENIZER_FILE
    if path.is_file():
        backend = read_tokenizer_file(path)
        added = folder / "added_tokens.json"
        with library_errors(lambda reason: ModelLoadError(f"{added}: not tokens ({reason}); fetch the file again")):
            config = with_added_tokens(config, read_json_if_there(added), backend)
        return Tokenizer(backend, config, find_templates(folder, config), origin=str(path))
    backend, special_tokens = convert_tokenizer(folder)
    return Tokenizer(backend, {**special_tokens, **config}, find_templates(folder, config), origin=str(folder))


def _cannot_encode(reason: str) -> ValidationError:
    return ValidationError(f"the tokenizer cannot encode this text ({reason})", parameter="prompt", value=None)


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
