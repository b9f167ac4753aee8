"""Where the weights come from: a directory, a model that `make model` put here, or the hub."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from scripts import model_fetch
from scripts.model_fetch_store import read_source
from scripts.quantization import QuantizeError, manifest

WORDS = ("README.md", "LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "USE_POLICY.md")
_OURS = ("manifest.json", "source.json")
SMALL = (".json", ".jinja", ".model", ".txt", ".tiktoken")
_READ = (*SMALL, ".safetensors")


@dataclass(frozen=True)
class Located:
    """directory: None where a download is needed first. model: what the manifest will say: a directory (relative to
    MODELS_DIR where it lies in it) or a hub id."""

    model: str
    revision: str
    directory: Path | None

    @property
    def on_hub(self) -> bool:
        return self.directory is None


def locate(model: str, revision: str, models: Path, environ: Mapping[str, str] = os.environ) -> Located:
    """Looks on this machine only. Raises QuantizeError for a path that is not there."""
    path = Path(model).expanduser()
    if path.is_dir():
        return _local(path, models)
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise QuantizeError(
            f"source.model: {model} is no directory: give one with config.json and safetensors, or owner/name"
        )
    if "/" in model:
        return _fetched(model, revision, models) or Located(model, revision, None)
    places = (models / model / "current", models / model, model_fetch.model_dir(environ).parent / model)
    for place in places:
        if (place / "config.json").is_file():
            return _local(place, models)
    raise QuantizeError(
        f"source.model: no model {model} in {places[1]} nor in {places[2]}: `make model` brings the small one, "
        "`make model NAME=owner/name` any other; or give a directory or a hub id"
    )


def _local(path: Path, models: Path) -> Located:
    """Inside MODELS_DIR it is named from there, so that the manifest says the same in a container and outside."""
    there, root = path.resolve(), models.resolve()
    name = there.relative_to(root) if there.is_relative_to(root) else there
    return Located(str(name), "local", there)


def _fetched(model: str, revision: str, models: Path) -> Located | None:
    """A version that `make model NAME=owner/name` left in MODELS_DIR, of the revision asked for."""
    for path in sorted(models.glob("*/*/source.json")):
        found = read_source(path.parent)
        if found and found.model == model and revision in (found.revision, found.requested):
            return Located(model, found.revision, path.parent.resolve())
    return None


def token(environ: Mapping[str, str]) -> tuple[str | None, str]:
    """The hub's token and where it was read, as `make model` reads it: HF_TOKEN_FILE, else private/hf_token in
    SECRETS_DIR; and, for containers, HF_TOKEN. Raises QuantizeError for a file that is named and cannot be read."""
    said = environ.get("HF_TOKEN_FILE")
    path = Path(said or Path(environ.get("SECRETS_DIR") or "secrets") / "private" / "hf_token").expanduser()
    try:
        return path.read_text(encoding="ascii").strip() or None, str(path)
    except FileNotFoundError:
        if said:
            raise QuantizeError(f"HF_TOKEN_FILE: {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise QuantizeError(f"{path}: no token can be read ({type(error).__name__})") from None
    return environ.get("HF_TOKEN") or None, "HF_TOKEN"


def download(
    where: Located, say: Callable[[str], None], *, weights: bool, environ: Mapping[str, str] = os.environ
) -> Located:
    """From the hub into its client's own cache, at one commit: the small files, or all. Raises QuantizeError.

    The token is used only for what is not given without.
    """
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    failures: tuple[type[Exception], ...] = (HfHubHTTPError, OSError, ValueError, *_unreachable())
    secret, place = token(environ)
    if weights:
        say(f"downloading {where.model} at {where.revision[:12]}")
    try:
        try:
            return _snapshot(where, weights, secret=False)
        except (GatedRepoError, RepositoryNotFoundError):
            if not secret:
                raise
        return _snapshot(where, weights, secret=secret)
    except GatedRepoError:
        how = (
            f"accept it with the account of the token in {place}"
            if secret
            else f"accept it, then write a token to {place}"
        )
        raise QuantizeError(
            f"source.model: {where.model} is given only to those who accepted its licence on its page: {how} "
            "(a local directory needs none)"
        ) from None
    except RevisionNotFoundError:
        raise QuantizeError(f"source.revision: {where.model} has no {where.revision!r}") from None
    except RepositoryNotFoundError:
        private = "the token may not see it" if secret else f"it is private and needs a token in {place}"
        raise QuantizeError(f"source.model: the hub shows no {where.model}: a wrong name, or {private}") from None
    except failures as error:
        reason = " ".join(str(error).split())[:160]
        raise QuantizeError(
            f"source.model: {where.model} can't be downloaded ({reason}): check the network, set HF_ENDPOINT where you "
            "use a mirror, or give a directory"
        ) from None


def _unreachable() -> tuple[type[Exception], ...]:
    """What the hub's client lets through where no answer came: its HTTP library's errors (httpx below version 2)."""
    found = []
    for name in ("httpx", "httpx2"):
        with contextlib.suppress(ImportError):
            found.append(importlib.import_module(name).HTTPError)
    return tuple(found)


def _snapshot(where: Located, weights: bool, secret: str | Literal[False]) -> Located:
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    unanswered: tuple[type[Exception], ...] = (HfHubHTTPError, OSError, *_unreachable())
    wanted = (*SMALL, ".safetensors") if weights else SMALL
    try:
        info = HfApi().model_info(where.model, revision=where.revision, timeout=20, token=secret)
    except unanswered as error:
        answer = getattr(error, "response", None)
        if answer is not None and answer.status_code < 500:
            raise
        # No hub now; what an earlier run downloaded is as good.
        patterns = [f"*{ending}" for ending in wanted]
        kept = snapshot_download(where.model, revision=where.revision, allow_patterns=patterns, local_files_only=True)
        return Located(where.model, Path(kept).name, Path(kept))
    folder = None
    for file in info.siblings or []:
        # A folder inside a repository is another copy of the weights, in the form they were trained in.
        if "/" not in file.rfilename and (file.rfilename.endswith(wanted) or file.rfilename in WORDS):
            found = hf_hub_download(where.model, file.rfilename, revision=info.sha, token=secret)
            folder = Path(found).parent
    if folder is None or not (folder / "config.json").is_file():
        raise ValueError("it holds no config.json")
    return Located(where.model, str(info.sha), folder)


def read_json(path: Path) -> dict[str, Any]:
    """{} where there is no such file, or no JSON object in it."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def files(directory: Path) -> list[Path]:
    """What decides the result: weights, configs, tokenizer; not what `make model` wrote beside them."""
    found = (path for path in sorted(directory.iterdir()) if path.suffix in _READ and path.is_file())
    return [path for path in found if path.name not in _OURS]


class Hashes:
    """Checksums of the source's files, kept by size and time, so that a second run needs seconds for a large model."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self._known = read_json(cache)

    def of(self, path: Path) -> manifest.File:
        """Raises OSError."""
        real = path.resolve()
        stat = real.stat()
        seen = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
        known = self._known.get(str(real))
        if isinstance(known, dict) and known.get("seen") == seen:
            return manifest.File(bytes=stat.st_size, sha256=str(known["sha256"]))
        found = manifest.hash_file(real)
        self._known[str(real)] = {"seen": seen, "sha256": found.sha256}
        return found

    def keep(self) -> None:
        """Best effort: a cache that cannot be written costs time, nothing else."""
        part = self._cache.with_suffix(".part")
        try:
            part.write_text(json.dumps(self._known, indent=1) + "\n", encoding="utf-8")
            part.replace(self._cache)
        except OSError:
            return
