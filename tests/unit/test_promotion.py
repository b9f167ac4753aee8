"""Versions, links and what may be promoted, on a real file system."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import _journal
from scripts._journal import Journal
from scripts.quantization import QuantizeError, promotion_engine, store
from scripts.quantization.manifest import read, write
from scripts.quantization.promotion import Move, plan_promotion, plan_revert
from tests.quantize import versions
from tests.quantize.versions import links


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return tmp_path / "models"


def promote(models: Path, wanted: str | None = None) -> Move | None:
    move = plan_promotion(models, "m", wanted)
    if move is not None:
        move.apply()
    return move


def test_a_passed_version_is_served_and_the_one_before_remembered(models: Path) -> None:
    versions.make(models, "m", "aaaaaaaaaaaa")
    promote(models)
    assert links(models / "m") == {"current": "aaaaaaaaaaaa"}
    versions.make(models, "m", "bbbbbbbbbbbb", b"other")
    promote(models)
    assert links(models / "m") == {"current": "bbbbbbbbbbbb", "previous": "aaaaaaaaaaaa"}
    assert promote(models) is None


def test_the_link_is_relative_so_that_it_holds_in_a_container(models: Path, tmp_path: Path) -> None:
    versions.make(models, "m", "aaaaaaaaaaaa")
    promote(models)
    models.rename(tmp_path / "elsewhere")
    assert (tmp_path / "elsewhere/m/current/config.json").read_text(encoding="utf-8") == "{}"


def test_a_revert_goes_back_and_a_second_one_returns(models: Path) -> None:
    for digest in ("aaaaaaaaaaaa", "bbbbbbbbbbbb"):
        versions.make(models, "m", digest, digest.encode())
        promote(models, digest)
    plan_revert(models, "m").apply()
    assert links(models / "m") == {"current": "aaaaaaaaaaaa", "previous": "bbbbbbbbbbbb"}
    plan_revert(models, "m").apply()
    assert links(models / "m") == {"current": "bbbbbbbbbbbb", "previous": "aaaaaaaaaaaa"}


def test_undoing_a_move_leaves_what_was_there(models: Path) -> None:
    home = models / "m"
    versions.make(models, "m", "aaaaaaaaaaaa")
    first = plan_promotion(models, "m", None)
    assert first is not None
    for _ in range(2):  # it bears repetition
        first.apply()
        first.undo()
        first.undo()
        assert links(home) == {}
    first.apply()
    versions.make(models, "m", "bbbbbbbbbbbb", b"other")
    second = plan_promotion(models, "m", "b")
    assert second is not None
    second.apply()
    Move.of(json.loads(json.dumps(second.note))).undo()
    assert links(home) == {"current": "aaaaaaaaaaaa"}


def cut_a_shard(path: Path) -> None:
    shard = path / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])


def change_a_byte(path: Path) -> None:
    shard = path / "model-00001-of-00002.safetensors"
    data = bytearray(shard.read_bytes())
    data[0] ^= 1
    shard.write_bytes(data)


def lose_a_file(path: Path) -> None:
    (path / "config.json").unlink()


def change_file_and_manifest(path: Path) -> None:
    """As a second run of a job would, that left the old verdict in."""
    change_a_byte(path)
    manifest = read(path)
    files = {name: store_hash(path / name) for name in manifest.files}
    write(path, manifest.model_copy(update={"files": files}))


def store_hash(path: Path) -> object:
    from scripts.quantization.manifest import hash_file

    return hash_file(path)


@pytest.mark.parametrize("change", [cut_a_shard, change_a_byte, lose_a_file, change_file_and_manifest])
def test_a_version_that_changed_after_the_gate_is_refused(models: Path, change: object) -> None:
    path = versions.make(models, "m", "aaaaaaaaaaaa")
    assert callable(change)
    change(path)
    with pytest.raises(QuantizeError, match="was changed after the gate"):
        promote(models)
    assert links(models / "m") == {}


@pytest.mark.parametrize(("verdict", "told"), [("FAIL", "FAIL"), ("ABSTAIN", "ABSTAIN"), (None, "not judged yet")])
def test_only_a_pass_is_promoted(models: Path, verdict: str | None, told: str) -> None:
    versions.make(models, "m", "aaaaaaaaaaaa", verdict=verdict)
    with pytest.raises(QuantizeError, match=told):
        promote(models)


@pytest.mark.parametrize(
    ("name", "wanted", "told"),
    [
        ("nope", None, "holds no model 'nope'; there are: m"),
        ("m", "c", "no version begins with c: aaaaaaaaaaaa, abbbbbbbbbbb"),
        ("m", "a", "several versions begin with a"),
    ],
)
def test_a_wrong_name_is_told_what_there_is(models: Path, name: str, wanted: str | None, told: str) -> None:
    versions.make(models, "m", "aaaaaaaaaaaa")
    versions.make(models, "m", "abbbbbbbbbbb", b"other")
    with pytest.raises(QuantizeError, match=told):
        plan_promotion(models, name, wanted)


def test_half_written_directories_are_no_versions(models: Path) -> None:
    versions.make(models, "m", "aaaaaaaaaaaa")
    versions.make(models, "m", ".bbbbbbbbbbbb.partial", b"other").joinpath("manifest.json").unlink()
    assert [found.version for found in store.versions(models, "m")] == ["aaaaaaaaaaaa"]


def test_with_nothing_before_a_revert_is_refused(models: Path) -> None:
    versions.make(models, "m", "aaaaaaaaaaaa")
    promote(models)
    with pytest.raises(QuantizeError, match="nothing was served before"):
        plan_revert(models, "m")


def test_a_revert_to_a_version_that_is_gone_or_damaged_is_refused(models: Path) -> None:
    for digest in ("aaaaaaaaaaaa", "bbbbbbbbbbbb"):
        path = versions.make(models, "m", digest, digest.encode())
        promote(models, digest)
    cut_a_shard(models / "m/aaaaaaaaaaaa")
    with pytest.raises(QuantizeError, match="can't be gone back to: model-00002"):
        plan_revert(models, "m")
    for file in (models / "m/aaaaaaaaaaaa").iterdir():
        file.unlink()
    (models / "m/aaaaaaaaaaaa").rmdir()
    with pytest.raises(QuantizeError, match="is gone"):
        plan_revert(models, "m")
    assert path.is_dir()
    assert links(models / "m")["current"] == "bbbbbbbbbbbb"


def test_a_dangling_current_can_be_promoted_over_and_is_not_remembered(models: Path) -> None:
    versions.make(models, "m", "aaaaaaaaaaaa")
    (models / "m/current").symlink_to("gone")
    promote(models)
    assert links(models / "m") == {"current": "aaaaaaaaaaaa"}


@pytest.mark.parametrize("where", ["/tmp", "../other/aaaaaaaaaaaa"])
def test_a_link_out_of_the_models_directory_is_refused(models: Path, where: str) -> None:
    versions.make(models, "m", "aaaaaaaaaaaa")
    (models / "m/current").symlink_to(where)
    with pytest.raises(QuantizeError, match="a container sees nothing there"):
        promote(models)


def test_a_directory_in_the_place_of_the_link_is_refused(models: Path) -> None:
    versions.make(models, "m", "aaaaaaaaaaaa")
    (models / "m/current").mkdir()
    with pytest.raises(QuantizeError, match="is a directory and no link"):
        promote(models)


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A journal of its own, and a machine without Docker."""
    monkeypatch.setattr(_journal, "FOLDER", tmp_path / "stack")
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path / "stack" / "swap.json"


@pytest.mark.parametrize(
    ("phase", "expected"), [(_journal.CHANGING, {"current": "aaaaaaaaaaaa"}), (_journal.HELD, None)]
)
def test_a_promotion_that_was_killed_is_undone_unless_it_had_been_verified(
    models: Path, journal: Path, phase: str, expected: dict[str, str] | None
) -> None:
    for digest in ("aaaaaaaaaaaa", "bbbbbbbbbbbb"):
        versions.make(models, "m", digest, digest.encode())
    promote(models, "a")
    move = plan_promotion(models, "m", "b")
    assert move is not None
    _journal.write(Journal("promotion of m", promotion_engine.KIND, phase, move.note))
    move.apply()
    said = promotion_engine.heal(lambda text: None)
    assert said == f"{'undone' if expected else 'kept'}: promotion of m"
    assert links(models / "m") == (expected or {"current": "bbbbbbbbbbbb", "previous": "aaaaaaaaaaaa"})
    assert not journal.exists()
    assert promotion_engine.heal(lambda text: None) is None


def test_a_change_of_another_kind_is_left_to_its_own_command(models: Path, journal: Path) -> None:
    _journal.write(Journal("engine: a -> b", "upgrade", _journal.CHANGING))
    assert promotion_engine.heal(lambda text: None) is None
    assert journal.exists()


def test_the_shipped_profiles_serve_what_is_promoted() -> None:
    profiles = store.ROOT / "configs/engine"
    assert promotion_engine.served(profiles / "llama3-8b-awq.rtx4090.yaml") == "/models/llama3-8b-awq/current"
    assert promotion_engine.served(profiles / "absent.yaml") is None
