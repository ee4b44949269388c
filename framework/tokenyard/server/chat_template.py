"""The server's own chat settings: `server.chat_template` and `server.default_chat_template_kwargs`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from tokenyard.errors import ConfigError, ModelLoadError, ValidationError
from tokenyard.model.chat_template import MAX_TEMPLATE_BYTES, read_template
from tokenyard.model.template_variables import check_template_kwargs
from tokenyard.sampling_checks import short

if TYPE_CHECKING:
    from tokenyard.config import ServerConfig
    from tokenyard.model.tokenizer import Tokenizer


def server_template(config: ServerConfig) -> str | None:
    """The text of `server.chat_template`, which is a file or the text itself; None = the model's own is used.

    Reads the file. Raises ConfigError for what is neither.
    """
    given = config.chat_template
    if given is None:
        return None
    if os.path.isfile(given):
        try:
            return read_template(Path(given))
        except (ModelLoadError, OSError) as error:
            raise ConfigError(f"server.chat_template: {error}") from error
    if "{" not in given:
        raise ConfigError(f"server.chat_template={short(given)}: there is no such file, and it is no template either")
    if len(given) > MAX_TEMPLATE_BYTES:
        raise ConfigError(f"server.chat_template has {len(given)} characters; at most {MAX_TEMPLATE_BYTES} are allowed")
    return given


def check_chat_settings(config: ServerConfig, template: str | None, tokenizer: Tokenizer) -> None:
    """Check the settings against the model, so that no request fails for them. Blocks if there are any.

    `template` is what `server_template` returned. Raises ConfigError.
    """
    if template is None and not config.default_chat_template_kwargs:
        return  # what there is to check takes a process
    try:
        names = tokenizer.chat_variables(template)
        check_template_kwargs(config.default_chat_template_kwargs, names)
    except ValidationError as error:
        name = "chat_template" if error.parameter == "messages" else "default_chat_template_kwargs"
        raise ConfigError(f"server.{name}: {error}") from error
