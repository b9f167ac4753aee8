"""API keys: who may call, and what each may do. The keys file is state: read again when it changes, atomically.

The file holds SHA-256 digests, never keys. A key is 256 random bits, so a fast hash is enough: nothing to guess.
`make keys` writes the file (scripts/keys.py); its form:

    {"keys": [{"name": "app1", "sha256": "…64 hex…", "group": null, "priority": 0, "weight": 1, …}]}
"""

import datetime
import hashlib
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import orjson
from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, field_validator

from gateway.wording import expectation

KEY_PREFIX = "sk-"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def _name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError("expected a letter or digit, then at most 63 letters, digits, dots, underscores or hyphens")
    return value


def _digest(value: str) -> str:
    if not _SHA256.fullmatch(value):
        raise ValueError("expected the 64 hex digits that `make keys` wrote")
    return value


Name = Annotated[str, AfterValidator(_name)]


class KeysFileError(Exception):
    """The keys file can't be used; the message says where and why, without any secret."""


class Key(BaseModel):
    """One entry. `group` isolates the prefix cache: keys of one group share it, others can't probe it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Name
    sha256: Annotated[str, AfterValidator(_digest)]
    created: AwareDatetime | None = None
    expires: AwareDatetime | None = None
    group: Name | None = None
    priority: int = Field(0, ge=-1000, le=1000, description="Handed to the engine; lower is served first.")
    weight: float = Field(1.0, ge=0.01, le=100, description="Share of the queue relative to other keys.")
    requests_per_minute: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)
    concurrent: int | None = Field(None, ge=1)
    prompt_tokens_details: bool = Field(
        False, description="Answers carry usage.prompt_tokens_details where the engine has them: never merged."
    )

    @field_validator("name")
    @classmethod
    def _not_reserved(cls, name: str) -> str:
        if name in (ANONYMOUS.name, OTHER):
            raise ValueError("this name is reserved")
        return name


class KeysFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who a request belongs to, for fairness, limits and accounting. Several keys may carry one name while rotating."""

    name: str
    group: str | None = None
    priority: int = 0
    weight: float = 1.0
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None
    prompt_tokens_details: bool = False


ANONYMOUS = Tenant("anonymous")  # everybody, where auth is disabled
OTHER = "other"  # the metrics label of requests that no key claimed


class Keyring:
    """An immutable set of keys, looked up by digest: the time taken says nothing about how close a guess was."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self._by_digest = {bytes.fromhex(key.sha256): (_tenant(key), key.expires) for key in keys}

    def __len__(self) -> int:
        return len(self._by_digest)

    def lookup(self, secret: bytes, now: datetime.datetime | None = None) -> Tenant | None:
        """The tenant of this key, unless it is unknown or expired."""
        found = self._by_digest.get(hashlib.sha256(secret).digest())
        if found is None:
            return None
        tenant, expires = found
        if expires is not None and (now or datetime.datetime.now(datetime.UTC)) >= expires:
            return None
        return tenant


def _tenant(key: Key) -> Tenant:
    return Tenant(**key.model_dump(exclude={"sha256", "created", "expires"}))


def new_key() -> tuple[str, str]:
    """A fresh key and its digest as hex."""
    secret = KEY_PREFIX + secrets.token_urlsafe(32)
    return secret, hashlib.sha256(secret.encode()).hexdigest()


def parse_keys(content: bytes, origin: str) -> KeysFile:
    """Raises KeysFileError naming the entry and what was expected, and nothing of what was found: it may be a key."""
    try:
        return KeysFile.model_validate(orjson.loads(content))
    except orjson.JSONDecodeError as error:
        raise KeysFileError(f"{origin}: expected JSON: {error.msg} at byte {error.pos}") from None
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) if part in _KNOWN_FIELDS or isinstance(part, int) else "…" for part in first["loc"])
        raise KeysFileError(f"{origin}: {where or 'top'}: {expectation(first)}") from None


_KNOWN_FIELDS = frozenset({"keys", *Key.model_fields})


def read_keyring(path: Path) -> Keyring:
    """The keys in a file. Raises KeysFileError if it can't be used; a file that says outright "no keys" can."""
    try:
        # Opening a pipe would wait for whoever writes into it. (A directory's own error says more.)
        if path.exists() and not path.is_file() and not path.is_dir():
            raise KeysFileError(f"{path}: is no regular file; expected the file `make keys NAME=app1` writes")
        content = path.read_bytes()
    except OSError as error:
        raise KeysFileError(f"{path}: {error.strerror}; expected the file `make keys NAME=app1` writes") from None
    keys = parse_keys(content, str(path)).keys
    if len({key.sha256 for key in keys}) != len(keys):
        raise KeysFileError(f"{path}: two entries have the same sha256; expected each key once")
    return Keyring(keys)
