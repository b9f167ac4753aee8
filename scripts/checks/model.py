"""The model directory: every shard whole, a known config, a tokenizer, a chat template, readable by a container."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts import model_fetch
from scripts.checks import Check, fail, judged, ok, skip, warn
from scripts.model_fetch_rules import ORIGINALS, friendly_name
from scripts.planner import PlanError
from scripts.planner.catalog import find_model
from scripts.planner.checkpoint import INDEX, read_checkpoint, read_config
from scripts.planner.gpus import load_gpus
from scripts.planner.model import parse_model
from scripts.planner.numbers import gib
from scripts.planner.settings import PROFILES

if TYPE_CHECKING:  # it brings the demo along, and `make model` needs these checks alone
    from scripts.checks.subject import Subject

_LFS = b"version https://git-lfs"
_TOKENIZERS = (("tokenizer.json",), ("tokenizer.model",), ("tekken.json",), ("vocab.json", "merges.txt"))
_JOBS = PROFILES.parent / "quantize"
_AGAIN = "make model NAME=... again, or copy the missing files there (docs/models.md)"


def checks(subject: Subject) -> list[Check]:
    """Of a directory that is not there only the first check is made."""
    first = directory(subject)
    where = subject.model_dir
    if first.status != "ok" or where is None:
        return [first]
    return [first, *files(where), access(where, subject)]


def files(where: Path) -> list[Check]:
    """What a directory holds, wherever it lies and whoever will read it."""
    return [config(where), weights(where), tokenizer(where), template(where), generation(where)]


def directory(subject: Subject) -> Check:
    name, expected = "model.directory", "a directory with config.json"
    where = subject.model_dir
    if where is None:
        said = subject.profile.get("model")
        if said is None:
            return skip(name, expected, f"profile {subject.profile_path.stem} names no model")
        why = f"{said!r} is no local path: the engine would download it, which nothing here can check"
        return skip(name, expected, why)
    if not where.is_dir():
        if subject.purpose == "demo":
            return skip(name, expected, "not there yet: make demo fetches it, or make model now")
        dangling = " (a link to nothing)" if where.is_symlink() else ""
        return fail(name, expected, f"{where} does not exist{dangling}", offer(subject))
    has_config = (where / "config.json").is_file()
    return judged(has_config, name, expected, f"{where}{'' if has_config else ' has no config.json'}", offer(subject))


def offer(subject: Subject) -> str:
    """The ways to a model for this profile, each with its commands in lines of their own."""
    wanted = subject.model_name
    if subject.on_cpu:
        return "make model (the small demo model)"
    ways: dict[str, list[str]] = {}
    if near := _served_instead(subject):
        ways["serve what is here, by .env"] = [f"ENGINE_PROFILE={near}"]
    if wanted in ORIGINALS:
        ways["fetch it"] = [f"make model NAME={ORIGINALS[wanted]}"]
    if job := _quantize_job(wanted):
        original = ORIGINALS.get(wanted.removesuffix("-awq"))
        card = load_gpus()[subject.card].name if subject.card in load_gpus() else "this card"
        fetch = [f"make model NAME={original}"] if original and not _holds(subject, friendly_name(original)) else []
        making = [*fetch, f"make quantize CONFIG={job}", f"make gate NAME={wanted}", f"make promote NAME={wanted}"]
        ways[f"4 bits of your own, made on {card}"] = making
    if wanted not in ORIGINALS:
        kind = "a ready AWQ checkpoint that you trust" if wanted.endswith("-awq") else "fetch it"
        ways[kind] = [f"make model NAME=org/model AS={wanted}"]
    ways["only try the stack, without a GPU"] = ["make model && make up-cpu"]
    told = [f"{what}:\n" + "\n".join(f"    {command}" for command in commands) for what, commands in ways.items()]
    return "\nor ".join(told)


def _quantize_job(name: str) -> str | None:
    """The shipped configuration that makes this model."""
    line = re.compile(rf"^name: {re.escape(name)}$", re.MULTILINE)
    found = (path for path in sorted(_JOBS.glob("*.yaml")) if line.search(path.read_text(encoding="utf-8")))
    return next((str(path.relative_to(_JOBS.parents[1])) for path in found), None)


def _holds(subject: Subject, name: str) -> bool:
    return (subject.models_root / name / "current" / "config.json").is_file()


def _served_instead(subject: Subject) -> str | None:
    """A shipped profile of the same card whose model is here."""
    for path in sorted(PROFILES.glob("*.yaml"), key=lambda path: (len(path.stem), path.stem)):  # the plain one first
        model, _, rest = path.stem.partition(".")
        if subject.card in rest.split(".") and model != subject.model_name and _holds(subject, model):
            return path.stem
    return None


def config(where: Path) -> Check:
    """An architecture that the planner does not know may still be served; no figure is given for it."""
    name, expected = "model.config", "an architecture the memory plan knows"
    try:
        model = parse_model(read_config(where), where.name)
    except PlanError as error:
        if "planner" in str(error):
            fix = "the engine may serve it all the same; no memory figure is checked. `vllm serve` has the last word"
            return warn(name, expected, str(error), fix)
        return fail(name, expected, str(error), _AGAIN)
    kind = model.quant.label if model.quant else model.dtype
    return ok(name, expected, f"{model.architecture}, {model.layers} layers, {kind}")


def weights(where: Path) -> Check:
    """Every file the index names, each as long as its own header says; and of the model config.json describes."""
    name, expected = "model.weights", "every safetensors file of the index, whole"
    for path in sorted(where.glob("*.safetensors")):
        if _head(path).startswith(_LFS):
            return fail(name, expected, f"{path.name} is a Git LFS pointer, not weights", "git lfs pull, in that clone")
    try:
        found = read_checkpoint(where)
    except PlanError as error:
        return fail(name, expected, str(error), _AGAIN)
    except OSError as error:
        return fail(name, expected, f"{error.filename}: {error.strerror}", "make it readable")
    if found is None:
        return fail(name, expected, f"{where} holds no weights", _AGAIN)
    try:
        find_model(str(where))
    except PlanError as error:
        if "not of one model" in str(error):
            return fail(name, expected, str(error), f"config.json and weights belong together: {_AGAIN}")
    size = sum(tensor.size for tensor in found.tensors.values())
    index = f" of {INDEX}" if (where / INDEX).is_file() else ""
    count = f"{found.files} file{'s' * (found.files != 1)}{index}"
    return ok(name, expected, f"{count}, {len(found.tensors)} tensors, {gib(size)}")


def tokenizer(where: Path) -> Check:
    name, expected = "model.tokenizer", "tokenizer.json, or another whole tokenizer, and tokenizer_config.json"
    have = next((names for names in _TOKENIZERS if all((where / file).is_file() for file in names)), None)
    if have is None:
        return fail(name, expected, f"{where} has no tokenizer files", _AGAIN)
    for file in (*have, "tokenizer_config.json"):
        path = where / file
        if file == "tokenizer_config.json" and not path.is_file():
            fix = "download it: without it special tokens and the chat template are missing"
            return warn(name, expected, f"{' and '.join(have)}, but no {file}", fix)
        if _head(path).startswith(_LFS):
            return fail(name, expected, f"{file} is a Git LFS pointer", "git lfs pull, in that clone")
        if path.suffix == ".json" and _json(path) is None:
            return fail(name, expected, f"{file} is no JSON object: cut off?", _AGAIN)
    return ok(name, expected, " and ".join(have))


def template(where: Path) -> Check:
    """Without one /v1/chat/completions answers 400."""
    name, expected = "model.chat_template", "a chat template"
    inside = (_json(where / "tokenizer_config.json") or {}).get("chat_template")
    if (isinstance(inside, str) and inside.strip()) or (isinstance(inside, list) and inside):
        return ok(name, expected, "in tokenizer_config.json")
    for file in ("chat_template.jinja", "chat_template.json"):
        if (where / file).is_file() and (where / file).stat().st_size:
            return ok(name, expected, file)
    fix = "take an instruct model, or name one in the profile: chat-template: /path/to/template.jinja"
    return warn(name, expected, "none: chat requests will be refused with 400, completions work", fix)


def generation(where: Path) -> Check:
    """Without it the engine samples with its own defaults, and Llama 3 does not know all its end-of-turn tokens."""
    name, expected = "model.generation", "generation_config.json"
    path = where / "generation_config.json"
    if not path.is_file():
        fix = "download it with the model: it holds the maker's sampling defaults and end-of-turn tokens"
        return warn(name, expected, "none", fix)
    if _json(path) is None:
        return fail(name, expected, f"{path.name} is no JSON object: cut off?", _AGAIN)
    return ok(name, expected, path.name)


def access(where: Path, subject: Subject) -> Check:
    """A container mounts MODELS_DIR alone, and reads it as another user."""
    name, expected = "model.access", "files any user may read, inside MODELS_DIR"
    if subject.purpose == "demo":
        return skip(name, expected, "the demo reads them as this user")
    if where == model_fetch.model_dir(subject.environ):
        return skip(
            name, expected, f"the demo model is still in the cache: make up-cpu copies it to {subject.models_root}"
        )
    root = subject.models_root.resolve()
    for path in [where, *sorted(where.iterdir())]:
        target = path.resolve()
        if not target.is_relative_to(root):
            fix = "copy the files themselves (cp -rL), or point MODELS_DIR higher: a container sees nothing outside it"
            return fail(name, expected, f"{path} lies at {target}, outside {root}", fix)
        mode = target.stat().st_mode
        wanted = stat.S_IROTH | (stat.S_IXOTH if target.is_dir() else 0)
        if mode & wanted != wanted:
            found = f"{path} has mode {stat.S_IMODE(mode):o}"
            return fail(name, expected, found, f"chmod -R o+rX {where}")
    return ok(name, expected, f"all of {where}")


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(32)
    except OSError:
        return b""


def _json(path: Path) -> Mapping[str, Any] | None:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
