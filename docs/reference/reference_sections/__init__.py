"""What fills the generated regions of the reference pages: a function without arguments for each region."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from reference_sections import api, cli, config_keys, http, interfaces, plugin_api, server, testing

Section: TypeAlias = Callable[[], str]

SECTIONS: Mapping[str, Section] = {
    "config.groups": config_keys.groups,
    "config.components": config_keys.components,
    "config.reserved": config_keys.reserved,
    "plugins.version": plugin_api.version,
    "plugins.hooks": plugin_api.hooks,
    "plugins.descriptors": plugin_api.descriptors,
    "interfaces.contracts": interfaces.contracts,
    "interfaces.data": interfaces.data,
    "api.names": api.names,
    "api.llm_arguments": api.llm_arguments,
    "api.llm_neutral": api.llm_neutral_arguments,
    "api.llm_methods": api.llm_methods,
    "api.async_llm": api.async_llm,
    "api.sampling": api.sampling_params,
    "api.outputs": api.outputs,
    "api.metrics": api.metrics,
    "api.errors": api.errors,
    "http.endpoints": http.endpoints,
    "http.sampling": http.sampling_fields,
    "http.completions": http.completion_fields,
    "http.chat": http.chat_fields,
    "http.tokens": http.token_fields,
    "http.refused": http.refused_fields,
    "server.metrics": server.metrics,
    "server.timelines": server.timelines,
    "testing.names": testing.names,
    "testing.harness": testing.harness,
    "testing.contracts": testing.contracts,
    "testing.attention": testing.attention_steps,
    "testing.errors": testing.errors,
    "cli.commands": cli.commands,
    "cli.bench_keys": config_keys.bench,
    "cli.engine_flags": cli.engine_flags,
    "cli.server_flags": cli.server_flags,
    "cli.refused_flags": cli.refused_flags,
}
