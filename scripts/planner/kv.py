"""The KV cache's arithmetic, block for block as vLLM 0.32 does it (v1/core/kv_cache_utils.py).

Layers of one kind share a block table (a group). A block of one group holds `block_size` tokens of every layer in
it; all groups draw blocks from one pool, and one block of the pool is never handed out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from scripts.planner import PlanError
from scripts.planner.model import Model, dtype_bytes
from scripts.planner.numbers import cdiv

_FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2")


@dataclass(frozen=True)
class Group:
    """window: tokens that a request keeps, None for all of them."""

    window: int | None


@dataclass(frozen=True)
class KvLayout:
    """groups: one entry a group. group_layers: layers in each (the last padded). in_flight_tokens: tokens that may be
    scheduled but not yet settled, which a sliding window keeps beyond its own width."""

    groups: tuple[Group, ...]
    group_layers: int
    layer_token_bytes: int
    block_size: int
    in_flight_tokens: int

    @property
    def block_bytes(self) -> int:
        return self.group_layers * self.layer_token_bytes * self.block_size

    def request_blocks(self, length: int) -> int:
        """Blocks that one request of `length` tokens can hold at once."""
        total = 0
        for group in self.groups:
            if group.window is None:
                total += cdiv(length, self.block_size)
            else:
                kept = min(group.window - 1 + self.in_flight_tokens, length)
                total += cdiv(kept, self.block_size) + 1
        return total

    def largest_length(self, blocks: int, limit: int) -> int:
        """The longest request, up to `limit`, that `blocks` blocks hold with the reserved one taken off; 0 = none."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self.request_blocks(middle) <= blocks - 1:
                low = middle
            else:
                high = middle - 1
        return low


@dataclass(frozen=True)
class Capacity:
    """What the engine reports: blocks, their tokens, and how many requests of max_model_len fit."""

    blocks: int
    tokens: int
    concurrency: float


def kv_layout(model: Model, kv_dtype: str, block_size: int, in_flight_tokens: int) -> KvLayout:
    windows = set(model.windows)
    if len(windows) > 2:
        raise PlanError(f"layers with {len(windows)} different attention windows: the planner knows up to two kinds")
    if kv_dtype in ("auto", "bfloat16", "float16"):
        element = dtype_bytes(model.dtype)
    elif kv_dtype in _FP8:
        element = 1
    else:
        raise PlanError(f"KV cache dtype {kv_dtype!r} is not known to the planner (known: auto, {', '.join(_FP8)})")
    per_layer = 2 * model.kv_heads * model.head_dim * element
    groups, group_layers = _groups(model.windows)
    return KvLayout(groups, group_layers, per_layer, block_size, in_flight_tokens)


def _groups(windows: Sequence[int | None]) -> tuple[tuple[Group, ...], int]:
    """Equal groups as large as the rarer kind, or as the commoner one where the two are within half of each other."""
    counts = {window: windows.count(window) for window in dict.fromkeys(windows)}
    smallest, largest = min(counts.values()), max(counts.values())
    size = largest if largest < smallest * 1.5 else smallest
    groups = [Group(window) for window, count in counts.items() for _ in range(cdiv(count, size))]
    return tuple(groups), size


def capacity(layout: KvLayout, pool_bytes: int, max_model_len: int) -> Capacity:
    """tokens is what `vllm:cache_config_info` calls kv_cache_size_tokens: concurrency times max_model_len."""
    blocks = max(pool_bytes // layout.block_bytes, 0)
    concurrency = blocks / layout.request_blocks(max_model_len)
    return Capacity(blocks, int(concurrency * max_model_len), concurrency)
