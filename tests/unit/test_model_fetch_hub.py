"""A model of one's choice, from a hub: whole, resumed, or refused with the way out.

The client library is the real one, and so are the sockets; the hub is tests/fakes/hub.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import model_fetch_named, models_hub
from scripts.model_fetch_named import main
from tests.fakes import checkpoint
from tests.fakes.checkpoint import SHARDS
from tests.fakes.hub import COMMIT, Fault, Hub, Repo, serve

NAME = "acme/Tiny-Chat"
TOKEN = "hf_" + "Secret0Secret1Secret"
WAIT = threading.Event()


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with serve() as hub:
        yield hub


@pytest.fixture
def hub(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """It holds one whole model; models and secrets are in tmp_path."""
    server.repos = {NAME: Repo(checkpoint.files() | {"pytorch_model.bin": b"pickle", "README.md": b"card"})}
    server.valid, server.seen = {TOKEN}, []
    server.faults.clear()
    server.go.clear()
    server.holding.clear()
    for name in ("HF_TOKEN", "HF_TOKEN_FILE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("MODELS_DIR", str(tmp_path / "models"))
    monkeypatch.setenv("SECRETS_DIR", str(tmp_path / "secrets"))
    monkeypatch.setattr(models_hub, "PAUSE_S", 0.001)
    return server


def tree(root: Path) -> set[str]:
    """All files below, links as such, without the lock."""
    found = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_symlink() or not path.is_dir()}
    return {name for name in found if not name.endswith(".lock")}


def give_token(tmp_path: Path) -> Path:
    path = tmp_path / "secrets" / "private" / "hf_token"
    path.parent.mkdir(parents=True)
    path.write_text(f"{TOKEN}\n")
    return path


def said(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert TOKEN not in out + err
    assert "s3cr3t" not in out + err, "a signed address is a secret too"
    return err


# -- what arrives -----------------------------------------------------------------------------------------------------


def test_a_model_arrives_whole_at_its_commit_without_what_nobody_needs(hub: Hub, tmp_path: Path) -> None:
    assert main([NAME]) == 0
    home = tmp_path / "models" / "tiny-chat"
    version = home / COMMIT[:12]
    wanted = {*checkpoint.files(), "README.md", "source.json"}
    assert tree(home) == {f"{COMMIT[:12]}/{name}" for name in wanted} | {"current"}
    assert (home / "current").resolve() == version
    assert all((version / name).read_bytes() == content for name, content in checkpoint.files().items())
    source = json.loads((version / "source.json").read_text())
    assert (source["model"], source["revision"], source["requested"]) == (NAME, COMMIT, "main")
    assert source["licence"] == "apache-2.0"
    assert source["files"][SHARDS[0]]["bytes"] == len(checkpoint.files()[SHARDS[0]])


def test_the_files_are_readable_for_a_container(hub: Hub, tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        assert main([NAME]) == 0
    finally:
        os.umask(old)
    version = tmp_path / "models" / "tiny-chat" / "current"
    assert all(path.stat().st_mode & 0o004 for path in version.iterdir())
    assert all(path.stat().st_mode & 0o005 == 0o005 for path in (version.resolve(), version.parent, version.parents[1]))


def test_a_second_run_asks_for_the_listing_alone(hub: Hub) -> None:
    main([NAME])
    hub.seen.clear()
    assert main([NAME, "--verify"]) == 0
    assert [seen.path for seen in hub.seen] == [f"/api/models/{NAME}?blobs=true"]


def test_a_branch_is_resolved_once_and_its_commit_is_what_is_fetched(hub: Hub, tmp_path: Path) -> None:
    hub.repos[NAME].branches = ("main", "refs/pr/1")
    assert main([f"{NAME}@refs/pr/1"]) == 0
    source = json.loads((tmp_path / "models" / "tiny-chat" / "current" / "source.json").read_text())
    assert (source["requested"], source["revision"]) == ("refs/pr/1", COMMIT)
    asked = {seen.path for seen in hub.seen if "/resolve/" in seen.path}
    assert all(f"/resolve/{COMMIT}/" in path for path in asked)


def test_a_new_commit_stands_beside_the_old_and_current_moves(hub: Hub, tmp_path: Path) -> None:
    main([NAME])
    hub.repos[NAME].commit = "d" * 40
    assert main([NAME]) == 0
    home = tmp_path / "models" / "tiny-chat"
    assert (home / "current").resolve().name == "d" * 12
    assert (home / "previous").resolve().name == COMMIT[:12], "make revert goes back to it"
    assert (home / "previous" / "config.json").is_file()


def test_a_promoted_artifact_is_not_displaced_by_a_download(hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / "models" / "tiny-chat"
    (home / "abc").mkdir(parents=True)
    (home / "abc" / "manifest.json").write_text("{}")
    (home / "current").symlink_to("abc")
    assert main([NAME]) == 0
    assert (home / "current").resolve().name == "abc"
    assert (home / COMMIT[:12] / "config.json").is_file()


def test_the_guides_model_lands_where_its_profiles_look(hub: Hub, tmp_path: Path) -> None:
    hub.repos["meta-llama/Meta-Llama-3-8B-Instruct"] = hub.repos[NAME]
    assert main(["meta-llama/Meta-Llama-3-8B-Instruct"]) == 0
    assert (tmp_path / "models" / "llama3-8b" / "current" / "config.json").is_file()


def test_as_chooses_the_directory(hub: Hub, tmp_path: Path) -> None:
    assert main([NAME, "--as", "mine"]) == 0
    assert (tmp_path / "models" / "mine" / "current" / "config.json").is_file()


def test_the_demo_models_place_is_not_built_over(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    """make up-cpu replaces what lies there."""
    hub.repos["acme/SmolLM2-135M-Instruct"] = hub.repos[NAME]
    assert main(["acme/SmolLM2-135M-Instruct"]) == 1
    assert "is the demo model's own place" in said(capsys)


def test_a_dry_run_makes_nothing(hub: Hub, tmp_path: Path) -> None:
    assert main([NAME, "--dry-run"]) == 0
    assert not (tmp_path / "models").exists()
    assert not hub.gets()


def test_the_makers_own_copy_of_the_weights_stays_away(hub: Hub, tmp_path: Path) -> None:
    hub.repos[NAME].files |= {"consolidated.safetensors": bytes(5000), "original/consolidated.00.pth": bytes(5000)}
    assert main([NAME]) == 0
    assert not [name for name in tree(tmp_path / "models") if "consolidated" in name]


# -- what breaks on the way -------------------------------------------------------------------------------------------


def test_a_cut_connection_is_gone_on_from_where_it_broke(hub: Hub) -> None:
    hub.faults += [Fault(cut=20000), Fault(cut=10000)]
    assert main([NAME]) == 0
    ranges = [seen.range for seen in hub.gets() if SHARDS[0] in seen.path]
    assert ranges == [None, "bytes=20000-", "bytes=30000-"]


def test_a_server_that_ignores_the_range_is_taken_from_the_start(hub: Hub) -> None:
    hub.faults += [Fault(cut=20000), Fault(whole=True)]
    assert main([NAME]) == 0


def test_an_address_whose_signature_ended_is_asked_for_anew(hub: Hub) -> None:
    hub.faults += [Fault(cut=20000), Fault(status=403)]
    assert main([NAME]) == 0
    heads = [seen for seen in hub.seen if seen.method == "HEAD" and SHARDS[0] in seen.path]
    assert len(heads) == 3


def test_wrong_bytes_are_never_a_model(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.faults += [Fault(wrong=True)]
    assert main([NAME]) == 1
    assert "another checksum" in said(capsys)
    assert not (tmp_path / "models" / "tiny-chat" / "current").exists()


def test_a_begun_file_that_is_not_its_start_is_fetched_anew(hub: Hub, tmp_path: Path) -> None:
    """As after a power cut: the length is there, the bytes are not."""
    hub.faults += [Fault(cut=20000), *[Fault(status=500)] * models_hub.ATTEMPTS]
    assert main([NAME]) == 1
    (part,) = (tmp_path / "models" / "tiny-chat").rglob("*.part")
    part.write_bytes(bytes(part.stat().st_size))
    assert main([NAME]) == 0


def test_a_hub_that_stays_down_keeps_what_came_for_the_next_run(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.faults += [Fault(cut=20000), *[Fault(status=500)] * models_hub.ATTEMPTS]
    assert main([NAME]) == 1
    assert "answered 500" in said(capsys)
    assert not (tmp_path / "models" / "tiny-chat" / "current").exists()
    hub.seen.clear()
    assert main([NAME]) == 0
    assert hub.gets()[0].range == "bytes=20000-"


def test_a_killed_run_leaves_no_model_and_the_next_goes_on(hub: Hub, tmp_path: Path) -> None:
    hub.faults += [Fault(cut=20000, hold=True)]
    process = subprocess.Popen([sys.executable, "-m", "scripts.model_fetch_named", NAME], stdout=subprocess.DEVNULL)
    try:
        assert hub.holding.wait(20)
        home = tmp_path / "models" / "tiny-chat"
        while not any(path.stat().st_size >= 20000 for path in home.rglob("*.part")):
            assert process.poll() is None
            WAIT.wait(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (home / "current").exists()
    hub.seen.clear()
    assert main([NAME]) == 0
    assert hub.gets()[0].range == "bytes=20000-"


# -- what is refused, and with which words ----------------------------------------------------------------------------


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
        ({SHARDS[1]: None}, f"1 files of its model.safetensors.index.json are not there ({SHARDS[1]})"),
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


def test_json_tells_the_same(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([NAME, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    path = str(tmp_path / "models" / "tiny-chat" / COMMIT[:12])
    assert (report["path"], report["fetched"], report["serving"], report["error"]) == (path, True, True, None)
    assert main(["acme/none", "--json"]) == 1
    assert "has no model" in json.loads(capsys.readouterr().out)["error"]


def test_a_disk_that_fills_up_on_the_way_is_named() -> None:
    error = OSError(28, "No space left on device")
    assert "no space left on the disk of /m; what came so far is kept" in model_fetch_named.why(error, Path("/m"))
