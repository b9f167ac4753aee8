"""A page from a release's source: the metrics its default logger defines, with a recorded page's figures.

The names, kinds, labels and help texts are the release's, and so are buckets that its definitions write out. The
figures are not: they are those of the nearest recorded release where that has the series, and zero elsewhere.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from scripts.golden_scrapes.builds import BuildError

SCRAPES = Path("tests/fixtures/scrapes")
Kind = type[Gauge] | type[Counter] | type[Histogram]
KINDS: dict[str, Kind] = {
    "_gauge_cls": Gauge,
    "_counter_cls": Counter,
    "_histogram_cls": Histogram,
    "Gauge": Gauge,
    "Counter": Counter,
    "Histogram": Histogram,  # prometheus_client.Gauge(...)
}


@dataclass(frozen=True)
class Release:
    """Where a release defines its metrics, and whose figures its page gets."""

    version: str
    source: str
    figures: str  # a recorded page
    labels: tuple[str, ...]
    set_to: tuple[tuple[str, float], ...] = ()  # figures that no recorded page has


V0_LOGGER, V1_LOGGER = "vllm/engine/metrics.py", "vllm/v1/metrics/loggers.py"
RELEASES = {
    "0.33.0": Release("0.33.0", V1_LOGGER, "0.32.0", ("model_name", "engine")),
    # What that release's engine is on a GPU.
    "0.8.5-v1": Release("0.8.5", V1_LOGGER, "0.10.2", ("model_name",)),
    "0.6.3": Release("0.6.3", V0_LOGGER, "0.8.5", ("model_name",), (("vllm:gpu_prefix_cache_hit_rate", 0.25),)),
    # The gauge's documented value for an engine without prefix caching.
    "0.6.3-prefix-off": Release(
        "0.6.3", V0_LOGGER, "0.8.5", ("model_name",), (("vllm:gpu_prefix_cache_hit_rate", -1.0),)
    ),
}


@dataclass(frozen=True)
class Definition:
    """One metric as the source defines it. `more`: labels beyond the engine's own. `buckets`: where written out."""

    name: str
    kind: Kind
    text: str
    more: tuple[str, ...]
    buckets: tuple[float, ...] | None


def page(name: str) -> str:
    """The derived page. Raises BuildError."""
    release = RELEASES[name]
    base = SCRAPES / f"{release.figures}.prom"
    if not base.is_file():
        raise BuildError(f"{base} is missing, whose figures it takes: record {release.figures} first")
    recorded = {family.name: family for family in text_string_to_metric_families(base.read_text(encoding="utf-8"))}
    tree = ast.parse(_source(release))
    registry = CollectorRegistry()
    for definition in definitions(tree):
        _fill(registry, definition, release, recorded)
    text = generate_latest(registry).decode()
    lines = [line for line in text.splitlines() if "_created" not in line]
    if "engine" in release.labels:  # its labels are the engine's settings, which an older engine has not
        lines += _cache_config(recorded)
    where = f"{release.source} of the vllm {release.version} wheel"
    head = [
        f"# derived from {where}: names, kinds, labels, help texts; never run",
        f"# figures: {release.figures}.prom where it has the series, else 0"
        + "".join(f"; {series} set to {value:g}" for series, value in release.set_to),
    ]
    return "\n".join([*head, *lines]) + "\n"


def _source(release: Release) -> str:
    with tempfile.TemporaryDirectory() as folder:
        pip = (sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps")
        command = (*pip, "--only-binary", ":all:", "--dest", folder, f"vllm=={release.version}")
        if subprocess.run(command, capture_output=True, check=False).returncode:
            raise BuildError(f"pip finds no wheel of vLLM {release.version}")
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(release.source).decode()


def definitions(tree: ast.Module) -> list[Definition]:
    """What the file's Prometheus logger makes for an engine with default flags: all that stands under no `if`."""
    found: dict[str, Definition] = {}
    for owner in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for method in (node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"):
            for call in _unconditional_calls(method.body):
                definition = _definition(call)
                found.setdefault(definition.name, definition)
    if len(found) < 15:
        raise BuildError(f"only {len(found)} metrics found: this release defines them in a way not known here")
    return list(found.values())


def _unconditional_calls(body: list[ast.stmt]) -> Iterator[ast.Call]:
    for statement in body:
        if isinstance(statement, ast.If):
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in KINDS:
                yield node


def _definition(call: ast.Call) -> Definition:
    given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    assert isinstance(call.func, ast.Attribute)
    labels, buckets = given["labelnames"], given.get("buckets")
    more: tuple[str, ...] = ()
    if isinstance(labels, ast.BinOp) and isinstance(labels.right, ast.List):
        more = tuple(_label(element) for element in labels.right.elts)
    return Definition(
        ast.literal_eval(given["name"]),
        KINDS[call.func.attr],
        ast.literal_eval(given["documentation"]),
        more,
        tuple(map(float, ast.literal_eval(buckets))) if isinstance(buckets, ast.List) else None,
    )


def _label(node: ast.expr) -> str:
    """A label's name: written out, or as `Metrics.labelname_finish_reason`."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    return {"Metrics.labelname_finish_reason": "finished_reason"}[ast.unparse(node)]


def _fill(registry: CollectorRegistry, made: Definition, release: Release, recorded: dict[str, Metric]) -> None:
    labels = (*release.labels, *made.more)
    family = recorded.get(made.name.removesuffix("_total"))
    buckets = made.buckets or tuple(
        sorted({float(s.labels["le"]) for s in family.samples if "le" in s.labels}) if family else ()
    )
    extra: dict[str, Any] = {"buckets": buckets} if made.kind is Histogram and buckets else {}
    metric = made.kind(made.name, made.text, labels, registry=registry, **extra)
    rows = [s for s in family.samples if not s.name.endswith(("_created", "_bucket"))] if family else []
    fixed = dict(release.set_to)
    if not rows and not made.more:
        rows_labels = [{"model_name": "smollm2-135m-instruct", "engine": "0"}]
    else:
        rows_labels = [dict(items) for items in dict.fromkeys(tuple(sorted(s.labels.items())) for s in rows)]
    for have in rows_labels:
        child = metric.labels(**{label: have.get(label, "0") for label in labels})
        same = {s.name.removeprefix(family.name): s.value for s in rows if s.labels == have} if family else {}
        if isinstance(child, Histogram):
            count = int(same.get("_count", 0))
            for _ in range(count):
                child.observe(same["_sum"] / count)
        elif isinstance(child, Counter):
            child.inc(same.get("_total", 0))
        else:
            child.set(fixed.get(made.name, same.get("", 0)))


def _cache_config(recorded: dict[str, Metric]) -> list[str]:
    """The info series, which carries the engine's own settings as labels."""
    family = recorded["vllm:cache_config_info"]
    lines = [f"# HELP {family.name} {family.documentation}", f"# TYPE {family.name} gauge"]
    for sample in family.samples:
        labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
        lines.append(f"{sample.name}{{{labels}}} {sample.value}")
    return lines
