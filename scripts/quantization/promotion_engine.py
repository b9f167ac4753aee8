"""What a promotion or a revert means for the running stack: its engine is swapped where it serves that model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from scripts import _journal
from scripts._compose import ROOT, Compose, ComposeError
from scripts._journal import Journal
from scripts._running import ENGINES, Stack
from scripts._smoke import smoke_chat
from scripts._swap import heal as heal_swap
from scripts._swap import swap
from scripts.quantization import QuantizeError
from scripts.quantization.gate import Answer, fault
from scripts.quantization.gate_config import Chat, GateConfig
from scripts.quantization.gate_engine import Launcher, serving
from scripts.quantization.manifest import read
from scripts.quantization.promotion import Move
from scripts.quantization.scoring import Scorer, ScoringError
from scripts.quantization.store import CURRENT

KIND = "promote"  # a revert is one, too: `make promote` and `make revert` both end what was interrupted
Say = Callable[[str], None]


@dataclass(frozen=True)
class Done:
    """away_s: how long requests waited at most; None where no engine was swapped. engine: what became of it."""

    away_s: float | None
    engine: str


def concerned(home: Path) -> Stack | str:
    """The running stack where its engine serves this model; else why no engine has to change. Raises SwapError."""
    try:
        found = {each.service: each for each in Compose().containers() if each.running}
    except ComposeError as error:
        return f"no engine was touched (Docker can't be asked: {error})"
    engine = next((found[name] for name in ENGINES if name in found), None)
    if engine is None:
        return "the stack's engine does not run, its next start serves it"
    profile = engine.env.get("ENGINE_PROFILE", "")
    if served(ROOT / f"configs/engine/{profile}.yaml") != f"/models/{home.name}/{CURRENT}":
        return f"the running engine serves another model (profile {profile})"
    return Stack.running()


def served(profile: Path) -> str | None:
    """What a profile lets an engine serve."""
    try:
        found: Any = yaml.safe_load(profile.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return str(found.get("model")) if isinstance(found, Mapping) else None


def plan(move: Move) -> Done:
    """What `apply` would do. Raises SwapError."""
    found = concerned(move.home)
    return Done(None, found if isinstance(found, str) else f"{found.engine.service} would be swapped under load")


def apply(move: Move, what: str, say: Say) -> Done:
    """Links, and the engine where it is concerned; undone where it raises: SwapError, JournalError, ComposeError,
    OSError.
    """
    found = concerned(move.home)
    if isinstance(found, str):
        try:
            move.apply()
        except BaseException:
            move.undo()
            raise
        return Done(None, found)
    chat = known_good(move.home / move.to)
    outcome = swap(
        found,
        lambda: _changed(move.apply),
        lambda: _changed(move.undo),
        lambda: smoke_chat(found) or (asked(found, chat) if chat else None),
        journal=Journal(f"{what} {move.home.name}/{move.to}", KIND, note=move.note),
        say=say,
    )
    return Done(outcome.away_s, f"{found.engine.service} was swapped, requests waited {outcome.away_s:.0f} s at most")


def _changed(step: Callable[[], None]) -> Mapping[str, str]:
    """Only links changed, no variable of compose.yaml."""
    step()
    return {}


def heal(say: Say) -> str | None:
    """Ends a promotion or revert that was killed: kept where the new engine had been verified, else undone.

    Raises SwapError, JournalError, ComposeError, OSError.
    """
    left = _journal.read()
    if left is None or left.kind != KIND:
        return None  # another kind is for its own command, and swap says so
    move = Move.of(left.note)
    found = concerned(move.home)
    if not isinstance(found, str):
        return heal_swap(found, lambda: None, lambda: _changed(move.undo), say=say)
    with _journal.alone():  # no engine to wait for: only links can be half done
        if left.phase != _journal.HELD:
            move.undo()
        _journal.clear()
    return f"{'kept' if left.phase == _journal.HELD else 'undone'}: {left.what}"


def known_good(version: Path) -> Chat | None:
    """A chat that the gate heard this version answer well; None for one that no gate judged."""
    try:
        gate = read(version).gate or {}
    except QuantizeError:
        return None
    for found in gate.get("chats", ()):
        if not found["original"]["wrong"] and not found["artifact"]["wrong"]:
            return Chat(ask=found["ask"], language=found["language"], expect=found["expect"])
    return None


def asked(stack: Stack, chat: Chat) -> str | None:
    """What is wrong with the running engine's answer to it."""
    status, text = stack.ask("engine", "GET", "/v1/models")
    body = {"messages": [{"role": "user", "content": chat.ask}], "max_tokens": 120, "temperature": 0}
    try:
        model = json.loads(text)["data"][0]["id"]
        status, text = stack.ask("engine", "POST", "/v1/chat/completions", {"model": model, **body}, timeout_s=300)
        choice = json.loads(text)["choices"][0]
        wrong = fault(chat, Answer(choice["message"]["content"] or "", str(choice["finish_reason"])))
    except (LookupError, TypeError, ValueError):
        return f"the chat {chat.ask!r} was answered {status}: {text[:200]}"
    return f"the answer to {chat.ask!r} {wrong}, and the gate had heard a good one" if wrong else None


def try_alone(version: Path, launcher: Launcher, config: GateConfig, say: Say) -> None:
    """Serves a version for one chat, without the stack. Raises QuantizeError where it does not answer well."""
    chat = known_good(version) or Chat(ask=config.chats[0].ask, language=config.chats[0].language)
    with serving(launcher, version, config.text.listed, config.engine, say) as url, Scorer(url, config) as scorer:
        try:
            answer = scorer.chat(chat)
        except ScoringError as error:
            raise QuantizeError(f"{version.parent.name}/{version.name} does not answer: {error}") from error
    if wrong := fault(chat, answer):
        raise QuantizeError(f"{version.parent.name}/{version.name}: the answer to {chat.ask!r} {wrong}")
