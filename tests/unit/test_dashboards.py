"""The shipped dashboards: what Grafana will read, checked as it stands in the files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from gateway.findings import KINDS
from gateway.metrics import Metrics
from scripts import _ports
from scripts.dashboards import __main__ as dashboards
from scripts.dashboards import _looks, _recorded, _runbooks, _slo, overview, preview
from scripts.dashboards._board import BOARDS
from scripts.dashboards._panels import GREEN
from scripts.dashboards._sdk import JSONEncoder, dashboard, register_default_plugins
from scripts.rules import components as rules

FILES = sorted(dashboards.FOLDER.glob("*.json"))
SHIPPED: dict[str, dict[str, Any]] = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in FILES}
DRAWN = {"timeseries", "stat", "bargauge", "table", "text"}  # what the preview can draw
# Names that nobody here exports or records: the exporters', Prometheus's own. Read before it is added to.
FOREIGN = {
    *("ALERTS", "ALERTS_FOR_STATE"),  # written by Prometheus for every alert
    *("process_resident_memory_bytes", "process_cpu_seconds_total"),  # the engine's client library
    *("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_GPU_TEMP"),  # the exporter's default fields
}
SUFFIXES = {
    "counter": ("_created",),  # the name itself ends in _total
    "histogram": ("_bucket", "_sum", "_count", "_created"),
}


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


ALL = [pytest.param(panel, id=f"{uid}/{panel['title']}") for uid, board in SHIPPED.items() for panel in panels(board)]
DATA = [param for param in ALL if param.values[0]["type"] != "text"]


def _filled(text: str) -> str:
    return re.sub(r"\$\w+", ".*", re.sub(r"\$__(rate_interval|interval|range)", "5m", text))


def expressions() -> Iterator[tuple[str, str]]:
    """Where it stands, and every expression with Grafana's variables put in."""
    for uid, board in SHIPPED.items():
        for panel in panels(board):
            for target in panel.get("targets", ()):
                yield f"{uid}/{panel['title']}", _filled(target["expr"])
        for annotation in board["annotations"]["list"]:
            yield f"{uid}/{annotation['name']}", _filled(annotation["target"]["expr"])
        for variable in board["templating"]["list"]:
            yield f"{uid}/${variable['name']}", variable["query"].removeprefix("label_values(").split(",")[0]


def _selectors(text: str) -> list[Any]:
    found: list[Any] = []

    def visit(node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)

    promql_parser.walk(promql_parser.parse(text), visit)
    return found


def _gateway_labels() -> dict[str, set[str]]:
    """Sample name -> the labels it has, with those that every scraped series gets."""
    known: dict[str, set[str]] = {}
    for collector in Metrics().registry._collector_to_names:
        labels = {*collector._labelnames, "instance", "job"}  # type: ignore[attr-defined]
        for family in collector.describe() if hasattr(collector, "describe") else collector.collect():
            names = [family.name + end for end in ("", *SUFFIXES.get(family.type, ()))]
            if family.type == "counter":
                names = [f"{family.name}_total", f"{family.name}_created"]
            known |= {name: labels | ({"le"} if name.endswith("_bucket") else set()) for name in names}
    return known


def _engine_names() -> set[str]:
    data = Path("scripts/engine_args/data")
    pinned = json.loads((data / "0.32.0.json").read_text(encoding="utf-8"))["metrics"]
    history = json.loads((data / "history.json").read_text(encoding="utf-8"))["metrics"]
    kinds = [*pinned, *((name, spans[-1][-1]) for name, spans in history.items())]
    names = {name for name, _ in kinds}
    for name, kind in kinds:
        stem = name.removesuffix("_total") if kind == "counter" else name
        names |= {stem + end for end in SUFFIXES.get(kind, ())}
    return names


def _recorded_names() -> set[str]:
    files = Path("configs/prometheus/rules").glob("*.yml")
    groups = [group for path in files for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]]
    return {rule["record"] for group in groups for rule in group["rules"] if "record" in rule}


GATEWAY_LABELS = _gateway_labels()
EXPRESSIONS = list(expressions())
KNOWN = GATEWAY_LABELS.keys() | _engine_names() | _recorded_names() | FOREIGN


def test_the_committed_files_are_what_the_code_says() -> None:
    assert dashboards.stale(dashboards.plan(), dashboards.FOLDER) == [], "make dashboards"


def test_a_changed_file_and_a_stray_one_are_stale(tmp_path: Path) -> None:
    files = {"a.json": "1", "b.json": "2"}
    (tmp_path / "a.json").write_text("other")
    (tmp_path / "c.json").write_text("3")
    found = "\n".join(dashboards.stale(files, tmp_path))
    assert all(f"{name}.json" in found for name in "abc")


def test_every_dashboard_has_its_fixed_uid() -> None:
    assert {uid: board["uid"] for uid, board in SHIPPED.items()} == {uid: uid for uid in (*BOARDS, _runbooks.UID)}


def test_every_expression_parses_and_asks_for_known_series_only() -> None:
    unknown = {
        (where, selector.name)
        for where, expr in EXPRESSIONS
        for selector in _selectors(expr)
        if selector.name not in KNOWN
    }
    assert not unknown


def test_selectors_name_labels_that_the_gateways_series_have() -> None:
    for where, expr in EXPRESSIONS:
        for selector in _selectors(expr):
            if labels := GATEWAY_LABELS.get(selector.name):
                assert {matcher.name for matcher in selector.matchers.matchers} <= labels, (where, selector.name)


def test_an_unknown_series_is_noticed() -> None:
    assert {one.name for one in _selectors("sum(rate(vllm:prompt_tokens[5m])) / vllm:no_such_thing")} - KNOWN == {
        "vllm:prompt_tokens",
        "vllm:no_such_thing",
    }


def test_a_share_is_never_summed() -> None:
    summed = re.compile(r"sum[^(]*\((vllm:(gpu|kv)_cache_usage|vllm:cache_hit_ratio|\w+:\w+:ratio)")
    assert not [where for where, expr in EXPRESSIONS if summed.search(expr)]


@pytest.mark.parametrize("panel", ALL)
def test_a_panel_has_title_description_and_a_type_that_can_be_drawn(panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert len(panel["description"]) >= 10
    assert panel["type"] in DRAWN


@pytest.mark.parametrize("panel", DATA)
def test_a_panel_of_data_has_a_unit_and_thresholds_in_it(panel: dict[str, Any]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    assert defaults["unit"]
    steps = [step["value"] for step in defaults["thresholds"]["steps"]]
    assert steps[0] is None
    assert steps[1:] == sorted(steps[1:])
    if defaults["unit"] == "percentunit":
        assert all(step <= 1 for step in steps[1:]), "a share is 0 to 1, not 0 to 100"


def test_a_curve_that_smears_an_event_over_five_minutes_says_so() -> None:
    """Others are drawn over $__rate_interval: a burst of a minute is a minute wide on them."""
    smeared = re.compile(r"\b[a-z]+:\w+:\w*5m\b|\[5m|vllm:cache_hit_ratio")
    for panel in (param.values[0] for param in DATA):
        if panel["type"] == "timeseries":
            said = f"{panel['description']} {[target['legendFormat'] for target in panel['targets']]}"
            if any(smeared.search(target["expr"]) for target in panel["targets"]):
                assert re.search("five minutes|5 minutes", said), panel["title"]
            else:
                assert not re.search("five minutes|5 minutes", said), panel["title"]


def test_a_capacity_that_no_engine_has_told_yet_is_no_capacity_of_zero() -> None:
    asked = [expr for _, expr in expressions() if "_capacity_tokens)" in expr]
    assert len(asked) > 5
    assert [expr for expr in asked if re.search(r"_capacity_tokens\)(?! > 0)", expr)] == []
    (settings,) = [expr for where, expr in expressions() if where.endswith("/Settings in force")]
    assert settings.endswith('{name="capacity_tokens"}) == 0')


def test_tokens_a_second_and_requests_have_an_axis_each() -> None:
    (panel,) = [each for each in panels(SHIPPED["vllm-capacity"]) if each["title"] == "Throughput and concurrency"]
    assert panel["fieldConfig"]["defaults"]["unit"] == "suffix:tok/s"
    running = {
        one["id"]: one["value"]
        for override in panel["fieldConfig"]["overrides"]
        if override["matcher"]["options"] == "running"
        for one in override["properties"]
    }
    assert (running["custom.axisPlacement"], running["unit"]) == ("right", "short")


@pytest.mark.parametrize("panel", DATA)
def test_a_panel_asks_the_provisioned_data_source(panel: dict[str, Any]) -> None:
    provisioned = yaml.safe_load(Path("grafana/provisioning/datasources/prometheus.yaml").read_text(encoding="utf-8"))
    (source,) = provisioned["datasources"]
    wanted = {"type": source["type"], "uid": source["uid"]}
    assert [panel["datasource"], *(target["datasource"] for target in panel["targets"])] == [wanted] * (
        1 + len(panel["targets"])
    )


@pytest.mark.parametrize("uid", SHIPPED)
def test_ids_are_there_once(uid: str) -> None:
    ids = [panel["id"] for panel in SHIPPED[uid]["panels"]]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("uid", SHIPPED)
def test_panels_lie_side_by_side(uid: str) -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in SHIPPED[uid]["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for cell in (
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ):
            assert cell not in taken, f"{panel['title']} lies on {taken[cell]}"
            taken[cell] = panel["title"]


@pytest.mark.parametrize("uid", SHIPPED)
def test_nothing_has_to_be_filled_in_at_import(uid: str) -> None:
    text = (dashboards.FOLDER / f"{uid}.json").read_text(encoding="utf-8")
    assert "__inputs" not in text
    assert "${DS_" not in text
    assert SHIPPED[uid].get("id") is None


@pytest.mark.parametrize("uid", SHIPPED)
def test_grafanas_model_knows_every_key(uid: str) -> None:
    register_default_plugins()
    board = dashboard.Dashboard.from_json(SHIPPED[uid])
    assert json.loads(json.dumps(board, cls=JSONEncoder)) == SHIPPED[uid]


def test_variables_that_are_used_exist_and_those_that_exist_are_used() -> None:
    for uid, board in SHIPPED.items():
        used = {name for name in re.findall(r"\$(\w+)", json.dumps(board["panels"])) if not name.startswith("__")}
        assert used == {variable["name"] for variable in board["templating"]["list"]}, uid


def test_every_dashboard_links_to_the_others() -> None:
    for uid, board in SHIPPED.items():
        assert {link["url"] for link in board["links"]} == {f"/d/{other}" for other in BOARDS if other != uid}


def test_the_promises_are_the_thresholds() -> None:
    text = overview.board(_slo.Slo(0.9, 7.5, 0.8, 0.3, 0.7, 0.35)).to_json()
    steps = {
        panel["title"]: [step["value"] for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"][1:]]
        for panel in panels(json.loads(text))
    }
    assert steps["Answered"] == [0.9]
    assert steps["TTFT ≤ 7.5 s"] == [0.8]
    assert steps["ITL ≤ 300 ms"] == [0.7]
    assert steps["Time to first token"] == [7.5]
    assert steps["Prefix cache hit ratio"] == [0.35]


def test_grafana_is_given_the_dashboards_and_opens_with_the_overview() -> None:
    """Compose mounts the folder where provisioning looks for it, and the home dashboard is a file of it."""
    grafana = yaml.safe_load(Path("compose.yaml").read_text(encoding="utf-8"))["services"]["grafana"]
    (provider,) = yaml.safe_load(Path("grafana/provisioning/dashboards/stack.yaml").read_text(encoding="utf-8"))[
        "providers"
    ]
    inside = Path(provider["options"]["path"])
    mounts = {Path(volume["target"]): Path(volume["source"]) for volume in grafana["volumes"]}
    target = next(target for target in mounts if inside.is_relative_to(target))
    assert mounts[target] / inside.relative_to(target) == dashboards.FOLDER
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert home.parent == inside
    assert home.stem == preview.OVERVIEW
    assert (dashboards.FOLDER / home.name).is_file()


def test_a_missing_program_is_one_line_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert preview.main([]) == 1
    assert capsys.readouterr().err == "preview: node is missing: apt-get install nodejs npm\n"


def test_a_prometheus_that_is_not_there_is_told_before_any_tool_is_looked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert preview.main(["--prometheus", "http://127.0.0.1:9"]) == 1
    assert capsys.readouterr().err.startswith("preview: no Prometheus answers at http://127.0.0.1:9: ")


def test_an_unknown_dashboard_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        preview.main(["--boards", "vllm-engine,vllm-nothing"])
    assert stopped.value.code == 2
    assert "no such dashboard: vllm-nothing; there are vllm-overview" in capsys.readouterr().err


def test_the_preview_tells_what_could_not_be_drawn() -> None:
    panel = {"title": "A", "error": None, "empty": True, "cutTitle": False}
    shot = {"uid": "u", "theme": "dark", "width": 1600, "problems": [], "panels": [panel]}
    assert preview.problems([shot]) == []  # idle is no mistake
    wrong = [{**panel, "error": "bad_data: parse error"}, {**panel, "title": "B", "cutTitle": True}]
    assert preview.problems([{**shot, "panels": wrong, "problems": ["boom"]}]) == [
        "u dark 1600: boom",
        "u dark 1600: A: bad_data: parse error",
        "u dark 1600: B: its title is cut off",
    ]


def test_the_recorded_card_has_the_series_that_panels_ask_for_and_its_energy_only_grows() -> None:
    recording = json.loads(_recorded.FILE.read_text(encoding="utf-8"))
    length = recording["every_s"] * len(recording["rows"])
    energies = []
    for seconds in range(0, 3 * length, recording["every_s"]):
        page = _recorded.page(recording, seconds)
        samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
        values = {sample.name.removesuffix("_total"): sample.value for sample in samples}
        energies.append(values["DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"])
    assert {one.name for _, expr in EXPRESSIONS for one in _selectors(expr) if one.name.startswith("DCGM_")} <= {
        *values
    }
    assert energies == sorted(set(energies))


def test_the_advice_panel_has_words_for_every_kind_that_asks_for_a_change() -> None:
    assert overview.ADVICE.keys() == {kind for kind, severity in KINDS.items() if severity != "info"}


def test_every_cause_of_a_failed_call_has_its_colour() -> None:
    causes = {labels[0] for labels in Metrics().failures._metrics}
    assert set(_looks.FAILURES) == causes
    assert GREEN not in _looks.FAILURES.values()


def test_a_runbook_becomes_a_panel_and_its_links_stay_inside_grafana(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("An index.")
    (tmp_path / "EngineHung.md").write_text(
        "# EngineHung\n\nOr [absent](EngineAbsent.md)? See [verify](../verify.md), [why](https://a.b/c)."
    )
    (tmp_path / "EngineAbsent.md").write_text("Gone.")
    board = json.loads(_runbooks.board(tmp_path).to_json())
    contents, absent, hung = board["panels"]
    assert [absent["title"], hung["title"]] == ["EngineAbsent", "EngineHung"]
    assert f"[EngineHung]({_runbooks.link('EngineHung')})" in contents["options"]["content"]
    assert _runbooks.link("EngineHung").endswith(f"={hung['id']}")
    assert hung["options"]["content"] == (
        f"Or [absent]({_runbooks.link('EngineAbsent')})? See [verify] (`verify.md`), [why](https://a.b/c)."
    )


def test_a_prometheus_that_does_not_answer_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preview, "tools", lambda: "chromium")
    url = f"http://127.0.0.1:{_ports.free_port()}"
    assert preview.main(["--prometheus", url]) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"preview: no Prometheus answers at {url}: ")
    assert told.count("\n") == 1


def test_links_to_runbooks_lead_to_panels_whose_files_exist() -> None:
    ids = {f"/d/{_runbooks.UID}?viewPanel={panel['id']}": panel["title"] for panel in panels(SHIPPED[_runbooks.UID])}
    used = {link["url"] for board in SHIPPED.values() for panel in panels(board) for link in panel.get("links", ())}
    assert len(used) >= 8
    assert not [url for url in used if url not in ids]
    assert all((_runbooks.FOLDER / f"{ids[url]}.md").is_file() for url in used)


def test_a_panels_runbook_is_that_of_an_alert_that_exists() -> None:
    alerts = {alert.name for component in rules.ALL for alert in component.alerts}
    used = {link["url"] for board in SHIPPED.values() for panel in panels(board) for link in panel.get("links", ())}
    assert used <= {_runbooks.link(name) for name in alerts}
