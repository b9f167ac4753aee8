"""Lists of engines in Prometheus' file_sd format, as JSON or YAML: one file can tell Prometheus and the gateway.

    [{"targets": ["10.0.0.5:8000", "10.0.0.6:8000"], "labels": {"__scheme__": "http"}}]

A target is host:port. Of the labels only `__scheme__` (http or https) means something here; the others are Prometheus'.
"""

from pathlib import Path
from typing import Any

import orjson
import yaml

from gateway.addresses import base_url

MAX_BYTES = 4 * 1024 * 1024
SUFFIXES = (".json", ".yml", ".yaml")


class TargetsError(Exception):
    """The list can't be used; one line says where and what was expected."""


def read_targets(path: Path) -> tuple[str, ...]:
    """The base URLs in a file, each once, in its order. Raises TargetsError."""
    try:
        # Opening a pipe would wait for whoever writes into it.
        if path.exists() and not path.is_file():
            raise TargetsError(f"{path}: is no regular file; expected a list of targets")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise TargetsError(f"{path}: {error.strerror}; expected a list of targets") from None
    if len(content) > MAX_BYTES:
        raise TargetsError(f"{path}: has more than {MAX_BYTES} bytes; expected a list of targets")
    return parse_targets(content, str(path), as_json=path.suffix == ".json")


def parse_targets(content: bytes, origin: str, *, as_json: bool) -> tuple[str, ...]:
    """Raises TargetsError naming line or field."""
    groups = _load(content, origin, as_json=as_json)
    if not isinstance(groups, list):
        found = "nothing" if groups is None else type(groups).__name__
        raise TargetsError(f'{origin}: expected a list of {{"targets": [...]}}, found {found} ([] says: no engines)')
    urls: dict[str, None] = {}
    for i, group in enumerate(groups):
        try:
            urls.update(dict.fromkeys(_urls(group)))
        except TargetsError as error:
            raise TargetsError(f"{origin}: [{i}]{error}") from None
    return tuple(urls)


def _load(content: bytes, origin: str, *, as_json: bool) -> Any:
    try:
        return orjson.loads(content) if as_json else yaml.safe_load(content)
    except orjson.JSONDecodeError as error:
        raise TargetsError(f"{origin}: line {error.lineno}: expected JSON: {error.msg}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}: " if mark else ""
        raise TargetsError(f"{origin}: {where}expected YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # not UTF-8, nested too deep, a date that is none
        raise TargetsError(f"{origin}: expected YAML: {' '.join(str(error).split())[:200]}") from None


def _urls(group: Any) -> list[str]:
    if not isinstance(group, dict) or not isinstance(group.get("targets"), list):
        raise TargetsError(': expected {"targets": ["host:port"], "labels": {...}}')
    for name in group:
        if name not in ("targets", "labels"):
            raise TargetsError(f".{str(name)[:80]}: expected only targets and labels")
    labels = group.get("labels") or {}
    if not isinstance(labels, dict):
        raise TargetsError(".labels: expected names and values")
    scheme = labels.get("__scheme__", "http")
    if scheme not in ("http", "https"):
        raise TargetsError(".labels.__scheme__: expected http or https")
    return [_url(scheme, target, i) for i, target in enumerate(group["targets"])]


def _url(scheme: str, target: Any, i: int) -> str:
    expected = f".targets[{i}]: expected host:port, for instance engine:8000"
    if not isinstance(target, str):
        raise TargetsError(expected)
    host, _, port = target.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536 or "/" in host or "@" in host:
        raise TargetsError(expected)
    try:
        return base_url(f"{scheme}://{target}")
    except ValueError:
        raise TargetsError(expected) from None
