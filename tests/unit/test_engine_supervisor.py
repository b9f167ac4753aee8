"""The engine container's supervisor: when it starts the engine again, what it calls the cause, what its health says."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ENGINE = Path(__file__).parents[2] / "docker" / "engine"


def load(name: str) -> ModuleType:
    """A module of the image, which is no package of this project."""
    spec = importlib.util.spec_from_file_location(f"engine_image_{name}", ENGINE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


restarts = load("restarts")
healthcheck = load("healthcheck")


def ended(
    code: int = 1, *, ready: bool = False, killed: str = "", tail: tuple[str, ...] = (), oom: bool = False
) -> object:
    return restarts.Ended(code, ready, killed, tail, oom)


def test_an_engine_that_never_came_up_is_started_a_few_times_and_not_again() -> None:
    policy = restarts.Restarts(max_starts=3)
    decisions = [policy.after(ended(), float(at)) for at in range(3)]
    assert [type(decision).__name__ for decision in decisions] == ["Again", "Again", "GiveUp"]
    assert "3 of 3" in decisions[-1].why


def test_an_engine_that_had_been_ready_is_always_started_again_and_more_slowly_each_time() -> None:
    policy = restarts.Restarts(max_starts=3)
    decisions = [policy.after(ended(ready=True), float(at)) for at in range(8)]
    assert [decision.delay_s for decision in decisions] == [1, 2, 4, 8, 16, 32, 60, 60]


def test_ends_that_are_long_past_do_not_slow_a_restart() -> None:
    policy = restarts.Restarts(max_starts=3)
    for at in range(5):
        policy.after(ended(ready=True), float(at))
    assert policy.after(ended(ready=True), 10_000.0).delay_s == 1


def test_a_start_that_worked_forgives_the_failed_ones() -> None:
    policy = restarts.Restarts(max_starts=3)
    for end in (ended(), ended(), ended(ready=True), ended(), ended()):
        assert isinstance(policy.after(end, 0.0), restarts.Again)


def test_an_argument_that_the_engine_refuses_is_not_tried_twice() -> None:
    line = "vllm: error: unrecognized arguments: --no-such-flag"
    decision = restarts.Restarts(max_starts=3).after(ended(2, tail=("usage: vllm serve", line)), 0.0)
    assert isinstance(decision, restarts.GiveUp)
    assert "unrecognized arguments: --no-such-flag" in decision.why


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        (
            ended(
                tail=(
                    "(EngineCore pid=9) ERROR 11-30 [core.py:1] ValueError: To serve one request 4 GiB is needed",
                    "(APIServer pid=8) RuntimeError: Engine core initialization failed. See root cause above.",
                )
            ),
            "ValueError: To serve one request 4 GiB is needed",
        ),
        (ended(tail=("torch.OutOfMemoryError: CUDA out of memory.",)), "OutOfMemoryError: CUDA out of memory."),
        (
            ended(
                tail=(
                    "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
                    "  Value error, max_model_len (200000) is too large. [type=value_error, input_value=Args",
                )
            ),
            "max_model_len (200000) is too large.",
        ),
        (ended(tail=("INFO nothing",)), "exit code 1"),
        (ended(-9), "ended by SIGKILL"),
        (ended(oom=True), "out of memory at the container's limit (ENGINE_MEMORY in .env)"),
        (ended(-9, killed="no forward progress for 60 s"), "no forward progress for 60 s"),
    ],
)
def test_the_cause_is_the_first_thing_that_went_wrong(end: object, cause: str) -> None:
    assert restarts.cause(end) == cause


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        ({"state": "ready", "cause": "", "at": 100.0}, (0, "ready")),
        ({"state": "starting", "cause": "", "at": 100.0}, (1, "starting")),
        ({"state": "gave up", "cause": "no memory", "at": 100.0}, (1, "gave up: no memory")),
        ({"state": "ready", "cause": "", "at": 10.0}, (1, "the supervisor has not looked for 91 s")),
        ({"state": "ready"}, (1, "starting")),
    ],
)
def test_the_health_check_says_what_the_supervisor_saw(
    tmp_path: Path, report: dict[str, object], expected: tuple[int, str]
) -> None:
    path = tmp_path / "state.json"
    path.write_text(json.dumps(report), encoding="utf-8")
    assert healthcheck.verdict(path, 101.0) == expected


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({"ENGINE_PROFILE": ""}, "ENGINE_PROFILE = '': expected one of a, b"),
        ({"ENGINE_PROFILE": "../a"}, "ENGINE_PROFILE = '../a': expected one of a, b"),
        ({"ENGINE_PROFILE": "a", "ENGINE_STALL_S": "soon"}, "ENGINE_STALL_S = 'soon': expected a number above 0"),
        ({"ENGINE_PROFILE": "a", "ENGINE_API_KEY_FILE": "/none"}, "ENGINE_API_KEY_FILE = '/none': expected a readable"),
        ({"ENGINE_PROFILE": "a", "PATH": "/nowhere"}, "PATH = '/nowhere': expected the program vllm on it"),
    ],
)
def test_a_setting_that_cannot_be_used_is_one_line_that_names_it(
    tmp_path: Path, env: dict[str, str], told: str
) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").touch()
    program = tmp_path / "vllm"
    program.write_text("#!/bin/sh\n", encoding="utf-8")
    program.chmod(0o755)
    done = subprocess.run(
        [sys.executable, str(ENGINE)],
        env={"PATH": str(tmp_path), "PYTHONPATH": str(ENGINE.parents[1]), "ENGINE_PROFILES": str(tmp_path), **env},
        capture_output=True, text=True, check=False, timeout=20,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith(f"supervisor: {told}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("password", "code", "told"),
    [("", 1, "missing or empty"), ("admin", 1, "5 characters"), ("longer than $twelve#", 0, "started")],
)
def test_grafana_does_not_start_without_a_password_that_is_one(
    tmp_path: Path, password: str, code: int, told: str
) -> None:
    secret, start = tmp_path / "password", tmp_path / "run.sh"
    secret.write_text(password, encoding="utf-8")
    start.write_text("#!/bin/sh\necho started\n", encoding="utf-8")
    start.chmod(0o755)
    done = subprocess.run(
        ["sh", str(ENGINE.parent / "grafana-entrypoint.sh")],
        env={"GF_SECURITY_ADMIN_PASSWORD__FILE": str(secret), "GRAFANA_START": str(start), "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, check=False, timeout=20,
    )  # fmt: skip
    assert done.returncode == code
    assert told in done.stdout + done.stderr
