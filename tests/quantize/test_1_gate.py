"""The gate on real artifacts: it passes what is fit to serve, and sees the ones that are not."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from scripts.quantization import gate_run
from scripts.quantization.manifest import HELD_OUT, read
from tests.quantize import conftest, versions
from tests.quantize.conftest import NAME, PYTHON, QUANTIZE_PYTHON, ROOT, Bench


def test_a_model_quantized_on_the_cpu_passes(bench: Bench, good: Path, summary: dict[str, Any]) -> None:
    """Its verdict and figures are in its manifest afterwards, and the report is beside it."""
    result = bench.judge(good)
    conftest.note(summary, "autoawq", result)
    found = gate_run.summary(result)
    assert result.judgement.verdict == "PASS", result.judgement.reasons
    assert found["figures"]["tokens"] > 2048
    assert gate_run.keep(result, found)
    assert read(good).gate == json.loads(json.dumps(found))
    assert (good / gate_run.REPORT).stat().st_size > 4000
    summary["speed"] = {**found["speed"], "weight_bytes": found["weight_bytes"]}
    summary["chats_well"] = sum(not chat["artifact"]["wrong"] for chat in found["chats"])


@pytest.mark.full
def test_the_command_reaches_the_same_verdict(bench: Bench, good: Path, summary: dict[str, Any]) -> None:
    """`make gate`, both engines started by it."""
    before = read(good).gate
    assert before is not None
    done = bench.script("gate", NAME, good.name, "--engine", "local", "--config", str(bench.config_file), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["verdict"], found["kept"]) == ("PASS", True)
    assert found["figures"]["ppl_artifact"] == pytest.approx(before["figures"]["ppl_artifact"], rel=0.005)
    summary["gate_s"] = found["seconds"]


def test_the_silent_garbage_of_stock_autoawq_on_a_cpu_fails(bench: Bench, summary: dict[str, Any]) -> None:
    """The mend turned off: everything is written and served as usual, only the weights are spoilt."""
    made = bench.job("smollm2-135m-stock", "--unsafe-stock-autoawq", calibration={"blocks": 2, "block_tokens": 128})
    result = bench.judge(Path(made["directory"]))
    conftest.note(summary, "stock autoawq", result)
    assert result.judgement.verdict == "FAIL"
    assert any("perplexity" in reason for reason in result.judgement.reasons)
    assert any("KL" in reason for reason in result.judgement.reasons)
    assert any("top-1" in reason for reason in result.judgement.reasons)


def swap_tokens(path: Path) -> None:
    """The tokenizer of another model: each id stands for its neighbour's text. The manifest calls it right."""
    tokenizer = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    special = {token["id"] for token in tokenizer["added_tokens"]}
    names = sorted((name for name, number in vocabulary.items() if number not in special), key=vocabulary.__getitem__)
    numbers = [vocabulary[name] for name in names]
    vocabulary.update(zip(names, numbers[1:] + numbers[:1], strict=True))
    (path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")


def lose_the_template(path: Path) -> None:
    """Another chat template: every token of the text is right, and every chat is not what the model was taught."""
    (path / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}", encoding="utf-8"
    )


@pytest.mark.full
@pytest.mark.parametrize("change", [swap_tokens, lose_the_template])
def test_another_tokenizer_or_template_fails(bench: Bench, good: Path, summary: dict[str, Any], change: Any) -> None:
    path = bench.models / NAME / f"0000{change.__name__[:8].replace('_', '')}"
    shutil.copytree(good, path)
    try:
        change(path)
        versions.rename(path)
        result = bench.judge(path)
    finally:
        shutil.rmtree(path)
    conftest.note(summary, change.__name__, result)
    assert result.judgement.verdict == "FAIL"
    assert "the artifact's tokenizer is not the original's" in result.judgement.reasons[0]


def test_too_little_held_out_text_is_an_abstention(bench: Bench, good: Path) -> None:
    """Figures of the run before, on a window's worth of them."""
    full = bench.judge(good)
    assert full.original is not None
    assert full.artifact is not None
    few = [dataclasses.replace(side, windows=side.windows[:2]) for side in (full.original, full.artifact)]
    result = gate_run.conclude(full.plan, few[0], few[1], bench.config, 1.0)
    assert result.judgement.verdict == "ABSTAIN"
    assert "held-out tokens were scored" in result.judgement.reasons[0]


@pytest.mark.full
def test_the_engines_figures_are_those_of_the_whole_vocabulary(
    bench: Bench, good: Path, summary: dict[str, Any], tmp_path: Path
) -> None:
    """The artifact dequantized in plain torch, float32, on the same tokens. The gate's KL takes all unlisted tokens as
    one, so it is a lower bound; the engine computes in bfloat16, which is a source of divergence of its own.
    """
    result = bench.judge(good)
    assert result.original is not None
    assert result.figures is not None
    windows = tmp_path / "windows.json"
    windows.write_text(json.dumps([window.tokens for window in result.original.windows]), encoding="utf-8")
    module = "tests.quantize.dequantized"
    done = conftest.run([str(QUANTIZE_PYTHON), "-m", module, str(bench.original), str(good), str(windows)], {})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    summary["whole_vocabulary"] = {key: round(value, 4) for key, value in found.items()}
    figures = result.figures
    assert found["tokens"] == figures.tokens
    assert figures.ppl_original == pytest.approx(found["ppl_original"], rel=0.02)
    assert figures.ppl_artifact == pytest.approx(found["ppl_artifact"], rel=0.02)
    assert figures.top1 == pytest.approx(found["top1"], abs=0.02)
    assert 0.75 * found["kl_mean"] < figures.kl_mean < 1.02 * found["kl_mean"]
    assert figures.guessed < 0.01


@pytest.mark.full
def test_an_engine_that_can_not_start_is_an_abstention_that_names_the_cause(bench: Bench, good: Path) -> None:
    """And the verdict that was reached before stands."""
    before = read(good).gate
    arguments = ["--engine", "local", "--config", str(bench.config_file), "--engine-args=--dtype float7", "--json"]
    done = bench.script("gate", NAME, good.name, *arguments)
    assert done.returncode == 3, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["verdict"], found["kept"]) == ("ABSTAIN", False)
    assert "float7" in found["reasons"][0]
    assert read(good).gate == before


def test_what_the_job_did_not_write_is_not_measured_at_all(bench: Bench, good: Path) -> None:
    """A shard cut by a byte: one line, before any engine is started."""
    path = bench.models / NAME / "000000000cut"
    shutil.copytree(good, path)
    try:
        shard = next(path.glob("*.safetensors"))
        os.truncate(shard, shard.stat().st_size - 1)
        done = bench.script("gate", NAME, path.name, "--engine", "local", "--json")
    finally:
        shutil.rmtree(path)
    assert done.returncode == 1
    assert done.stderr.startswith(f"gate: {NAME}/000000000cut is not as the job wrote it: {shard.name} has")
    assert len(done.stderr.splitlines()) == 1


def test_another_original_than_the_one_quantized_is_refused(bench: Bench, good: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(bench.original, other)
    (other / "config.json").write_text("{}", encoding="utf-8")
    done = bench.script("gate", NAME, good.name, "--original", str(other))
    assert done.returncode == 1
    assert "is not the original that was quantized: config.json is another file" in done.stderr


def engines() -> list[psutil.Process]:
    """Engines of a gate on this machine."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if "--served-model-name" in line and line[line.index("--served-model-name") + 1] == "gate":
            found.append(process)
    return found


def test_a_gate_killed_midway_leaves_no_engine_and_no_verdict(bench: Bench) -> None:
    """kill -9 while the original's engine starts. The next run is as if there had been none."""
    path = versions.rounded(bench.models, "killed", "aaaaaaaaaaaa", bench.original, ["A text. " * 200])
    before = {process.pid for process in engines()}
    gate = subprocess.Popen(
        [str(PYTHON), "-m", "scripts.gate", "killed", "--engine", "local"],
        env={**os.environ, "MODELS_DIR": str(bench.models)},
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )
    try:
        conftest.until(lambda: {found.pid for found in engines()} - before, "the gate's engine", 120)
    finally:
        gate.send_signal(signal.SIGKILL)
        gate.wait()
    conftest.until(lambda: not {found.pid for found in engines()} - before, "an end of the gate's engine", 60)
    assert read(path).gate is None
    assert {file.name for file in path.iterdir()} == {*read(path).files, "manifest.json"}
    assert (path / HELD_OUT).is_file()
