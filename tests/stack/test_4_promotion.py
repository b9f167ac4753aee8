"""Another version of a model under a running load: judged in the engine's container, promoted, reverted, taken back."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.quantize import versions
from tests.quantize.versions import links
from tests.stack.checkout import MODEL, ROOT, Stack, until
from tests.stack.load import ANSWERED, Load
from tests.stack.test_2_faults import ENGINE_HEALS_S, engine_ready, settle
from tests.stack.test_3_upgrade import PATIENCE

NAME = "smollm2-135m-awq"
PROFILE = "smollm2-135m-awq.cpu"
TEXT = {"window_tokens": 256, "max_tokens": 1024, "min_tokens": 512, "listed": 64}
# What rounding costs this model is not what is tried here; whether the container can be asked for it is.
LAX = {"ppl_rise_max": 0.5, "kl_mean_max": 0.5, "top1_min": 0.6, "chats_wrong_max": 0.9}


@pytest.fixture(scope="module")
def home(stack: Stack) -> Iterator[Path]:
    """Two versions that can be served and one that can't; the stack runs with the first."""
    models = stack.root / "models"
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in ("docs/operations.md", "docs/security.md")]
    first = versions.rounded(models, NAME, "aaaaaaaaaaaa", models / MODEL, texts)
    versions.serve(first)
    shutil.copytree(first, first.with_name("bbbbbbbbbbbb"))
    versions.rename(first.with_name("bbbbbbbbbbbb"))
    broken = first.with_name("cccccccccccc")
    shutil.copytree(first, broken)
    config = json.loads((broken / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"]["bits"] = 3  # the manifest agrees, the engine does not
    (broken / "config.json").write_text(json.dumps(config), encoding="utf-8")
    versions.rename(broken)
    gate = yaml.safe_load((stack.root / "configs/quantize/gate.yaml").read_text(encoding="utf-8"))
    sizes = [{**size, "limits": LAX} for size in gate["sizes"]]
    (stack.root / "gate.yaml").write_text(yaml.safe_dump({**gate, "text": TEXT, "sizes": sizes}), encoding="utf-8")
    profile = (stack.root / "configs/engine/smollm2-135m.cpu.yaml").read_text(encoding="utf-8")
    profile = profile.replace(f"/models/{MODEL}\n", f"/models/{NAME}/current\n")
    (stack.root / f"configs/engine/{PROFILE}.yaml").write_text(profile, encoding="utf-8")
    gateway = stack.root / "configs/gateway.yaml"
    good = gateway.read_text(encoding="utf-8")
    gateway.write_text(good.replace("timeouts:\n", PATIENCE), encoding="utf-8")
    up = stack.make("up-cpu", ENGINE_PROFILE=PROFILE)
    assert up.returncode == 0, up.stdout + up.stderr
    assert stack.compose("restart", "gateway").returncode == 0
    yield first.parent
    gateway.write_text(good, encoding="utf-8")
    up = stack.make("up-cpu")
    assert up.returncode == 0, up.stdout + up.stderr
    assert stack.compose("restart", "gateway").returncode == 0


@pytest.fixture(autouse=True)
def _whole(stack: Stack, home: Path) -> None:
    until(lambda: engine_ready(stack), "a ready engine", ENGINE_HEALS_S)


def served(stack: Stack) -> str:
    """The version that the engine's container sees behind the link."""
    return stack.python("engine-cpu", f"import os; print(os.path.realpath('/models/{NAME}/current'))").rpartition("/")[
        2
    ]


def test_the_gate_asks_the_engine_in_its_container(stack: Stack, home: Path, summary: dict[str, Any]) -> None:
    """Beside the running stack, which is not disturbed; the container is gone afterwards."""
    before = stack.inspect("engine-cpu")["Id"]
    arguments = "--engine compose --config gate.yaml --json"
    done = stack.make("gate", f"NAME={NAME}", "DIGEST=bbbb", f"ARGS={arguments}")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["verdict"], found["kept"]) == ("PASS", True)
    assert stack.inspect("engine-cpu")["Id"] == before
    assert stack.chat().status_code == 200
    assert stack.docker("ps", "--all", "--quiet", "--filter", "name=vllm-stack-gate") == ""
    summary["gate_in_a_container_s"] = found["seconds"]


@pytest.mark.parametrize(
    ("target", "arguments"), [("promote", ["DIGEST=bbbb"]), ("revert", [])], ids=["promote", "revert"]
)
def test_another_version_takes_over_and_no_request_fails(
    stack: Stack, home: Path, summary: dict[str, Any], target: str, arguments: list[str]
) -> None:
    before, engine = links(home), stack.inspect("engine-cpu")["Id"]
    with Load(stack) as load:
        began_s = settle(load)
        done = stack.make(target, f"NAME={NAME}", *arguments, "ARGS=--json")
        took_s = time.monotonic() - began_s
        assert done.returncode == 0, done.stdout + done.stderr
        answered = len(load.seen)
        until(lambda: len(load.seen) >= answered + 6, "answers by the new engine", 120)
        outcomes = load.outcomes(began_s)
        longest_s = load.longest_s(began_s)
    assert set(outcomes) == {ANSWERED}
    found = json.loads(done.stdout)
    assert links(home) == {"current": found["version"], "previous": before["current"]}
    assert served(stack) == found["version"] != before["current"]
    assert stack.inspect("engine-cpu")["Id"] != engine
    summary.setdefault("promotions", {})[target] = {
        "took_s": round(took_s, 1),
        "clients_saw": outcomes,
        "longest_answered_s": round(longest_s, 1),
    }


def test_a_version_that_does_not_hold_is_taken_back_and_no_request_fails(
    stack: Stack, home: Path, summary: dict[str, Any]
) -> None:
    """It passed the gate, says its manifest; the engine does not load it. Links and engine are as they were."""
    versions.judge_again(home / "cccccccccccc", "PASS")
    before = links(home)
    with Load(stack) as load:
        began_s = settle(load)
        failed = stack.make("promote", f"NAME={NAME}", "DIGEST=cccc")
        answered = len(load.seen)
        until(lambda: len(load.seen) >= answered + 6, "answers by the old engine", 120)
        outcomes = load.outcomes(began_s)
    assert failed.returncode != 0
    assert failed.stderr.startswith("promote: the engine did not start")
    assert "Traceback" not in failed.stderr
    assert set(outcomes) == {ANSWERED}
    assert links(home) == before
    assert served(stack) == before["current"]
    summary.setdefault("promotions", {})["does not hold"] = {"clients_saw": outcomes}
