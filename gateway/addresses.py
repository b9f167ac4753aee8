"""What an address in the settings, or in a list of engines, has to look like."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, HttpUrl, ValidationError


def host_port(value: str) -> str:
    host, _, port = value.rpartition(":")
    if not host or not port.isdecimal() or not 0 <= int(port) <= 65535:
        raise ValueError("expected host:port, for instance 0.0.0.0:8080")
    return value


def _web(value: str, example: str) -> HttpUrl:
    """Raises ValueError that says what is wrong with it and shows one that is right."""
    front, there, rest = value.partition("://")
    if front.lower() not in ("http", "https") or not there:
        raise ValueError(f"expected http:// or https:// in front, for instance {example}")
    try:
        return HttpUrl(value)
    except ValidationError:
        wrong = "host and port" if rest else "a host"
        raise ValueError(f"expected {wrong} behind {front}://, for instance {example}") from None


def base_url(value: str) -> str:
    """Checked, in one spelling: lower case, no zeros before the port, no slash at the end. Raises ValueError."""
    url = _web(value, "http://engine:8000")
    if url.path not in (None, "/") or url.query or url.fragment:
        raise ValueError("expected a base URL without a path, for instance http://engine:8000")
    if url.username or url.password:  # it would stand in logs, metrics and /status
        raise ValueError("expected a base URL without user name and password; the engine's key is engine.api_key_file")
    front, colon, port = value.rstrip("/").lower().rpartition(":")
    return f"{front}:{int(port)}" if port.isdecimal() else f"{front}{colon}{port}"


def origin(value: str) -> str:
    if value == "*":
        return value
    url = _web(value, "https://app.example.com")
    if f"{url.scheme}://{value.partition('://')[2]}" != value or "/" in value.partition("://")[2] or url.username:
        raise ValueError("expected an origin as browsers send it, for instance https://app.example.com, or *")
    return value.lower()


def collector_url(value: str) -> str:
    url = _web(value, "http://collector:4318")
    if url.username or url.password or url.query or url.fragment:
        raise ValueError("expected an OTLP/HTTP address, for instance http://collector:4318")
    return value.rstrip("/") + "/v1/traces" if url.path in (None, "/") else value


def targets_file(path: Path) -> Path:
    if path.suffix not in (".json", ".yml", ".yaml"):
        raise ValueError("expected a file named *.json, *.yml or *.yaml, as Prometheus does")
    return path


def dns_url(value: str) -> str:
    # A certificate names a host, and its addresses are what gets asked.
    if _web(value, "http://engine:8000").scheme != "http":
        raise ValueError("expected http://, for instance http://engine:8000: engines are asked by their addresses")
    return base_url(value)


HostPort = Annotated[str, AfterValidator(host_port)]
BaseUrl = Annotated[str, AfterValidator(base_url)]
DnsUrl = Annotated[str, AfterValidator(dns_url)]
Origin = Annotated[str, AfterValidator(origin)]
CollectorUrl = Annotated[str, AfterValidator(collector_url)]
TargetsFile = Annotated[Path, AfterValidator(targets_file)]
