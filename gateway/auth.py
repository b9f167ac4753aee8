"""Who is asking: keys from headers, checked against the keyring in force, which follows its file. Fails closed."""

import asyncio
import hmac
import logging
from pathlib import Path

from gateway.client import Scope
from gateway.errors import UnauthorizedError
from gateway.keys import ANONYMOUS, Keyring, KeysFileError, Tenant, read_keyring
from gateway.metrics import Metrics
from gateway.settings import Auth as AuthSettings

logger = logging.getLogger(__name__)


class Authenticator:
    """Owner of the keyring in force. A keys file that turns bad keeps the old keyring, and says so in a metric."""

    def __init__(self, settings: AuthSettings, metrics: Metrics) -> None:
        """Raises KeysFileError: a gateway never starts without usable keys unless auth is disabled outright."""
        self._metrics = metrics
        self._path: Path | None = None if settings.disabled else settings.keys_file
        self._reload_s = settings.reload_s
        self._stamp = self._file_stamp()
        self._keyring = Keyring([]) if self._path is None else read_keyring(self._path)

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
            self.reload_if_changed()

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
            logger.info("keys reloaded", extra={"fields": {"keys": len(self._keyring)}})

    def _file_stamp(self) -> tuple[int, int, int] | None:
        if self._path is None:
            return None
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_ino, stat.st_size


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
        """Raises KeysFileError if a token file was named but can't be used."""
        self._token = b""
        if path is None:
            return
        try:
            self._token = path.read_bytes().strip()
        except OSError as error:
            raise KeysFileError(f"{path}: {error.strerror}; expected a file with the admin token") from None
        if len(self._token) < 16:
            raise KeysFileError(f"{path}: expected an admin token of at least 16 characters")

    def allows(self, scope: Scope) -> bool:
        return bool(self._token) and hmac.compare_digest(_secret(scope), self._token)
