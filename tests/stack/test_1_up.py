"""From nothing to an answered chat, and what then runs: who listens where, as whom, with what rights."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest

from scripts import _ports
from tests.stack.checkout import MODEL, ROOT, Stack, until
from tests.stack.conftest import NOT_HERE

STARTED = ("alertmanager", "caddy", "engine-cpu", "gateway", "node-exporter", "prometheus")


@pytest.mark.ci
def test_a_chat_is_answered_through_the_published_port(stack: Stack) -> None:
    answer = stack.chat("What is the capital of France?", temperature=0)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == MODEL
    assert answer.json()["choices"][0]["message"]["content"].strip()


@pytest.mark.ci
def test_all_services_but_three_run_here(stack: Stack, summary: dict[str, Any]) -> None:
    """No service is a stand-in for the engine or the gateway; the list is printed at the end."""
    everything = set(stack.compose("config", "--services").stdout.split())
    running = set(stack.compose("ps", "--services", "--status", "running").stdout.split())
    assert running == set(STARTED)
    assert everything - running - {"load", "quantize-cpu"} == set(NOT_HERE)  # those two have tests of their own
    summary["started"], summary["not_here"] = sorted(running), NOT_HERE
    version = stack.python("engine-cpu", "import importlib.metadata as m; print(m.version('vllm'))")
    assert version.startswith("0.32.0")


def test_up_says_what_it_waits_for_and_what_to_do_next(stack: Stack) -> None:
    said = (stack.root / "up.log").read_text(encoding="utf-8")
    assert "waiting for engine-cpu (starting)" in said
    for port in ("GATEWAY_PORT", "PROMETHEUS_PORT", "GRAFANA_PORT"):
        assert f"http://127.0.0.1:{stack.ports[port]}" in said
    assert f"curl {stack.url}/v1/chat/completions" in said
    assert said.count(stack.key) == 2  # when it is made, and in the request to copy


@pytest.mark.ci
def test_a_second_up_is_quick_and_changes_nothing(stack: Stack, summary: dict[str, Any]) -> None:
    before = {name: stack.inspect(name)["Id"] for name in STARTED}
    began = time.monotonic()
    again = stack.make("up-cpu")
    summary["second_up_s"] = round(time.monotonic() - began, 1)
    assert again.returncode == 0, again.stderr
    assert {name: stack.inspect(name)["Id"] for name in STARTED} == before
    assert summary["second_up_s"] < 30
    assert "sk-" not in again.stdout


def test_prometheus_scrapes_engine_and_gateway(stack: Stack) -> None:
    url = f"http://127.0.0.1:{stack.ports['PROMETHEUS_PORT']}/api/v1/query"

    def up() -> bool:
        found = stack.http.get(url, params={"query": 'up{job=~"engine|gateway"}'}).json()["data"]["result"]
        return len(found) == 2 and all(series["value"][1] == "1" for series in found)

    until(up, "both targets up", 30)


@pytest.mark.parametrize("name", STARTED)
def test_a_container_has_no_rights_to_lose(stack: Stack, name: str) -> None:
    """Seen on the running container, not on the file: user, root, capabilities, privileges, limits."""
    found = stack.inspect(name)
    host = found["HostConfig"]
    assert host["ReadonlyRootfs"] is True
    assert host["CapDrop"] == ["ALL"]
    assert host["CapAdd"] == (["NET_BIND_SERVICE"] if name == "caddy" else None)
    assert host["PidsLimit"] > 0
    assert host["Memory"] > 0
    status = stack.compose("exec", "-T", name, "cat", "/proc/self/status").stdout
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["NoNewPrivs"] == "1"
    assert int(fields["CapEff"], 16) == 0
    assert fields["Uid"].split()[0] not in ("0", "")
    assert stack.compose("exec", "-T", name, "touch", "/usr/here").returncode != 0


def test_the_gateway_is_also_there_behind_tls(stack: Stack) -> None:
    """Profile tls: a certificate of Caddy's own for localhost, and each event of a stream as it comes."""
    url = f"https://localhost:{stack.ports['HTTPS_PORT']}/v1/chat/completions"
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Count to ten."}],
        "stream": True,
        "max_tokens": 96,
        "ignore_eos": True,
    }
    with (
        httpx.Client(verify=False, trust_env=False, timeout=120) as client,  # noqa: S501 - nobody signed it, by design
        client.stream("POST", url, json=body, headers=stack.headers) as answer,
    ):
        assert answer.status_code == 200
        arrived = [(time.monotonic(), line) for line in answer.iter_lines() if line]
    assert arrived[-1][1] == "data: [DONE]"
    assert arrived[-1][0] - arrived[0][0] > 0.2  # not all at once at the end


def test_the_demo_load_chats_with_a_key_of_its_own(stack: Stack) -> None:
    up = stack.make("up-cpu", COMPOSE_PROFILES="cpu,tls,load")
    try:
        assert up.returncode == 0, up.stdout + up.stderr
        until(lambda: " answered" in stack.logs("load"), "an answer to the load", 60)
        told = stack.logs("load").splitlines()
        assert not any("HTTP" in line or "Error" in line for line in told), told
        assert stack.inspect("load")["State"]["Health"]["Status"] == "healthy"
    finally:
        stack.compose("rm", "--stop", "--force", "load")


def test_only_the_front_door_is_published_beyond_this_machine(stack: Stack) -> None:
    """Field case H1, as Docker has bound the ports."""
    bound = {
        (name, address["HostIp"])
        for name in STARTED
        for addresses in stack.inspect(name)["NetworkSettings"]["Ports"].values()
        for address in addresses or []
    }
    front = {(name, address) for name, address in bound if address != "127.0.0.1"}
    assert {name for name, _ in front} == {"gateway", "caddy"}
    assert {name for name, _ in bound - front} == {"prometheus", "alertmanager"}


def test_the_engine_has_no_way_out(stack: Stack) -> None:
    """Its network leads to the gateway and Prometheus alone."""
    source = "import socket; s = socket.socket(); s.settimeout(3); print(s.connect_ex(('1.1.1.1', 53)))"
    assert stack.python("engine-cpu", source) != "0"
    assert list(stack.inspect("engine-cpu")["NetworkSettings"]["Networks"]) == ["vllm-stack-test_engine"]


def test_the_engine_asks_for_a_key_that_only_the_gateway_has(stack: Stack) -> None:
    source = (
        "import urllib.request, urllib.error\n"
        "try: print(urllib.request.urlopen('http://engine:8000/v1/models').status)\n"
        "except urllib.error.HTTPError as error: print(error.code)"
    )
    assert stack.python("gateway", source) == "401"
    assert httpx.get(f"{stack.url}/v1/models", trust_env=False).status_code == 401


@pytest.mark.ci
def test_secrets_are_nowhere_but_in_their_files(stack: Stack) -> None:
    """Field case H8: not in logs, environments, command lines or images."""
    secrets = [path.read_text(encoding="utf-8").strip() for path in (stack.root / "secrets/private").iterdir()]
    assert len(secrets) >= 3
    places = [stack.logs(name) + json.dumps(stack.inspect(name)) for name in STARTED]
    places.append(stack.docker("history", "--no-trunc", "--format", "{{json .}}", "vllm-stack/gateway:local"))
    places += [stack.docker("top", stack.inspect(name)["Id"], "-eo", "pid,args") for name in STARTED]
    for secret in (*secrets, stack.key):
        assert not any(secret in place for place in places)


@pytest.mark.ci
def test_the_gateways_image_is_small(stack: Stack, summary: dict[str, Any]) -> None:
    """What is ours in it; the published base beneath is another 125 MB."""
    image = stack.docker("image", "inspect", "vllm-stack/gateway:local", "--format", "{{.Size}}")
    base = stack.docker("image", "inspect", "python:3.11-slim-bookworm", "--format", "{{.Size}}")
    summary["gateway_image_mb"] = {"image": int(image) // 10**6, "base": int(base) // 10**6}
    engine = stack.docker("image", "inspect", "vllm-stack/engine-cpu:0.32.0", "--format", "{{.Size}}")
    packages = sum(path.stat().st_size for path in (ROOT / ".venv-engine").rglob("*") if path.is_file())
    summary["engine_cpu_image_mb"] = {"image": int(engine) // 10**6, "packages": packages // 10**6}
    assert int(image) - int(base) < 75e6


def test_ports_of_the_stack_are_found_taken_by_itself(stack: Stack) -> None:
    """The preflight of a second `up` must not trip over the first; the port is really held."""
    assert not _ports.is_free(stack.ports["GATEWAY_PORT"])
