"""The rule files are what scripts/rules makes of configs/slo.yaml; windows scale exactly."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from gateway.metrics import Metrics
from scripts.engine_args import History
from scripts.rules import Alert, Record, __main__, document, promises
from scripts.rules.components import ALL
from scripts.rules.render import Renderer
from scripts.rules.windows import Windows, milliseconds, text

ROOT = Path(__file__).parents[2]
RENDERER = Renderer(promises.load())
RULES = [rule for component in ALL for rule in component.rules]
SLO = yaml.safe_load(promises.PATH.read_text(encoding="utf-8"))


def test_the_committed_rules_and_tables_are_fresh() -> None:
    assert __main__.main(["--check"]) == 0


def test_the_gateways_table_says_who_asks_for_a_metric() -> None:
    """An alert, a recorded series, a panel: each where its expression names the metric, whatever its ending."""
    boards = {"Board": "rate(gateway_request_seconds_bucket[5m])", "Other": "gateway_keys_file_bad"}
    rows = {
        cells[1].strip(" `"): [cell.strip() for cell in cells[2:]]
        for line in document.gateway(ALL, boards).splitlines()[2:]
        for cells in [line.split("|")]
    }
    assert rows["gateway_request_seconds"][0] == "histogram"
    assert "`gateway:request_seconds:pNN_5m`" in rows["gateway_request_seconds"][3]
    assert rows["gateway_request_seconds"][4] == "Board"
    assert "runbooks/GatewayKeysFileBad.md" in rows["gateway_keys_file_bad"][3]
    assert rows["gateway_keys"][3:5] == ["", ""], "a longer name is another metric"


def test_the_files_are_those_of_the_components_and_no_others() -> None:
    assert {path.stem for path in (ROOT / __main__.RULES).iterdir()} == {component.name for component in ALL}


def names(expr: str) -> set[str]:
    """The exported series an expression reads."""
    bare = re.sub(r'"[^"]*"|\b(?:by|on|without) \([^)]*\)', "", expr)
    return set(re.findall(r"(?<![\w:])(?:vllm:\w+|gateway_\w+|DCGM_\w+|node_\w+|process_\w+)", bare))


READ = {name for rule in RULES for name in names(rule.expr)}
RECORDED = {rule.name for rule in RULES if isinstance(rule, Record)}


def test_every_engine_series_was_exported_by_a_captured_release() -> None:
    history = History.load()
    ours = {name for name in READ if name.startswith("vllm:")} - RECORDED
    assert len(ours) > 12
    assert {name for name in ours if history.metric_life(name) is None} == set()


@pytest.mark.parametrize("version", ["0.6.3", "0.8.5", "0.10.2", "0.18.0", "0.26.0", "0.32.0", "0.33.0"])
def test_every_engine_rule_finds_its_series_in_each_version(version: str) -> None:
    """At least one of the names a rule offers for a thing exists there; 0.6.3 has no queue time."""
    engine = History.load().engine(version)
    missing = set()
    for rule in ALL[0].records:
        offered = names(rule.expr) - RECORDED
        if offered and not any(engine.has_metric(name) for name in offered):
            missing.add(rule.name.split(":p")[0])
    old = {
        "model:request_queue_time_seconds",
        "engine",  # engine:prefix_cache_*: it exports a ratio instead of counters
    }
    assert missing == (old if version == "0.6.3" else set())


def test_every_gateway_series_is_one_the_gateway_exports() -> None:
    exported = set()
    for family in Metrics().registry.collect():
        base = family.name
        exported |= {
            "counter": {f"{base}_total", f"{base}_created"},
            "histogram": {f"{base}_bucket", f"{base}_sum", f"{base}_count"},
        }.get(family.type, {base})
    ours = {name for name in READ if name.startswith("gateway_")}
    assert len(ours) > 8
    assert ours - exported == set()


def test_no_rate_of_a_gauge_and_no_sum_of_shares() -> None:
    gauges = {f.name for f in Metrics().registry.collect() if f.type == "gauge"}
    gauges |= {f"vllm:{name}" for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")}
    for rule in RULES:
        for name in re.findall(r"(?:rate|increase)\(\s*([\w:]+)", rule.expr):
            assert name not in gauges, rule.name
        assert not re.search(r"sum[^(]*\([^()]*(usage_perc|hit_rate|:ratio)", rule.expr), rule.name


def test_a_recorded_name_says_level_metric_and_operation() -> None:
    guides = {"vllm:cache_hit_ratio", "vllm:gpu_cache_usage_ratio"}
    assert guides <= RECORDED
    levels = "engine|model|gateway|stack|slo|gpu|host"
    for name in RECORDED - guides:
        assert re.fullmatch(rf"({levels}):[a-z0-9_]+:[a-z0-9_]+", name), name


def test_every_expression_has_its_numbers_filled_in() -> None:
    for rule in RULES:
        assert "@" not in RENDERER.expr(rule), rule.name


# -- windows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("duration", "scale", "scrape_ms", "range_", "hold"),
    [
        ("5m", 1, 5000, "5m", "5m"),
        ("5m", 0.05, 1000, "15s", "15s"),
        ("5m", 0.05, 5000, "20s", "15s"),  # a range spans four scrapes
        ("30m", 0.05, 5000, "90s", "90s"),
        ("10s", 0.05, 5000, "20s", "5s"),  # a hold lasts one scrape
        ("1m", 0.025, 500, "2s", "1500ms"),
        ("3d", 0.01, 1000, "2592s", "2592s"),
        ("6h", 0.5, 5000, "3h", "3h"),
    ],
)
def test_windows_scale_exactly_and_stop_at_the_scrapes(
    duration: str, scale: float, scrape_ms: int, range_: str, hold: str
) -> None:
    windows = Windows(scale, scrape_ms)
    assert windows.range(duration) == range_
    assert windows.hold(duration) == hold


def test_every_duration_of_every_rule_is_scaled_and_nothing_else_changes(tmp_path: Path) -> None:
    assert __main__.main(["--out", str(tmp_path), "--window-scale", "0.1", "--scrape-interval", "1s"]) == 0
    for component in ALL:
        full = (ROOT / __main__.RULES / f"{component.name}.yml").read_text(encoding="utf-8")
        short = (tmp_path / f"{component.name}.yml").read_text(encoding="utf-8")
        found = re.compile(r"(?:\[|for: )(\d+(?:ms|[smhd]))\b")
        before, after = found.findall(full), found.findall(short)
        assert [text(max(milliseconds(one) // 10, 1000)) for one in before] == after
        assert found.sub("", full) == found.sub("", short)


def test_the_committed_rules_cannot_be_written_with_short_windows(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        __main__.main(["--window-scale", "0.1"])
    assert left.value.code == 2
    assert "need --out" in capsys.readouterr().err


# -- slo.yaml ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"availability": 99.5}, "availability: expected less than 1"),
        ({"ttft": {"limit_s": 2, "share": 0.95}}, "ttft.limit_s is 2, expected one of the histogram's edges: 0.005"),
        ({"itl": {"limit_s": 0.11, "share": 0.95}}, "itl.limit_s is 0.11, expected one of"),
        ({"ttfb": 1}, "ttfb: is unknown"),
    ],
)
def test_a_bad_promise_is_one_line_and_nothing_is_written(
    change: dict[str, object],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "slo.yaml"
    path.write_text(yaml.safe_dump({**SLO, **change}), encoding="utf-8")
    monkeypatch.setattr(promises.load, "__defaults__", (path,))
    assert __main__.main(["--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_promise_reaches_the_rules() -> None:
    changed = promises.Promises.model_validate({**SLO, "ttft": {"limit_s": 1, "share": 0.9}})
    rules = {rule.name: rule for rule in RULES if not isinstance(rule, Alert) and rule.labels.get("slo") == "ttft"}
    assert 'le="1.0"' in Renderer(changed).expr(rules["slo:within_limit:ratio_rate5m"])


# -- runbooks ---------------------------------------------------------------------------------------------------------

RUNBOOKS = ROOT / "docs/runbooks"
SECTIONS = ["What it means", "What clients see", "Look at", "Do", "How it heals"]
ALERTS = {alert.name: alert for component in ALL for alert in component.alerts}


def test_every_alert_has_its_runbook_and_every_runbook_its_alert() -> None:
    assert {path.stem for path in RUNBOOKS.iterdir()} == set(ALERTS)


@pytest.mark.parametrize("name", sorted(ALERTS))
def test_a_runbook_says_all_of_it_and_names_only_what_exists(name: str) -> None:
    page = (RUNBOOKS / f"{name}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {name}\n")
    assert re.findall(r"^## (.*)$", page, re.MULTILINE) == SECTIONS
    assert all(part.strip() for part in re.split(r"^## .*$", page, flags=re.MULTILINE)[1:])
    for target in re.findall(r"\]\(([^)]+)\)", page):
        assert (RUNBOOKS / target).is_file(), target
    series = set(re.findall(r"`((?:engine|model|gateway|stack|slo|gpu|host|vllm):[a-z0-9_:]+)", page))
    known = History.load()
    assert {one for one in series if one not in RECORDED and known.metric_life(one) is None} == set()
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`make ([a-z-]+)", page):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("path", sorted(RUNBOOKS.iterdir()), ids=lambda path: path.stem)
def test_a_command_of_a_runbook_works_where_it_is_typed(path: Path) -> None:
    """The host's shell expands no path of a container, nothing but a container reaches port 9000, and every access line
    has the word replica."""
    page = " ".join(path.read_text(encoding="utf-8").split())
    for command in re.findall(r"`([^`]+)`", page):
        assert not re.match(r"docker compose exec .*\*", command), command
        assert ":9000" not in command or command.startswith(("docker", "http")), command
        assert not re.search(r"grep (-i )?replica$", command), command


def test_no_alert_tells_to_shrink_the_pool_for_pressure() -> None:
    """Lowering gpu-memory-utilization helps where a peak or another program does not fit beside the pool."""
    for name, alert in ALERTS.items():
        if "ower gpu-memory-utilization" in alert.description:
            assert name in ("EngineCrashLoop", "GpuMemoryFull"), name


def test_shares_are_compared_with_shares() -> None:
    """0 to 1: a limit of 85 would never be reached."""
    compared = [
        (rule.name, float(limit))
        for rule in RULES
        for limit in re.findall(r"(?:ratio\w*(?:\{[^}]*\})?|_perc)\s*[<>]=?\s*([\d.]+)", RENDERER.expr(rule))
    ]
    assert len(compared) > 10
    assert [one for one in compared if not 0 <= one[1] <= 1] == []
