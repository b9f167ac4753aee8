"""A running stack, seen through its HTTP answers; ports, free, ours and taken by real sockets."""

import http.server
import json
import socket
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from scripts import _ports, demo
from scripts.checks import Check, stack
from scripts.checks.probes import Answer, Probes, Ran
from scripts.checks.subject import decide

GATEWAY, ENGINE = "http://127.0.0.1:8080", "http://127.0.0.1:8000"
PROMETHEUS, ALERTMANAGER = "http://127.0.0.1:9090", "http://127.0.0.1:9093"
RUNNING = {
    f"{GATEWAY}/healthz": Answer(200, '{"status": "ok"}'),
    f"{GATEWAY}/readyz": Answer(200, '{"status": "ready"}'),
    f"{ENGINE}/health": Answer(200, ""),
    f"{ENGINE}/version": Answer(200, '{"version": "0.32.0"}'),
    f"{ENGINE}/metrics": Answer(200, "# TYPE x gauge\nvllm:num_requests_running 0.0\n"),
    "http://127.0.0.1:9000/metrics": Answer(200, "gateway_in_flight_requests 0.0\n"),
}


def look(
    root: Path, purpose: str, answers: Mapping[str, Answer], holders: Mapping[int, str] | None = None
) -> dict[str, Check]:
    eyes = Probes(
        run=lambda command, environ=None: None,
        get=lambda url: answers.get(url),
        port_holder=lambda port: (holders or {}).get(port),
        environ={},
        root=root,
    )
    return {check.name: check for check in stack.checks(eyes, decide(eyes, purpose, "smollm2-135m.cpu", None))}


def test_nothing_running_is_not_checked_and_never_well(tmp_path: Path) -> None:
    found = look(tmp_path, "demo", {})
    assert {name: check.status for name, check in found.items() if not name.startswith("stack.port")} == dict.fromkeys(
        ("stack.healthz", "stack.readyz", "stack.engine", "stack.targets", "stack.alerts"), "skip"
    )


def test_a_running_demo_is_well(tmp_path: Path) -> None:
    held = dict.fromkeys((8080, 9000, 8000), "python (pid 1)")
    found = look(tmp_path, "demo", RUNNING, held)
    assert {check.status for check in found.values() if check.name not in ("stack.targets", "stack.alerts")} == {"ok"}
    assert found["stack.port.gateway"].found == "this stack's gateway (python (pid 1))"


def test_the_demos_own_prometheus_is_looked_at_wherever_the_demo_put_everything(tmp_path: Path) -> None:
    record = tmp_path / ".demo" / "8081" / demo.RECORD
    record.parent.mkdir(parents=True)
    record.write_text('{"gateway": 8081, "admin": 9001, "engine": 8001, "prometheus": 9191}')
    held = dict.fromkeys((8081, 9001, 8001, 9191), "python (pid 1)")
    target = {"labels": {"job": "engine"}, "health": "down", "lastError": "refused"}
    answers = {
        "http://127.0.0.1:8081/readyz": Answer(200, '{"status": "ready"}'),
        "http://127.0.0.1:9191/api/v1/status/buildinfo": Answer(200, '{"status": "success"}'),
        "http://127.0.0.1:9191/api/v1/targets?state=active": Answer(
            200, json.dumps({"data": {"activeTargets": [target]}})
        ),
    }
    found = look(tmp_path, "demo", answers, held)
    assert (found["stack.targets"].status, found["stack.targets"].found) == ("warn", "engine (refused)")
    assert found["stack.port.prometheus"].status == found["stack.port.gateway"].status == "ok"
    assert found["stack.readyz"].status == "ok"
    assert look(tmp_path, "demo", {})["stack.targets"].found == "no Prometheus answers"


@pytest.mark.parametrize(
    ("url", "answer", "name", "status", "said"),
    [
        (f"{GATEWAY}/healthz", Answer(500, ""), "stack.healthz", "fail", "500"),
        (f"{GATEWAY}/readyz", Answer(503, '{"reason": "no engine"}'), "stack.readyz", "warn", "503: no engine"),
        (f"{ENGINE}/health", Answer(503, ""), "stack.engine", "fail", "503"),
        (f"{ENGINE}/version", Answer(200, '{"version": "0.26.0"}'), "stack.version", "warn", "vLLM 0.26.0"),
        (f"{ENGINE}/version", Answer(404, "no"), "stack.version", "skip", "is that a vLLM?"),
        (f"{ENGINE}/metrics", Answer(200, "python_info 1.0\n"), "stack.figures", "fail", "none"),
    ],
)
def test_each_fault_of_a_running_stack_is_found(
    url: str, answer: Answer, name: str, status: str, said: str, tmp_path: Path
) -> None:
    check = look(tmp_path, "demo", RUNNING | {url: answer})[name]
    assert (check.status, said in check.found) == (status, True)


def test_the_cpu_builds_version_counts_as_the_pinned_one(tmp_path: Path) -> None:
    found = look(tmp_path, "demo", RUNNING | {f"{ENGINE}/version": Answer(200, '{"version": "0.32.0+cpu"}')})
    assert found["stack.version"].status == "ok"


@pytest.mark.parametrize(
    ("image", "status"),
    [("vllm/vllm-openai:v0.32.0", "ok"), ("vllm/vllm-openai:v0.26.0", "warn"), ("mine/engine:latest", "skip")],
)
def test_in_containers_the_images_tag_tells_the_version(image: str, status: str, tmp_path: Path) -> None:
    (tmp_path / "compose.yaml").touch()
    config = json.dumps({"services": {"engine-cpu": {"image": image}, "gateway": {"ports": [{"published": "8443"}]}}})

    def run(command: Sequence[str], environ: Mapping[str, str] | None = None) -> Ran | None:
        return Ran(0, config) if "config" in command else None

    eyes = Probes(run=run, get=lambda url: None, port_holder=lambda port: None, environ={}, root=tmp_path)
    subject = decide(eyes, "stack", "smollm2-135m.cpu", None)
    found = {check.name: check for check in stack.checks(eyes, subject)}
    assert found["stack.version"].status == status
    assert stack.wanted_ports(eyes, subject) == {"gateway": 8443}


def test_without_compose_the_ports_are_those_of_env(tmp_path: Path) -> None:
    eyes = Probes(run=lambda command, environ=None: None, environ={"GATEWAY_PORT": "8443"}, root=tmp_path)
    ports = stack.wanted_ports(eyes, decide(eyes, "stack", "smollm2-135m.cpu", None))
    assert ports == {"gateway": 8443, "prometheus": 9090, "alertmanager": 9093, "grafana": 3000}


def test_with_tls_caddys_two_ports_are_asked_for_too(tmp_path: Path) -> None:
    environ = {"COMPOSE_PROFILES": "cpu, tls", "HTTPS_PORT": "8443"}
    eyes = Probes(run=lambda command, environ=None: None, environ=environ, root=tmp_path)
    ports = stack.wanted_ports(eyes, decide(eyes, "stack", "smollm2-135m.cpu", None))
    assert (ports["caddy"], ports["caddy:8443"]) == (80, 8443)


def test_every_published_port_of_a_service_counts(tmp_path: Path) -> None:
    (tmp_path / "compose.yaml").touch()
    twice = [{"published": "443", "host_ip": "0.0.0.0"}, {"published": "443", "host_ip": "::"}]
    config = json.dumps({"services": {"caddy": {"ports": [{"published": "80"}, *twice]}}})
    eyes = Probes(run=lambda command, environ=None: Ran(0, config), environ={}, root=tmp_path)
    ports = stack.wanted_ports(eyes, decide(eyes, "stack", "smollm2-135m.cpu", None))
    assert ports == {"caddy": 80, "caddy:443": 443}
    assert {stack.service_of(entry) for entry in ports} == {"caddy"}


@pytest.mark.parametrize(("running", "status"), [("gateway\ncaddy\n", "ok"), ("gateway\n", "fail")])
def test_a_port_of_caddy_is_ours_where_compose_says_it_runs(running: str, status: str) -> None:
    eyes = Probes(run=lambda command, environ=None: Ran(0, running), port_holder=lambda port: "docker-proxy (pid 1)")
    assert stack.port(eyes, "caddy:443", 443).status == status


# -- ports, by real sockets -------------------------------------------------------------------------------------------


def test_a_free_port_is_free() -> None:
    assert stack.port(Probes(), "gateway", _ports.free_port()).found == "free"


def test_a_port_that_somebody_else_holds_is_named_with_its_holder() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        check = stack.port(Probes(), "something-else", other.getsockname()[1])
    assert (check.status, "(pid " in check.found) == ("fail", True)


@pytest.mark.parametrize(("body", "status"), [(b'{"status": "unready"}', "ok"), (b'{"status": "fine"}', "fail")])
def test_a_gateway_is_known_by_what_it_answers(body: bytes, status: str) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(503)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert stack.port(Probes(), "gateway", server.server_address[1]).status == status
    finally:
        server.shutdown()
        server.server_close()


# -- Prometheus and Alertmanager --------------------------------------------------------------------------------------


def stacked(root: Path, url: str, answer: Answer) -> dict[str, Check]:
    return look(root, "stack", {url: answer})


def test_a_target_that_is_down_is_named(tmp_path: Path) -> None:
    active = [
        {"labels": {"job": "engine"}, "health": "down", "lastError": "connection refused"},
        {"labels": {"job": "gateway"}, "health": "up", "lastError": ""},
    ]
    url = f"{PROMETHEUS}/api/v1/targets?state=active"
    check = stacked(tmp_path, url, Answer(200, json.dumps({"data": {"activeTargets": active}})))["stack.targets"]
    assert (check.status, check.found) == ("warn", "engine (connection refused)")
    check = stacked(tmp_path, url, Answer(200, json.dumps({"data": {"activeTargets": active[1:]}})))["stack.targets"]
    assert (check.status, check.found) == ("ok", "1 up")
    assert stacked(tmp_path, url, Answer(200, "hello"))["stack.targets"].status == "skip"


@pytest.mark.parametrize(
    ("receivers", "status", "said"),
    [
        ("[{name: team}]", "warn", "sends nowhere"),
        ("[{name: team, email_configs: []}, {name: other, slack_configs: [{channel: x}]}]", "warn", "sends nowhere"),
        ("[{name: team, email_configs: [{to: a@b}], webhook_configs: [{url: http://x}]}]", "ok", "email, webhook"),
        ("nonsense", "skip", "can't be read"),
    ],
)
def test_a_receiver_that_sends_nowhere_is_a_warning(receivers: str, status: str, said: str, tmp_path: Path) -> None:
    config = f"route: {{receiver: team}}\nreceivers: {receivers}\n"
    body = json.dumps({"config": {"original": config}, "versionInfo": {}})
    check = stacked(tmp_path, f"{ALERTMANAGER}/api/v2/status", Answer(200, body))["stack.alerts"]
    assert (check.status, said in check.found) == (status, True), check.found
