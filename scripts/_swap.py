"""Replaces what the stack's one engine runs, under load, and takes it back by itself where the new one does not hold.

    outcome = swap(Stack.running(), change, undo, verify, keep=..., journal=Journal("what, for people", "promote"))

1. The gateway sends the engine nothing new. Requests that come wait in its waiting room, each for at most
   `timeouts.reload_wait_s`; whoever waits longer is refused with 503 and a Retry-After.
2. What is in flight ends; after `drain_s` the old engine is stopped anyway, and finishes within its shutdown-timeout.
3. `change()` alters what an engine starts from: a link, a file, or, by what it returns, variables of compose.yaml. The
   engine's container is then made anew: the old one is gone before the new one starts, since both want the same card.
4. The new one is ready once its container is healthy and the gateway sees it. `verify()` tries it while no client can
   reach it, and returns what is wrong with it, None if nothing is.
5. Held: `keep()` makes the change last, and the gateway sends again. Not held: `undo()` is change's inverse; the
   engine before is made anew and waited for, and the gateway sends again.

`change`, `undo` and `keep` must bear being repeated: after a kill -9 the next command finds the journal and calls
`heal(Stack.running(interrupted=True), keep, undo)`, which does step 5 again. Interrupted by a signal, swap undoes and
raises what it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from scripts import _journal
from scripts._compose import ComposeError
from scripts._journal import Journal
from scripts._running import Stack, SwapError, Variables

Say = Callable[[str], None]

DRAIN_S = 60.0
START_S = 2400.0  # above ENGINE_START_S: the engine's own supervisor gives up before
BACK_S = 60.0  # a gateway that was killed is back by then


class NotBackError(SwapError):
    """The engine before did not come back either: nothing is served. The journal stays, for the next command."""


@dataclass(frozen=True)
class Outcome:
    """Seconds: until what was in flight had ended, until the new engine was ready, and from drain to sending again."""

    drained_s: float
    started_s: float
    away_s: float


def swap(
    stack: Stack,
    change: Callable[[], Variables],
    undo: Callable[[], Variables],
    verify: Callable[[], str | None],
    *,
    journal: Journal,
    keep: Callable[[], None] = lambda: None,
    say: Say = print,
    drain_s: float = DRAIN_S,
    start_s: float = START_S,
) -> Outcome:
    """The module's docstring. Raises SwapError (undone, the stack serves what it did), NotBackError (it does not),
    JournalError (another change is under way, or was interrupted and is to be healed first).
    """
    with _journal.alone():
        if left := _journal.read():
            raise _journal.JournalError(f"{left.what} was interrupted: it is to be healed first")
        began = time.monotonic()
        try:
            _journal.write(journal)
            say("the gateway holds new requests back")
            stack.drain(on=True)
            _ended(stack, drain_s, say)
            drained_s = time.monotonic() - began
            _journal.write(journal.at(_journal.CHANGING))
            say(f"{stack.engine.service}: stopping the old one, starting the new one")
            stack.make_anew(change())
            started_s = _ready(stack, start_s, say)
            if wrong := verify():
                raise SwapError(wrong)
            _journal.write(journal.at(_journal.HELD))
        except BaseException as error:
            _undo(stack, undo, journal, start_s, say, _why(error))
            if isinstance(error, SwapError | ComposeError | OSError):
                raise SwapError(_why(error)) from error
            raise
        _finish(stack, keep)
        return Outcome(drained_s, started_s, time.monotonic() - began)


def heal(
    stack: Stack,
    keep: Callable[[], None],
    undo: Callable[[], Variables],
    *,
    say: Say = print,
    start_s: float = START_S,
) -> str | None:
    """Ends a change that was interrupted: one that was verified is kept, any other undone. What it did, None if there
    was nothing to do. Raises SwapError, NotBackError, JournalError, ComposeError.
    """
    with _journal.alone():
        left = _journal.read()
        if left is None:
            return None
        say(f"found an interrupted change ({left.phase}): {left.what}")
        if left.phase == _journal.HELD:
            _finish(stack, keep)
            return f"it had been verified, and is kept: {left.what}"
        _undo(stack, undo, left, start_s, say, "it was interrupted")
        return f"undone: {left.what}"


def _finish(stack: Stack, keep: Callable[[], None]) -> None:
    """The order matters to whoever is killed in between: recorded, then served, then forgotten."""
    keep()
    _send_again(stack)
    _journal.clear()


def _send_again(stack: Stack) -> None:
    """Patient: a gateway that was killed meanwhile comes back, and takes the order, which then says nothing new."""
    until = time.monotonic() + BACK_S
    while True:
        try:
            return stack.drain(on=False)
        except SwapError:
            if time.monotonic() > until:
                raise
        stack.pause(1)


def _undo(
    stack: Stack,
    undo: Callable[[], Variables],
    journal: Journal,
    start_s: float,
    say: Say,
    why: str,
) -> None:
    """The engine before, serving again. Raises NotBackError."""
    now = _journal.read()
    try:
        if now is not None and now.phase != _journal.DRAINING:  # until then nothing was changed
            say(f"going back: {why}")
            _journal.write(journal.at(_journal.UNDOING))
            stack.make_anew(undo())
            _ready(stack, start_s, say)
        _send_again(stack)
        _journal.clear()
    except (SwapError, ComposeError, OSError) as error:
        raise NotBackError(f"{why}; and the engine before is not back: {_why(error)}") from error


def _ended(stack: Stack, drain_s: float, say: Say) -> None:
    """Returns when nothing is in flight, or `drain_s` is over: the old engine's own drain then does the rest."""
    until = time.monotonic() + drain_s
    quiet = 0
    while quiet < 2:  # a request that was being sent at the first look is seen at the second
        calls = stack.replica()["calls"]
        quiet = quiet + 1 if calls == 0 else 0
        if time.monotonic() > until:
            say(f"{calls} requests still run after {drain_s:.0f} s; the engine ends them while it stops")
            return
        stack.pause(0.1)


def _ready(stack: Stack, start_s: float, say: Say) -> float:
    """Seconds until the new container is healthy and the gateway sees its engine. Raises SwapError with the cause."""
    began = time.monotonic()
    told = ""
    while True:
        container = stack.container()
        if container is not None:
            if why := stack.failed(container):
                raise SwapError(why)
            # Healthy is the container's own word, so it can't be the old engine that the gateway still remembers.
            if container.well and _seen(stack):
                return time.monotonic() - began
        waits = f"waiting for {stack.engine.service} ({container.said or container.health if container else 'gone'})"
        if waits != told:
            say(waits)
            told = waits
        if time.monotonic() - began > start_s:
            raise SwapError(f"not ready after {start_s:.0f} s: {waits}")
        stack.pause(1)


def _seen(stack: Stack) -> bool:
    """Whether the gateway knows its engine to be ready. Not where it can't be asked: it may be starting itself."""
    try:
        return stack.replica()["state"] in ("draining", "ready")
    except SwapError:
        return False


def _why(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
