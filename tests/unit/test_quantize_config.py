"""configs/quantize/*.yaml as the job reads them, and the manifest as the gate will read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts.quantization import QuantizeError, config, manifest

SMALL: dict[str, Any] = {"name": "a", "source": {"model": "m"}, "calibration": {"source": "texts.jsonl"}}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": "../etc"}, "name: a directory's name"),
        ({"calibraton": {}}, "calibraton: is no setting"),
        ({"producer": "gptq"}, "producer: Input should be 'autoawq' or 'llmcompressor', found 'gptq'"),
        (
            {"calibration": {"source": "x", "blocks": 0}},
            "calibration.blocks: Input should be greater than or equal to 1",
        ),
        ({"weights": {"w_bit": "four"}}, "weights.w_bit: Input should be a valid integer"),
    ],
)
def test_a_wrong_key_is_one_line_naming_file_key_and_value(change: dict[str, Any], says: str) -> None:
    with pytest.raises(QuantizeError) as raised:
        config.parse(SMALL | change, "my.yaml")
    assert str(raised.value).startswith(f"my.yaml: {says}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2\n", ""])
def test_a_file_that_is_no_mapping_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(QuantizeError, match=r"c\.yaml") as raised:
        config.load(path)
    assert "\n" not in str(raised.value)


def test_a_missing_file_names_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(QuantizeError, match="does not exist"):
        config.load(tmp_path / "none.yaml")


def made(directory: Path) -> manifest.Manifest:
    """A manifest over the files of a directory."""
    return manifest.Manifest(
        name="a",
        digest="0" * 12,
        producer="autoawq",
        quantization={},
        config={},
        source=manifest.Source(model="m", revision="local", architecture="LlamaForCausalLM", files={}),
        calibration=manifest.Calibration(
            source="t", format="text", seed=0, sha256="", texts=1, blocks=1, block_tokens=32, tokens=32, texts_found=2
        ),
        held_out=manifest.HeldOut(sha256="", texts=1, tokens=8),
        versions={},
        run=manifest.Run(
            started_at="", finished_at="", stages_s={}, device="cpu", device_name="", peak_ram_bytes=1,
            peak_gpu_bytes=None, layers=(),
        ),
        files={path.name: manifest.hash_file(path) for path in sorted(directory.iterdir())},
    )  # fmt: skip


def test_a_manifest_comes_back_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    written = made(tmp_path)
    manifest.write(tmp_path, written)
    assert manifest.read(tmp_path) == written
    assert written.weight_bytes == 7
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "model.safetensors"]


def test_damage_names_what_is_missing_cut_or_changed(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).write_bytes(b"12345")
    whole = made(tmp_path)
    assert not list(manifest.damage(tmp_path, whole, hashes=True))
    (tmp_path / "a").unlink()
    (tmp_path / "b").write_bytes(b"123")
    (tmp_path / "c").write_bytes(b"54321")
    assert len(list(manifest.damage(tmp_path, whole))) == 2
    assert list(manifest.damage(tmp_path, whole, hashes=True)) == [
        "a is missing",
        "b has 3 bytes where 5 were written",
        "c has another checksum than when it was written",
    ]


@pytest.mark.parametrize("text", ["", "{", '{"format": 2}', '{"format": 1, "name": "a"}'])
def test_what_is_no_manifest_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / manifest.MANIFEST).write_text(text)
    with pytest.raises(QuantizeError, match="is no manifest of format 1") as raised:
        manifest.read(tmp_path)
    assert "\n" not in str(raised.value)


def test_a_directory_without_a_manifest_is_unfinished(tmp_path: Path) -> None:
    with pytest.raises(QuantizeError, match="no quantization job finished it"):
        manifest.read(tmp_path)


def test_the_digest_changes_with_any_part_and_not_with_their_order() -> None:
    assert manifest.digest_of({"a": 1, "b": [2]}) == manifest.digest_of({"b": [2], "a": 1})
    assert manifest.digest_of({"a": 1, "b": [2]}) != manifest.digest_of({"a": 1, "b": [3]})
