"""A fetch that is refused says why in one line and leaves nothing; a token goes nowhere it need not."""

# ruff: noqa: F811

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import models_hub
from scripts.model_fetch_named import main
from tests.fakes import checkpoint
from tests.fakes.checkpoint import SHARDS
from tests.fakes.hub import Hub
from tests.unit.model_hub import NAME, TOKEN, give_token, hub, said, server, tree  # noqa: F401 - two are fixtures, which arguments name


def test_a_gated_model_without_a_token_names_the_page_and_the_file(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.repos[NAME].gated, hub.repos[NAME].readers = "manual", (TOKEN,)
    assert main([NAME]) == 1
    message = said(capsys)
    assert f"accept it on {hub.url}/{NAME}" in message
    assert str(tmp_path / "secrets/private/hf_token") in message
    assert "HF_TOKEN is set" not in message
    assert tree(tmp_path) == set()


def test_a_token_in_the_environment_is_not_used_and_that_is_said(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.repos[NAME].gated, hub.repos[NAME].readers = "auto", (TOKEN,)
    assert main([NAME]) == 1
    assert "HF_TOKEN is set, but not read" in said(capsys)
    assert not any(seen.authorization for seen in hub.seen)


def test_a_gated_model_is_given_to_a_token_that_the_cdn_never_sees(hub: Hub, tmp_path: Path) -> None:
    give_token(tmp_path)
    hub.repos[NAME].gated, hub.repos[NAME].readers = "auto", (TOKEN,)
    assert main([NAME]) == 0
    assert any(seen.authorization == f"Bearer {TOKEN}" for seen in hub.seen if seen.port == "hub")
    assert hub.gets()
    assert not any(seen.authorization for seen in hub.gets())


def test_an_open_model_is_asked_for_without_the_token(hub: Hub, tmp_path: Path) -> None:
    give_token(tmp_path)
    assert main([NAME]) == 0
    assert not any(seen.authorization for seen in hub.seen)


def test_a_licence_not_yet_granted_is_told_from_a_wrong_token(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    give_token(tmp_path)
    hub.repos[NAME].gated = "manual"
    assert main([NAME]) == 1
    assert "may not read acme/Tiny-Chat yet" in said(capsys)
    hub.valid = set()
    assert main([NAME]) == 1
    assert "is refused (wrong, ended or withdrawn)" in said(capsys)


def test_a_private_model_is_found_with_a_token_alone(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.repos[NAME].private, hub.repos[NAME].readers = True, (TOKEN,)
    assert main([NAME]) == 1
    assert "has no model acme/Tiny-Chat, or it is private" in said(capsys)
    give_token(tmp_path)
    assert main([NAME]) == 0


def test_a_token_file_of_ones_own_and_a_bad_one(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.repos[NAME].gated, hub.repos[NAME].readers = "auto", (TOKEN,)
    mine = tmp_path / "mine"
    monkeypatch.setenv("HF_TOKEN_FILE", str(mine))
    assert main([NAME]) == 1
    assert f"HF_TOKEN_FILE: {mine} does not exist" in said(capsys)
    mine.write_text(f"{TOKEN}\nand more\n")
    assert main([NAME]) == 1
    assert "should hold a token and nothing else" in said(capsys)
    mine.write_text(TOKEN)
    assert main([NAME]) == 0


def test_a_token_is_not_sent_over_a_clear_line(tmp_path: Path) -> None:
    far = models_hub.Hub("http://mirror.example", models_hub.Token(TOKEN), lambda line: None)
    with pytest.raises(models_hub.HubError, match=r"not https: the token of .* is not sent"):
        far._use_token()


def test_a_token_shows_itself_to_nobody() -> None:
    assert TOKEN not in repr(models_hub.Token(TOKEN))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("acme/Nothing", "has no model acme/Nothing, or it is private"),
        (f"{NAME}@v9", "has no branch, tag or commit 'v9'"),
        ("tiny", "'tiny' is neither a directory nor org/model[@revision]"),
        ("../../etc/passwd", "no such directory"),
        ("acme/../secrets", "is neither a directory nor"),
        ("a/b/c", "is neither a directory nor"),
        (f"{NAME}@../main", "is no revision"),
        (f"{NAME}@", "is no revision"),
        (TOKEN, "looks like a token"),
        ("", "is neither a directory nor"),
    ],
)
def test_a_name_that_is_none_is_refused_in_one_line(
    name: str, message: str, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name]) == 1
    error = said(capsys)
    assert message in error
    assert error.count("\n") == 1
    assert tree(tmp_path) == set()


@pytest.mark.parametrize("name", ["../up", "a/b", ".hidden", "Ünicode", "x..y", ""])
def test_a_directory_outside_models_dir_is_refused(
    name: str, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([NAME, "--as", name]) == (0 if name == "" else 1)
    assert name == "" or "can't be a directory below MODELS_DIR" in said(capsys)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.safetensors.index.json": None, **dict.fromkeys(SHARDS)}, "only as .bin, which can run code"),
        ({"config.json": None}, "has no config.json"),
        ({"model.safetensors.index.json": None}, "2 safetensors files and no model.safetensors.index.json"),
        ({SHARDS[1]: None}, f"its model.safetensors.index.json names 1 that it lacks ({SHARDS[1]})"),
        ({"tokenizer.json": None}, "has no tokenizer files"),
        ({"modules.json": b"[]"}, "is a sentence-transformers model"),
        (
            {"config.json": json.dumps(checkpoint.CONFIG | {"model_type": "own", "auto_map": {"A": "a.A"}}).encode()},
            "wants code from the repository",
        ),
        ({"tokenizer_config.json": b'{"auto_map": {}, "x": 1}'}, ""),
        ({"tokenizer_config.json": b'{"auto_map": {"AutoTokenizer": ["t.T", null]}}'}, "its tokenizer needs code"),
        ({"config.json": json.dumps(checkpoint.CONFIG | {"num_hidden_layers": 4}).encode()}, "not of one model"),
        ({SHARDS[1]: checkpoint.files()[SHARDS[1]][:-2]}, "is truncated"),
        ({"config.json": b"{"}, "is no JSON"),
    ],
)
def test_a_repository_that_is_no_model_is_refused_and_nothing_is_left(
    changes: dict[str, bytes | None], message: str, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = hub.repos[NAME].files | changes
    hub.repos[NAME].files = {name: content for name, content in files.items() if content is not None}
    assert main([NAME]) == (1 if message else 0)
    if message:
        assert message in said(capsys)
        assert tree(tmp_path) == set()
        assert not (tmp_path / "models").exists()


def test_code_of_a_repository_is_judged_before_its_weights_are_asked_for(hub: Hub) -> None:
    config = checkpoint.CONFIG | {"model_type": "own", "auto_map": {"AutoModel": "a.A"}}
    hub.repos[NAME].files["config.json"] = json.dumps(config).encode()
    assert main([NAME]) == 1
    assert not hub.gets()


def test_code_that_the_engine_has_itself_is_no_reason(hub: Hub, tmp_path: Path) -> None:
    config = checkpoint.CONFIG | {"auto_map": {"AutoModel": "modeling.Own"}}
    hub.repos[NAME].files |= {"config.json": json.dumps(config).encode(), "modeling.py": b"import os"}
    assert main([NAME]) == 0
    assert not list((tmp_path / "models").rglob("*.py"))


def test_a_full_disk_is_told_before_the_first_byte(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.repos[NAME].sizes[SHARDS[0]] = 1 << 60
    assert main([NAME]) == 1
    assert "are free: make room" in said(capsys)
    assert tree(tmp_path) == set()
    assert not any("/resolve/" in seen.path for seen in hub.seen)


@pytest.mark.parametrize("evil", ["../../evil.json", "/etc/evil.json", "a/../../evil.json", ".hidden.json"])
def test_a_listing_can_name_no_file_outside(evil: str, hub: Hub, tmp_path: Path) -> None:
    hub.repos[NAME].extra = [evil]
    assert main([NAME]) == 0
    assert not [name for name in tree(tmp_path) if "evil" in name or "hidden" in name]


@pytest.mark.parametrize(
    ("endpoint", "message"),
    [
        ("http://127.0.0.1:9", "can't be reached"),
        ("mirror.example", "is no address"),
        ("{url}/elsewhere", "answered 404"),
        ("{cdn}", "answered 404"),
    ],
)
def test_an_endpoint_that_is_no_hub_is_told(
    endpoint: str, message: str, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint.format(url=hub.url, cdn=hub.cdn))
    assert main([NAME]) == 1
    error = said(capsys)
    assert message in error
    assert error.count("\n") == 1
