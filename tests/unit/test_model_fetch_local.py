"""A model of one's choice, from a directory on this machine: the same rules, and nothing outside is needed later."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.checks import model
from scripts.checks.probes import ROOT
from scripts.model_fetch_named import main, next_step
from scripts.model_fetch_rules import friendly, parse_request
from scripts.model_fetch_store import Place
from tests.fakes import checkpoint
from tests.fakes.checkpoint import SHARDS


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A whole model outside MODELS_DIR."""
    monkeypatch.setenv("MODELS_DIR", str(tmp_path / "models"))
    checkpoint.write(tmp_path / "My-Model")
    return tmp_path / "My-Model"


def current(tmp_path: Path, name: str = "my-model") -> Path:
    return tmp_path / "models" / name / "current"


def test_a_directory_is_linked_where_its_file_system_is_the_same(mine: Path, tmp_path: Path) -> None:
    assert main([str(mine)]) == 0
    taken = current(tmp_path)
    assert (taken / SHARDS[0]).samefile(mine / SHARDS[0])
    assert json.loads((taken / "source.json").read_text())["revision"] == "local"
    assert taken.resolve().is_relative_to(tmp_path / "models"), "a container sees nothing outside"
    assert {check.status for check in model.files(taken)} == {"ok"}


def test_the_original_may_go(mine: Path, tmp_path: Path) -> None:
    main([str(mine)])
    for path in mine.iterdir():
        path.unlink()
    assert (current(tmp_path) / SHARDS[0]).read_bytes() == checkpoint.files()[SHARDS[0]]


def test_what_only_its_owner_may_read_is_copied_and_the_original_keeps_its_mode(mine: Path, tmp_path: Path) -> None:
    (mine / "config.json").chmod(0o600)
    assert main([str(mine)]) == 0
    assert not (current(tmp_path) / "config.json").samefile(mine / "config.json")
    assert [
        (current(tmp_path) / "config.json").stat().st_mode & 0o777,
        (mine / "config.json").stat().st_mode & 0o777,
    ] == [
        0o644,
        0o600,
    ]


def test_a_linked_original_keeps_its_mode(mine: Path, tmp_path: Path) -> None:
    (mine / SHARDS[0]).chmod(0o444)
    assert main([str(mine)]) == 0
    assert (mine / SHARDS[0]).stat().st_mode & 0o777 == 0o444


def test_a_snapshot_of_the_hubs_cache_is_taken_through_its_links_under_its_own_name(mine: Path, tmp_path: Path) -> None:
    repo = tmp_path / "cache" / "models--acme--Tiny-Chat"
    snapshot = repo / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    mine.rename(repo / "blobs")
    for path in (repo / "blobs").iterdir():
        (snapshot / path.name).symlink_to(os.path.relpath(path, snapshot))
    assert main([str(snapshot)]) == 0
    taken = current(tmp_path, "tiny-chat")
    assert not any(path.is_symlink() for path in taken.iterdir())


def test_the_same_files_are_the_same_version_and_other_ones_another(mine: Path, tmp_path: Path) -> None:
    main([str(mine)])
    first = current(tmp_path).resolve()
    assert main([str(mine)]) == 0
    assert current(tmp_path).resolve() == first
    (mine / "generation_config.json").unlink()
    (mine / "generation_config.json").write_text("{}")
    assert main([str(mine)]) == 0
    assert current(tmp_path).resolve() != first
    assert first.is_dir()


def test_a_damaged_version_is_made_again(mine: Path, tmp_path: Path) -> None:
    main([str(mine)])
    (current(tmp_path) / SHARDS[1]).unlink()
    assert main([str(mine)]) == 0
    assert (current(tmp_path) / SHARDS[1]).is_file()


@pytest.mark.parametrize("damage", ["cut", "missing", "pointer", "template"])
def test_an_incomplete_directory_leaves_nothing(
    damage: str, mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = mine / SHARDS[1]
    if damage == "cut":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif damage == "missing":
        shard.unlink()
    elif damage == "pointer":
        shard.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n")
    else:
        (mine / "tokenizer_config.json").write_text("{}")
    assert main([str(mine)]) == (0 if damage == "template" else 1)
    out, err = capsys.readouterr()
    assert "chat requests will be refused" in out if damage == "template" else SHARDS[1] in err
    assert (tmp_path / "models").exists() == (damage == "template")


def test_a_directory_of_models_dir_itself_is_left_where_it_is(
    mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models").mkdir()
    mine.rename(tmp_path / "models" / "here")
    assert main([str(tmp_path / "models" / "here")]) == 1
    assert "a profile serves it with `model: /models/here`" in capsys.readouterr().err


def test_a_model_that_lies_flat_in_models_dir_is_not_built_over(
    mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint.write(tmp_path / "models" / "my-model")
    assert main([str(mine)]) == 1
    assert "is itself a model, without versions: choose another name (AS=...)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("repository", "name"),
    [
        ("Meta-Llama-3-8B-Instruct", "llama3-8b"),
        ("Llama-3-8B-Instruct-AWQ", "llama3-8b-awq"),
        ("llama-3-8b-instruct-awq", "llama3-8b-awq"),
        ("Llama-3.1-8B-Instruct", "llama3.1-8b"),
        ("Meta-Llama-3-8B", "meta-llama-3-8b"),
        ("Qwen3-8B-AWQ", "qwen3-8b-awq"),
    ],
)
def test_a_repository_gets_the_name_its_profiles_use_and_a_base_model_never_an_instruct_ones(
    repository: str, name: str
) -> None:
    assert friendly(repository) == name
    assert parse_request(f"acme/{repository}").name == name


@pytest.mark.parametrize(
    ("said", "command"),
    [
        ([], "scripts.model_fetch "),
        (["NAME=a/b"], "scripts.model_fetch_named 'a/b'"),
        (["NAME=a/b", "AS=c", "ARGS=--dry-run"], "scripts.model_fetch_named 'a/b' --as 'c' --dry-run"),
    ],
)
def test_make_model_takes_its_names_from_the_command_line_alone(said: list[str], command: str) -> None:
    """WSL exports NAME, and AS is make's own word for an assembler."""
    environ = os.environ | {"NAME": "DESKTOP-1", "AS": "as", "MAKEFLAGS": "", "MAKELEVEL": "0"}
    made = subprocess.run(
        ["make", "-n", "model", *said], env=environ, cwd=ROOT, capture_output=True, text=True, check=True
    )
    last = made.stdout.splitlines()[-1]
    assert last.rstrip().removeprefix(".venv/bin/python -m ") == command.rstrip()


def test_what_to_do_next_names_the_profiles_that_ship() -> None:
    assert "llama3-8b.rtx4090" in next_step("llama3-8b")
    assert "llama3-8b-awq" not in next_step("llama3-8b")
    assert "write `model: /models/mine/current`" in next_step("mine")


def test_a_second_run_waits_for_the_first_even_where_the_first_leaves_nothing(tmp_path: Path) -> None:
    place = Place(tmp_path / "models", "m")
    code = (
        "import sys; from pathlib import Path; from scripts.model_fetch_store import Place\n"
        "place = Place(Path(sys.argv[1]), 'm')\n"
        "with place.alone(lambda: print('waits', flush=True)): print(place.home.is_dir())"
    )
    with place.alone(lambda: pytest.fail("nobody is at work")):
        command = [sys.executable, "-c", code, str(tmp_path / "models")]
        second = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert second.stdout is not None
        assert second.stdout.readline() == "waits\n"
    assert second.communicate(timeout=20)[0] == "True\n"
    assert not place.home.exists()
