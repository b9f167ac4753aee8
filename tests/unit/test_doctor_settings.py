"""What people write wrong in .env, profiles and keys, each with its name and its fix."""

import datetime
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts.checks import Check, settings
from scripts.checks.envfile import EXAMPLE, example_names, parse_env, why_missing
from scripts.checks.probes import ROOT, Probes
from scripts.checks.subject import decide

NOW = datetime.datetime(2026, 12, 1, tzinfo=datetime.UTC)
DAY = datetime.timedelta(days=1)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with the project's own .env.example and a .env copied from it."""
    text = (ROOT / EXAMPLE).read_text(encoding="utf-8")
    (tmp_path / EXAMPLE).write_text(text)
    (tmp_path / ".env").write_text(text)
    return tmp_path


def env_file(root: Path, environ: dict[str, str] | None = None) -> Check:
    eyes = Probes(environ=environ or {}, root=root)
    return settings.env_file(eyes, decide(eyes, "stack", None, None))


# -- .env -------------------------------------------------------------------------------------------------------------


def test_a_copy_of_the_example_is_well(project: Path) -> None:
    assert env_file(project).status == "ok"


def test_the_example_knows_the_names_behind_its_hashes() -> None:
    required, known = example_names((ROOT / EXAMPLE).read_text(encoding="utf-8"))
    assert "ENGINE_PROFILE" in required
    assert {"MODELS_DIR", "GATEWAY_PORT", "ENGINE_IMAGE"} <= known - set(required)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("ENGINE_PROFIL=x", "ENGINE_PROFIL is unknown: did you mean ENGINE_PROFILE?"),
        ("MODEL_DIR=/m", "MODEL_DIR is unknown: did you mean MODELS_DIR?"),
        ("SOMETHING_ELSE=1", "SOMETHING_ELSE is unknown"),
        ("COMPOSE_PROFILE=gpu", "COMPOSE_PROFILE is unknown: did you mean COMPOSE_PROFILES?"),
        ("GATEWAY__BATCHING__WINDOW_MS=5", "reaches no container: configs/gateway.yaml"),
        ("ENGINE_PROFILE=again", "sets ENGINE_PROFILE a second time, after line"),
        ("MODELS_DIR=/my models", 'has a space in a value without quotes: MODELS_DIR="/my models"'),
        ("just words", "is not NAME=value"),
        ("GRAFANA_PORT=abc", "a port, 1 to 65535"),
        ("GATEWAY_PORT=99999", "a port, 1 to 65535"),
        ("GATEWAY_PORT=0", "a port, 1 to 65535"),
        ("GATEWAY_BIND=localhorst", "an address of this machine"),
        ("ENGINE_MEMORY=24gigs", "a size such as 24g"),
        ("STALL_S=sixty", "whole seconds"),
        ("LOAD_CLIENTS=0", "a whole number"),
        ("QUANTIZE_USER=me", "numbers of a user and a group"),
        ("PROMETHEUS_KEEP=15 days", "a duration such as 15d"),
        ("PROMETHEUS_SIZE=10", "a size such as 10GB"),
        ("ENGINE_ARGS=--max-model-lenn 99", "it has no --max-model-lenn: did you mean --max-model-len?"),
        ("ENGINE_ARGS=--enable-paged-attn", "it has no --enable-paged-attn"),
        ("ENGINE_ARGS='--max-model-len", "is not NAME=value"),
        ("QUANTIZE=nope", "expected one of"),
    ],
)
def test_a_mistake_in_env_is_named_with_its_line(line: str, said: str, project: Path) -> None:
    with (project / ".env").open("a") as file:
        file.write(f"{line}\n")
    check = env_file(project)
    number = len((project / ".env").read_text().splitlines())
    assert check.status == "fail"
    assert check.found.startswith(f".env:{number}: ")
    assert said in check.found


@pytest.mark.parametrize("value", ["gpus", "gpu,cpu", "tls", "gpu,grafana"])
def test_compose_profiles_name_one_engine_and_what_there_is_beside_it(value: str, project: Path) -> None:
    path = project / ".env"
    path.write_text(path.read_text().replace("COMPOSE_PROFILES=gpu", f"COMPOSE_PROFILES={value}"))
    assert f"COMPOSE_PROFILES={value}: expected gpu or cpu" in env_file(project).found


@pytest.mark.parametrize(
    "line",
    [
        *(
            "GATEWAY_BIND=127.0.0.1",
            "GATEWAY_BIND=::1",
            "ENGINE_MEMORY=1.5g",
            "GATEWAY_MEMORY=700m",
            "PROMETHEUS_KEEP=1d12h",
        ),
        "ENGINE_ARGS=--max-model-len=4096 --no-enable-prefix-caching --kv_cache_dtype fp8",
    ],
)
def test_a_value_that_can_be_is_taken(line: str, project: Path) -> None:
    with (project / ".env").open("a") as file:
        file.write(f"{line}\n")
    assert env_file(project).status == "ok"


def test_every_default_that_the_example_shows_is_a_value_that_can_be(project: Path) -> None:
    path = project / ".env"
    (project / "configs/quantize").mkdir(parents=True)
    (project / "configs/quantize/llama3-8b-instruct.yaml").touch()
    path.write_text(re.sub(r"^# (?=[A-Z_]+=)", "", path.read_text(), flags=re.MULTILINE))
    assert env_file(project).status == "ok", env_file(project).found


def test_every_mistake_names_its_line() -> None:
    text = "# why\n\nA=1\n\n\nB = 2 3\nA=4\njust words\nC='5 6'\nENGINE_ARGS=--a --b\n"
    found = parse_env(text)
    assert [line for line, _ in found.mistakes] == [6, 7, 8]
    assert found.lines == {"A": 7, "B": 6, "C": 9, "ENGINE_ARGS": 10}


def test_a_typo_is_one_message_and_not_also_a_missing_name(project: Path) -> None:
    path = project / ".env"
    path.write_text(path.read_text().replace("ENGINE_PROFILE=", "ENGINE_PROFLE="))
    line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if text.startswith("ENGINE_PROFLE="))
    assert env_file(project).found == f".env:{line}: ENGINE_PROFLE is unknown: did you mean ENGINE_PROFILE?"
    found = parse_env(path.read_text())
    assert why_missing("ENGINE_PROFILE", found) == env_file(project).found


@pytest.mark.parametrize(
    ("name", "meant"), [("ENGINE_PROFIL", "ENGINE_PROFILE"), ("MODEL_DIR", "MODELS_DIR"), ("STAL_S", "STALL_S")]
)
def test_a_typo_in_the_shell_is_a_warning_as_it_may_be_another_programs(name: str, meant: str, project: Path) -> None:
    check = env_file(project, {name: "x"})
    assert (check.status, check.found) == ("warn", f"{name} of this shell is unknown: did you mean {meant}?")
    assert check.fix.startswith(f"unset {name}, ")


def test_names_that_other_programs_read_are_no_typos(project: Path) -> None:
    others = (
        "HTTPS_PROXY",
        "http_proxy",
        "HF_TOKEN",
        "HF_HOME",
        "COMPOSE_FILE",
        "DOCKER_HOST",
        "PROMETHEUS_URL",
        "PATH",
    )
    assert env_file(project, dict.fromkeys(others, "x")).status == "ok"


def test_a_profile_that_nobody_named_is_said_to_be_the_demos(project: Path) -> None:
    """Else every check below would be read as being about the profile that .env was thought to name."""
    path = project / ".env"
    path.write_text(path.read_text().replace("ENGINE_PROFILE=", "ENGINE_PROFIL="))
    line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if text.startswith("ENGINE_PROFIL="))
    eyes = Probes(environ={}, root=project)
    told = decide(eyes, None, None, None).describe()
    said = "the stack, in containers; profile smollm2-135m.cpu, the demo's: "
    assert told == f"{said}.env:{line}: ENGINE_PROFIL is unknown: did you mean ENGINE_PROFILE?"
    assert decide(eyes, None, "llama3-8b-awq.rtx4090", None).unset == ""
    path.unlink()
    assert decide(eyes, "stack", None, None).describe() == f"{said}there is no .env that names one"
    assert decide(eyes, None, None, None).describe() == "the demo, on this host's CPU; profile smollm2-135m.cpu"


def test_an_empty_value_is_told_with_its_line() -> None:
    assert why_missing("A", parse_env("\nA=\n")) == ".env:2: A has no value"
    assert why_missing("A", parse_env("B=1\n")) == ".env sets no A"


def test_a_name_that_is_commented_out_by_mistake_is_missed(project: Path) -> None:
    path = project / ".env"
    path.write_text(path.read_text().replace("ENGINE_PROFILE=", "# ENGINE_PROFILE="))
    assert "ENGINE_PROFILE is not set" in env_file(project).found
    assert env_file(project, {"ENGINE_PROFILE": "smollm2-135m.cpu"}).status == "ok"


def test_windows_line_ends_are_told(project: Path) -> None:
    path = project / ".env"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert "CRLF" in env_file(project).found


def test_dockers_own_variables_are_welcome(project: Path) -> None:
    with (project / ".env").open("a") as file:
        file.write("COMPOSE_PROJECT_NAME=llm\nDOCKER_HOST=unix:///run/docker.sock\n")
    assert env_file(project).status == "ok"


def test_no_env_fails_for_the_stack_and_not_for_the_demo(tmp_path: Path) -> None:
    eyes = Probes(environ={}, root=tmp_path)
    assert settings.env_file(eyes, decide(eyes, "stack", "smollm2-135m.cpu", None)).status == "fail"
    assert settings.env_file(eyes, decide(eyes, "demo", None, None)).status == "skip"


def test_values_are_kept_as_written() -> None:
    assert parse_env("A='x y' # why\nB=$HOME\nC=\n").values == {"A": "x y", "B": "$HOME", "C": ""}


# -- the gateway's settings -------------------------------------------------------------------------------------------


def test_the_gateways_settings_are_loaded_by_its_own_code() -> None:
    """Nothing is replaced here: a process of its own reads the project's configuration."""
    eyes = Probes(environ={})
    assert settings.gateway(eyes, decide(eyes, "demo", None, None)).found == "1 engine, listens on 127.0.0.1:8080"
    assert settings.gateway(eyes, decide(eyes, "stack", "smollm2-135m.cpu", None)).status == "ok"


def test_a_broken_setting_is_said_in_the_gateways_words(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text("batching:\n  window_ms: -1\n  windw_ms: 2\n")
    eyes = Probes(environ={"GATEWAY_CONFIG": str(path)})
    eyes = replace(eyes, run=lambda command, environ=None: Probes().run(command, {**(environ or {}), **eyes.environ}))
    check = settings.gateway(eyes, decide(eyes, "demo", None, None))
    assert check.status == "fail"
    assert "batching.window_ms = -1" in check.found
    assert "batching.windw_ms is not a setting" in check.found
    assert "Traceback" not in check.found


# -- keys -------------------------------------------------------------------------------------------------------------


def keys(root: Path, entries: list[dict[str, Any]] | str | None) -> Check:
    folder = root / "elsewhere"
    folder.mkdir(exist_ok=True)
    if entries is not None:
        content = entries if isinstance(entries, str) else json.dumps({"keys": entries})
        (folder / "keys.json").write_text(content)
    eyes = Probes(environ={"SECRETS_DIR": "elsewhere"}, root=root)
    return settings.keys(eyes, decide(eyes, "stack", "smollm2-135m.cpu", None), NOW)


def key(name: str, expires: datetime.datetime | None = None) -> dict[str, Any]:
    digest = f"{abs(hash((name, expires))):064x}"[:64]
    return {"name": name, "sha256": digest, "expires": expires.isoformat() if expires else None}


def test_valid_keys_are_counted(tmp_path: Path) -> None:
    check = keys(tmp_path, [key("app1"), key("app2", NOW + 60 * DAY)])
    assert (check.status, check.found) == ("ok", "2 valid keys")
    assert keys(tmp_path, [key("app1")]).found == "1 valid key"


def test_a_key_that_ends_soon_is_named(tmp_path: Path) -> None:
    check = keys(tmp_path, [key("app1"), key("app2", NOW + 3 * DAY)])
    assert (check.status, check.found) == ("warn", "app2 expires 2026-12-04")


def test_a_rotation_in_progress_is_no_surprise(tmp_path: Path) -> None:
    assert keys(tmp_path, [key("app1", NOW + DAY), key("app1")]).status == "ok"


def test_an_expired_key_is_named_and_no_valid_one_fails(tmp_path: Path) -> None:
    assert keys(tmp_path, [key("app1"), key("old", NOW - DAY)]).found == "old has expired"
    check = keys(tmp_path, [key("old", NOW - DAY)])
    assert (check.status, "none valid" in check.found) == ("fail", True)


@pytest.mark.parametrize("content", [None, "", "{", '{"keys": [{"name": "a"}]}', '{"keys": []}'])
def test_a_keys_file_that_is_none_fails(content: str | None, tmp_path: Path) -> None:
    assert keys(tmp_path, content).status == "fail"


def test_the_demo_asks_for_no_keys() -> None:
    eyes = Probes(environ={})
    assert settings.keys(eyes, decide(eyes, "demo", None, None), NOW).status == "skip"


# -- the profile ------------------------------------------------------------------------------------------------------


def profile(tmp_path: Path, text: str, name: str = "llama3-8b-awq.rtx4090") -> tuple[Check, Check]:
    path = tmp_path / f"{name}.yaml"
    path.write_text(text)
    eyes = Probes(environ={"MODELS_DIR": "/nowhere", "XDG_CACHE_HOME": "/nowhere"}, root=tmp_path)
    subject = decide(eyes, "stack", str(path), None)
    return settings.profile(subject), settings.fit(subject)


SOUND = "model: /models/llama3-8b-awq/current\nmax-model-len: 8192\ngpu-memory-utilization: 0.92\n"


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "engine").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_profile_that_ships_is_well(path: Path) -> None:
    eyes = Probes(environ={"MODELS_DIR": "/nowhere", "XDG_CACHE_HOME": "/nowhere"})
    subject = decide(eyes, "stack", path.stem, None)
    assert settings.profile(subject).status == "ok"
    assert settings.fit(subject).status in ("ok", "skip")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("max-model-length: 8192", "max-model-length is no flag of vLLM 0.32.0: did you mean max-model-len?"),
        ("enable-paged-attn: true", "enable-paged-attn is no flag"),
        ("swap-space: 4", "swap-space is no flag"),
        ("enable-prefix-caching: false", "silently dropped: write no-enable-prefix-caching: true"),
    ],
)
def test_a_line_that_does_nothing_or_stops_the_start_is_named(line: str, said: str, tmp_path: Path) -> None:
    check, _ = profile(tmp_path, f"{SOUND}{line}\n")
    assert (check.status, said in check.found) == ("fail", True), check.found


def test_a_profile_that_does_not_fit_its_card_says_what_to_write(tmp_path: Path) -> None:
    """Field case D2: the same value in a profile for another card stands in its name."""
    _, fits = profile(tmp_path, SOUND)
    assert (fits.status, "estimate" in fits.found) == ("ok", True)
    _, fits = profile(tmp_path, SOUND.replace("-awq", ""), "llama3-8b.rtx4080")
    assert (fits.status, "no room for a KV cache" in fits.found) == ("fail", True)


@pytest.mark.parametrize("text", ["- a\n", "a: [", ""])
def test_a_profile_that_is_no_mapping_fails(text: str, tmp_path: Path) -> None:
    check, fits = profile(tmp_path, text)
    assert (check.status, fits.status) == ("fail", "skip")


def test_a_profile_that_is_not_there_names_those_that_are() -> None:
    eyes = Probes(environ={})
    check = settings.profile(decide(eyes, "stack", "llama3-8b.rtx9090", None))
    assert (check.status, "there is no " in check.found) == ("fail", True)
    assert "llama3-8b.rtx3090" in check.fix


def test_a_profile_that_is_not_there_is_told_with_the_line_that_names_it(project: Path) -> None:
    path = project / ".env"
    path.write_text(path.read_text().replace("=llama3-8b-awq.rtx4090", "=llama3-8b.awq.rtx4090"))
    line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if text.startswith("ENGINE_PROFILE="))
    eyes = Probes(environ={}, root=project)
    check = settings.profile(decide(eyes, "stack", None, None), eyes)
    assert check.found.startswith(f".env:{line}: ENGINE_PROFILE=llama3-8b.awq.rtx4090: there is no ")
    assert check.fix.startswith("write one that is there: llama3-8b-awq.rtx4090, ")
    shell = replace(eyes, environ={"ENGINE_PROFILE": "llama3-8b.rtx9090"})
    check = settings.profile(decide(shell, "stack", None, None), shell)
    assert check.found.startswith("ENGINE_PROFILE of this shell=llama3-8b.rtx9090: ")


def test_the_command_line_and_the_file_are_each_told_their_own_wrong_profile(project: Path) -> None:
    eyes = Probes(environ={}, root=project)
    sound, wrong = "llama3-8b-awq.rtx3090", "llama3-8b-awq.rtx409"
    path = project / ".env"
    before = path.read_text()

    def found(in_file: str, named: str) -> tuple[str, str]:
        path.write_text(before.replace("ENGINE_PROFILE=llama3-8b-awq.rtx4090", f"ENGINE_PROFILE={in_file}"))
        subject = decide(eyes, "stack", named, None)
        told = [check.found if check.status == "fail" else "" for check in (
            settings.env_file(eyes, subject), settings.profile(subject, eyes))]  # fmt: skip
        return told[0].partition(": ")[2], told[1].partition(": ")[0]

    of_file = f"ENGINE_PROFILE={wrong}: there is no such file in configs/engine"
    assert found(sound, sound) == ("", "")
    assert found(wrong, sound) == (of_file, "")
    assert found(sound, "nonsense") == ("", "--profile=nonsense")
    assert found(wrong, "nonsense") == (of_file, "--profile=nonsense")
