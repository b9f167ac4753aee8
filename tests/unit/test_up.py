"""`make up` and `make down` before Docker is asked: what they decide, what they refuse, what they make."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from scripts import _one_shot, _secrets, _stack_model, down, model_fetch, up
from scripts._bring_up import UpError, awaited
from scripts._compose import ROOT, Container, failure, reason


def container(service: str, **changes: object) -> Container:
    fields: dict[str, object] = {
        "id": service, "service": service, "state": "running", "health": "healthy", "said": "", "code": 0,
        "restarts": 0, "image": "i", "image_id": "sha256:1", "env": {},
    }  # fmt: skip
    return Container(**fields | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "said",
    [
        "unknown flag: --profile\n\nUsage:  docker [OPTIONS] COMMAND\n\nRun 'docker --help' for more",
        "docker: 'compose' is not a docker command.\nSee 'docker --help'",
    ],
)
def test_docker_without_compose_is_told_by_that(said: str) -> None:
    assert reason(said) == "docker has no Compose here: docs.docker.com/compose/install"


def test_a_stack_whose_engine_still_loads_is_waited_for() -> None:
    loading = [container("engine", health="starting", said="starting"), container("gateway")]
    assert failure(loading) is None
    assert awaited(loading) == "engine (starting)"


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (container("engine", health="starting", said="gave up: no memory"), "gave up: no memory"),
        (container("gateway", state="restarting", restarts=2, code=1), "it ended 2 times, last with exit code 1"),
        (container("grafana", state="exited", code=1), "it ended with exit code 1"),
    ],
)
def test_a_service_that_will_not_come_up_is_named_with_its_reason(broken: Container, told: str) -> None:
    assert failure([container("prometheus"), broken]) == (broken.service, told)


def test_a_service_that_ended_once_and_is_started_again_may_still_come_up() -> None:
    assert failure([container("gateway", state="restarting", restarts=1, code=137)]) is None


def test_without_a_gpu_the_settings_are_the_examples_with_two_lines_changed() -> None:
    example = (ROOT / ".env.example").read_text(encoding="utf-8")
    made = up.cpu_env_file(example)
    changed = [line for line in made.splitlines() if line not in example.splitlines()]
    assert changed == ["COMPOSE_PROFILES=cpu", f"ENGINE_PROFILE={up.CPU_PROFILE}"]
    assert len(made.splitlines()) == len(example.splitlines())


@pytest.mark.parametrize(
    ("cpu", "said", "expected"),
    [
        (True, "", up.CPU_PROFILE),
        (True, "llama3-8b-awq.rtx4090", up.CPU_PROFILE),
        (True, "mine.cpu", "mine.cpu"),
        (False, "llama3-8b-awq.rtx4090", "llama3-8b-awq.rtx4090"),
    ],
)
def test_each_engine_gets_a_profile_of_its_kind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cpu: bool, said: str, expected: str
) -> None:
    monkeypatch.setattr(up, "ROOT", tmp_path)
    (tmp_path / ".env").write_text(f"ENGINE_PROFILE={said}\n", encoding="utf-8")
    assert up.environment(cpu, {}) == {"ENGINE_PROFILE": expected}


def test_a_cpu_profile_on_the_way_to_a_gpu_is_refused_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(up, "ROOT", tmp_path)
    (tmp_path / ".env").write_text(f"ENGINE_PROFILE={up.CPU_PROFILE}\n", encoding="utf-8")
    with pytest.raises(UpError, match="make up-cpu"):
        up.environment(False, {})


def test_without_settings_up_says_how_to_make_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(up, "ROOT", tmp_path)
    with pytest.raises(UpError, match=r"cp \.env\.example \.env"):
        up.environment(False, {})


def test_what_else_the_settings_name_comes_with_the_chosen_engine() -> None:
    assert up.profiles("cpu", "gpu, tls,load") == ["cpu", "tls", "load"]
    assert up.profiles("gpu", "") == ["gpu"]


def test_down_stops_the_gateway_before_everything_else() -> None:
    running = [container("engine"), container("gateway")]
    assert down.plan(running, None) == [("stop", "gateway"), ("down",)]
    assert down.plan(running, 5) == [("stop", "--timeout", "5", "gateway"), ("down", "--timeout", "5")]
    assert down.plan([container("gateway", state="exited")], None) == [("down",)]


def test_secrets_are_made_once_readable_by_containers_and_by_nobody_else_here(tmp_path: Path) -> None:
    where = tmp_path / "secrets"
    key = _secrets.make(_secrets.plan(where))
    assert key is not None
    assert key not in (where / "keys.json").read_text(encoding="utf-8")
    private = where / "private"
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert stat.S_IMODE(where.stat().st_mode) == 0o711
    assert {path.name for path in private.iterdir()} == set(_secrets.NAMES)
    assert {stat.S_IMODE(path.stat().st_mode) for path in private.iterdir()} == {0o644}
    values = {path.read_text(encoding="utf-8") for path in private.iterdir()}
    assert len(values) == len(_secrets.NAMES)
    assert min(map(len, values)) > 40
    again = _secrets.plan(where)
    assert again == _secrets.Plan(where, (), first_key=False)
    assert _secrets.make(again) is None
    assert {path.read_text(encoding="utf-8") for path in private.iterdir()} == values


def test_the_demo_load_gets_a_key_of_its_own_only_where_it_runs(tmp_path: Path) -> None:
    where = tmp_path / "secrets"
    _secrets.make(_secrets.plan(where))
    keys, secret = where / "keys.json", where / "private" / _secrets.LOAD_KEY
    assert '"load"' not in keys.read_text(encoding="utf-8")
    for _ in range(2):  # a lost file is made again, under the same name
        _secrets.make(_secrets.plan(where, load=True))
        made = secret.read_text(encoding="ascii").strip()
        assert hashlib.sha256(made.encode()).hexdigest() in keys.read_text(encoding="utf-8")
        assert _secrets.plan(where, load=True).load_key is False
        secret.unlink()


def small_model(folder: Path) -> Path:
    """A directory that passes for the fetched one."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}", encoding="utf-8")
    manifest = {"recipe": model_fetch.RECIPE, "files": {"config.json": {"bytes": 2, "sha256": "-"}}}
    (folder / model_fetch.MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    return folder


def test_the_small_model_is_copied_from_the_cache_once(tmp_path: Path) -> None:
    environ = {"MODELS_DIR": str(tmp_path / "models"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert "make model" in _stack_model.plan(environ).problem
    cached = small_model(model_fetch.model_dir(environ))
    chosen = _stack_model.plan(environ)
    assert chosen.source == cached
    _stack_model.copy(chosen)
    assert (tmp_path / "models" / model_fetch.NAME / "config.json").is_file()
    assert [path.name for path in (tmp_path / "models").iterdir()] == [model_fetch.NAME]
    assert _stack_model.plan(environ) == _stack_model.Plan(chosen.target)


def test_an_empty_secret_is_refused_rather_than_used(tmp_path: Path) -> None:
    _secrets.make(_secrets.plan(tmp_path / "secrets"))
    path = tmp_path / "secrets" / "private" / "grafana_admin_password"
    path.write_text("", encoding="utf-8")
    with pytest.raises(_secrets.SecretsError, match="grafana_admin_password is empty"):
        _secrets.plan(tmp_path / "secrets")


def test_a_directory_that_keeps_the_gateways_user_out_is_refused(tmp_path: Path) -> None:
    _secrets.make(_secrets.plan(tmp_path / "secrets"))
    (tmp_path / "secrets").chmod(0o700)
    with pytest.raises(_secrets.SecretsError, match="chmod 711"):
        _secrets.plan(tmp_path / "secrets")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become the gateway's user")
def test_the_gateways_user_reads_the_keys_there_and_can_not_look_around() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        where = Path(folder) / "secrets"
        _secrets.make(_secrets.plan(where))
        look = (
            "import os, sys; from gateway.keys import parse_keys; os.setgid(10001); os.setuid(10001); w = sys.argv[1];"
            "print(len(parse_keys(open(w + '/keys.json', 'rb').read(), w).keys))\n"
            "for path in (w, w + '/private/admin_token'):\n"
            "  try: print((os.listdir if path == w else open)(path))\n"
            "  except PermissionError: print('no')"
        )
        done = subprocess.run([sys.executable, "-c", look, str(where)], capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["1", "no", "no"]


def test_a_private_directory_that_lets_others_in_is_refused(tmp_path: Path) -> None:
    _secrets.make(_secrets.plan(tmp_path / "secrets"))
    (tmp_path / "secrets" / "private").chmod(0o755)
    with pytest.raises(_secrets.SecretsError, match="chmod 700"):
        _secrets.plan(tmp_path / "secrets")


def test_a_docker_command_that_failed_is_told_by_its_error_and_not_by_its_progress() -> None:
    stderr = " Network x  Creating\n Network x  Created\nError response from daemon: port is already allocated\n"
    assert reason(stderr) == "Error response from daemon: port is already allocated"


def test_the_jobs_profile_is_that_of_the_machine() -> None:
    assert up.profiles("gpu", "gpu,quantize") == ["gpu", "quantize"]
    assert up.profiles("cpu", "cpu,quantize,tls") == ["cpu", "quantize-cpu", "tls"]


def test_a_job_that_ended_well_is_no_failure_and_one_that_did_not_is() -> None:
    ended = container("quantize", state="exited", health="", code=0)
    assert failure([ended]) is None
    assert ended.well
    assert failure([container("quantize", state="exited", health="", code=1)]) == (
        "quantize", "it ended with exit code 1",
    )  # fmt: skip
    assert failure([container("grafana", state="exited", code=0)]) is not None


def test_the_job_runs_as_the_owner_of_the_models_and_never_as_root(tmp_path: Path) -> None:
    """Root's directory is given to a user of the job's own, where root is who runs this; else the way out is said."""
    owner = tmp_path.stat().st_uid
    if owner:
        assert _one_shot.writer(tmp_path, owner).user == f"{owner}:{tmp_path.stat().st_gid}"
        return
    chosen = _one_shot.writer(tmp_path, 0)
    assert chosen == _one_shot.Writer("10004:10004", give=True)
    with pytest.raises(_one_shot.JobError, match=f"sudo chown 1000 {tmp_path}"):
        _one_shot.writer(tmp_path, 1000)
    _one_shot.give(tmp_path, chosen)
    assert tmp_path.stat().st_uid == 10004
    assert _one_shot.writer(tmp_path, 0).user == "10004:10004"
    with pytest.raises(_one_shot.JobError, match="make model"):
        _one_shot.writer(tmp_path / "absent", 0)
