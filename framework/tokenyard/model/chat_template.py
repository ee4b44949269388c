"""Chat templates: finding a model's template, and rendering messages with it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from tokenyard.errors import ModelLoadError, ValidationError
from tokenyard.model.template_renderer import TemplateFailedError, TemplateRenderer

if TYPE_CHECKING:
    from tokenyard.model.chat_messages import Message, PlainValue

TEMPLATE_FILE = "chat_template.jinja"
MAX_TEMPLATE_BYTES = 2**20
DEFAULT, FOR_TOOLS = "default", "tool_use"  # names of templates, where a model has several

NamedTemplates: TypeAlias = dict[str, str]


class ChatTemplate:
    """One template with the model's special tokens."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], renderer: TemplateRenderer) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._renderer = renderer

    @property
    def names(self) -> frozenset[str]:
        """The variables that the template reads."""
        try:
            return self._renderer.names(self.source)
        except TemplateFailedError as error:
            raise _refusal(f"the chat template cannot be used: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        tools: PlainValue,
        variables: Mapping[str, PlainValue],
        *,
        add_generation_prompt: bool,
    ) -> str:
        """The prompt text; ValidationError with the template's own words when it refuses the messages."""
        given: dict[str, PlainValue] = {"documents": None, **self._special_tokens, **variables, "tools": tools}
        try:
            return self._renderer.render(
                self.source, {**given, "messages": list(messages), "add_generation_prompt": add_generation_prompt}
            )
        except TemplateFailedError as error:
            raise _refusal(f"the chat template refuses these messages: {error}") from error


class OpenEnd:
    """Leaves the final message of a chat open: a mark is put at its end, and the rendered text is cut there."""

    def __init__(self) -> None:
        self._mark = f"\ue003{secrets.randbelow(10**20):020d}\ue003"

    def put(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with the mark at the end."""
        *earlier, final = messages
        # With a space after it the mark shows whether the template trims the message's end.
        return [*earlier, {**final, "content": f"{final['content']}{self._mark} "}]

    def cut(self, rendered: str, final: Message) -> str:
        """The rendered text up to the end of the final message, trimmed as the template trims."""
        place = rendered.rfind(self._mark)
        if place < 0 or str(final["content"]).strip() not in rendered:
            raise _refusal("continue_final_message: the chat template does not show the final message as it is")
        before = rendered[:place]
        return before if rendered.startswith(" ", place + len(self._mark)) else before.rstrip()


def find_templates(folder: Path, tokenizer_config: Mapping[str, object]) -> NamedTemplates:
    """A folder's templates by name: chat_template.jinja, else tokenizer_config's; empty when it has none."""
    path = folder / TEMPLATE_FILE
    if path.is_file():
        return {DEFAULT: read_template(path)}
    return templates_in_config(tokenizer_config.get("chat_template"), folder)


def read_template(path: Path) -> str:
    """The template in a file; ModelLoadError when it is too large or no text."""
    if path.stat().st_size > MAX_TEMPLATE_BYTES:
        raise ModelLoadError(f"{path}: more than {MAX_TEMPLATE_BYTES} bytes, which no chat template needs")
    try:
        return path.read_text(encoding="utf-8")
    except ValueError as error:
        raise ModelLoadError(f"{path}: not UTF-8 text") from error


def templates_in_config(value: object, path: Path) -> NamedTemplates:
    """The templates in tokenizer_config's `chat_template`: text, or a list of named ones."""
    if value is None:
        return {}
    if isinstance(value, list):
        entries = [(item.get("name"), item.get("template")) for item in value if isinstance(item, Mapping)]
    else:
        entries = [(DEFAULT, value)]
    templates = {}
    for name, text in entries:
        if not isinstance(name, str) or not isinstance(text, str) or len(text) > MAX_TEMPLATE_BYTES:
            raise ModelLoadError(f"{path}: 'chat_template' must be text of at most {MAX_TEMPLATE_BYTES} bytes")
        templates[name] = text
    return templates


def _refusal(what: str) -> ValidationError:
    return ValidationError(what, parameter="messages", value=None)
