"""`make verify-grafana` against a small server that speaks Grafana's API: what holds passes, what does not is named.

Grafana itself does not run where these tests do.
"""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripts.verify_grafana import FOLDER, Grafana, GrafanaError, queries, variables, verify

DASHBOARD = {
    "uid": "one", "title": "One",
    "templating": {"list": [
        {"name": "model", "type": "query", "allValue": ".+", "current": {"value": ["$__all"]}},
        {"name": "model_long", "type": "query", "current": {"value": "x"}},
        {"name": "source", "type": "datasource"},
    ]},
    "annotations": {"list": [{"name": "deployed", "expr": "changes(a[1m])"}]},
    "panels": [
        {"type": "row", "title": "Row", "panels": [
            {"title": "In", "targets": [{"refId": "A", "expr": 'a{m=~"$model",l="${model_long}"}', "instant": True}]},
        ]},
        {"title": "Outer", "datasource": {"type": "prometheus", "uid": "${source}"}, "targets": [
            {"refId": "A", "expr": "rate(a[$__rate_interval])"}, {"refId": "B", "expr": "b"}]},
    ],
}  # fmt: skip


class Scripted:
    """What the server says; a test changes it."""

    def __init__(self) -> None:
        self.datasource: tuple[int, Any] = (200, {"status": "OK", "message": "ok"})
        self.dashboards = {"one": {"dashboard": {"title": "One"}, "meta": {"provisioned": True}}}
        self.errors: dict[str, str] = {}
        self.without_data: set[str] = set()
        self.asked: list[dict[str, Any]] = []
        self.password = "right"

    def answer(self, method: str, path: str, body: Any, user: str) -> tuple[int, Any]:
        if path == "/api/health":
            return 200, {"database": "ok", "version": "12.3.1"}
        if user != f"admin:{self.password}":
            return 401, {"message": "Invalid username or password"}
        if path == "/api/datasources/uid/prometheus/health":
            return self.datasource
        if (found := re.fullmatch(r"/api/dashboards/uid/(.+)", path)) is not None:
            there = self.dashboards.get(found[1])
            return (200, there) if there else (404, {"message": "Dashboard not found"})
        if (method, path) == ("POST", "/api/ds/query"):
            (query,) = body["queries"]
            self.asked.append(query)
            if error := self.errors.get(query["expr"]):
                return 400, {"results": {query["refId"]: {"error": error, "status": 400}}}
            values = [] if query["expr"] in self.without_data else [[1, 2], [0.5, 0.7]]
            return 200, {"results": {query["refId"]: {"status": 200, "frames": [{"data": {"values": values}}]}}}
        return 404, {"message": "Not found"}


@pytest.fixture
def scripted() -> Scripted:
    return Scripted()


@pytest.fixture
def grafana(scripted: Scripted) -> Iterator[Grafana]:
    class Handler(BaseHTTPRequestHandler):
        def reply(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            user = base64.b64decode(self.headers.get("Authorization", "").removeprefix("Basic ")).decode()
            status, answer = scripted.answer(self.command, self.path, body, user)
            text = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = reply  # noqa: N815 - the names that http.server looks for

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        with httpx.Client(base_url=url, auth=("admin", "right"), trust_env=False) as client:
            yield Grafana(client)
        server.shutdown()
        thread.join()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "one.json").write_text(json.dumps(DASHBOARD), encoding="utf-8")
    return tmp_path


def test_all_panels_are_asked_those_in_rows_and_annotations_too(
    grafana: Grafana, scripted: Scripted, folder: Path
) -> None:
    report = verify(grafana, folder)
    assert (report.wrong, report.empty, report.dashboards, report.queries) == ([], [], 1, 4)
    assert [query["expr"] for query in scripted.asked] == [
        'a{m=~".+",l="x"}', "rate(a[$__rate_interval])", "b", "changes(a[1m])",
    ]  # fmt: skip
    assert scripted.asked[0]["instant"] is True
    assert scripted.asked[1]["range"] is True
    assert {query["datasource"]["uid"] for query in scripted.asked} == {"prometheus"}


def test_a_query_that_fails_is_named_with_its_panel(grafana: Grafana, scripted: Scripted, folder: Path) -> None:
    scripted.errors["b"] = "bad_data: parse error"
    assert verify(grafana, folder).wrong == ["one.json: One / Outer / B: bad_data: parse error"]


def test_a_query_without_data_is_told_apart(grafana: Grafana, scripted: Scripted, folder: Path) -> None:
    scripted.without_data.add("b")
    report = verify(grafana, folder)
    assert (report.wrong, report.empty) == ([], ["one.json: One / Outer / B"])


@pytest.mark.parametrize(
    ("there", "told"),
    [
        (None, "one.json: Grafana has no dashboard of uid one (404)"),
        ({"dashboard": {"title": "One"}, "meta": {}}, "one.json: Grafana's dashboard one does not come from the file"),
        (
            {"dashboard": {"title": "Old"}, "meta": {"provisioned": True}},
            "one.json: Grafana has another version, titled 'Old'",
        ),
    ],
)
def test_a_dashboard_that_is_not_the_file_is_named(
    grafana: Grafana, scripted: Scripted, folder: Path, there: Any, told: str
) -> None:
    scripted.dashboards = {"one": there} if there else {}
    assert verify(grafana, folder).wrong == [told]


def test_a_data_source_that_cannot_reach_prometheus_is_named(
    grafana: Grafana, scripted: Scripted, folder: Path
) -> None:
    scripted.datasource = (400, {"status": "ERROR", "message": "no such host"})
    (told,) = verify(grafana, folder).wrong
    assert told.startswith("data source prometheus is not healthy: 400")
    assert "no such host" in told


def test_a_wrong_password_says_what_to_do(grafana: Grafana, scripted: Scripted, folder: Path) -> None:
    scripted.password = "other"
    with pytest.raises(GrafanaError, match="Grafana refuses the password"):
        verify(grafana, folder)


def test_no_dashboards_at_all_is_wrong(grafana: Grafana, tmp_path: Path) -> None:
    assert verify(grafana, tmp_path).wrong == [f"{tmp_path} holds no dashboard"]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_no_variable_of_a_shipped_dashboard_stays_unfilled(path: Path) -> None:
    """Grafana fills in its own ($__...); any other one left would make the query an error."""
    dashboard = json.loads(path.read_text(encoding="utf-8"))
    assert all(variables(dashboard).values())
    for query in queries(dashboard):
        assert not re.search(r"\$(?!__)|\[\[", query.body["expr"]), query
        assert query.body["datasource"]["uid"] == "prometheus"
