"""Two real engines behind one real gateway that asks for keys, for the whole directory: SmolLM2, and a tiny Llama 3.

Both engines boot at the same time. Runs in .venv-clients: `make test-conformance`.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

if importlib.util.find_spec("anthropic") is None:
    pytest.exit("tests/conformance needs the clients' environment: make test-conformance", returncode=4)

import httpx
import llama_models.llama3
from prometheus_client.parser import text_string_to_metric_families

from scripts import _ports, demo, model_fetch
from tests.engine.conftest import PRECISE, processes

# `auto` makes the engine look for calls in what the model wrote; hermes is the form of SmolLM2's template.
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
LLAMA = "llama-3-tiny"
LLAMA_ARGUMENTS = (
    *("--served-model-name", LLAMA, "--max-model-len", "1024", "--kv-cache-memory-bytes", "64M"),
    *("--max-num-seqs", "8", "--block-size", "32", "--enforce-eager", *PRECISE),
)
TOKENIZER = Path(llama_models.llama3.__file__).parent / "tokenizer.model"


@dataclass(frozen=True)
class Front:
    """The gateway as its clients know it, and its pages for the tests. `http` sends the key."""

    url: str
    key: str
    http: httpx.Client
    admin_url: str
    log: Path
    model: str = demo.MODEL
    llama: str = LLAMA

    @property
    def openai_url(self) -> str:
        return f"{self.url}/v1"

    def metric(self, name: str, **labels: str) -> float:
        """The sum of these series on the gateway's admin port."""
        page = self.http.get(f"{self.admin_url}/metrics").text
        samples = (sample for family in text_string_to_metric_families(page) for sample in family.samples)
        return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())


@pytest.fixture(scope="session")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    model = model_fetch.model_dir()
    assert not model_fetch.plan(model).fetch, f"the model is not in {model}: make model"
    folder = tmp_path_factory.mktemp("conformance")
    keys, llama = folder / "keys.json", folder / "llama"
    ports = demo.Ports(_ports.free_port(), _ports.free_port(), _ports.free_port())
    second = _ports.free_port()
    engine, gateway = demo.plan(ports, model, None).services
    with processes(folder) as started:
        started.start(demo.Service("engine", (*engine.command, *PRECISE, *TOOLS), engine.env))
        _python("-m", "tests.conformance.llama_checkpoint", str(TOKENIZER), str(llama), engines=True)
        vllm, listen = engine.command[0], ("--host", _ports.HOST, "--port", str(second))
        started.start(demo.Service("llama", (vllm, "serve", str(llama), *LLAMA_ARGUMENTS, *listen), engine.env))
        key = _python("-m", "scripts.keys", "add", "app1", "--file", str(keys)).strip()
        engines = [f"http://{_ports.HOST}:{port}" for port in (ports.engine, second)]
        settings = {
            **gateway.env,
            "GATEWAY__ENGINES": json.dumps(engines),
            "GATEWAY__AUTH__DISABLED": "false",
            "GATEWAY__AUTH__KEYS_FILE": str(keys),
        }
        started.start(demo.Service("gateway", gateway.command, settings))
        url, admin_url = (f"http://{_ports.HOST}:{port}" for port in (ports.gateway, ports.admin))
        with httpx.Client(
            base_url=url, timeout=120, trust_env=False, headers={"Authorization": f"Bearer {key}"}
        ) as http:
            started.until(lambda: all(_completes(http, name) for name in (demo.MODEL, LLAMA)), "both models answering")
            yield Front(url, key, http, admin_url, started.log("gateway"))


def _python(*arguments: str, engines: bool = False) -> str:
    python = str(demo.ROOT / ".venv-engine/bin/python") if engines else sys.executable
    done = subprocess.run((python, *arguments), cwd=demo.ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _completes(http: httpx.Client, model: str) -> bool:
    try:
        return http.post("/v1/completions", json={"model": model, "prompt": "x", "max_tokens": 1}).status_code == 200
    except httpx.HTTPError:
        return False
