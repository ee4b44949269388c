"""Flags of `tokenyard serve`, by vLLM's names where it has them."""

from __future__ import annotations

from tokenyard.launch import flag_values as values
from tokenyard.launch.flag_values import Flag

SERVER_FLAGS = (
    Flag("--host", "server.host", values.text, "HOST", "name or address to listen on (127.0.0.1)"),
    Flag("--port", "server.port", values.integer, "PORT", "0 = one that is free (8000)"),
    Flag("--uds", "server.uds", values.text, "PATH", "listen on a Unix domain socket instead"),
    Flag("--root-path", "server.root_path", values.text, "PATH", "the prefix under which a proxy serves this"),
    Flag(
        "--served-model-name",
        "server.served_model_name",
        values.item,
        "NAME",
        "a name that requests may use; may be given several times, the first one stands in answers",
        is_list=True,
    ),
    Flag("--response-role", "server.response_role", values.text, "ROLE", "of chat answers (assistant)"),
    Flag("--chat-template", "server.chat_template", values.text, "FILE", "a file, or the template itself"),
    Flag(
        "--default-chat-template-kwargs",
        "server.default_chat_template_kwargs",
        values.json_object,
        "JSON",
        "variables of the template, unless a request has them",
    ),
    Flag("--trust-request-chat-template", "server.trust_request_chat_template", None, "", "requests may bring one"),
    Flag("--ssl-keyfile", "server.ssl_keyfile", values.text, "FILE", "the certificate's key, PEM"),
    Flag("--ssl-certfile", "server.ssl_certfile", values.text, "FILE", "the server's certificate, PEM: serve HTTPS"),
    Flag("--ssl-ca-certs", "server.ssl_ca_certs", values.text, "FILE", "clients need a certificate that these sign"),
    Flag(
        "--allowed-origins",
        "server.allowed_origins",
        values.origins,
        "ORIGIN",
        "of browsers (CORS): one, or a JSON list; may be given several times",
        is_list=True,
    ),
    Flag(
        "--allowed-hosts",
        "server.allowed_hosts",
        values.origins,
        "HOST",
        "accepted Host headers: one, or a JSON list; may be given several times",
        is_list=True,
    ),
    Flag("--shutdown-timeout", "server.shutdown_timeout", values.number, "S", "that running requests have at the end"),
    Flag("--max-num-queued-reqs", "server.max_num_queued_reqs", values.count, "N", "unfinished requests; beyond: 503"),
    Flag(
        "--max-num-queued-tokens",
        "server.max_num_queued_tokens",
        values.count,
        "N",
        "prompt tokens that wait for their prefill; beyond: 503",
    ),
    Flag("--request-timeout", "server.request_timeout", values.number, "S", "of requests that name none"),
    Flag("--slow-reader-timeout", "server.slow_reader_timeout", values.number, "S", "in which a stream takes nothing"),
    Flag("--stall-timeout", "server.stall_timeout", values.number, "S", "without a step before /readyz says so"),
    Flag("--restart-engine", "server.restart_engine", None, "", "start a dead engine again"),
    Flag("--enable-log-requests", "server.log_requests", None, "", "a line for each request, without its text"),
    Flag("--disable-log-requests", "server.log_requests", None, "", "none of them", is_inverted=True),
    Flag("--disable-log-stats", "engine.log_stats", None, "", "no statistics of the engine", is_inverted=True),
    Flag("--log-stats-interval", "server.log_stats_interval", values.number, "S", "of the line about load; 0 = none"),
    Flag("--otlp-traces-endpoint", "server.otlp_traces_endpoint", values.text, "URL", "where spans go"),
)
