"""From the conversation in a request's body to a prompt, by the settings of the server and of the request."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tokenyard.errors import UnsupportedError, ValidationError
from tokenyard.front_end import ChatOptions
from tokenyard.model.chat_messages import normalise_messages
from tokenyard.server.prompts import prompt_from

if TYPE_CHECKING:
    from tokenyard.engine.input_processor import TokenizedPrompt
    from tokenyard.front_end import FrontEnd
    from tokenyard.server.protocol.chat import ChatRequest
    from tokenyard.server.service import Service


def tokenize_chat(service: Service, body: ChatRequest) -> TokenizedPrompt:
    """The checked prompt; its text is what the chat template made, if the request wants to see that. Blocks."""
    front = service.engine.front
    options = chat_options(
        service,
        add_generation_prompt=body.adds_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        chat_template=body.chat_template,
        tools=body.tools or None,
        variables=body.chat_template_kwargs,
    )
    if body.reasoning_effort is not None:
        options = _with_effort(options, body.reasoning_effort, front)
    with prompt_from("messages"):
        prompt = front.tokenize_chat(body.messages, options)
    return replace(prompt, text=_rendered(front, body.messages, options)) if body.return_prompt_text else prompt


def chat_options(
    service: Service,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    tools: Sequence[Mapping[str, object]] | None = None,
    variables: Mapping[str, object] | None = None,
) -> ChatOptions:
    """What a request asks for, over the server's own settings.

    ValidationError for a template, where requests may not bring one: a template is a program.
    """
    server = service.config.server
    if chat_template is not None and not server.trust_request_chat_template:
        raise ValidationError(
            "chat_template: this server uses its own chat template; leave it out (or have the server started with "
            "server.trust_request_chat_template=true)",
            parameter="chat_template",
            value=None,
        )
    if variables is None or isinstance(variables, Mapping):  # else refused where variables are checked
        variables = {**server.default_chat_template_kwargs, **(variables or {})} or None
    return ChatOptions(
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        chat_template=service.chat_template if chat_template is None else chat_template,
        tools=tools,
        chat_template_kwargs=variables,
    )


def answer_role(service: Service, body: ChatRequest) -> str:
    """The role of the answer: the server's for a new message, that of the last one where the answer goes on with it.

    The messages have been checked.
    """
    if body.adds_generation_prompt:
        return service.config.server.response_role
    return str(body.messages[-1]["role"])


def echoed_text(body: ChatRequest, role: str) -> str:
    """What the answer begins with: with `echo` the last message, if it has the answer's role."""
    (last,) = normalise_messages(body.messages[-1:])
    return str(last["content"]) if body.echo and last["role"] == role else ""


def _with_effort(options: ChatOptions, effort: str, front: FrontEnd) -> ChatOptions:
    """`reasoning_effort` as the template has it; UnsupportedError when it has no place for it."""
    names = front.tokenizer.chat_variables(options.chat_template)
    variables = _effort_variables(effort, names)
    if not variables and effort != "none":
        raise UnsupportedError(
            f"reasoning_effort={effort!r}: this model's chat template does not read it; leave it out",
            parameter="reasoning_effort",
            value=effort,
        )
    return replace(options, chat_template_kwargs={**variables, **(options.chat_template_kwargs or {})} or None)


def _effort_variables(effort: str, names: Collection[str]) -> dict[str, object]:
    variables: dict[str, object] = {"reasoning_effort": effort} if "reasoning_effort" in names else {}
    if effort == "none" and "enable_thinking" in names:
        variables["enable_thinking"] = False
    return variables


def _rendered(front: FrontEnd, messages: Sequence[Mapping[str, object]], options: ChatOptions) -> str:
    return front.tokenizer.render_chat(
        messages,
        add_generation_prompt=options.add_generation_prompt,
        continue_final_message=options.continue_final_message,
        chat_template=options.chat_template,
        tools=options.tools,
        chat_template_kwargs=options.chat_template_kwargs,
    )
