"""What requests in flight have in common: an engine with a prefix cache keeps a shared beginning once. Pure.

A prompt's leading parts are known by the keys of prefixes.py. Only parts beyond FROM_BYTES are told apart: what is
shorter is not worth the bookkeeping. Where a pool has several engines, a beginning counts once although each engine
that reads it holds it; routing sends those who share one to the same.
"""

from collections.abc import Sequence

from gateway.prefixes import Prompts

FROM_BYTES = 1024

Parts = Sequence[tuple[int, int]]  # key and tokens of consecutive leading parts


def parts_of(prompts: Prompts, prompt_tokens: int) -> Parts:
    """The leading parts of a call's one prompt, which sum to no more than `prompt_tokens`; none for lists."""
    if len(prompts.first) != 1 or prompts.more or prompts.first[0].total < FROM_BYTES:
        return ()
    prompt, found, told = prompts.first[0], [], 0
    for (_, end), key in zip(prompt.spans, prompt.keys, strict=True):
        if end >= FROM_BYTES:
            tokens = end * prompt_tokens // prompt.total
            found.append((key, tokens - told))
            told = tokens
    return found


class Held:
    """The leading parts of everything in flight, each once."""

    def __init__(self) -> None:
        self.tokens = 0
        self._holders: dict[int, int] = {}
        self._tokens: dict[int, int] = {}  # as its first holder counted it

    def __len__(self) -> int:
        return len(self._holders)

    def common(self, parts: Parts) -> int:
        """Tokens of `parts` that are held already. Who holds a part holds all before it."""
        tokens = 0
        for key, size in parts:
            if key not in self._holders:
                break
            tokens += size
        return tokens

    def take(self, parts: Parts) -> None:
        for key, size in parts:
            holders = self._holders.get(key, 0)
            self._holders[key] = holders + 1
            if not holders:
                self._tokens[key] = size
                self.tokens += size

    def give_back(self, parts: Parts) -> None:
        """What was taken before; the last holder of a part frees it."""
        for key, _ in parts:
            holders = self._holders[key] - 1
            if holders:
                self._holders[key] = holders
            else:
                del self._holders[key]
                self.tokens -= self._tokens.pop(key)
