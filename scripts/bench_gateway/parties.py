"""Who is measured, and how each is started: one process on one core, with the features it ships. Pure but `versions`.

- the gateway: keys, request ids, access log, metrics, admission, usage and its ledger; micro-batching as shipped, and
  once more with window 0
- vllm-router, the Rust one of PyPI: its defaults, one worker
- LiteLLM's proxy: one worker, a master key, no database
- the gateway of another checkout, where one is named: what did a change bring?
- nobody: the load asks the source itself
"""

import json
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from scripts.bench_gateway.answers import CHAT_MODEL, MODEL
from scripts.bench_gateway.load import Address

DIRECT, GATEWAY, NO_WINDOW, ROUTER, LITELLM = "direct", "gateway", "gateway, window 0", "vllm-router", "LiteLLM"
OURS = (GATEWAY, NO_WINDOW)
BESIDE = "the other gateway"
PEERS = (ROUTER, LITELLM)
MASTER_KEY = "sk-bench"
_PACKAGES = {ROUTER: "vllm-router", LITELLM: "litellm"}


@dataclass(frozen=True)
class Party:
    """How to start one, and how to talk to it. `share` of the streams' length is what it is given (1 to all, or less to
    the one that takes so much longer)."""

    name: str
    command: tuple[str, ...]
    address: Address
    ready: str  # path that answers 200
    environment: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)  # name to text, in the run's own folder
    share: float = 1.0


def gateway(
    name: str,
    python: str,
    ports: tuple[int, int],
    engine: str,
    folder: Path,
    key: tuple[str, str],
    window_ms: float,
    tree: str | None = None,
) -> Party:
    """`key`: the secret and its digest. `tree`: the checkout whose gateway it is, if not this one's."""
    secret, digest = key
    stem = {GATEWAY: "gateway", NO_WINDOW: "gateway0"}.get(name, "beside")
    environment = {
        "GATEWAY_CONFIG": "configs/gateway.yaml",
        "GATEWAY__LISTEN": f"127.0.0.1:{ports[0]}",
        "GATEWAY__ADMIN_LISTEN": f"127.0.0.1:{ports[1]}",
        "GATEWAY__ENGINES": json.dumps([engine]),
        "GATEWAY__AUTH__KEYS_FILE": str(folder / f"{stem}.keys.json"),
        "GATEWAY__LEDGER__PATH": str(folder / f"{stem}.usage.sqlite"),
        "GATEWAY__BATCHING__WINDOW_MS": f"{window_ms:g}",
    }
    keys = json.dumps({"keys": [{"name": "bench", "sha256": digest}]})
    address = Address(ports[0], {"Authorization": f"Bearer {secret}"})
    command = (*(("env", "-C", tree) if tree else ()), python, "-m", "gateway")
    return Party(name, command, address, "/readyz", environment, files={f"{stem}.keys.json": keys})


def router(python: str, ports: tuple[int, int], engine: str) -> Party:
    command = [python, "-m", "vllm_router.launch_router", "--host", "127.0.0.1", "--port", str(ports[0])]
    command += ["--worker-urls", engine, "--prometheus-port", str(ports[1]), "--prometheus-host", "127.0.0.1"]
    command += ["--worker-startup-check-interval", "1"]  # the default of 30 s only delays the start
    return Party(ROUTER, tuple(command), Address(ports[0]), "/health")


def litellm(python: str, port: int, engine: str, folder: Path) -> Party:
    def entry(name: str, provider: str) -> dict[str, Any]:
        told = {"model": f"{provider}/{name}", "api_base": f"{engine}/v1", "api_key": "none"}
        return {"model_name": name, "litellm_params": told}

    # Completions have a provider of their own there; the other would turn them into chats.
    models = [entry(MODEL, "text-completion-openai"), entry(CHAT_MODEL, "openai")]
    config = {"model_list": models, "general_settings": {"master_key": MASTER_KEY}}
    command = [python, "-m", "litellm.proxy.proxy_cli", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--num_workers", "1", "--config", str(folder / "litellm.yaml")]
    return Party(
        LITELLM,
        tuple(command),
        Address(port, {"Authorization": f"Bearer {MASTER_KEY}"}),
        "/health/liveliness",
        {
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # its price list is otherwise fetched from the net at each start
            # It would open no more than 500 connections to one engine, and hold the others back.
            "AIOHTTP_CONNECTOR_LIMIT": "4096",
            "AIOHTTP_CONNECTOR_LIMIT_PER_HOST": "4096",
        },
        {"litellm.yaml": yaml.safe_dump(config)},
        share=0.02,
    )


def versions(python: str) -> dict[str, str]:
    """The peers that this interpreter has, with their versions. Those it lacks are not in it."""
    source = (
        "import importlib.metadata as m, json, sys\n"
        "found = {}\n"
        "for name in sys.argv[1:]:\n"
        "    try: found[name] = m.version(name)\n"
        "    except m.PackageNotFoundError: pass\n"
        "print(json.dumps(found))"
    )
    try:
        told = subprocess.run(
            [python, "-c", source, *_PACKAGES.values()], capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    found = json.loads(told.stdout)
    return {name: found[package] for name, package in _PACKAGES.items() if package in found}
