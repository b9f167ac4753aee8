"""schemathesis on the published OpenAPI document, against the real gateway with the scripted engine behind it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.protocol import HOT_ROUTES
from scripts import _ports, demo
from tests.engine.conftest import Processes, processes
from tests.fakes.engine import MODEL

# Not among them: positive_data_acceptance. No schema knows how much a model's context takes, or what a grammar allows.
CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance"),
    *("response_headers_conformance", "negative_data_rejection", "unsupported_method", "allow_header_conformance"),
    *("ignored_auth", "missing_required_header"),
)
EXAMPLES = 10  # random requests an operation, beside those that walk through every field of its schema


class Api:
    """A gateway with a key, and the document it publishes."""

    def __init__(self, started: Processes, folder: Path) -> None:
        port, admin, engine = (_ports.free_port() for _ in range(3))
        keys = folder / "keys.json"
        made = (sys.executable, "-m", "scripts.keys", "add", "fuzz", "--file", str(keys))
        self.key = subprocess.run(made, cwd=demo.ROOT, capture_output=True, text=True, check=True).stdout.strip()
        self.url, self.admin_url = (f"http://{_ports.HOST}:{p}" for p in (port, admin))
        fake = (sys.executable, "-m", "tests.fakes.engine", "--port", str(engine))
        settings = {
            "GATEWAY__LISTEN": f"{_ports.HOST}:{port}",
            "GATEWAY__ADMIN_LISTEN": f"{_ports.HOST}:{admin}",
            "GATEWAY__ENGINES": json.dumps([f"http://{_ports.HOST}:{engine}"]),
            "GATEWAY__AUTH__KEYS_FILE": str(keys),
        }
        started.start(demo.Service("scripted-engine", fake, {}))
        started.start(demo.Service("gateway", (sys.executable, "-m", "gateway"), settings))
        self.log = started.log("gateway")
        started.until(self._ready, "a ready gateway")

    def _ready(self) -> bool:
        try:
            return self.get(f"{self.url}/readyz").status_code == 200
        except httpx.HTTPError:
            return False

    def get(self, url: str) -> httpx.Response:
        return httpx.get(url, headers={"Authorization": f"Bearer {self.key}"}, timeout=10, trust_env=False)

    def document(self) -> dict[str, Any]:
        answer = self.get(f"{self.url}/openapi.json")
        assert answer.status_code == 200, answer.text
        read: dict[str, Any] = answer.json()
        return read

    def answered(self) -> Counter[tuple[str, str]]:
        """(route, status) -> requests of any key or none, as the gateway counts them."""
        page = self.get(f"{self.admin_url}/metrics").text
        counts: Counter[tuple[str, str]] = Counter()
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name == "gateway_requests_total":
                    counts[sample.labels["route"], sample.labels["status"]] += int(sample.value)
        return counts


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    folder = tmp_path_factory.mktemp("openapi")
    with processes(folder) as started:
        yield Api(started, folder)


def narrowed(document: dict[str, Any], scheme: str) -> dict[str, Any]:
    """The document for one way to send a key, and the one model there is: random names would all end at their 404."""
    for operations in document["paths"].values():
        if "post" in operations:
            body = operations["post"]["requestBody"]["content"]["application/json"]["schema"]
            assert body["properties"]["model"]["type"] == "string"
            body["properties"]["model"] = {"const": MODEL}
    schemes = document["components"]["securitySchemes"]
    document["components"]["securitySchemes"] = {scheme: schemes[scheme]}
    document["security"] = [{scheme: []}]
    return document


@pytest.mark.parametrize(("scheme", "header"), [("bearer", "Authorization: Bearer {}"), ("apiKey", "x-api-key: {}")])
def test_no_request_that_the_document_allows_or_forbids_makes_a_5xx_or_an_undocumented_answer(
    api: Api, tmp_path: Path, scheme: str, header: str
) -> None:
    before = api.answered()
    (tmp_path / "openapi.json").write_text(json.dumps(narrowed(api.document(), scheme)))
    command = (str(Path(sys.executable).parent / "schemathesis"), "run", "openapi.json", "--url", api.url)
    options = ("--header", header.format(api.key), "--checks", ",".join(CHECKS), "--phases", "coverage,fuzzing")
    amount = ("--max-examples", str(EXAMPLES), "--seed", "1", "--continue-on-failure", "--no-color")
    ran = subprocess.run(
        (*command, *options, *amount), cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    gained = api.answered() - before
    assert [route for route in HOT_ROUTES if not gained[route, "200"] or not gained[route, "400"]] == []
    assert {answer: count for answer, count in gained.items() if answer[1] >= "500"} == {}
    assert '"exception"' not in api.log.read_text()


def test_the_document_lists_every_route_that_the_gateway_serves_and_needs_a_key(api: Api) -> None:
    paths = api.document()["paths"]
    assert set(HOT_ROUTES) | {"/v1/models", "/v1/models/{name}", "/healthz", "/readyz"} == set(paths)
    assert httpx.get(f"{api.url}/openapi.json", timeout=10, trust_env=False).status_code == 401
