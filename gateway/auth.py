"""Who is asking: keys from headers, checked against the keyring in force, which follows its file. Fails closed."""

import asyncio
import hashlib
import hmac
import logging
from pathlib import Path

from gateway.client import Scope
from gateway.errors import UnauthorizedError
from gateway.keys import ANONYMOUS, Keyring, KeysFileError, Tenant, read_keyring
from gateway.metrics import Metrics
from gateway.settings import Auth as AuthSettings
from gateway.settings import SettingsError

logger = logging.getLogger(__name__)


class Authenticator:
    """Owner of the keyring in force. A keys file that turns bad keeps the old keyring, and says so in a metric.

    At the start no keys is a mistake. Later it is what revoking the last key leaves, and has to count.
    """

    def __init__(self, settings: AuthSettings, metrics: Metrics) -> None:
        """Raises SettingsError: a gateway never starts without usable keys unless auth is disabled outright."""
        self._metrics = metrics
        self._path: Path | None = None if settings.disabled else settings.keys_file
        self._reload_s = settings.reload_s
        self._stamp = self._file_stamp()
        self._keyring = Keyring([]) if self._path is None else _first_keyring(self._path)
        metrics.keys.set_function(lambda: len(self._keyring))

    def authenticate(self, scope: Scope) -> Tenant:
        """The tenant of a request. Raises UnauthorizedError; what was sent appears in no message."""
        if self._path is None:
            return ANONYMOUS
        secret = _secret(scope)
        tenant = self._keyring.lookup(secret) if secret else None
        if tenant is None:
            raise UnauthorizedError(
                "send a valid API key: Authorization: Bearer sk-…"
                if not secret
                else "this API key is unknown or expired"
            )
        return tenant

    async def follow_file(self) -> None:
        """Run for the gateway's life: take over the keys file whenever it changes."""
        while self._path is not None:
            await asyncio.sleep(self._reload_s)
            try:
                if self._file_stamp() != self._stamp:  # reading ten thousand keys takes a tenth of a second
                    await asyncio.to_thread(self.reload_if_changed)
            except Exception:
                # A bug must not end the following: revoked keys would stay valid for good.
                self._metrics.keys_file_bad.set(1)
                logger.exception("looking at the keys file failed")

    def reload_if_changed(self) -> None:
        stamp = self._file_stamp()
        if self._path is None or stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keyring = read_keyring(self._path)
        except KeysFileError as error:
            self._metrics.keys_reload_failures.inc()
            self._metrics.keys_file_bad.set(1)
            logger.error("the keys file is unusable, the old keys stay in force", extra={"fields": {"why": str(error)}})  # noqa: TRY400
        else:
            self._metrics.keys_file_bad.set(0)
            level = logging.INFO if len(self._keyring) else logging.ERROR
            logger.log(level, "keys reloaded", extra={"fields": {"keys": len(self._keyring)}})

    def _file_stamp(self) -> tuple[int, ...] | None:
        if self._path is None:
            return None
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_size


def _first_keyring(path: Path) -> Keyring:
    try:
        keyring = read_keyring(path)
    except KeysFileError as error:
        raise SettingsError(f"auth.keys_file = {str(path)!r}: {str(error).removeprefix(f'{path}: ')}") from None
    if not len(keyring):
        raise SettingsError(
            f"auth.keys_file = {str(path)!r}: holds no key; expected at least one, `make keys NAME=app1` adds it"
        )
    return keyring


def _secret(scope: Scope) -> bytes:
    """The key as sent: Authorization: Bearer, or Anthropic's x-api-key. More than one such header counts as none."""
    found = []
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, credentials = value.partition(b" ")
            found.append(credentials.strip() if scheme.lower() == b"bearer" else b"")
        elif name == b"x-api-key":
            found.append(value.strip())
    return found[0] if len(found) == 1 else b""


class AdminToken:
    """The token that drain and status ask for; where none is configured those routes are off."""

    def __init__(self, path: Path | None) -> None:
        """Raises SettingsError if a token file was named but can't be used."""
        self._digest = None if path is None else _digest(read_secret(path, "auth.admin_token_file", least=16).encode())

    @property
    def configured(self) -> bool:
        return self._digest is not None

    def allows(self, scope: Scope) -> bool:
        secret = _secret(scope)
        return self._digest is not None and bool(secret) and hmac.compare_digest(_digest(secret), self._digest)


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()  # equal lengths, so that comparing tells nothing about the length either


def read_secret(path: Path, setting: str, least: int = 1) -> str:
    """The one secret in a file, without the newline editors add. Raises SettingsError, which never quotes it."""
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise SettingsError(f"{setting} = {str(path)!r}: {error.strerror}; expected a file with the secret") from None
    if len(secret) < least or not secret.isascii() or any(byte <= 0x20 or byte == 0x7F for byte in secret):
        raise SettingsError(
            f"{setting} = {str(path)!r}: expected one secret of at least {least} printable ASCII characters in it"
        )
    return secret.decode()
