"""What may be fetched, under which name, and which of a repository's files are a model. Pure but for `judge`.

Only safetensors: other weight files are pickles, which run code when they are read. Only code that the engine ships:
a config that brings its own (auto_map) is refused where the engine would need it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.planner import PlanError
from scripts.planner.checkpoint import INDEX
from scripts.planner.model import parse_model

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_REVISION = re.compile(r"[A-Za-z0-9][\w./-]{0,127}")
_TOKEN = re.compile(r"hf_\w{8,}")
# The guides' model by the name that the profiles use; an instruct model only, the base model can't chat.
_LLAMA = re.compile(r"(?:meta-)?llama-(3(?:\.\d)?)-(\d+b)-instruct(-awq)?")
# Where the shipped profiles' models come from, by directory: what is offered where one is missing.
ORIGINALS = {
    "llama3-8b": "meta-llama/Meta-Llama-3-8B-Instruct",
    "qwen3-8b-awq": "Qwen/Qwen3-8B-AWQ",
}
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_BESIDE = re.compile(
    r"config\.json|generation_config\.json|(tokenizer|special_tokens|added_tokens|preprocessor|processor|quant|"
    r"quantize)\w*\.json|vocab\.json|merges\.txt|tekken\.json|tokenizer\.model|chat_template\.(json|jinja)|"
    r"(LICEN[CS]E|NOTICE|USE_POLICY|README)(\.\w+)?",
    re.IGNORECASE,
)


class RefusedError(Exception):
    """It will not be fetched; the message is one line with the way out."""


@dataclass(frozen=True)
class Request:
    """repo is set for the hub (revision None: its main branch), local for a directory. name: below MODELS_DIR."""

    name: str
    repo: str = ""
    revision: str | None = None
    local: Path | None = None


@dataclass(frozen=True)
class File:
    """One file of a repository. sha256 for large files, git_sha1 (of the blob) for the others."""

    name: str
    size: int
    sha256: str | None = None
    git_sha1: str | None = None


def parse_request(text: str, as_name: str | None = None) -> Request:
    """`org/model`, `org/model@revision`, or a directory. Raises RefusedError."""
    if _TOKEN.search(text) or _TOKEN.search(as_name or ""):
        raise RefusedError("that looks like a token, which belongs into a file: docs/models.md")
    path = Path(text).expanduser()
    if text.startswith(("/", ".", "~")) or (text and not _REPO.fullmatch(text.partition("@")[0]) and path.is_dir()):
        if not path.is_dir():
            raise RefusedError(f"{text}: no such directory")
        path = path.resolve()
        # A snapshot of the hub's cache is called after its commit; its model stands two directories above.
        cached = re.fullmatch(r"models--(.+)--(.+)", path.parents[1].name) if path.parent.name == "snapshots" else None
        return Request(_name(as_name or friendly(cached[2] if cached else path.name)), local=path)
    repo, at, revision = text.partition("@")
    if not _REPO.fullmatch(repo) or "--" in repo or ".." in repo:
        raise RefusedError(f"{text!r} is neither a directory nor org/model[@revision], as on the hub's page")
    if at and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise RefusedError(f"{revision!r} is no revision: a branch, a tag or a commit stands behind the @")
    return Request(_name(as_name or friendly_name(repo)), repo, revision or None)


def friendly(name: str) -> str:
    """The directory for a repository's name: the one that profiles use where they know the model."""
    low = name.lower()
    llama = _LLAMA.fullmatch(low)
    return f"llama{llama[1]}-{llama[2]}{llama[3] or ''}" if llama else low


def friendly_name(repo: str) -> str:
    """The same for org/model."""
    return friendly(repo.partition("/")[2])


def _name(text: str) -> str:
    if not _NAME.fullmatch(text) or ".." in text:
        raise RefusedError(f"{text!r} can't be a directory below MODELS_DIR: AS=<small letters, digits, . _ ->")
    return text


def choose(files: Iterable[File], what: str) -> list[File]:
    """The files that are the model: small ones first, then the weights. Raises RefusedError."""
    top = {file.name: file for file in files if "/" not in file.name and not file.name.startswith(".")}
    if "modules.json" in top:
        raise RefusedError(f"{what} is a sentence-transformers model in several directories, which isn't supported")
    if "config.json" not in top:
        raise RefusedError(f"{what} has no config.json: not a model that the engine can read")
    weights = _weights(top, what)
    return [file for name, file in sorted(top.items()) if _BESIDE.fullmatch(name) or name == INDEX] + weights


def _weights(top: Mapping[str, File], what: str) -> list[File]:
    tensors = {name: file for name, file in sorted(top.items()) if name.endswith(".safetensors")}
    if INDEX in top:
        # Beside the shards some repositories hold the same weights once more in their maker's own format.
        return [file for name, file in tensors.items() if not name.startswith("consolidated")]
    if "model.safetensors" in tensors:
        return [tensors["model.safetensors"]]
    if len(tensors) == 1:
        return list(tensors.values())
    if tensors:
        raise RefusedError(f"{what} has {len(tensors)} safetensors files and no {INDEX} that says how they belong")
    kinds = sorted({Path(name).suffix for name in top if name.endswith((*_PICKLED, ".gguf"))})
    if not kinds:
        raise RefusedError(f"{what} holds no weights")
    reason = "" if kinds == [".gguf"] else ", which can run code when they are read"
    raise RefusedError(
        f"{what} has its weights only as {', '.join(kinds)}{reason}: only safetensors are taken. Its maker, or a "
        "branch of the repository, may offer them (NAME=org/model@branch)"
    )


def judge(folder: Path, names: Iterable[str]) -> None:
    """Looks at what the small files say, before the weights come. names: every file chosen. Raises RefusedError."""
    config = _object(folder / "config.json")
    own = config.get("auto_map")
    if own and not _served_natively(config):
        raise RefusedError(
            f"its config.json wants code from the repository ({', '.join(sorted(map(str, own)))}), which is never run "
            "here. Take a version that the engine serves by itself"
        )
    tokenizer = folder / "tokenizer_config.json"
    if tokenizer.is_file() and _object(tokenizer).get("auto_map"):
        raise RefusedError("its tokenizer needs code from the repository (auto_map), which is never run here")
    if (folder / INDEX).is_file():
        listed = _object(folder / INDEX).get("weight_map")
        if not isinstance(listed, dict) or not listed:
            raise RefusedError(f"its {INDEX} lists no weights")
        missing = sorted({str(name) for name in listed.values()} - set(names))
        if missing:
            raise RefusedError(f"its {INDEX} names {len(missing)} that it lacks ({', '.join(missing[:3])})")


def _served_natively(config: Mapping[str, Any]) -> bool:
    """Whether the engine has the code itself: a known architecture, and the model_type that belongs to it.

    A known architecture under a model_type of the repository's own would still ask for that code.
    """
    try:
        model = parse_model(config, "")
    except PlanError:
        return False
    kind = str(config.get("model_type", "")).replace("_", "")
    return bool(kind) and model.architecture.lower().startswith(f"{kind}for")


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        raise RefusedError(f"its {path.name} is no JSON: the model is broken") from None
    if not isinstance(found, dict):
        raise RefusedError(f"its {path.name} is no JSON object: the model is broken")
    return found
