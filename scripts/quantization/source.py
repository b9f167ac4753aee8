"""Where the weights come from: a directory, a model that `make model` put here, or the hub."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts import model_fetch
from scripts.model_fetch_store import read_source
from scripts.quantization import QuantizeError, manifest

_READ = (".safetensors", ".json", ".jinja", ".model", ".txt", ".tiktoken")
_OURS = ("manifest.json", "source.json")
SMALL = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")


@dataclass(frozen=True)
class Located:
    """directory: None where a download is needed first. model: what the manifest will say: a directory or a hub id."""

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
        return Located(str(path.resolve()), "local", path.resolve())
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise QuantizeError(
            f"source.model: {model} is no directory: give one with config.json and safetensors, or owner/name"
        )
    if "/" in model:
        return _fetched(model, revision, models) or Located(model, revision, None)
    places = (models / model / "current", models / model, model_fetch.model_dir(environ).parent / model)
    for place in places:
        if (place / "config.json").is_file():
            return Located(str(place.resolve()), "local", place.resolve())
    raise QuantizeError(
        f"source.model: no model {model} in {places[1]} nor in {places[2]}: `make model` brings the small one, "
        "`make model NAME=owner/name` any other; or give a directory or a hub id"
    )


def _fetched(model: str, revision: str, models: Path) -> Located | None:
    """A version that `make model NAME=owner/name` left in MODELS_DIR, of the revision asked for."""
    for path in sorted(models.glob("*/*/source.json")):
        found = read_source(path.parent)
        if found and found.model == model and revision in (found.revision, found.requested):
            return Located(model, found.revision, path.parent.resolve())
    return None


def download(where: Located, say: Callable[[str], None], *, weights: bool) -> Located:
    """From the hub into its client's own cache, at one commit: the small files, or all. Raises QuantizeError.

    The token is read by the client itself (HF_TOKEN, or its own login); a local directory needs none.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    patterns = [*SMALL, "*.safetensors"] if weights else list(SMALL)
    try:
        try:
            commit = str(HfApi().model_info(where.model, revision=where.revision, timeout=20).sha)
        except (OSError, HfHubHTTPError) as error:
            if isinstance(error, HfHubHTTPError) and error.response is not None and error.response.status_code < 500:
                raise
            # No hub now; what an earlier run downloaded is as good.
            snapshot = snapshot_download(
                where.model, revision=where.revision, allow_patterns=patterns, local_files_only=True
            )
            return Located(where.model, Path(snapshot).name, Path(snapshot))
        if weights:
            say(f"downloading {where.model} at {commit[:12]}")
        snapshot = snapshot_download(where.model, revision=commit, allow_patterns=patterns, ignore_patterns=["*/*"])
        return Located(where.model, commit, Path(snapshot))
    except GatedRepoError:
        raise QuantizeError(
            f"source.model: {where.model} is given only to those who accepted its licence: accept it on its page, then "
            "set HF_TOKEN to a token of that account (a local directory needs none)"
        ) from None
    except RevisionNotFoundError:
        raise QuantizeError(f"source.revision: {where.model} has no {where.revision!r}") from None
    except RepositoryNotFoundError:
        raise QuantizeError(
            f"source.model: the hub shows no {where.model}: a wrong name, or a private one that needs HF_TOKEN"
        ) from None
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:160]
        raise QuantizeError(
            f"source.model: {where.model} can't be downloaded ({reason}): check the network, set HF_ENDPOINT where you "
            "use a mirror, or give a directory"
        ) from None


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
