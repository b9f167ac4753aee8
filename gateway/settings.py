"""Settings: configs/gateway.yaml, overridden by GATEWAY__SECTION__KEY, validated once, frozen from then on.

The names are a contract with users and tests. A wrong value, or a name that does not exist, refuses to start with one
line a mistake: key, value, expectation. docs/settings.md lists them all (a test keeps it complete).
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)
from pydantic_settings import SettingsError as SourceError

from gateway.addresses import BaseUrl, CollectorUrl, DnsUrl, HostPort, Origin, TargetsFile
from gateway.wording import explain, unknown

ENV_PREFIX = "GATEWAY__"
CONFIG_VARIABLE = "GATEWAY_CONFIG"
DEFAULT_CONFIG = Path("configs/gateway.yaml")


class SettingsError(Exception):
    """The settings can't be used; the message has a line a mistake."""


Seconds = Annotated[float, Field(gt=0, le=86400)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Auth(Section):
    disabled: bool = Field(False, description="Serve everybody without a key. For a demo on loopback only.")
    keys_file: Path | None = Field(None, description="The keys file that `make keys` writes. Reloaded when it changes.")
    admin_token_file: Path | None = Field(
        None,
        description="File with the token that drain and /status on the admin port ask for; without one they are off.",
    )
    reload_s: Seconds = Field(1.0, description="How often the keys file is looked at for changes.")


class Batching(Section):
    window_ms: float = Field(
        15, ge=0, le=1000, description="Longest a batchable request waits for company; 0 turns merging off."
    )
    max_prompts: int = Field(8, ge=1, le=1024, description="Prompts in one merged call; the engine takes at most 1024.")
    max_tokens: int = Field(
        8192, ge=1, description="Token budget of one merged call: prompt estimates plus max_tokens."
    )
    max_answer_tokens: int = Field(
        128,
        ge=1,
        description="Requests that ask for more go straight through: short answers never wait for long ones.",
    )
    coalesce: bool = Field(
        True, description="Identical deterministic requests of one tenant in flight share one engine call."
    )


class Admission(Section):
    capacity_tokens: int | None = Field(
        None,
        ge=1,
        description="Tokens (prompt estimate + max_tokens) in flight at once, of each model (models that share an "
        "engine count as one); a beginning that several prompts share counts once where the engine caches prefixes. "
        "Unset: its engines' own KV cache size.",
    )
    max_in_flight: int = Field(
        1024,
        ge=1,
        description="Requests of a model in flight at once, whatever their size; also the limit of connections.",
    )
    max_queue_tokens: int = Field(
        262144, ge=0, description="Tokens of a model that may wait in the gateway; beyond it requests are refused."
    )
    max_wait_s: Seconds = Field(
        30,
        description="Longest predicted wait that is still accepted, unless the client's deadline is sooner.",
    )
    assumed_answer_tokens: int = Field(
        256, ge=1, description="Answer length assumed where a client sets no max_tokens."
    )


class Timeouts(Section):
    connect_s: Seconds = Field(
        1.5, description="For the TCP connection to an engine, before another replica is tried; one SYN may get lost."
    )
    first_byte_s: Seconds = Field(300, description="From sending a streamed request to the first byte of its answer.")
    idle_s: Seconds = Field(120, description="Between two reads of a stream that has begun.")
    total_s: Seconds = Field(900, description="A whole request; a client may ask for less with X-Request-Timeout-S.")
    head_s: Seconds = Field(15, description="For the client to send its request line and headers.")
    body_s: Seconds = Field(30, description="For the client to send its whole body.")
    keepalive_s: Seconds = Field(15, description="Silence on an open stream after which an SSE comment is sent.")
    stall_s: Seconds = Field(60, description="No forward progress for this long makes an engine count as hung.")
    reload_wait_s: Seconds = Field(
        120, description="Longest a request waits for an engine that was ready and is restarting."
    )
    drain_s: Seconds = Field(120, description="At shutdown: longest wait for requests in flight.")


class Health(Section):
    interval_s: Seconds = Field(1, description="Between two looks at each engine's /health and /metrics.")
    timeout_s: Seconds = Field(5, description="For one such look.")
    max_missed: int = Field(3, ge=1, description="Looks in a row that must time out before an engine counts as down.")
    idle_probe_s: Seconds = Field(
        30, description="An engine that made no progress for this long is asked for one token."
    )


class Circuit(Section):
    failures: int = Field(
        5, ge=1, description="Calls in a row that must fail, of two different requests or more, to leave a replica out."
    )
    share: float = Field(0.5, gt=0, le=1, description="Or this share of its last `calls`, those of the last minute.")
    calls: int = Field(20, ge=2, le=1000, description="Calls that `share` is taken of; it needs as many.")
    open_s: Seconds = Field(2, description="Longest first time that it is left out; doubled each time it fails again.")
    max_open_s: Seconds = Field(60, description="Longest time that it is left out before one request may try it.")


class Discovery(Section):
    files: tuple[TargetsFile, ...] = Field(
        (), description="Files that list engines in Prometheus' file_sd format, followed while they change."
    )
    dns: tuple[DnsUrl, ...] = Field(
        (), description="Base URLs whose host stands for one engine per A or AAAA record, resolved again and again."
    )
    interval_s: Seconds = Field(5, description="Between two looks at each file and name.")


class Limits(Section):
    max_head_bytes: int = Field(
        65536, ge=4096, le=1048576, description="Request line and headers together; more is refused with 431."
    )
    max_body_bytes: int = Field(8 * 1024 * 1024, ge=1024, description="Larger bodies are refused with 413.")
    max_arriving_bytes: int = Field(
        256 * 1024 * 1024,
        ge=1024,
        description="Bodies that are still arriving, all clients together; beyond it uploads are refused with 429.",
    )
    max_answer_bytes: int = Field(
        64 * 1024 * 1024,
        ge=1024,
        description="An engine's answer that is no stream; one that is larger is broken off, and its client gets 502.",
    )
    max_depth: int = Field(64, ge=4, le=512, description="Nesting of the JSON body.")
    max_containers: int = Field(10_000, ge=100, description="Objects and lists in the JSON body.")
    max_values: int = Field(500_000, ge=1000, description="Values in the JSON body, token ids included.")
    max_n: int = Field(16, ge=1, description="Choices per prompt (`n`).")
    max_logprobs: int = Field(20, ge=0, description="`logprobs`, `top_logprobs`, `prompt_logprobs`.")
    max_prompts: int = Field(
        256, ge=1, le=1024, description="Prompts in one completion, inputs in one embedding request."
    )
    max_answer_tokens: int | None = Field(
        None, ge=1, description="Upper limit for max_tokens; unset: the engine's own."
    )


class Policy(Section):
    allow_chat_template: bool = Field(
        False, description="Let clients send their own chat template (it is code that runs in the engine)."
    )
    allow_media_urls: bool = Field(False, description="Let clients make the engine fetch image, audio and video URLs.")
    allow_truncation: bool = Field(False, description="Let clients ask for silent truncation (truncate_prompt_tokens).")
    engine_priority: bool = Field(
        False, description="Send each key's priority on; the engine must run --scheduling-policy priority."
    )


class Cors(Section):
    allow_origins: tuple[Origin, ...] = Field(
        (), description="Origins that browsers may call from, `*` for any; empty: CORS is off."
    )


class Engine(Section):
    api_key_file: Path | None = Field(
        None, description="File with the key that the engines ask for (their VLLM_API_KEY)."
    )


class Logs(Section):
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="Lowest level that is written.")
    access: bool = Field(
        True, description="One line for each finished request. Never contains prompts, answers or keys."
    )


class Ledger(Section):
    path: Path | None = Field(
        None, description="SQLite file for each tenant's usage, kept across restarts; unset: no ledger."
    )


class Tracing(Section):
    otlp_endpoint: CollectorUrl | None = Field(
        None, description="OTLP/HTTP collector for one span a request (needs the extra `tracing`); unset: no spans."
    )
    sample_ratio: float = Field(
        1.0, ge=0, le=1, description="Share of requests traced where the client's traceparent does not decide."
    )


class Settings(BaseSettings):
    """All of it. Instances are frozen; build them with `load`."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        env_ignore_empty=True,  # compose hands on `${NAME:-}` as an empty variable: that is "not set"
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
    )

    listen: HostPort = Field("127.0.0.1:8080", description="Public address: /v1/*, /healthz, /readyz.")
    admin_listen: HostPort = Field("127.0.0.1:9000", description="Internal address: /metrics, /status, drain.")
    workers: int = Field(
        1,
        ge=1,
        le=64,
        description="Processes that serve both addresses. Of what admission and `limits.max_arriving_bytes` allow each "
        "gets its part, a key's limits are counted together; docs/operations.md tells what else is whose.",
    )
    engines: tuple[BaseUrl, ...] = Field(
        ("http://127.0.0.1:8000",),
        description="Base URLs of the engines (a JSON list in the environment); unset where discovery has a source: "
        "none. They, and any proxy before them, must "
        "keep idle connections for 5 s or more, as vLLM does: the gateway uses one again for up to 4 s, and a request "
        "that meets a closing one fails with 502.",
    )
    aliases: dict[str, str] = Field(
        default_factory=dict, description="Extra model names: what clients say -> what an engine serves."
    )
    auth: Auth = Auth()
    batching: Batching = Batching()
    admission: Admission = Admission()
    timeouts: Timeouts = Timeouts()
    health: Health = Health()
    circuit: Circuit = Circuit()
    discovery: Discovery = Discovery()
    limits: Limits = Limits()
    policy: Policy = Policy()
    cors: Cors = Cors()
    engine: Engine = Engine()
    logs: Logs = Logs()
    ledger: Ledger = Ledger()
    tracing: Tracing = Tracing()

    @property
    def static_engines(self) -> tuple[str, ...]:
        """`engines`, unless it is only the default and discovery has a source."""
        found = self.discovery.files or self.discovery.dns
        return () if found and "engines" not in self.model_fields_set else self.engines

    @model_validator(mode="after")
    def _fails_closed(self) -> "Settings":
        if not self.auth.disabled and self.auth.keys_file is None:
            raise ValueError(
                "auth.keys_file is not set: expected the file `make keys NAME=app1` writes, or auth.disabled: true"
            )
        if not (self.engines or self.discovery.files or self.discovery.dns):
            raise ValueError("engines = []: expected at least 1 base URL, or discovery.files, or discovery.dns")
        if len(set(self.engines)) != len(self.engines):
            raise ValueError("engines names one engine twice")
        for name in ("capacity_tokens", "max_in_flight"):
            if (value := getattr(self.admission, name)) is not None and value < self.workers:
                raise ValueError(f"admission.{name} = {value}: expected at least workers, each takes its share")
        if (room := self.limits.max_arriving_bytes) // self.workers < self.limits.max_body_bytes:
            whose = f"{self.workers} workers x " if self.workers > 1 else ""
            raise ValueError(f"limits.max_arriving_bytes = {room}: expected at least {whose}limits.max_body_bytes")
        if self.listen == self.admin_listen and not self.listen.endswith(":0"):
            raise ValueError(f"admin_listen = {self.admin_listen!r}: expected another address than listen has")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # What the caller passes stands for the file: `load` reads it, so that a missing file can be told apart.
        return env_settings, init_settings


def _leaves(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    found: set[tuple[str, ...]] = set()
    for name, field in model.model_fields.items():
        found.add((*prefix, name))
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= _leaves(field.annotation, (*prefix, name))
    return found


def _unknown_variables(environ: Mapping[str, str], known: set[str]) -> list[str]:
    open_ended = f"{ENV_PREFIX}ALIASES__"
    return sorted(
        name
        for name in environ
        if name.upper().startswith(ENV_PREFIX) and name.upper() not in known and not name.upper().startswith(open_ended)
    )


def _no_json(field: str) -> tuple[str, str]:
    """Key and value of the variable that should hold a list or mapping: the field's own, or one of its section's."""
    section = Settings.model_fields[field].annotation
    inner = section.model_fields if isinstance(section, type) and issubclass(section, BaseModel) else {}
    for name, part in inner.items():
        value = os.environ.get(f"{ENV_PREFIX}{field}__{name}".upper(), "")
        if get_origin(part.annotation) is tuple and value and not _is_json(value):
            return f"{field}.{name}", value
    return field, os.environ.get(ENV_PREFIX + field.upper(), "")


def _is_json(value: str) -> bool:
    try:
        json.loads(value)
    except ValueError:
        return False
    return True


_EXAMPLES = {
    "engines": '["http://engine:8000"]',
    "aliases": '{"my-model": "smollm2"}',
    "discovery.files": '["/etc/gateway/engines.json"]',
    "discovery.dns": '["http://engine:8000"]',
    "cors.allow_origins": '["https://app.example.com"]',
}


def _json_example(key: str) -> str:
    return _EXAMPLES.get(key, '{"key": "value"}')


def load() -> Settings:
    """Read the file named by GATEWAY_CONFIG (default configs/gateway.yaml, if there), then the environment over it.

    Raises SettingsError naming key, value and expectation of everything that is wrong.
    """
    named = os.environ.get(CONFIG_VARIABLE)
    path = Path(named) if named else DEFAULT_CONFIG
    from_file: dict[str, Any] = {}
    if path.is_file():
        try:
            from_file = YamlConfigSettingsSource(Settings, yaml_file=path)()
        except Exception as error:  # PyYAML's errors and pydantic-settings' share no base class
            raise SettingsError(
                f"{path}: expected YAML with the keys of docs/settings.md, found {' '.join(str(error).split())}"
            ) from error
    elif named:
        raise SettingsError(f"{CONFIG_VARIABLE} = {named!r}: expected a file, found none")
    leaves = _leaves(Settings)
    variables = {ENV_PREFIX + "__".join(path).upper() for path in leaves}
    strange = _unknown_variables(os.environ, variables)
    mistakes = [unknown(name, variables, "__") for name in strange]
    try:
        settings = Settings(**from_file)
    except ValidationError as error:
        told = {name.upper().removeprefix(ENV_PREFIX).replace("__", ".").lower() for name in strange}
        lines = explain(error, {".".join(path) for path in leaves})
        mistakes += [line for line in lines if line.partition(" is not a setting")[0] not in told]
    except SourceError as error:  # a list or mapping in the environment that is no JSON
        key, value = _no_json(str(error).partition('field "')[2].partition('"')[0])
        mistakes.append(f"{key} = {value!r}: expected JSON, for instance {_json_example(key)}")
    if mistakes:
        raise SettingsError("\n".join(mistakes))
    return settings
