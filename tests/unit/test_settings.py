"""Settings: what is refused, in which words, and that each is documented."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from gateway.settings import Settings, SettingsError, load
from scripts import settings_doc


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """No settings from outside, and just enough of our own to start."""
    for name in list(os.environ):
        if name.upper().startswith("GATEWAY_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GATEWAY__AUTH__DISABLED", "true")
    yield monkeypatch


def mistakes(monkeypatch: pytest.MonkeyPatch, **variables: str) -> list[str]:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as refused:
        load()
    return str(refused.value).splitlines()


def test_the_contracts_names_exist_and_have_the_documented_defaults(configured: pytest.MonkeyPatch) -> None:
    settings = load()
    assert settings.batching.window_ms == 15
    assert settings.batching.max_prompts == 8
    assert settings.timeouts.stall_s == 60
    contract: dict[str, Any] = {
        "GATEWAY__LISTEN": "0.0.0.0:1",
        "GATEWAY__ADMIN_LISTEN": "[::1]:2",
        "GATEWAY__ENGINES": '["http://a:1", "http://b:2/"]',
        "GATEWAY__AUTH__KEYS_FILE": "/keys.json",
        "GATEWAY__AUTH__DISABLED": "false",
        "GATEWAY__BATCHING__WINDOW_MS": "0",
        "GATEWAY__BATCHING__MAX_PROMPTS": "16",
        "GATEWAY__BATCHING__MAX_TOKENS": "100",
        "GATEWAY__ADMISSION__MAX_QUEUE_TOKENS": "5",
        "GATEWAY__ADMISSION__MAX_WAIT_S": "6",
        "GATEWAY__TIMEOUTS__CONNECT_S": "1",
        "GATEWAY__TIMEOUTS__FIRST_BYTE_S": "2",
        "GATEWAY__TIMEOUTS__IDLE_S": "3",
        "GATEWAY__TIMEOUTS__TOTAL_S": "4",
        "GATEWAY__TIMEOUTS__STALL_S": "5",
        "GATEWAY__TIMEOUTS__RELOAD_WAIT_S": "6",
    }
    for name, value in contract.items():
        configured.setenv(name, value)
    settings = load()
    assert settings.engines == ("http://a:1", "http://b:2")
    assert settings.auth.keys_file == Path("/keys.json")
    assert (settings.batching.window_ms, settings.timeouts.total_s) == (0, 4)


def test_the_environment_wins_over_the_file_key_by_key(configured: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "gateway.yaml").write_text("batching:\n  window_ms: 3\n  max_prompts: 4\nlisten: 127.0.0.1:1\n")
    configured.setenv("GATEWAY_CONFIG", "gateway.yaml")
    configured.setenv("GATEWAY__BATCHING__WINDOW_MS", "7")
    settings = load()
    assert (settings.batching.window_ms, settings.batching.max_prompts, settings.listen) == (7, 4, "127.0.0.1:1")


def test_without_a_keys_file_it_refuses_to_start_unless_auth_is_disabled_outright(
    configured: pytest.MonkeyPatch,
) -> None:
    configured.delenv("GATEWAY__AUTH__DISABLED")
    assert mistakes(configured) == [
        "auth.keys_file is not set: expected the file `make keys NAME=app1` writes, or auth.disabled: true"
    ]
    assert mistakes(configured, GATEWAY__AUTH__KEYS_FILE="") == mistakes(configured)


@pytest.mark.parametrize(
    ("name", "value", "key", "expectation"),
    [
        ("LISTEN", "8080", "listen", "expected host:port"),
        ("LISTEN", "host:", "listen", "expected host:port"),
        ("LISTEN", "host:99999", "listen", "expected host:port"),
        ("ADMIN_LISTEN", "127.0.0.1:8080", "admin_listen", "another address"),
        ("ENGINES", "http://engine:8000", "engines", '["http://engine:8000"]'),
        ("ENGINES", "[]", "engines", "at least 1"),
        (
            "ENGINES",
            '["engine:8000"]',
            "engines.0",
            "expected http:// or https:// in front, for instance http://engine:8000",
        ),
        ("ENGINES", '["engine"]', "engines.0", "expected http:// or https:// in front"),
        ("ENGINES", '["http://engine:99999"]', "engines.0", "expected host and port behind http://"),
        ("ENGINES", '["http://"]', "engines.0", "expected a host behind http://"),
        ("ENGINES", '"http://engine:8000"', "engines", "expected a list"),
        ("ENGINES", '["http://engine:8000/v1"]', "engines.0", "without a path"),
        ("ENGINES", '["http://engine:8000?x"]', "engines.0", "without a path"),
        ("ENGINES", '["ftp://engine"]', "engines.0", "expected http:// or https:// in front"),
        ("ENGINES", '["http://a:1", "http://a:1"]', "engines", "twice"),
        ("ALIASES", "gpt", "aliases", "JSON"),
        ("AUTH__DISABLED", "maybe", "auth.disabled", "expected true or false"),
        ("AUTH__RELOAD_S", "0", "auth.reload_s", "expected more than 0"),
        ("BATCHING__WINDOW_MS", "-1", "batching.window_ms", "expected at least 0"),
        ("BATCHING__WINDOW_MS", "15ms", "batching.window_ms", "expected a number"),
        ("BATCHING__WINDOW_MS", "nan", "batching.window_ms", "finite"),
        ("BATCHING__MAX_PROMPTS", "0", "batching.max_prompts", "expected at least 1"),
        ("BATCHING__MAX_PROMPTS", "2.5", "batching.max_prompts", "expected a whole number"),
        ("TIMEOUTS__TOTAL_S", "inf", "timeouts.total_s", "finite"),
        ("TIMEOUTS__STALL_S", "999999", "timeouts.stall_s", "expected at most 86400"),
        ("CIRCUIT__FAILURES", "0", "circuit.failures", "expected at least 1"),
        ("CIRCUIT__SHARE", "1.5", "circuit.share", "expected at most 1"),
        ("DISCOVERY__FILES", '["/etc/engines.txt"]', "discovery.files.0", "*.json, *.yml or *.yaml"),
        ("DISCOVERY__FILES", "engines.json", "discovery.files", '["/etc/gateway/engines.json"]'),
        ("CORS__ALLOW_ORIGINS", "https://a.example", "cors.allow_origins", '["https://app.example.com"]'),
        ("DISCOVERY__DNS", '["engine:8000"]', "discovery.dns.0", "expected http:// or https:// in front"),
        ("DISCOVERY__DNS", '["https://engine:8000"]', "discovery.dns.0", "by their addresses"),
        ("DISCOVERY__DNS", '["http://engine:8000/v1"]', "discovery.dns.0", "without a path"),
        ("LOGS__LEVEL", "verbose", "logs.level", "'DEBUG', 'INFO'"),
        ("CORS__ALLOW_ORIGINS", '["app.example.com"]', "cors.allow_origins.0", "expected http:// or https:// in front"),
        ("CORS__ALLOW_ORIGINS", '["https://app.example.com/"]', "cors.allow_origins.0", "origin as browsers send it"),
        ("CORS__ALLOW_ORIGINS", '["null"]', "cors.allow_origins.0", "expected http:// or https:// in front"),
        ("TRACING__OTLP_ENDPOINT", "collector:4318", "tracing.otlp_endpoint", "for instance http://collector:4318"),
        ("TRACING__SAMPLE_RATIO", "2", "tracing.sample_ratio", "expected at most 1"),
        ("NONSENSE", "15", "GATEWAY__NONSENSE", "is not a setting (docs/settings.md lists them)"),
        ("BATCHING__NONSENSE", "15", "GATEWAY__BATCHING__NONSENSE", "is not a setting (docs/settings.md lists them)"),
        ("BATCHING__WINDW_MS", "15", "GATEWAY__BATCHING__WINDW_MS", "did you mean GATEWAY__BATCHING__WINDOW_MS?"),
        ("WINDOW_MS", "15", "GATEWAY__WINDOW_MS", "not a setting: did you mean GATEWAY__BATCHING__WINDOW_MS?"),
        (
            "TIMEOUT__TOTAL_S",
            "15",
            "GATEWAY__TIMEOUT__TOTAL_S",
            "not a setting: did you mean GATEWAY__TIMEOUTS__TOTAL_S?",
        ),
        ("TIMEOUTS", '{"totl_s": 5}', "timeouts.totl_s", "not a setting: did you mean timeouts.total_s?"),
    ],
)
def test_a_wrong_value_is_refused_with_key_value_and_expectation_on_one_line(
    configured: pytest.MonkeyPatch, name: str, value: str, key: str, expectation: str
) -> None:
    lines = mistakes(configured, **{f"GATEWAY__{name}": value})
    assert len(lines) == 1, lines
    assert lines[0].startswith(key), lines
    assert expectation in lines[0], lines
    assert "Input should" not in lines[0]
    if "GATEWAY__" not in key and "not a setting" not in expectation and expectation != "twice":
        shown = value.strip('[]"')
        assert shown.replace('", "', "', '") in lines[0] or value == "[]", lines


def test_every_mistake_is_told_at_once(configured: pytest.MonkeyPatch) -> None:
    lines = mistakes(configured, GATEWAY__LISTEN="x", GATEWAY__BATCHING__MAX_PROMPTS="0", GATEWAY__NONSENSE="1")
    assert len(lines) == 3


def test_a_password_in_an_engines_address_is_refused_and_not_repeated(configured: pytest.MonkeyPatch) -> None:
    (line,) = mistakes(configured, GATEWAY__ENGINES='["http://user:canary@engine:8000"]')
    assert "without user name and password" in line
    assert "canary" not in line


@pytest.mark.parametrize(
    ("content", "expectation"),
    [
        ("batching: [", "expected YAML"),
        ("- a\n- b\n", "expected YAML"),
        ("nonsense: 1", "nonsense is not a setting"),
        ("batching:\n  window: 1", "batching.window is not a setting: did you mean batching.window_ms?"),
        ("batching: 5", "batching = 5: expected keys and values"),
        ("engines: http://engine:8000", "engines = 'http://engine:8000': expected a list"),
        ("listen: 8080", "listen = 8080: expected text"),
    ],
)
def test_a_wrong_file_is_refused_with_what_is_wrong_in_it(
    configured: pytest.MonkeyPatch, tmp_path: Path, content: str, expectation: str
) -> None:
    (tmp_path / "gateway.yaml").write_text(content)
    lines = mistakes(configured, GATEWAY_CONFIG=str(tmp_path / "gateway.yaml"))
    assert len(lines) == 1
    assert expectation in lines[0]


def test_a_named_file_that_is_missing_is_refused_and_the_default_one_may_be_missing(
    configured: pytest.MonkeyPatch,
) -> None:
    load()
    assert mistakes(configured, GATEWAY_CONFIG="missing.yaml") == [
        "GATEWAY_CONFIG = 'missing.yaml': expected a file, found none"
    ]


def test_an_empty_variable_counts_as_not_set(configured: pytest.MonkeyPatch) -> None:
    configured.setenv("GATEWAY__BATCHING__WINDOW_MS", "")
    configured.setenv("GATEWAY__LEDGER__PATH", "")
    settings = load()
    assert settings.batching.window_ms == 15
    assert settings.ledger.path is None


def test_the_default_engine_is_none_where_discovery_has_a_source(configured: pytest.MonkeyPatch) -> None:
    assert load().static_engines == ("http://127.0.0.1:8000",)
    configured.setenv("GATEWAY__DISCOVERY__DNS", '["http://engine:8000"]')
    assert load().static_engines == ()
    configured.setenv("GATEWAY__ENGINES", '["http://127.0.0.1:8000"]')
    assert load().static_engines == ("http://127.0.0.1:8000",)
    configured.setenv("GATEWAY__ENGINES", "[]")
    assert load().static_engines == ()


def test_settings_are_frozen() -> None:
    settings = Settings(auth={"disabled": True})  # type: ignore[arg-type]
    with pytest.raises(ValidationError):
        settings.listen = "0.0.0.0:1"
    with pytest.raises(ValidationError):
        settings.batching.window_ms = 1


def test_a_collectors_base_address_gets_the_standard_path() -> None:
    settings = Settings(auth={"disabled": True}, tracing={"otlp_endpoint": "http://collector:4318"})  # type: ignore[arg-type]
    assert settings.tracing.otlp_endpoint == "http://collector:4318/v1/traces"


def test_every_setting_has_a_description() -> None:
    for section, fields in settings_doc.sections():
        for name, field in fields.items():
            assert field.description, f"{section}.{name}"
            assert field.description.endswith((".", "`)")), f"{section}.{name}"


def test_the_settings_page_is_up_to_date_and_complete() -> None:
    """`make settings-doc` writes it."""
    page = settings_doc.TARGET.read_text(encoding="utf-8")
    assert page == settings_doc.render()
    for name, field in Settings.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            for inner in field.annotation.model_fields:
                assert f"`{name}.{inner}`" in page
        else:
            assert f"`{name}`" in page


def test_the_shipped_file_is_accepted(configured: pytest.MonkeyPatch) -> None:
    configured.setenv("GATEWAY_CONFIG", str(Path(__file__).parents[2] / "configs/gateway.yaml"))
    load()
