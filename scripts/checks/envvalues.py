"""What a value of .env may be. A wrong one else ends in Compose's or the engine's words, minutes later. Pure."""

from __future__ import annotations

import ipaddress
import re
import shlex
from collections.abc import Callable
from pathlib import Path

from scripts.checks.envfile import nearest
from scripts.engine_args.vocabulary import PINNED, load

PROFILES = ("gpu", "cpu", "tls", "load", "quantize", "quantize-cpu")
_ENGINES = {"gpu", "cpu"}

Rule = Callable[[str], str]  # what is expected instead; "" where the value is well


def problem(variable: str, value: str, root: Path) -> str:
    """What is wrong with it and what is expected, in a phrase; "" where nothing is, or nothing is known of it."""
    if not value:
        return ""
    if variable == "QUANTIZE":
        return _quantize(value, root)
    expected = next((rule(value) for pattern, rule in _RULES if re.fullmatch(pattern, variable)), "")
    return expected and f"{variable}={value}: expected {expected}"


def _shaped(pattern: str, expected: str) -> Rule:
    return lambda value: "" if re.fullmatch(pattern, value) else expected


def _port(value: str) -> str:
    return "" if value.isdecimal() and 1 <= int(value) <= 65535 else "a port, 1 to 65535"


def _address(value: str) -> str:
    try:
        ipaddress.ip_address(value)
    except ValueError:
        return "an address of this machine, 0.0.0.0 for all of them"
    return ""


def _profiles(value: str) -> str:
    parts = {part.strip() for part in value.split(",")}
    if parts <= set(PROFILES) and len(parts & _ENGINES) == 1:
        return ""
    return "gpu or cpu, and any of tls, load, quantize, separated by commas"


def _engine_args(value: str) -> str:
    """Each flag is one of the pinned engine's; another image may know others, so its own parser has the last word."""
    try:
        words = shlex.split(value)
    except ValueError as error:
        return f"arguments of vllm serve ({error})"
    engine = load()
    names = {flag.name.upper() for flag in engine.flags}
    for word in words:
        flag = word.partition("=")[0]
        if flag.startswith("--") and engine.flag(flag) is None:
            near = nearest(flag.upper(), names)
            return f"flags of vLLM {PINNED}; it has no {flag}" + (f": did you mean {near.lower()}?" if near else "")
    return ""


def _quantize(value: str, root: Path) -> str:
    folder = root / "configs" / "quantize"
    there = sorted(path.stem for path in folder.glob("*.yaml") if path.stem != "gate")
    return "" if value in there else f"QUANTIZE={value}: expected one of {', '.join(there)}"


_RULES: tuple[tuple[str, Rule], ...] = (
    (r"\w+_PORT", _port),
    (r"\w+_MEMORY", _shaped(r"\d+(\.\d+)?[bkmgBKMG][bB]?", "a size such as 24g or 700m")),
    (r"ENGINE_START_S|STALL_S", _shaped(r"[1-9]\d*", "whole seconds")),
    (r"ENGINE_MAX_STARTS|LOAD_CLIENTS", _shaped(r"[1-9]\d*", "a whole number")),
    (r"QUANTIZE_USER", _shaped(r"\d+:\d+", "numbers of a user and a group, such as 1000:1000")),
    (r"PROMETHEUS_KEEP", _shaped(r"(\d+(ms|[smhdwy]))+", "a duration such as 15d")),
    (r"PROMETHEUS_SIZE", _shaped(r"\d+([KMGTPE]B|B)", "a size such as 10GB")),
    ("GATEWAY_BIND", _address),
    ("COMPOSE_PROFILES", _profiles),
    ("ENGINE_ARGS", _engine_args),
)
