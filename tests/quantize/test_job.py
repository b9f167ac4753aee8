"""The job itself, as a user runs it: repeated, interrupted, killed, beside another, with both producers.

The model has the small model's shape with two to six layers and random weights: the search does all that it does on a
real one, in seconds.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts import model_fetch
from scripts.quantization import manifest, producers
from scripts.quantization.store import versions
from tests.fakes import hub

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-quantize" / "bin" / "python"
LIMIT_S = 240
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
WORDS = list("abcdefghijklmnopqrstuvwxyz0123456789")


def texts(path: Path) -> Path:
    """Conversations of random words, the same ones each time."""
    draw = random.Random(1)
    lines = []
    for _ in range(120):
        said = [" ".join(draw.choices(WORDS, k=30)) for _ in range(2)]
        messages = [{"role": "user", "content": said[0]}, {"role": "assistant", "content": said[1]}]
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines) + "\n")
    return path


class Job:
    """One model, its texts and a MODELS_DIR."""

    def __init__(self, folder: Path, layers: int) -> None:
        self.folder, self.models = folder, folder / "models"
        self.source = folder / f"source-{layers}"
        command = [str(PYTHON), "-m", "scripts.quantization.random_model", "smollm2-135m-instruct", str(self.source)]
        command += ["--tokenizer", str(model_fetch.model_dir()), "--layers", str(layers)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=LIMIT_S)
        assert done.returncode == 0, done.stderr
        end = {"eos_token_id": 0, "do_sample": False}
        (self.source / "generation_config.json").write_text(json.dumps(end))
        self.texts = texts(folder / "texts.jsonl")

    def start(
        self, models: Path | None = None, *more: str, env: dict[str, str] | None = None, **change: Any
    ) -> subprocess.Popen[str]:
        """The command with a configuration of this model; keys of `change` replace its parts."""
        given: dict[str, Any] = {
            "name": "tiny",
            "source": {"model": str(self.source)},
            "weights": {"group_size": 64},
            "calibration": {"source": str(self.texts), "blocks": 4, "block_tokens": 64, "held_out_tokens": 1024},
            "device": "cpu",
        }
        path = self.folder / f"{time.monotonic_ns()}.yaml"
        path.write_text(yaml.safe_dump(given | change))
        command = [str(PYTHON), "-m", "scripts.quantize", "--config", str(path), "--models", str(models or self.models)]
        pipe = subprocess.PIPE
        ours = {"XDG_CACHE_HOME": str(self.folder / "cache"), "PYTHONUNBUFFERED": "1"}
        environ = os.environ | OFFLINE | ours | (env or {})
        return subprocess.Popen([*command, *more], cwd=ROOT, env=environ, stdout=pipe, stderr=pipe, text=True)

    def run(
        self, models: Path | None = None, *more: str, env: dict[str, str] | None = None, **change: Any
    ) -> tuple[int, str, str]:
        process = self.start(models, *more, env=env, **change)
        out, err = process.communicate(timeout=LIMIT_S)
        return process.returncode, out, err

    def artifact(self, models: Path | None = None) -> Path:
        (found,) = versions(models or self.models, "tiny")
        return found.path


def until_layer(process: subprocess.Popen[str]) -> list[str]:
    """What it said until its first layer was done."""
    said = []
    assert process.stdout
    for line in process.stdout:
        said.append(line)
        if line.startswith("layer 1 of"):
            return said
    raise AssertionError("".join(said) + (process.stderr.read() if process.stderr else ""))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("job"), 2)


@pytest.fixture(scope="module")
def made(job: Job) -> Iterator[Path]:
    """A finished artifact of `job`."""
    code, out, err = job.run()
    assert code == 0, out + err
    yield job.artifact()


def test_a_finished_job_left_a_whole_artifact_and_nothing_else(job: Job, made: Path) -> None:
    found = manifest.read(made)
    assert not list(manifest.damage(made, found, hashes=True))
    assert {path.name for path in made.iterdir()} == {*found.files, manifest.MANIFEST}
    assert {path.name for path in made.parent.iterdir()} == {made.name, ".quantize.lock"}
    assert (found.calibration.blocks, found.calibration.tokens, found.calibration.texts_found) == (4, 256, 120)
    assert found.source.revision == "local"
    assert found.source.files["config.json"] == manifest.hash_file(job.source / "config.json")
    assert found.versions["autoawq"] == "0.2.9"
    assert [layer.index for layer in found.run.layers] == [0, 1]
    assert all(layer.error is not None and 0 < layer.error < 0.1 for layer in found.run.layers)
    assert found.run.peak_ram_bytes > 100 << 20
    assert found.gate is None
    card = (made / "README.md").read_text()
    assert found.digest in card


def test_configs_are_put_right(job: Job, made: Path) -> None:
    config = json.loads((made / "config.json").read_text())
    original = json.loads((job.source / "config.json").read_text())
    assert config["use_cache"] is True
    assert config["quantization_config"]["quant_method"] == "awq"
    assert {key: config[key] for key in original} == original
    generation = json.loads((made / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [0, 2], "do_sample": False}  # 2 ends a turn of the chat template
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (made / name).read_bytes() == (job.source / name).read_bytes()


def test_the_same_again_is_said_to_be_there_in_seconds(job: Job, made: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in made.iterdir()}
    started = time.monotonic()
    code, out, err = job.run()
    assert code == 0, out + err
    assert f"{made} is there already" in out
    assert time.monotonic() - started < 15  # no library is imported, no text is read; 2 s on a quiet machine
    assert {path: path.stat().st_mtime_ns for path in made.iterdir()} == before


def test_a_repeat_is_the_same_bit_for_bit(job: Job, made: Path, tmp_path: Path) -> None:
    code, out, err = job.run(tmp_path)
    assert code == 0, out + err
    first, second = manifest.read(made), manifest.read(job.artifact(tmp_path))
    assert {k: v for k, v in second.files.items() if k != manifest.CARD} == {
        k: v for k, v in first.files.items() if k != manifest.CARD
    }
    assert second.calibration == first.calibration
    assert second.held_out == first.held_out
    assert second.digest == first.digest


def test_changed_settings_are_another_artifact_beside_the_first(job: Job, made: Path) -> None:
    code, out, err = job.run(None, "--dry-run", weights={"group_size": 32})
    assert code == 0, out + err
    assert f"would make {made.parent}" in out
    assert made.name not in out
    assert made.is_dir()


def test_an_artifact_that_was_touched_is_not_taken_for_done(job: Job, made: Path) -> None:
    held = made / manifest.HELD_OUT
    whole = held.read_bytes()
    held.write_bytes(whole[:100])
    try:
        code, _, err = job.run()
    finally:
        held.write_bytes(whole)
    assert code == 1
    assert "heldout.jsonl has 100 bytes" in err
    assert len(err.strip().splitlines()) == 1


def test_killed_is_told_cleared_and_begun_anew_and_a_second_job_waits(tmp_path: Path) -> None:
    job = Job(tmp_path, 6)
    first = job.start()
    until_layer(first)
    first.kill()  # as a power cut does it
    first.communicate()
    (left,) = (job.models / "tiny").glob(".*.partial")
    assert versions(job.models, "tiny") == []

    second = job.start()
    said = "".join(until_layer(second))
    assert f"found {left.name}: a run of " in said
    assert "ended unfinished at: layer " in said
    assert "this run starts from the beginning" in said

    code, _, err = job.run()
    assert code == 1
    assert err.startswith(f"quantize: process {second.pid} is at work in ")

    second.send_signal(signal.SIGTERM)
    _, err = second.communicate(timeout=LIMIT_S)
    assert second.returncode == 130
    assert err.strip().splitlines()[-1] == "quantize: interrupted; nothing half-made was left"
    assert [path.name for path in (job.models / "tiny").iterdir()] == [".quantize.lock"]


def test_llm_compressor_makes_compressed_tensors_of_the_same_model(job: Job, tmp_path: Path) -> None:
    code, out, err = job.run(tmp_path, producer="llmcompressor")
    assert code == 0, out + err
    assert "layer 2 of 2" in out
    made = job.artifact(tmp_path)
    config = json.loads((made / "config.json").read_text())
    quantization = config["quantization_config"]
    assert quantization["quant_method"] == "compressed-tensors"
    assert quantization["config_groups"]["group_0"]["weights"]["symmetric"] is False
    assert quantization["config_groups"]["group_0"]["weights"]["num_bits"] == 4
    assert quantization["ignore"] == ["lm_head"]
    assert config["tie_word_embeddings"] is True


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"calibration": {"source": "hub:owner/texts"}},
            "calibration.source: the hub's data set owner/texts can't be had",
        ),
        ({"source": {"model": "owner/model"}}, "source.model: owner/model can't be downloaded"),
        ({"calibration": {"source": "nowhere.jsonl"}}, "calibration.source: nowhere.jsonl does not exist"),
        ({"weights": {"group_size": 128}}, "does not divide hidden_size 576"),
        ({"device": "cuda"}, "device: cuda is asked for, but no NVIDIA card is seen here"),
    ],
)
def test_what_cannot_be_had_is_one_line_before_any_weight(
    job: Job, tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    """Without a network; within seconds."""
    started = time.monotonic()
    code, _, err = job.run(tmp_path, **change)
    assert code == 1
    assert says in err
    assert len(err.strip().splitlines()) == 1, err
    assert time.monotonic() - started < 60
    assert not list(tmp_path.iterdir())


def hub_folder(job: Job) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in job.source.iterdir()}


def test_a_model_of_the_hub_is_looked_at_before_its_weights_are_fetched_and_kept_at_its_commit(
    job: Job, tmp_path: Path
) -> None:
    """A hub on loopback, a model that only a token may read; the token goes nowhere before it is needed."""
    secret = tmp_path / "token"
    secret.write_text("hf_reader\n")
    with hub.serve() as served:
        served.cdn = served.cdn.replace("127.0.0.1", "localhost")  # this client tells another host by its name
        served.valid = {"hf_reader"}
        served.repos["owner/model"] = hub.Repo(hub_folder(job), gated="auto", readers=("hf_reader",))
        away = {"HF_ENDPOINT": served.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf")}
        source = {"model": "owner/model"}
        code, _, err = job.run(tmp_path / "m", env=away, source=source)
        assert code == 1
        assert "accepted its licence on its page: accept it, then write a token to " in err
        assert len(err.strip().splitlines()) == 1, err
        away["HF_TOKEN_FILE"] = str(secret)
        code, _, err = job.run(tmp_path / "m", env=away, source=source, weights={"group_size": 128})
        assert code == 1
        assert "does not divide hidden_size 576" in err
        assert not [seen for seen in served.gets() if "safetensors" in seen.path]
        code, out, err = job.run(tmp_path / "m", env=away, source=source)
        assert code == 0, out + err
        assert "hf_reader" not in out + err
        made = manifest.read(job.artifact(tmp_path / "m"))
        assert (made.source.model, made.source.revision) == ("owner/model", hub.COMMIT)
        assert "model-00001-of-00003.safetensors" in made.source.files
        asked = len(served.gets())
        code, out, err = job.run(tmp_path / "m", env=away, source=source)
        assert code == 0, out + err
        assert "is there already" in out
        assert len(served.gets()) == asked
    assert {seen.authorization for seen in served.seen} == {None, "Bearer hf_reader"}


def test_too_little_text_is_told_before_weights(job: Job, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("one line\n\ntwo\n\nthree\n")
    code, _, err = job.run(tmp_path / "m", calibration={"source": str(short)})
    assert code == 1
    assert "3 texts give" in err
    assert "are needed" in err
    assert len(err.strip().splitlines()) == 1, err


def test_every_architecture_that_is_promised_is_known_to_autoawq() -> None:
    ask = "from awq.models.auto import AWQ_CAUSAL_LM_MODEL_MAP as known; print(*known)"
    done = subprocess.run(
        [str(PYTHON), "-W", "ignore", "-c", ask], capture_output=True, text=True, check=True, timeout=LIMIT_S
    )
    assert set(producers.MODEL_TYPES) <= set(done.stdout.split())


def test_without_its_library_the_job_says_which_environment_it_needs(job: Job, tmp_path: Path) -> None:
    """Run with the tests' own python, which has neither torch nor transformers."""
    path = tmp_path / "c.yaml"
    given = {"name": "a", "source": {"model": str(job.source)}, "weights": {"group_size": 64}, "device": "cpu"}
    path.write_text(yaml.safe_dump(given | {"calibration": {"source": str(job.texts)}}))
    command = [sys.executable, "-m", "scripts.quantize", "--config", str(path), "--models", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 1
    assert "make .venv-quantize/.installed" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
