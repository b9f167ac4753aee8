"""Which leading parts of a prompt came by before, so what the prefix cache could make of it. Pure.

An engine says how many tokens missed, not why. The gateway sees every prompt, so it can say: it remembers hashes of
prompts' leading parts at fixed lengths (every 64 bytes up to 1 KiB, eight an octave beyond) and which engine, since
which start of it, read them last. From that and what the answer says was cached, each prompt token gets an outcome.

Memory: two generations of at most ENTRIES / 2 hashes, the older one dropped after WINDOW_S / 2 or when the younger is
full; what is used stays. No text is kept: the hashes are Python's own, keyed anew in each process. Lengths in bytes
become tokens by the request's own bytes per token, so a shared part is told to within one block and 64 bytes, or 12 %.
"""

import bisect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

ENTRIES = 65536
WINDOW_S = 600.0
LISTED = 16  # prompts of one call that are looked at

HIT, REPEATED, SHORT, TAIL, FIRST_SEEN = "hit", "repeated", "short", "tail", "first_seen"
SALTED, RESTARTED, ELSEWHERE, EVICTED, UNKNOWN = "salted", "restarted", "elsewhere", "evicted", "unknown"
OUTCOMES = (HIT, REPEATED, SHORT, TAIL, FIRST_SEEN, SALTED, RESTARTED, ELSEWHERE, EVICTED, UNKNOWN)

Epoch = tuple[str, int]  # an engine's URL and how often it has started: what it cached lives no longer
Document = Mapping[str, Any]
Tokens = dict[str, int]


def _grid(step: int, dense: int, most: int) -> tuple[int, ...]:
    ends = list(range(step, dense + 1, step))
    while ends[-1] < most:
        ends.append(ends[-1] + (1 << (ends[-1].bit_length() - 1) >> 3))
    return tuple(ends)


_ENDS = _grid(64, 1024, 8 << 20)
_SPANS = tuple(zip((0, *_ENDS[:-1]), _ENDS, strict=True))


class Prompt(NamedTuple):
    """A prompt as the model reads it, without its text. `keys[i]` stands for what comes before the end of `spans[i]`
    (bytes) among those whose blocks may serve each other: one model's, under one cache salt. `anyone`: under any."""

    total: int
    spans: Sequence[tuple[int, int]]
    keys: Sequence[int]
    anyone: Sequence[int]


class Prompts(NamedTuple):
    """A call's first prompts, and how many further ones are not looked at."""

    first: Sequence[Prompt]
    more: int


class Look(NamedTuple):  # a third of what a frozen dataclass takes to make
    """One prompt's leading bytes that came by before: `here`, at this engine since its start; `before`, at all;
    `other`, here under another cache salt. `lost` says what `before` beyond `here` was lost by."""

    total: int
    here: int
    before: int
    other: int
    lost: str


class Prefixes:
    """The memory. Its owner calls `prompts` once a request, and `look` before the engine is asked."""

    def __init__(self, entries: int = ENTRIES, window_s: float = WINDOW_S) -> None:
        self._half = entries // 2
        self._half_s = window_s / 2
        self._young: dict[int, Epoch] = {}
        self._old: dict[int, Epoch] = {}
        self._turned_s = 0.0
        self._salts = False  # some key has a group, so equal text may lie in the cache twice

    def __repr__(self) -> str:
        return f"<Prefixes {len(self)} entries>"

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def prompts(self, document: Document, group: str | None) -> Prompts:
        """A call's. `group`: whose cache salt it has."""
        self._salts = self._salts or group is not None
        texts, more = leading_texts(document)
        model = document.get("model")
        seed, any_seed, found = hash((group, model)), hash((-1, model)), []
        for text in texts:
            spans = _spans(len(text))
            anyone = _keys(text, spans, any_seed) if self._salts else ()
            found.append(Prompt(len(text), spans, _keys(text, spans, seed), anyone))
        return Prompts(found, more)

    def look(self, prompts: Prompts, epoch: Epoch, now_s: float) -> list[Look]:
        """A look at each of a call's prompts; remembers them."""
        if len(self._young) >= self._half or now_s - self._turned_s > self._half_s:
            # Idle for longer than that, nothing in either is young enough.
            self._old = self._young if now_s - self._turned_s <= 2 * self._half_s else {}
            self._young = {}
            self._turned_s = now_s
        return [self._one(prompt, epoch) for prompt in prompts.first]

    def _one(self, prompt: Prompt, epoch: Epoch) -> Look:
        total, spans, keys, anyone = prompt
        here, before, last = self._deepest(keys, spans, epoch)
        lost = RESTARTED if last is not None and last[0] == epoch[0] else ELSEWHERE
        other = 0
        if anyone:
            other = self._deepest(anyone, spans, epoch)[0]
            self._young.update(dict.fromkeys(anyone, epoch))
        self._young.update(dict.fromkeys(keys, epoch))
        return Look(total, here, before, other, lost)

    def _deepest(
        self, keys: Sequence[int], spans: Sequence[tuple[int, int]], epoch: Epoch
    ) -> tuple[int, int, Epoch | None]:
        """Bytes that this epoch has read, bytes that any has, and which."""
        young, old = self._young, self._old
        before, last = 0, None
        for i in range(len(keys) - 1, -1, -1):
            found = young.get(keys[i]) or old.get(keys[i])
            if found is None:
                continue
            if last is None:
                before, last = spans[i][1], found
            if found == epoch:
                return spans[i][1], before, last
        return 0, before, last


def _keys(text: bytes, spans: Sequence[tuple[int, int]], seed: int) -> list[int]:
    key = seed
    return [key := hash((key, text[start:end])) for start, end in spans]


def _spans(total: int) -> Sequence[tuple[int, int]]:
    """The grid up to `total`, and what is left as a last span, so that a whole prompt is known again."""
    count = bisect.bisect_right(_ENDS, total)
    last = _ENDS[count - 1] if count else 0
    return _SPANS[:count] if last == total else (*_SPANS[:count], (last, total))


def leading_texts(document: Document) -> tuple[list[bytes], int]:
    """What the model reads of each prompt, in the order it reads it, such that a longer conversation begins alike."""
    prompt = document.get("prompt")
    if isinstance(prompt, str):
        return [prompt.encode()], 0
    value = next((document[name] for name in ("messages", "prompt", "input") if document.get(name)), "")
    if isinstance(value, list) and value and isinstance(value[0], list | str):
        return [_text(entry) for entry in value[:LISTED]], max(0, len(value) - LISTED)
    front = [_text(document[name]) for name in ("tools", "system", "instructions") if document.get(name)]
    return [b"".join([*front, _text(value)])], 0


def _text(value: Any) -> bytes:
    # Without the closing bracket a list's text is how every continuation of it begins.
    return value.encode() if isinstance(value, str) else orjson.dumps(value)[:-1]


def outcomes(
    looks: Sequence[Look], more: int, prompt_tokens: int, cached: int | None, block_size: int | None
) -> Tokens:
    """Outcome -> tokens, which sum to `prompt_tokens`. `cached`: what the answer says was; None where it is silent.

    A prompt's last token is always computed, so ⌊(n−1) / block⌋ blocks of it can hit at the most.
    """
    if block_size is None or not looks:
        return {UNKNOWN: prompt_tokens}
    if len(looks) == 1 and not more:
        return _of_one(looks[0], prompt_tokens, cached, block_size)
    share = left = prompt_tokens * len(looks) // (len(looks) + more)
    size = sum(look.total for look in looks) or 1
    found: Tokens = {UNKNOWN: prompt_tokens - share}
    for i, look in enumerate(looks, 1):
        tokens = left if i == len(looks) else share * look.total // size
        left -= tokens
        for outcome, part in _of_one(look, tokens, None, block_size).items():
            found[outcome] = found.get(outcome, 0) + part
    return {outcome: tokens for outcome, tokens in found.items() if tokens}


def _of_one(look: Look, tokens: int, cached: int | None, block_size: int) -> Tokens:
    cacheable = max(0, tokens - 1) // block_size * block_size
    reached = 0 if cached is None else min(cached, cacheable)
    found = {TAIL if cacheable else SHORT: tokens - cacheable, HIT: reached}
    steps = ((REPEATED if cached is None else EVICTED, look.here), (look.lost, look.before), (SALTED, look.other))
    for outcome, size in steps:
        # A part is known by its bytes alone, so the block it may end in is not expected to hit.
        whole = size == look.total
        depth = cacheable if whole else size * tokens // look.total // block_size * block_size - block_size
        if depth > reached:
            found[outcome] = found.get(outcome, 0) + depth - reached
            reached = depth
    found[FIRST_SEEN] = cacheable - reached
    return {outcome: count for outcome, count in found.items() if count}
