"""Chat templates: finding a model's template, and rendering messages with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from tokenyard.errors import ModelLoadError, ValidationError

if TYPE_CHECKING:
    from jinja2 import Template

    from tokenyard.model.chat_messages import Message, PlainValue
    from tokenyard.model.template_sandbox import TemplateSandbox

TEMPLATE_FILE = "chat_template.jinja"
MAX_TEMPLATE_BYTES = 2**20
_OWN_NAMES = frozenset(
    {"messages", "add_generation_prompt", "raise_exception", "strftime_now", "chat_template", "tokenize"}
)


class ChatTemplate:
    """One template with the model's special tokens; compiled when it is first used."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, PlainValue],
    ) -> str:
        """The prompt text; ValidationError with the template's own words when it refuses the messages."""
        if reserved := sorted(variables.keys() & (_OWN_NAMES | self._special_tokens.keys())):
            raise ValidationError(
                f"chat template variable {reserved[0]!r} is set by the engine and cannot be given",
                parameter="chat_template_kwargs",
                value=reserved[0],
            )
        sandbox, template = self._compiled
        known = {"tools": None, "documents": None, **self._special_tokens, **variables}
        try:
            return sandbox.render(
                template, {**known, "messages": messages, "add_generation_prompt": add_generation_prompt}
            )
        except Exception as error:  # anything at all may be raised by somebody else's template
            raise _refusal("the chat template refuses these messages", error, messages) from error

    @cached_property
    def _compiled(self) -> tuple[TemplateSandbox, Template]:
        from tokenyard.model.template_sandbox import TemplateSandbox  # jinja2: 35 ms that completions do not need

        sandbox = TemplateSandbox()
        try:
            return sandbox, sandbox.compile_template(self.source)
        except Exception as error:
            raise _refusal("the model's chat template cannot be used", error, None) from error


def find_template(folder: Path, tokenizer_config: Mapping[str, object]) -> str | None:
    """A folder's template: chat_template.jinja, else tokenizer_config's (of several, the one named `default`)."""
    path = folder / TEMPLATE_FILE
    if path.is_file():
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            raise ModelLoadError(f"{path}: more than {MAX_TEMPLATE_BYTES} bytes, which no chat template needs")
        try:
            return path.read_text(encoding="utf-8")
        except ValueError as error:
            raise ModelLoadError(f"{path}: not UTF-8 text") from error
    return template_in_config(tokenizer_config.get("chat_template"), folder)


def template_in_config(value: object, path: Path) -> str | None:
    """The template in tokenizer_config's `chat_template`: text, or a list of named ones."""
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, Mapping)}
        value = named.get("default")
    if value is None:
        return None
    if not isinstance(value, str) or len(value) > MAX_TEMPLATE_BYTES:
        raise ModelLoadError(f"{path}: 'chat_template' must be text of at most {MAX_TEMPLATE_BYTES} bytes")
    return value


def _refusal(what: str, error: Exception, messages: object) -> ValidationError:
    lines = str(error).splitlines() or [type(error).__name__]
    return ValidationError(f"{what}: {' '.join(lines)[:500]}", parameter="messages", value=messages)
