"""Faults of a gateway with several engines or several workers: its list, its circuits, its processes."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil

from scripts import _ports
from scripts.prove_observability.faults import Expected, Fault
from scripts.prove_observability.faults_serving import front, gateway_with, rules
from scripts.prove_observability.lab import Lab
from scripts.prove_observability.prom import until
from scripts.prove_observability.traffic import load, talkative

LOOK_S = "0.2"
WORKER_SCALE = 0.03  # three starts of a worker have to fit into the half hour


@contextlib.contextmanager
def one_of_two_away(lab: Lab) -> Iterator[None]:
    """Beside the engine a second one is listed, and nobody listens at its address."""
    away = f"http://{_ports.HOST}:{_ports.free_port()}"
    with gateway_with(lab, ENGINES=json.dumps([lab.url("engine"), away])):
        yield


@contextlib.contextmanager
def _listed_by_file(lab: Lab) -> Iterator[Path]:
    """The gateway takes its engine from a targets file; yields it."""
    file = lab.folder / "engines.json"
    file.write_text(json.dumps([{"targets": [f"{_ports.HOST}:{lab.ports['engine']}"]}]), encoding="utf-8")
    with gateway_with(lab, ENGINES="[]", DISCOVERY__FILES=json.dumps([str(file)]), DISCOVERY__INTERVAL_S=LOOK_S):
        lab.gateway_ready()
        yield file


@contextlib.contextmanager
def targets_file_says(lab: Lab, text: str) -> Iterator[None]:
    with _listed_by_file(lab) as file:
        good = file.read_text(encoding="utf-8")
        file.write_text(text, encoding="utf-8")
        try:
            yield
        finally:
            file.write_text(good, encoding="utf-8")


@contextlib.contextmanager
def name_unknown(lab: Lab) -> Iterator[None]:
    """Beside the engine, a name that no resolver knows."""
    with gateway_with(lab, DISCOVERY__DNS='["http://engines.invalid:8000"]', DISCOVERY__INTERVAL_S=LOOK_S):
        yield


@contextlib.contextmanager
def calls_fail(lab: Lab) -> Iterator[None]:
    """Streams' first bytes are waited for so shortly that none comes in time; /health goes on saying 200."""
    lab.engine_with()
    with gateway_with(lab, TIMEOUTS__FIRST_BYTE_S="0.001", CIRCUIT__MAX_OPEN_S="2"):
        lab.gateway_ready()
        with load(front(lab), *(talkative,) * 4):
            yield


@contextlib.contextmanager
def worker_killed(lab: Lab) -> Iterator[None]:
    """SIGKILL to one of two workers, and twice more to its successor."""
    with gateway_with(lab, WORKERS="2"):
        lab.gateway_ready()
        rules(lab, WORKER_SCALE)
        try:
            for killed in range(3):
                until(lambda: lab.prometheus.value("gateway_workers") == 2, "two workers", 60)
                lab.struck_at = time.monotonic()
                max(_workers(lab), key=lambda worker: worker.create_time()).kill()
                restarts = f"gateway_worker_restarts_total > {killed}"
                until(lambda: lab.prometheus.instant(restarts), restarts, 60)  # noqa: B023 - asked at once
            yield
        finally:
            rules(lab, lab.scale)


def _workers(lab: Lab) -> list[psutil.Process]:
    parent = lab.running["gateway"].main()
    assert parent is not None
    return [child for child in parent.children() if "gateway.worker" in child.cmdline()]


FAULTS = (
    Fault(
        "one of two engines away",
        "a second engine in the gateway's list, at whose address nobody listens",
        (Expected("GatewayReplicaNotReady"),),
        one_of_two_away,
    ),
    Fault(
        "targets file spoiled",
        "half a JSON document in place of the gateway's targets file",
        (Expected("GatewayReplicaListStale"),),
        partial(targets_file_says, text='[{"targets": [\n'),
        ci=True,
    ),
    Fault(
        "targets file emptied",
        "the gateway's targets file says that there is no engine",
        (Expected("GatewayNoReadyReplica"),),
        partial(targets_file_says, text="[]"),
        ci=True,
    ),
    Fault(
        "name unknown",
        "a name in the gateway's list of engines that no resolver knows",
        (Expected("GatewayReplicaListStale"),),
        name_unknown,
    ),
    Fault(
        "calls fail",
        "a first byte is waited for 1 ms: every stream fails while /health says 200",
        (Expected("GatewayCircuitOpen"),),
        calls_fail,
        ci=True,
    ),
    Fault(
        "worker killed",
        "SIGKILL to one of two workers, three times; the half hour is 54 s here",
        (Expected("GatewayCrashLoop"),),
        worker_killed,
    ),
)
