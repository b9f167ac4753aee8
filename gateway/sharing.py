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
        # Key -> holders, and tokens as the newest of them counts the part: estimates are learned.
        self._parts: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._parts)

    def common(self, parts: Parts) -> int:
        """Tokens that taking `parts` would not add. Who holds a part holds all before it."""
        tokens = 0
        for key, _ in parts:
            if (part := self._parts.get(key)) is None:
                break
            tokens += part[1]
        return tokens

    def take(self, parts: Parts) -> None:
        for key, size in parts:
            if (part := self._parts.get(key)) is None:
                self._parts[key] = [1, size]
                self.tokens += size
                continue
            part[0] += 1
            if part[1] != size:
                self.tokens += size - part[1]
                part[1] = size

    def give_back(self, parts: Parts) -> None:
        """What was taken before; the last holder of a part frees it."""
        for key, _ in parts:
            part = self._parts[key]
            part[0] -= 1
            if not part[0]:
                del self._parts[key]
                self.tokens -= part[1]
