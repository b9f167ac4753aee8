"""A make target that was told too little says in one line what is missing; one without Docker says so in one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from scripts import advise, demo, gate, keys, promote, restore, revert, upgrade, usage, verify
from scripts.bench import compare
from scripts.engine_args import __main__ as engine_args

ROOT = Path(__file__).parents[2]
Main = Callable[[Sequence[str]], int]


@pytest.mark.parametrize(
    ("main", "argv", "line"),
    [
        (keys.main, [], f"keys: say what to do, and to whom: {keys.EXAMPLE}"),
        (keys.main, ["rotate"], f"keys: say what to do, and to whom: {keys.EXAMPLE}"),
        (keys.main, ["ad"], "keys: argument COMMAND: invalid choice: 'ad'"),
        (
            keys.main,
            ["add", "x", "--concurrent", "y"],
            "keys: argument --concurrent: 'y': expected a whole number: make keys",
        ),
        (gate.main, [], "gate: name a model: make gate NAME=llama3-8b-awq (make models lists them)"),
        (promote.main, [], "promote: name a model: make promote NAME=llama3-8b-awq (make models lists them)"),
        (revert.main, [], "revert: name a model: make revert NAME=llama3-8b-awq (make models lists them)"),
        (restore.main, [], "restore: name a backup: make restore FILE=backups/today.tar"),
        (upgrade.main, [], "upgrade: name the engine's new image: make upgrade ENGINE_IMAGE=vllm/vllm-openai:v0.33.0"),
        (upgrade.main, ["no image"], "upgrade: 'no image' is no image's name: make upgrade ENGINE_IMAGE="),
        (upgrade.main, ["x", "--drain-s", "soon"], "upgrade: argument --drain-s: 'soon': expected a number: make"),
        (
            usage.main,
            ["--since", "yesterday"],
            "usage: argument --since: 'yesterday': expected a day such as 2030-01-31 (",
        ),
        (
            usage.main,
            ["--until", "2030-13-1"],
            "usage: argument --until: '2030-13-1': expected a day such as 2030-01-31 (",
        ),
        (verify.main, ["here:8000"], "verify: argument engine: 'here:8000': expected an address such as http://127"),
        (advise.main, ["--prometheus", "http://"], "advise: argument --prometheus: 'http://': expected an address"),
        (advise.main, ["--window", "ten"], "advise: argument --window: 'ten': expected a number (make advise"),
        (demo.main, ["--prot", "1"], "demo: unrecognized arguments: --prot 1: did you mean --port? (make demo"),
        (demo.main, ["now"], "demo: unrecognized arguments: now (make demo ARGS=--help tells more)"),
        (compare.main, [], "bench-compare: name two runs, A and B: make bench-compare A="),
        (engine_args.main, ["add"], "engine-args: say what to capture: make engine-args VERSION="),
    ],
)
def test_too_little_or_nonsense_is_one_line_with_one_that_works(
    main: Main, argv: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert err.startswith(line), err
    assert err.count("\n") == 1


@pytest.mark.parametrize("target", ["keys", "gate", "promote", "revert", "restore", "upgrade"])
def test_make_hands_on_no_empty_names(target: str) -> None:
    told = subprocess.run(
        ["make", "-n", "-o", ".venv/.installed", target], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "''" not in told.stdout


@pytest.mark.parametrize("command", ["ps", "logs", "shell-engine"])
@pytest.mark.parametrize(
    ("docker", "why"),
    [
        (None, "docker is not installed: docs.docker.com/engine/install"),
        ("exit 1", "docker has no Compose here: docs.docker.com/compose/install"),
    ],
    ids=["no docker", "no compose"],
)
def test_without_docker_or_compose_the_reason_is_one_line(
    command: str, docker: str | None, why: str, tmp_path: Path
) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "dirname", "env", "grep"):
        found = next(Path(folder, name) for folder in os.environ["PATH"].split(":") if Path(folder, name).exists())
        (tools / name).symlink_to(found)
    if docker is not None:
        (tools / "docker").write_text(f"#!/usr/bin/env bash\n{docker}\n")
        (tools / "docker").chmod(0o755)
    done = subprocess.run(
        [str(ROOT / "scripts/compose.sh"), command],
        env={"PATH": str(tools)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"{command}: {why}\n")


def test_compose_gets_the_command_and_all_profiles(tmp_path: Path) -> None:
    (tmp_path / "docker").write_text('#!/usr/bin/env bash\n[ "$2" = version ] || echo "$@"\n')
    (tmp_path / "docker").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"

    def said(*arguments: str) -> tuple[int, str, str]:
        command = [str(ROOT / "scripts/compose.sh"), *arguments]
        done = subprocess.run(command, env={"PATH": path}, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout.strip(), done.stderr.strip()

    assert said("ps", "--all") == (0, "compose --profile * ps --all", "")
    assert said("logs", "--follow", "gateway") == (0, "compose --profile * logs --follow gateway", "")
    assert said("shell-engine") == (1, "", "shell-engine: no engine runs: make up (make up-cpu)")
