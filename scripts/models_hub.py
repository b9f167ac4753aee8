"""The hub: what a repository holds at one commit, and one file of it, whole, whatever happened to the last attempt.

The client library speaks to it. Its own downloads begin anew in every run; a shard is gigabytes, so what came of one
is kept here under its checksum's name and gone on with. Nothing counts before its checksum is right.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

# Plain HTTP with ranges: what came so far stays a prefix of the file, which the other protocol does not promise.
os.environ.setdefault("HF_HUB_DISABLE_XET", "1")

import httpx2  # the client library's own; its errors pass through
from huggingface_hub import HfApi, get_hf_file_metadata, get_session, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import hf_raise_for_status  # type: ignore[attr-defined]  # exported lazily

from scripts.model_fetch_rules import File, Request

HUB = "https://huggingface.co"
TOKEN_FILE = "private/hf_token"  # noqa: S105 - in SECRETS_DIR
ATTEMPTS = 5  # in a row that brought nothing
PAUSE_S = 0.5  # before the next attempt; doubled for each that brought nothing
_TIMEOUT_S = 20.0
_CHUNK = 1 << 20


class HubError(Exception):
    """It could not be had; the message is for people, its first line the cause."""


@dataclass(frozen=True)
class Token:
    """A secret and where it was read; it shows itself to nobody."""

    value: str = field(default="", repr=False)
    path: Path = Path(TOKEN_FILE)
    variable: bool = False  # HF_TOKEN is set, which is not read


@dataclass(frozen=True)
class Listing:
    """A repository at one commit. private: its files are given to a token alone."""

    repo: str
    commit: str
    licence: str
    private: bool
    files: tuple[File, ...]


def read_token(environ: Mapping[str, str], root: Path) -> Token:
    """HF_TOKEN_FILE, else private/hf_token in SECRETS_DIR; no file is no token. Raises HubError for a bad one."""
    said = environ.get("HF_TOKEN_FILE")
    path = root / Path(said or Path(environ.get("SECRETS_DIR") or "secrets") / TOKEN_FILE).expanduser()
    try:
        value = path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        if said:
            raise HubError(f"HF_TOKEN_FILE: {path} does not exist") from None
        return Token(path=path, variable=bool(environ.get("HF_TOKEN")))
    except (OSError, UnicodeDecodeError) as error:
        raise HubError(f"{path}: no token can be read ({type(error).__name__})") from None
    if not re.fullmatch(r"[\x21-\x7e]+", value):
        raise HubError(f"{path} should hold a token and nothing else, in one line")
    return Token(value, path)


class Hub:
    """One endpoint. The token is sent to its host alone, and only for what is not given without."""

    def __init__(
        self, endpoint: str, token: Token, say: Callable[[str], None], came: Callable[[int], None] = lambda size: None
    ) -> None:
        """say: a line for people. came: bytes that arrived, as they do."""
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise HubError(f"HF_ENDPOINT={endpoint} is no address: https://...")
        self.endpoint = endpoint.rstrip("/")
        self._host = parts.hostname
        self._clear = parts.scheme == "http" and parts.hostname not in ("127.0.0.1", "localhost", "::1")
        self._token = token
        self._say = say
        self._came = came
        self._with_token = False
        self._api = HfApi(endpoint=self.endpoint, token=False)
        logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)  # its lines hold signed addresses

    def list(self, request: Request) -> Listing:
        """Resolves the revision to its commit. Raises HubError."""
        try:
            try:
                return self._list(request)
            except HfHubHTTPError as error:
                if error.response.status_code not in (401, 403, 404) or not self._token.value:
                    raise
                self._use_token()
                return self._list(request)
        except (HfHubHTTPError, httpx2.HTTPError, OfflineModeIsEnabled) as error:
            raise HubError(self._explain(error, request)) from None
        except HFValidationError as error:
            raise HubError(_short(error)) from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise HubError(f"{self.endpoint} gives no answer that a hub gives: look at HF_ENDPOINT") from None

    def _list(self, request: Request) -> Listing:
        info = self._api.model_info(
            request.repo,
            revision=request.revision,
            files_metadata=True,
            timeout=_TIMEOUT_S,
            token=self._secret,
        )
        if not info.sha or not re.fullmatch(r"[0-9a-f]{40}", info.sha):
            raise HubError(f"{self.endpoint} named no commit for {request.repo}: is that a hub?")
        files = []
        for found in info.siblings or []:
            if found.size is None:
                raise HubError(f"{self.endpoint} does not say how large {found.rfilename} is: is that a hub?")
            files.append(File(found.rfilename, found.size, found.lfs.sha256 if found.lfs else None, found.blob_id))
        if (info.gated or info.private) and self._token.value:
            self._use_token()
        card = info.card_data
        licence = str((card.get("license_name") or card.get("license")) if card else "") or "not stated"
        return Listing(request.repo, info.sha, licence, bool(info.gated or info.private), tuple(files))

    def download(self, listing: Listing, request: Request, file: File, folder: Path) -> str:
        """Puts the file into `folder` and returns its sha256. Raises HubError, and OSError for the disk's errors.

        What came so far is in `folder` under another name, and the next call goes on from there.
        """
        if (target := folder / file.name).is_file() and (found := _checksum(target, file)):
            return found
        part = folder / f".{file.name}.{(file.sha256 or file.git_sha1 or listing.commit)[:12]}.part"
        idle = 0
        while True:
            before = part.stat().st_size if part.exists() else 0
            try:
                self._get(listing, file, part)
            except (HfHubHTTPError, httpx2.HTTPError, OfflineModeIsEnabled) as error:
                came = part.stat().st_size - before if part.exists() else 0
                idle = 0 if came > 0 else idle + 1
                if not _passing(error) or idle >= ATTEMPTS:
                    raise HubError(self._explain(error, request)) from None
                self._say(f"{file.name}: the connection broke ({_short(error)}); goes on from {_mib(before + came)}")
                time.sleep(min(PAUSE_S * 2**idle, 15))
                continue
            if found := _checksum(part, file):
                part.replace(target)
                return found
            part.unlink()
            if before == 0:
                raise HubError(f"{file.name} came with another checksum than the hub lists, twice or from the start")
            self._say(f"{file.name}: what an earlier run left does not belong to it; from the start")

    def _get(self, listing: Listing, file: File, part: Path) -> None:
        """Appends what is missing of the file to `part`."""
        if part.exists() and part.stat().st_size > file.size:
            part.unlink()
        url = hf_hub_url(listing.repo, file.name, revision=listing.commit, endpoint=self.endpoint)
        # Anew for every attempt: the address it leads to is signed and ends within the hour.
        found = get_hf_file_metadata(url, token=self._secret, timeout=_TIMEOUT_S, endpoint=self.endpoint)
        headers = {"Accept-Encoding": "identity"}  # a range of a compressed answer is not a range of the file
        if isinstance(self._secret, str) and _origin(found.location) == _origin(url):
            headers["Authorization"] = f"Bearer {self._secret}"
        with part.open("ab") as sink:
            start = sink.tell()
            if start < file.size or start == 0:
                self._stream(found.location, headers, sink, file.size)
            sink.flush()
            os.fsync(sink.fileno())

    def _stream(self, url: str, headers: Mapping[str, str], sink: BinaryIO, size: int) -> None:
        start = sink.tell()
        ranged = {"Range": f"bytes={start}-"} if start else {}
        with get_session().stream(
            "GET", url, headers={**headers, **ranged}, timeout=_TIMEOUT_S, follow_redirects=True
        ) as answer:
            if answer.is_error:
                answer.read()
            hf_raise_for_status(answer)
            if answer.status_code != 206:  # all of it, whatever was asked for
                sink.truncate(0)
                start = 0
            elif not answer.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
                raise httpx2.RemoteProtocolError(f"another range than {start}- came")
            for block in answer.iter_bytes():
                start += len(block)
                if start > size:
                    raise httpx2.RemoteProtocolError("more came than the hub lists")
                sink.write(block)
                self._came(len(block))
        if start < size:
            raise httpx2.RemoteProtocolError(f"it ended after {start} of {size} bytes")

    @property
    def _secret(self) -> str | bool:
        return self._token.value if self._with_token else False

    def _use_token(self) -> None:
        if self._clear:
            raise HubError(f"{self.endpoint} is not https: the token of {self._token.path} is not sent there")
        if not self._with_token and self.endpoint != HUB:
            self._say(f"the token of {self._token.path} goes to {self._host}")
        self._with_token = True

    def _explain(self, error: Exception, request: Request) -> str:
        page, token = f"{self.endpoint}/{request.repo}", self._token
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
        if isinstance(error, GatedRepoError):
            if not self._with_token:
                return (
                    f"{request.repo} is given only to those who accepted its licence.\n"
                    f"  1. log in and accept it on {page}\n"
                    f"  2. make a token that may read it on {self.endpoint}/settings/tokens\n"
                    f"  3. write it into {token.path} (chmod 600), then run this again"
                    + ("\n  HF_TOKEN is set, but not read: every process inherits it" if token.variable else "")
                )
            return (
                f"the account of the token in {token.path} may not read {request.repo} yet.\n"
                f"  Accept its licence on {page} with that account; some are granted by hand, which that page tells.\n"
                "  A fine-grained token needs the permission to read gated repositories."
            )
        if status == 401 and self._with_token and not isinstance(error, RepositoryNotFoundError):
            return f"the token in {token.path} is refused (wrong, ended or withdrawn): {self.endpoint}/settings/tokens"
        if isinstance(error, RevisionNotFoundError):
            return f"{request.repo} has no branch, tag or commit {request.revision!r}: {page}/commits"
        if isinstance(error, RepositoryNotFoundError):
            private = "the token may not see it" if self._with_token else "it is private"
            return f"{self._host} has no model {request.repo}, or {private}: look at {page}"
        if isinstance(error, OfflineModeIsEnabled):
            return "HF_HUB_OFFLINE is set in this shell, which forbids downloads: unset it"
        if status == 429:
            return f"{self._host} asks for a pause (429, too many requests): try again in a few minutes"
        if status:
            return f"{self._host} answered {status} for {request.repo}: {_short(error)}"
        return (
            f"{self._host} can't be reached ({_short(error)}): check network and proxy, set HF_ENDPOINT where you "
            "use a mirror, or download elsewhere and name the directory (NAME=/path)"
        )


def _passing(error: Exception) -> bool:
    """Whether another attempt may go better. 403 is how an address whose signature ended is refused."""
    if isinstance(error, (GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError, OfflineModeIsEnabled)):
        return False
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code >= 500 or error.response.status_code in (403, 408, 416, 429)
    return True


def _short(error: Exception) -> str:
    """One line without addresses: those may be signed."""
    if isinstance(error, HfHubHTTPError):
        return error.server_message or error.response.reason_phrase
    first = next(iter(str(error).splitlines()), "")
    return re.sub(r"https?://\S+", "...", first) or type(error).__name__


def _checksum(path: Path, file: File) -> str:
    """The sha256 of what lies there; empty where it is not the file that the hub lists."""
    if path.stat().st_size != file.size:
        return ""
    sha256 = hashlib.sha256()
    git = hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
    with path.open("rb") as source:
        while block := source.read(_CHUNK):
            sha256.update(block)
            if file.sha256 is None:
                git.update(block)
    good = sha256.hexdigest() == file.sha256 if file.sha256 else file.git_sha1 in (None, git.hexdigest())
    return sha256.hexdigest() if good else ""


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
