"""Proves the dashboards on the running Grafana: data source, every dashboard, every query; then again after a restart.

    make verify-grafana        python -m scripts.verify_grafana [--url URL] [--no-restart] [--need-data] [--json]

1. Grafana's database and the data source `prometheus` are healthy.
2. Each file of grafana/dashboards is there under its uid, provisioned from the file.
3. Each query of each panel, and of each annotation, is answered through Grafana's own API (POST /api/ds/query) without
   an error; variables stand for all their values. A query without data is listed; only with --need-data it fails.
4. Grafana's container is made anew on the volume that it has now, and 1 to 3 hold again.

The user is admin, the password that of secrets/private/grafana_admin_password. Requests to the stack notice nothing.

Exit codes: 0 all of it holds, 1 something does not (each a line), 2 wrong usage.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from scripts import _secrets
from scripts._command import Parser, web_address
from scripts._compose import ROOT, Compose, ComposeError
from scripts.backup import environment

FOLDER = ROOT / "grafana" / "dashboards"
SOURCE = "prometheus"  # the uid in grafana/provisioning/datasources
START_S = 120.0
RANGE = "now-15m"


class GrafanaError(Exception):
    """Grafana can't be asked; the message is one line."""


@dataclass(frozen=True)
class Query:
    """One query of a dashboard: where it stands, and what Grafana's API takes for it."""

    where: str
    body: Mapping[str, Any]


@dataclass
class Report:
    """What was found wrong, and which queries had no data."""

    dashboards: int = 0
    queries: int = 0
    wrong: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)


def queries(dashboard: Mapping[str, Any]) -> Iterator[Query]:
    """Every target of every panel, those in rows too, and of every annotation."""
    values = variables(dashboard)
    title = str(dashboard.get("title"))
    for panel in _panels(dashboard.get("panels", [])):
        for target in panel.get("targets", []):
            yield _query(
                f"{title} / {panel.get('title')} / {target.get('refId')}", target, panel.get("datasource"), values
            )
    for annotation in dashboard.get("annotations", {}).get("list", []):
        if expr := annotation.get("expr") or annotation.get("target", {}).get("expr"):
            target = {"refId": "Anno", "expr": expr}
            yield _query(f"{title} / annotation {annotation.get('name')}", target, annotation.get("datasource"), values)


def _panels(panels: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for panel in panels:
        yield panel
        yield from _panels(panel.get("panels", []))


def variables(dashboard: Mapping[str, Any]) -> dict[str, str]:
    """Each variable as the browser would send it with "All" chosen; a data source variable is the one there is."""
    found = {}
    for each in dashboard.get("templating", {}).get("list", []):
        current = (each.get("current") or {}).get("value")
        first = current[0] if isinstance(current, list) and current else current
        if each.get("type") == "datasource":
            found[each["name"]] = SOURCE
        elif first in (None, "", "$__all"):
            found[each["name"]] = each.get("allValue") or ".*"
        else:
            found[each["name"]] = str(first)
    return found


def _query(where: str, target: Mapping[str, Any], inherited: Any, values: Mapping[str, str]) -> Query:
    source = target.get("datasource") or inherited or {}
    uid = source.get("uid") if isinstance(source, dict) else None
    instant = bool(target.get("instant"))
    body = {
        "refId": target.get("refId") or "A",
        "datasource": {"type": SOURCE, "uid": _filled(uid or SOURCE, values)},
        "expr": _filled(str(target.get("expr", "")), values),
        "instant": instant,
        "range": not instant,
        "format": target.get("format") or "time_series",
        "intervalMs": 15000,
        "maxDataPoints": 100,
    }
    return Query(where, body)


def _filled(text: str, values: Mapping[str, str]) -> str:
    """Longest names first: $instance is no $in before a word. Grafana fills in its own, $__range and its kin."""
    for name in sorted(values, key=len, reverse=True):
        for spelling in (f"${{{name}}}", f"${{{name}:regex}}", f"[[{name}]]", f"${name}"):
            text = text.replace(spelling, values[name])
    return text


class Grafana:
    """Grafana's HTTP API, as admin."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def get(self, path: str) -> tuple[int, Any]:
        return self._ask("GET", path, None)

    def query(self, query: Query) -> tuple[str, int]:
        """What is wrong with its answer (empty: nothing), and how many values it has."""
        status, answer = self._ask("POST", "/api/ds/query", {"from": RANGE, "to": "now", "queries": [query.body]})
        result = (answer.get("results") or {}).get(query.body["refId"]) if isinstance(answer, dict) else None
        if status not in (200, 207, 400) or result is None:
            return f"HTTP {status}: {str(answer)[:200]}", 0
        if error := result.get("error"):
            return str(error), 0
        frames = result.get("frames") or []
        return "", sum(len(values) for frame in frames for values in (frame.get("data") or {}).get("values", [])[1:])

    def _ask(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        try:
            answer = self._client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise GrafanaError(f"{self._client.base_url}{path}: {type(error).__name__}: is the stack up?") from error
        if answer.status_code in (401, 403):
            raise GrafanaError(
                "Grafana refuses the password in secrets/private/grafana_admin_password: it takes one only when its "
                "volume is new (docs/operations.md says how to change it later)"
            )
        try:
            return answer.status_code, answer.json()
        except ValueError:
            return answer.status_code, answer.text


def verify(grafana: Grafana, folder: Path = FOLDER) -> Report:
    """Steps 1 to 3. Raises GrafanaError."""
    report = Report()
    status, health = grafana.get("/api/health")
    if status != 200 or not isinstance(health, dict) or health.get("database") != "ok":
        report.wrong.append(f"Grafana is not healthy: {status} {health}")
    status, health = grafana.get(f"/api/datasources/uid/{SOURCE}/health")
    if status != 200 or not isinstance(health, dict) or health.get("status") != "OK":
        report.wrong.append(f"data source {SOURCE} is not healthy: {status} {str(health)[:200]}")
    for path in sorted(folder.glob("*.json")):
        _dashboard(grafana, json.loads(path.read_text(encoding="utf-8")), path.name, report)
    if not report.dashboards:
        report.wrong.append(f"{folder} holds no dashboard")
    return report


def _dashboard(grafana: Grafana, dashboard: Mapping[str, Any], file: str, report: Report) -> None:
    report.dashboards += 1
    status, there = grafana.get(f"/api/dashboards/uid/{dashboard['uid']}")
    if status != 200:
        report.wrong.append(f"{file}: Grafana has no dashboard of uid {dashboard['uid']} ({status})")
    elif not there.get("meta", {}).get("provisioned"):
        report.wrong.append(f"{file}: Grafana's dashboard {dashboard['uid']} does not come from the file")
    elif there["dashboard"].get("title") != dashboard.get("title"):
        report.wrong.append(f"{file}: Grafana has another version, titled {there['dashboard'].get('title')!r}")
    for query in queries(dashboard):
        report.queries += 1
        wrong, values = grafana.query(query)
        if wrong:
            report.wrong.append(f"{file}: {query.where}: {wrong}")
        elif not values:
            report.empty.append(f"{file}: {query.where}")


def ready(grafana: Grafana, pause: Callable[[float], object] | None = None) -> None:
    """Waits for its API. Raises GrafanaError."""
    until = time.monotonic() + START_S
    while True:
        try:
            if grafana.get("/api/health")[0] == 200:
                return
        except GrafanaError:
            if time.monotonic() > until:
                raise
        (pause or threading.Event().wait)(1)


def show(name: str, report: Report, need_data: bool) -> bool:
    """Prints a report; whether it is good."""
    good = not report.wrong and not (need_data and report.empty)
    print(f"{name}: {'ok' if good else 'NOT ok'}: {report.dashboards} dashboards, {report.queries} queries, "
          f"{len(report.wrong)} wrong, {len(report.empty)} without data")  # fmt: skip
    for line in report.wrong:
        print(f"  wrong    {line}")
    for line in report.empty:
        print(f"  no data  {line}")
    return good


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("verify-grafana", description="Prove the dashboards.")
    parser.add_argument("--url", type=web_address, help="Grafana (default: http://127.0.0.1:GRAFANA_PORT)")
    parser.add_argument("--no-restart", action="store_true", help="without the second boot on the old volume")
    parser.add_argument("--need-data", action="store_true", help="a query without data is wrong, too")
    parser.add_argument("--json", action="store_true", help="both reports as JSON")
    arguments = parser.parse_args(argv)
    environ = environment()
    url = arguments.url or f"http://127.0.0.1:{environ.get('GRAFANA_PORT') or 3000}"
    secret = _secrets.folder(environ) / "private/grafana_admin_password"
    try:
        auth = ("admin", secret.read_text(encoding="utf-8").strip())
        with httpx.Client(base_url=url, auth=auth, timeout=30, trust_env=False) as client:
            grafana = Grafana(client)
            reports = {"first boot": verify(grafana)}
            if not arguments.no_restart:
                Compose().run("up", "--detach", "--no-deps", "--force-recreate", "grafana")
                ready(grafana)
                reports["second boot, old volume"] = verify(grafana)
    except (GrafanaError, ComposeError) as error:
        print(f"verify-grafana: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"verify-grafana: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps({name: vars(report) for name, report in reports.items()}, indent=1))
        return int(any(each.wrong or (arguments.need_data and each.empty) for each in reports.values()))
    good = [show(name, report, arguments.need_data) for name, report in reports.items()]
    return int(not all(good))


if __name__ == "__main__":
    sys.exit(main())
