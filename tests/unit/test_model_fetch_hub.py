"""A model of one's choice, from a hub: whole, or resumed from where it broke.

The client library is the real one, and so are the sockets; the hub is tests/fakes/hub.py.
"""

# ruff: noqa: F811

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import model_fetch_named, models_hub
from scripts.model_fetch_named import main
from tests.fakes import checkpoint
from tests.fakes.checkpoint import SHARDS
from tests.fakes.hub import COMMIT, Fault, Hub
from tests.unit.model_hub import NAME, WAIT, hub, said, server, tree  # noqa: F401 - two are fixtures, which arguments name

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
