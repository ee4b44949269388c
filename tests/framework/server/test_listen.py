"""The listening socket: bound at once, with one line for each mistake."""

from __future__ import annotations

import socket
import ssl
import stat
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from http_server import free_port, running_server, server_process
from tokenyard.config import EngineConfig, ServerConfig
from tokenyard.errors import ConfigError, UserError
from tokenyard.server import run
from tokenyard.server.listen import check_certificates, open_listener
from tokenyard.server.run import check_packages, load_config

TLS = Path(__file__).resolve().parent.parent.parent / "fixtures" / "tls"
CERT, KEY = TLS / "cert.pem", TLS / "key.pem"  # for localhost; it signs itself


def refusal(config: ServerConfig) -> str:
    with pytest.raises(ConfigError) as caught, open_listener(config):
        pass
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_busy_port_is_one_line_that_says_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        message = refusal(ServerConfig(port=port))
    assert f"port {port}" in message
    assert "--port" in message


@pytest.mark.parametrize("host", ["no-such-host.invalid", "300.1.1.1", "192.0.2.1"])
def test_a_host_that_is_not_of_this_machine_is_refused(host: str) -> None:
    assert host in refusal(ServerConfig(host=host, port=0))


def test_port_0_is_a_free_one_which_the_address_names() -> None:
    with open_listener(ServerConfig(port=0, root_path="/llm")) as listener:
        port = listener.socket.getsockname()[1]
        assert listener.address == f"http://127.0.0.1:{port}/llm"
    with open_listener(ServerConfig(port=port)):
        pass  # given back


def test_an_ipv6_address_is_shown_in_brackets() -> None:
    try:
        with open_listener(ServerConfig(host="::1", port=0)) as listener:
            assert listener.address.startswith("http://[::1]:")
    except ConfigError as error:
        pytest.skip(str(error))


def test_a_unix_socket_is_gone_at_the_end_and_one_left_behind_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    config = ServerConfig(uds=str(path))
    with open_listener(config):
        assert stat.S_ISSOCK(path.stat().st_mode)
        assert "in use" in refusal(config)
        assert path.exists()
    assert not path.exists()
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    with open_listener(config):
        pass


@pytest.mark.parametrize(
    ("name", "piece"), [("folder", "not a socket"), ("file", "not a socket"), ("x" * 120, "longer")]
)
def test_a_path_that_is_no_socket_is_left_alone(tmp_path: Path, name: str, piece: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    assert piece in refusal(ServerConfig(uds=str(tmp_path / name)))
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "folder must exist" in refusal(ServerConfig(uds=str(tmp_path / "none" / "api.sock")))


def test_a_server_answers_on_a_unix_socket(tiny_llama_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    with running_server([f"server.uds={path}"], model=tiny_llama_dir), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert client.makefile("rb").read().startswith(b"HTTP/1.1 200")


def test_a_server_speaks_tls(tiny_llama_dir: Path) -> None:
    overrides = [f"server.ssl_certfile={CERT}", f"server.ssl_keyfile={KEY}"]
    with running_server(overrides, model=tiny_llama_dir) as server:
        assert server.url.startswith("https://")
        url = server.url.replace("127.0.0.1", "localhost") + "/health"
        context = ssl.create_default_context(cafile=str(CERT))
        with urllib.request.urlopen(url, context=context) as answer:
            assert answer.status == 200


def test_with_ca_certs_a_client_needs_a_certificate(tiny_llama_dir: Path) -> None:
    overrides = [
        f"server.ssl_certfile={CERT}",
        f"server.ssl_keyfile={KEY}",
        f"server.ssl_ca_certs={CERT}",
    ]
    with running_server(overrides, model=tiny_llama_dir) as server:
        url = server.url.replace("127.0.0.1", "localhost") + "/health"
        context = ssl.create_default_context(cafile=str(CERT))
        with pytest.raises((ssl.SSLError, ConnectionError, urllib.error.URLError)):
            urllib.request.urlopen(url, context=context)
        context.load_cert_chain(CERT, KEY)
        with urllib.request.urlopen(url, context=context) as answer:
            assert answer.status == 200


def test_a_certificate_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    good = ServerConfig(ssl_certfile=str(CERT), ssl_keyfile=str(KEY))
    check_certificates(good)
    (tmp_path / "no.pem").write_text("nothing", encoding="utf-8")
    for bad, piece in [
        (replace(good, ssl_certfile=str(tmp_path / "none.pem")), "none.pem"),
        (replace(good, ssl_certfile=str(tmp_path / "no.pem")), "no.pem"),
        (replace(good, ssl_keyfile=str(TLS / "key-with-password.pem")), "without a password"),
        (replace(good, ssl_ca_certs=str(tmp_path / "no.pem")), "no.pem"),
        (ServerConfig(ssl_keyfile=str(KEY)), "needs server.ssl_certfile"),
        (ServerConfig(ssl_ca_certs=str(CERT)), "needs server.ssl_certfile"),
    ]:
        with pytest.raises(ConfigError, match=piece) as caught:
            check_certificates(bad)
        assert "\n" not in str(caught.value)


def test_2_3_19_a_busy_port_ends_the_command_before_the_model_is_looked_for(tmp_path: Path) -> None:
    """PRC-05, its last sentence."""
    port = free_port()
    arguments = [str(tmp_path / "no-model"), f"--port={port}"]
    with socket.create_server(("127.0.0.1", port)), server_process(arguments, wait=False) as server:
        assert server.process.wait(60) == 2
        (line,) = [line for line in server.log.splitlines() if line.startswith("error: ")]
        assert f"port {port}" in line
        assert "no-model" not in server.log


@pytest.mark.slow
def test_e5_a_server_that_everybody_can_reach_without_a_key_warns_in_a_box(tmp_path: Path) -> None:
    arguments = [str(tmp_path / "no-model"), "--host=0.0.0.0"]
    for keys, expected in [({}, 1), ({"TOKENYARD_API_KEY": "a-key"}, 0)]:
        with server_process(arguments, wait=False, environment=keys) as server:
            assert server.process.wait(60) == 2
            assert server.log.count("it has no API key") == expected
            assert server.log.count("+-----") == 2 * expected


def test_what_is_missing_is_named_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    check_packages()
    monkeypatch.setattr(run, "find_spec", lambda name: None if name == "fastapi" else object())
    with pytest.raises(UserError, match=r"fastapi.*pip install 'tokenyard\[serve\]'"):
        check_packages()


def test_a_script_gives_a_config_a_dict_or_overrides() -> None:
    assert load_config(["server.port=1"])[0].server.port == 1
    assert load_config({"server": {"port": 2}})[0].server.port == 2
    assert load_config(())[0] == EngineConfig()
    for wrong in ("server.port=1", 3, [3]):
        with pytest.raises(UserError):
            load_config(wrong)  # type: ignore[arg-type]
