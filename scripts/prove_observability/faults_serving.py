"""Faults of what serves: the engine, the gateway, and too much or the wrong kind of load."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

from scripts import _ports
from scripts.prove_observability.faults import Expected, Fault
from scripts.prove_observability.lab import Lab
from scripts.prove_observability.prom import until
from scripts.prove_observability.traffic import (
    Front,
    fresh_long,
    load,
    long_answer,
    middling_answer,
    mistaken,
    talkative,
)

# About 2,300 tokens: just enough for one request of the profile's longest kind.
SMALL_KV = ("--kv-cache-memory-bytes", "51M")
CRASH_SCALE = 0.12  # three starts of a real engine have to fit into the half hour


def front(lab: Lab) -> Front:
    return Front(lab.url("gateway"), lab.keys["proof"])


@contextlib.contextmanager
def gateway_killed(lab: Lab) -> Iterator[None]:
    lab.kill("gateway")
    try:
        yield
    finally:
        lab.gateway()
        lab.gateway_ready()


@contextlib.contextmanager
def keys_file_spoiled(lab: Lab) -> Iterator[None]:
    good = lab.keys_file.read_bytes()
    lab.keys_file.write_text('{"keys": [\n', encoding="utf-8")
    try:
        yield
    finally:
        lab.keys_file.write_bytes(good)


@contextlib.contextmanager
def log_unread(lab: Lab) -> Iterator[None]:
    """Nobody reads the gateway's stderr, and many requests want their line in it."""
    pump = lab.running["gateway"].pump
    assert pump is not None
    pump.reading.clear()
    try:
        with load(front(lab), *(mistaken,) * 16, pace_s=0):
            yield
    finally:
        pump.reading.set()


@contextlib.contextmanager
def gateway_with(lab: Lab, **settings: str) -> Iterator[None]:
    lab.stop("gateway")
    lab.gateway(**settings)
    try:
        yield
    finally:
        lab.stop("gateway")
        lab.gateway()
        lab.gateway_ready()


@contextlib.contextmanager
def engine_elsewhere(lab: Lab) -> Iterator[None]:
    """The gateway looks for its engine at a wrong address; Prometheus still reaches the engine."""
    with gateway_with(lab, ENGINES=f'["http://{_ports.HOST}:{_ports.free_port()}"]'):
        yield


@contextlib.contextmanager
def overload(lab: Lab) -> Iterator[None]:
    """Room for six requests, sixty clients: some wait long, the rest is refused."""
    room = {"ADMISSION__CAPACITY_TOKENS": "500", "ADMISSION__MAX_QUEUE_TOKENS": "100000", "ADMISSION__MAX_WAIT_S": "9"}
    with gateway_with(lab, **room):
        lab.gateway_ready()
        with load(front(lab), *(talkative,) * 60):
            yield


@contextlib.contextmanager
def prompts_without_prefix(lab: Lab) -> Iterator[None]:
    """Long prompts that share nothing, one after the other, in between the streams of others."""
    lab.engine_with()
    with load(front(lab), *(fresh_long,) * 3, *(talkative,) * 10):
        yield


@contextlib.contextmanager
def engine_hung(lab: Lab) -> Iterator[None]:
    """SIGSTOP to the process that computes, with requests in it: /health still says 200."""
    lab.engine_with()
    with load(front(lab), *(talkative,) * 3):
        until(lambda: (lab.prometheus.value("sum(vllm:num_requests_running)") or 0) > 0, "running requests", 30)
        lab.freeze(on=True)
        try:
            yield
        finally:
            lab.freeze(on=False)


@contextlib.contextmanager
def engine_killed(lab: Lab) -> Iterator[None]:
    lab.kill("engine")
    try:
        yield
    finally:
        lab.engine()
        lab.engine_up()


@contextlib.contextmanager
def kv_cache_tight(lab: Lab) -> Iterator[None]:
    """A flag: a tenth of the KV cache. Then more long answers than fit, past the gateway, which would hold them back.

    The alerts clear when the load ends; the flag stays for the next fault, for a start takes half a minute.
    """
    lab.engine_with(*SMALL_KV)
    with load(Front(lab.url("engine")), *(long_answer,) * 11):
        yield


@contextlib.contextmanager
def kv_cache_exhausted(lab: Lab) -> Iterator[None]:
    """The same with so many that most of them wait, and shorter answers."""
    lab.engine_with(*SMALL_KV)
    with load(Front(lab.url("engine")), *(middling_answer,) * 40):
        yield


@contextlib.contextmanager
def engine_crashes(lab: Lab) -> Iterator[None]:
    """Killed each time it has just come up, three times."""
    rules(lab, CRASH_SCALE)
    for _ in range(3):
        until(lambda: lab.prometheus.value('sum(up{job="engine"})') == 1, "a scraped engine", 60)
        lab.kill("engine")
        until(lambda: lab.prometheus.value('sum(up{job="engine"})') == 0, "a failed scrape", 60)
        lab.engine()
        lab.engine_up()
    try:
        yield
    finally:
        rules(lab, lab.scale)


def rules(lab: Lab, scale: float) -> None:
    """Other windows from now on."""
    where = ("--out", str(lab.folder / "rules"), "--scrape-interval", f"{lab.interval_s}s")
    command = (sys.executable, "-m", "scripts.rules", *where, "--window-scale", str(scale))
    subprocess.run(command, capture_output=True, check=True)
    lab.prometheus.reload()


FAULTS = (
    Fault(
        "gateway killed",
        "SIGKILL to the gateway",
        (Expected("GatewayAbsent"), Expected("ScrapeTargetDown", job="gateway", inhibited=True)),
        gateway_killed,
        ci=True,
    ),
    Fault(
        "keys file spoiled",
        "half a JSON document in its place",
        (Expected("GatewayKeysFileBad"),),
        keys_file_spoiled,
        ci=True,
    ),
    Fault(
        "log unread",
        "the reader of the gateway's stderr stands still",
        (Expected("GatewayLogLinesDropped"),),
        log_unread,
    ),
    Fault(
        "engine elsewhere",
        "the gateway restarted with a wrong engine address",
        (Expected("GatewayNoReadyReplica"), Expected("GatewayReplicaNotReady", inhibited=True)),
        engine_elsewhere,
        ci=True,
    ),
    Fault(
        "overload",
        "sixty clients where six fit",
        (
            Expected("GatewayShedding"),
            Expected("GatewayQueueSaturated"),
            Expected("TtftSloMissed"),
            Expected("SloErrorBudgetBurnFast"),
            Expected("SloErrorBudgetBurnSlow"),
        ),
        overload,
        fire_s=150,
        clear_s=400,
    ),
    Fault(
        "prompts without prefix",
        "long prompts that share nothing, among streams",
        (Expected("EngineLowHitRatio"), Expected("ItlSloMissed")),
        prompts_without_prefix,
        fire_s=150,
    ),
    Fault("engine hung", "SIGSTOP to the engine's computing process", (Expected("EngineHung"),), engine_hung, ci=True),
    Fault(
        "engine killed",
        "SIGKILL to the engine",
        (
            Expected("EngineAbsent"),
            Expected("GatewayNoReadyReplica", inhibited=True),
            Expected("ScrapeTargetDown", job="engine", inhibited=True),
        ),
        engine_killed,
        ci=True,
    ),
    Fault(
        "KV cache tight",
        "restarted with a tenth of the KV cache; eleven long answers at once",
        (Expected("EngineKvPressure", "warning"),),
        kv_cache_tight,
        fire_s=240,
    ),
    Fault(
        "KV cache exhausted",
        "the same with forty shorter ones",
        (
            Expected("EngineKvPressure", "critical"),
            Expected("EngineKvPressure", "warning", inhibited=True),
            Expected("EnginePreemptions"),
            Expected("EngineQueueSaturated"),
        ),
        kv_cache_exhausted,
        fire_s=240,
    ),
    Fault(
        "engine crashes",
        "killed three times just after it came up; the half hour is 216 s here",
        (Expected("EngineCrashLoop"),),
        engine_crashes,
        fire_s=400,
    ),
)
