"""The end of a job: configs put right, progress told, memory bounded, the card written."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.planner.checkpoint import read_header
from scripts.planner.numbers import GIB
from scripts.quantization import QuantizeError, card, finish, manifest, memory
from scripts.quantization.progress import Progress, human, left_behind
from tests.fakes import checkpoint
from tests.unit.test_quantize_config import made

AWQ = {"quant_method": "awq", "bits": 4}


def put(path: Path, **content: object) -> None:
    path.write_text(json.dumps(content))


def pair(tmp_path: Path) -> tuple[Path, Path]:
    """An original, and what a producer leaves of it."""
    source, out = tmp_path / "source", tmp_path / "out"
    checkpoint.write(source)
    out.mkdir()
    put(out / "config.json", use_cache=False, rope_parameters={"rope_theta": 1.0}, tie_word_embeddings=False)
    put(out / "generation_config.json", do_sample=True, eos_token_id=1)
    (out / "tokenizer.json").write_text("the producer's own")
    (out / "model.safetensors").write_bytes(b"weights")
    return source, out


def test_the_originals_config_stays_and_the_producers_slips_do_not(tmp_path: Path) -> None:
    source, out = pair(tmp_path)
    finish.configs(source, out, AWQ, 2)
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"] == AWQ
    assert config["use_cache"] is True
    assert config["tie_word_embeddings"] is False  # as the weights were saved
    assert "rope_parameters" not in config
    assert config["hidden_size"] == checkpoint.CONFIG["hidden_size"]
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert (out / "tokenizer_config.json").is_file()
    assert (out / "model.safetensors").read_bytes() == b"weights"


def test_every_end_token_is_kept_and_sampling_is_the_originals(tmp_path: Path) -> None:
    source, out = pair(tmp_path)
    put(source / "generation_config.json", eos_token_id=128001, temperature=0.6, do_sample=True)
    finish.configs(source, out, AWQ, 128009)
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [128001, 128009], "temperature": 0.6, "do_sample": True}
    put(source / "generation_config.json", eos_token_id=2)
    finish.configs(source, out, AWQ, 2)
    assert json.loads((out / "generation_config.json").read_text()) == {"eos_token_id": 2}


@pytest.mark.parametrize(
    ("found", "ends"),
    [
        (([1, 2], 1, None), [1, 2]),
        ((None, 5, 6), [5, 6]),
        ((None, [5, 7], 6), [5, 7, 6]),
        ((None, None, None), []),
        ((True, "x", 0), [0]),
    ],
)
def test_end_tokens_are_each_there_once(found: tuple[object, ...], ends: list[int]) -> None:
    assert finish.end_tokens(*found) == ends


def test_a_checkpoint_without_packed_weights_is_refused(tmp_path: Path) -> None:
    checkpoint.write(tmp_path)
    with pytest.raises(QuantizeError, match="saved no qweight tensors"):
        finish.check(tmp_path, "awq")


def test_publishing_is_one_rename_and_files_can_be_read_by_others(tmp_path: Path) -> None:
    part, target = tmp_path / ".d.partial", tmp_path / "d"
    part.mkdir(mode=0o700)
    (part / "a").write_text("x")
    (part / "a").chmod(0o600)
    assert list(finish.files(part)) == ["a"]
    finish.publish(part, target)
    assert [path.name for path in tmp_path.iterdir()] == ["d"]
    assert target.stat().st_mode & 0o777 == 0o755
    assert (target / "a").stat().st_mode & 0o777 == 0o644


def test_a_shards_metadata_gets_one_order_and_its_tensors_stay(tmp_path: Path) -> None:
    """Two files that differ in that order alone become one."""
    tensors = {"w": {"dtype": "I32", "shape": [2], "data_offsets": [0, 8]}}
    made = []
    for index, names in enumerate((("format", "lm_head.weight"), ("lm_head.weight", "format"))):
        raw = (
            json.dumps({"__metadata__": dict.fromkeys(names, "pt"), **tensors}, separators=(",", ":")).encode() + b"  "
        )
        path = tmp_path / f"{index}.safetensors"
        path.write_bytes(len(raw).to_bytes(8, "little") + raw + b"12345678")
        finish.settle(path)
        made.append(path.read_bytes())
    assert made[0] == made[1]
    assert made[0].endswith(b"12345678")
    assert read_header(tmp_path / "0.safetensors")["w"].shape == (2,)


# -- progress ---------------------------------------------------------------------------------------------------------


class Clock:
    """Seconds that go on by what a test adds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_each_layer_is_told_with_what_is_left(tmp_path: Path) -> None:
    clock, said = Clock(), list[str]()
    progress = Progress(tmp_path, said.append, clock, lambda: 0.0)
    with progress.stage("quantize"):
        for took, error in ((10.0, 0.0123), (14.0, None), (12.0, None)):
            progress.layer_begins()
            clock.now += took
            progress.layer_ends(3, error)
    assert said == [
        "layer 1 of 3: 10 s, output error 1.23%, about 20 s left",
        "layer 2 of 3: 14 s, about 12 s left",
        "layer 3 of 3: 12 s",
    ]
    assert progress.stages == {"quantize": 36.0}
    assert left_behind(tmp_path) == "a run of 1970-01-01T00:00:00+00:00 ended unfinished at: layer 3 of 3"


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"doing": 1}'])
def test_a_state_that_cannot_be_read_is_still_a_leftover(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "progress.json").write_text(content)
    assert left_behind(tmp_path) == "a run ended unfinished"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.6, "1 min 00 s"), (200, "3 min 20 s"), (3900, "1 h 05 min")]
)
def test_durations_are_said_as_people_do(seconds: float, text: str) -> None:
    assert human(seconds) == text


# -- memory -----------------------------------------------------------------------------------------------------------


def test_a_job_that_passes_its_bound_is_stopped_where_it_stands() -> None:
    started = time.monotonic()
    with pytest.raises(memory.OverBoundError, match=r"1\.00 GiB"), memory.bounded(GIB, lambda: 2 * GIB):
        threading.Event().wait(30)
    assert time.monotonic() - started < 10


def test_within_the_bound_nothing_happens_and_no_watcher_is_left() -> None:
    def looks() -> Iterator[int]:
        while True:
            yield 1
            looked.set()

    looked, sizes = threading.Event(), looks()
    with memory.bounded(GIB, lambda: next(sizes)):
        assert looked.wait(30)
    assert not [thread for thread in threading.enumerate() if thread.name == "memory bound"]


def test_what_is_held_is_this_process_and_no_more_than_its_peak() -> None:
    before = memory.held()
    block = bytearray(os.urandom(1)) * (64 << 20)
    assert memory.held() - before > 60 << 20
    assert memory.peak() > memory.held() > len(block)


# -- the card ---------------------------------------------------------------------------------------------------------


def test_the_card_names_source_method_and_licence_and_claims_no_quality(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"0" * 100)
    base = made(tmp_path)
    run = base.run.model_copy(
        update={"layers": (manifest.Layer(index=0, s=1, error=0.02), manifest.Layer(index=1, s=1))}
    )
    known = {"quantization": AWQ, "config": {"weights": {"w_bit": 4, "group_size": 64}}, "run": run}
    text = card.write(base.model_copy(update=known), "apache-2.0")
    assert "license: apache-2.0" in text
    assert "4 bits in groups of 64" in text
    assert "Largest output error of a layer: 2.00%" in text
    assert "Nothing here says how good it is" in text
