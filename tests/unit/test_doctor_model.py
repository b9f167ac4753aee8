"""Model directories with one thing wrong at a time."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from scripts import model_fetch
from scripts.checks import Check, model, report
from scripts.checks.probes import Probes
from scripts.checks.subject import Subject, decide
from scripts.model_fetch_rules import ORIGINALS, friendly_name
from tests.fakes import checkpoint
from tests.fakes.checkpoint import CONFIG


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A small but complete model of two shards, as MODELS_DIR/small/current."""
    where = tmp_path / "models" / "small" / "v1"
    checkpoint.write(where)
    (where.parent / "current").symlink_to("v1")
    return where


def subject(whole: Path, purpose: str = "stack") -> Subject:
    root = whole.parents[2]
    found = decide(Probes(environ={}, root=root), purpose, "smollm2-135m.cpu", None)
    return replace(found, profile={"model": "/models/small/current"}, model_dir=root / "models/small/current")


def look(whole: Path, purpose: str = "stack") -> dict[str, Check]:
    return {check.name: check for check in model.checks(subject(whole, purpose))}


def test_a_whole_model_is_well(whole: Path) -> None:
    found = look(whole)
    assert {name: check.status for name, check in found.items()} == dict.fromkeys(
        (
            f"model.{part}"
            for part in ("directory", "config", "weights", "tokenizer", "chat_template", "generation", "access")
        ),
        "ok",
    )
    assert found["model.weights"].found.startswith("2 files of model.safetensors.index.json, 20 tensors")


def test_a_missing_shard_is_named(whole: Path) -> None:
    (whole / "model-00002-of-00002.safetensors").unlink()
    check = look(whole)["model.weights"]
    assert check.status == "fail"
    assert "1 of 2 shards are missing (model-00002-of-00002.safetensors)" in check.found


def test_a_truncated_shard_is_named_with_its_length(whole: Path) -> None:
    path = whole / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    check = look(whole)["model.weights"]
    assert (check.status, "is truncated" in check.found, path.name in check.found) == ("fail", True, True)


def test_a_git_lfs_pointer_is_told_from_weights(whole: Path) -> None:
    (whole / "model-00001-of-00002.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:1\n"
    )
    assert "Git LFS pointer" in look(whole)["model.weights"].found


def test_a_tensor_that_no_shard_holds_is_named(whole: Path) -> None:
    index = whole / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    listed["weight_map"]["model.layers.9.extra.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(listed))
    assert "model.layers.9.extra.weight" in look(whole)["model.weights"].found


def test_weights_of_another_model_are_noticed(whole: Path) -> None:
    (whole / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 4}))
    check = look(whole)["model.weights"]
    assert (check.status, "not of one model" in check.found) == ("fail", True)


def test_no_weights_at_all(whole: Path) -> None:
    for path in whole.glob("model*"):
        path.unlink()
    assert "holds no weights" in look(whole)["model.weights"].found


def test_an_unknown_architecture_is_said_and_gets_no_figure(whole: Path) -> None:
    (whole / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["MambaTransformerForEverything"]}))
    check = look(whole)["model.config"]
    assert (check.status, "MambaTransformerForEverything" in check.found) == ("warn", True)
    assert "no memory figure" in check.fix


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({k: v for k, v in CONFIG.items() if k != "hidden_size"})])
def test_a_broken_config_fails(text: str, whole: Path) -> None:
    (whole / "config.json").write_text(text)
    assert look(whole)["model.config"].status == "fail"


@pytest.mark.parametrize(
    ("file", "content", "status"),
    [
        ("tokenizer.json", None, "fail"),
        ("tokenizer.json", '{"model": {"vocab": {"a', "fail"),
        ("tokenizer.json", "version https://git-lfs.github.com/spec/v1\n", "fail"),
        ("tokenizer_config.json", None, "warn"),
        ("tokenizer_config.json", "{", "fail"),
    ],
)
def test_a_tokenizer_must_be_whole(file: str, content: str | None, status: str, whole: Path) -> None:
    (whole / file).unlink() if content is None else (whole / file).write_text(content)
    assert look(whole)["model.tokenizer"].status == status


def test_another_kind_of_tokenizer_counts(whole: Path) -> None:
    (whole / "tokenizer.json").unlink()
    (whole / "tokenizer.model").write_bytes(b"\x00")
    assert look(whole)["model.tokenizer"].found == "tokenizer.model"


def test_a_missing_chat_template_is_a_warning_and_its_own_file_is_none(whole: Path) -> None:
    (whole / "tokenizer_config.json").write_text("{}")
    assert look(whole)["model.chat_template"].status == "warn"
    (whole / "chat_template.jinja").write_text("{{ messages }}")
    assert look(whole)["model.chat_template"].status == "ok"


def test_a_missing_generation_config_is_a_warning_and_a_cut_one_fails(whole: Path) -> None:
    (whole / "generation_config.json").write_text("{")
    assert look(whole)["model.generation"].status == "fail"
    (whole / "generation_config.json").unlink()
    assert look(whole)["model.generation"].status == "warn"


def test_a_file_that_a_container_may_not_read_fails(whole: Path) -> None:
    """Field case G5: the engine runs as another user."""
    (whole / "config.json").chmod(0o600)
    check = look(whole)["model.access"]
    assert (check.status, "mode 600" in check.found, "chmod -R o+rX" in check.fix) == ("fail", True, True)
    assert look(whole, "demo")["model.access"].status == "skip"


def test_the_demo_model_in_the_cache_will_be_copied_and_is_no_failure(tmp_path: Path) -> None:
    environ = {"MODELS_DIR": str(tmp_path / "models"), "XDG_CACHE_HOME": str(tmp_path)}
    checkpoint.write(model_fetch.model_dir(environ))
    found = {
        check.name: check for check in model.checks(decide(Probes(environ=environ), "stack", "smollm2-135m.cpu", None))
    }
    assert (found["model.weights"].status, found["model.access"].status) == ("ok", "skip")


def test_a_link_out_of_the_mount_fails(whole: Path) -> None:
    """So a snapshot of the hub's cache is laid out: links into ../../blobs, which a container does not see."""
    blob = whole.parents[2] / "blobs" / "tokenizer"
    blob.parent.mkdir()
    (whole / "tokenizer.json").rename(blob)
    (whole / "tokenizer.json").symlink_to(blob)
    check = look(whole)["model.access"]
    assert (check.status, "outside" in check.found) == ("fail", True)


def missing(tmp_path: Path, profile: str, purpose: str = "stack") -> Check:
    """What is said of a model that is not there."""
    eyes = Probes(environ={"MODELS_DIR": str(tmp_path / "models"), "XDG_CACHE_HOME": str(tmp_path)})
    (check,) = model.checks(decide(eyes, purpose, profile, None))
    return check


def test_an_empty_model_directory_is_offered_what_fits_the_profile(tmp_path: Path) -> None:
    check = missing(tmp_path, "llama3-8b-awq.rtx4090")
    assert check.status == "fail"
    assert [line for line in check.fix.splitlines() if "NVIDIA GeForce RTX 4090" in line]
    commands = [line.strip() for line in check.fix.splitlines() if line.startswith("    ")]
    assert commands[:4] == [
        "make model NAME=meta-llama/Meta-Llama-3-8B-Instruct",
        "make quantize CONFIG=configs/quantize/llama3-8b-instruct.yaml",
        "make gate NAME=llama3-8b-awq",
        "make promote NAME=llama3-8b-awq",
    ]
    shown = [line.strip() for line in report.lines([check])]
    assert set(commands) <= set(shown), "a command to copy is a line of its own"
    assert "make model NAME=org/model AS=llama3-8b-awq" in check.fix
    assert "make up-cpu" in check.fix
    assert "make model NAME=meta-llama/Meta-Llama-3-8B-Instruct\n" in missing(tmp_path, "llama3-8b.rtx4090").fix
    assert "make model NAME=Qwen/Qwen3-8B-AWQ\n" in missing(tmp_path, "qwen3-8b-awq.rtx4090").fix
    assert missing(tmp_path, "smollm2-135m.cpu").fix == "make model (the small demo model)"


def test_a_model_that_is_here_for_the_same_card_is_named_first(tmp_path: Path) -> None:
    checkpoint.write(tmp_path / "models" / "llama3-8b" / "v1")
    (tmp_path / "models" / "llama3-8b" / "current").symlink_to("v1")
    fix = missing(tmp_path, "llama3-8b-awq.rtx4090").fix
    assert fix.startswith("serve what is here, by .env:\n    ENGINE_PROFILE=llama3-8b.rtx4090\n")
    assert "make model NAME=meta-llama" not in fix, "it is here already"


def test_what_is_offered_lands_where_the_profile_looks() -> None:
    assert {friendly_name(repo): repo for repo in ORIGINALS.values()} == ORIGINALS


def test_before_the_first_demo_its_model_is_not_there_yet(tmp_path: Path) -> None:
    check = missing(tmp_path, "smollm2-135m.cpu", "demo")
    assert (check.status, check.found) == ("skip", "not there yet: make demo fetches it, or make model now")


def test_a_directory_that_is_not_there_ends_the_matter(whole: Path) -> None:
    (whole.parent / "current").unlink()
    (whole.parent / "current").symlink_to("v2")
    found = look(whole)
    assert list(found) == ["model.directory"]
    assert "a link to nothing" in found["model.directory"].found


def test_a_hub_name_is_not_looked_for_on_this_disk(whole: Path) -> None:
    hub = replace(subject(whole), profile={"model": "meta-llama/Llama-3-8B"}, model_dir=None)
    (check,) = model.checks(hub)
    assert (check.status, "would download it" in check.found) == ("skip", True)
