from __future__ import annotations

import errno
import logging
from pathlib import Path

import fake_hub
import pytest
from fake_hub import SECRET, FakeHub, refusal
from hypothesis import given
from hypothesis import strategies as st
from tokenyard import LLM
from tokenyard.errors import ModelLoadError
from tokenyard.model.files import resolve_model
from tokenyard.model.hub import HubId, parse_hub_id

REPO = "Org/Tiny"


def test_an_unknown_repository_is_one_line_with_advice(hub: FakeHub) -> None:
    assert "no such repository" in refusal("Org/Nothing")
    assert "HF_TOKEN" in refusal("Org/Nothing")


@pytest.mark.parametrize(
    ("status", "reason"), [(401, "token"), (403, "token"), (429, "wait"), (500, "500"), (503, "503"), (418, "418")]
)
def test_what_the_hub_answers_is_told(hub: FakeHub, status: int, reason: str) -> None:
    hub.status = status
    assert reason in refusal(REPO)


@pytest.mark.parametrize("gated", [True, False])
def test_a_token_opens_what_is_closed_without_it(tiny_llama_dir: Path, hub: FakeHub, gated: bool) -> None:
    hub.add(REPO, tiny_llama_dir)
    hub.token, hub.gated = SECRET, gated
    assert ("accept its conditions" if gated else "private") in refusal(REPO)
    assert "HF_TOKEN" in refusal(REPO, token="hf_other")
    assert resolve_model(REPO, token=SECRET).commit is not None


def test_hf_token_of_the_environment_is_used_unless_it_is_switched_off(
    tiny_llama_dir: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(REPO, tiny_llama_dir)
    hub.token = SECRET
    monkeypatch.setenv("HF_TOKEN", SECRET)
    assert "private" in refusal(REPO, token=False)
    assert resolve_model(REPO).commit is not None
    assert {seen.token for seen in hub.seen} == {None, SECRET}


def test_a_token_that_must_be_there_and_is_not_is_an_error(hub: FakeHub) -> None:
    assert "no token is stored" in refusal(REPO, token=True)
    assert hub.seen == []


@pytest.mark.parametrize("odd", ["\n", " x", "\0", "é", "\x7f"])
@pytest.mark.parametrize("way", ["argument", "environment"])
def test_a_token_that_no_header_can_carry_is_refused_without_showing_it(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, odd: str, way: str
) -> None:
    token = f"{SECRET}{odd}{SECRET}"
    if way == "argument":
        assert "not shown" in refusal(REPO, token=token)
    elif "\0" not in odd:
        monkeypatch.setenv("HF_TOKEN", token)
        refusal(REPO)
    assert "not shown" in refusal(REPO, token="")


def test_a_token_is_in_no_config_log_or_error(
    tiny_llama_dir: Path, hub: FakeHub, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.add(REPO, tiny_llama_dir)
    hub.token = SECRET
    caplog.set_level(logging.DEBUG)
    with pytest.raises(ModelLoadError) as caught:
        LLM("Org/Nothing", hf_token=SECRET)
    error: BaseException | None = caught.value
    while error is not None:
        assert SECRET not in f"{error!r} {error}"
        error = error.__cause__ or error.__context__
    with LLM(REPO, max_model_len=64, hf_token=SECRET) as llm:
        assert SECRET not in repr(vars(llm)) + repr(vars(llm.model_config)) + repr(llm.engine)
    assert SECRET in {seen.token for seen in hub.seen}
    assert SECRET not in caplog.text + "".join(capfd.readouterr())


def test_a_full_disk_is_told_with_the_way_out(
    tiny_llama_dir: Path, hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(REPO, tiny_llama_dir)

    def no_space(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", no_space)
    message = refusal(REPO)
    assert f"no space left in {cache}" in message
    assert "HF_HUB_CACHE" in message


def test_a_cache_that_cannot_be_written_is_told_with_the_way_out(
    tiny_llama_dir: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(REPO, tiny_llama_dir)

    def no_right(*arguments: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", no_right)
    assert "cannot be written to" in refusal(REPO)


def test_a_download_that_broke_off_leaves_no_model_and_goes_on_later(
    tiny_llama_dir: Path, hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    commit = hub.add(REPO, tiny_llama_dir)
    hub.break_after = 1000
    assert "start again" in refusal(REPO)
    fake_hub.use_in_process(monkeypatch, cache, None)
    assert "missing: model.safetensors" in refusal(REPO)
    fake_hub.use_in_process(monkeypatch, cache, hub.url)
    hub.break_after = None
    hub.seen.clear()
    files = resolve_model(REPO)
    assert files.commit == commit
    assert (files.path / "model.safetensors").read_bytes() == (tiny_llama_dir / "model.safetensors").read_bytes()
    assert hub.fetched() == ["model.safetensors"]


# Names


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen/Qwen3-0.6B", HubId("Qwen/Qwen3-0.6B")),
        ("a/b:c-Q8_0.gguf", HubId("a/b", "c-Q8_0.gguf")),
        ("meta-llama/Llama-3.2-1B", HubId("meta-llama/Llama-3.2-1B")),
        ("gpt2", None),
        ("a/b/c", None),
        ("/a/b", None),
        ("./a", None),
        ("a/..", None),
        ("a/b--c", None),
        ("a/b.gguf", None),
        ("~/a", None),
        ("a/b\n", None),
        ("ä/b", None),
        ("a/" + "b" * 200, None),
    ],
)
def test_what_is_a_hub_id(name: str, expected: HubId | None) -> None:
    assert parse_hub_id(name) == expected


@pytest.mark.parametrize("file", ["", "../x.gguf", "x.bin", "a/x.gguf", "*.gguf", "x.gguf:y", "Q4_K_M"])
def test_b9_after_the_colon_only_the_name_of_a_gguf_file_is_taken(offline: Path, file: str) -> None:
    assert ".gguf file" in refusal(f"a/b:{file}")


@given(st.text(max_size=40) | st.from_regex(r"[\w.:/-]{1,30}/[\w.:/-]{1,30}", fullmatch=True))
def test_b9_a_hub_id_has_no_part_that_leads_out_of_the_cache(name: str) -> None:
    try:
        found = parse_hub_id(name)
    except ModelLoadError:
        return
    if found is not None:
        assert found.repository.count("/") == 1
        for text in (*found.repository.split("/"), found.file or "x"):
            assert text.isascii()
            assert ".." not in text or text == found.file
            assert not set(text) & set("/\\\0*?[]: \n")
