"""A plan as text for people, as JSON for programs, and as a bar."""

import re
import textwrap
from collections.abc import Sequence
from typing import Any

from scripts.planner.memory import CONTEXT_BYTES, Plan
from scripts.planner.numbers import GIB, gib
from scripts.planner.verify import Report

BAR_WIDTH = 76
NARROWEST = 40
ENDLESS = 1 << 16  # columns of what is no terminal: a program reads it, or a pager that breaks lines itself
_TIED = "\u00a0"  # a space at which no line is broken
_FILLS = {"weights": "█", "engine buffers": "▚", "non-torch, slack": "▞", "transient peak": "▓", "CUDA graphs": "▒"}
_POOL_FILL, _OUTSIDE_FILL = "░", "·"


def segments(plan: Plan) -> list[tuple[str, str, int]]:
    """The card from left to right: (name, fill, bytes). A pool below 0 takes no room in the picture."""
    found = [(part.name, _FILLS[part.name], part.size) for part in plan.parts]
    found.append(("KV cache", _POOL_FILL, max(plan.pool, 0)))
    rest = plan.total - sum(size for _, _, size in found)
    if plan.gpu is not None and rest > 0:
        found.append(("outside the engine's share", _OUTSIDE_FILL, rest))
    return found


def bar(plan: Plan, width: int = BAR_WIDTH) -> list[str]:
    """The bar and its legend. Each part gets its share of the width, rounded at its edges so that the sum holds."""
    shown = segments(plan)
    total = sum(size for _, _, size in shown)
    line, at = "", 0
    for _, fill, size in shown:
        before, at = at, at + size
        line += fill * (round(at * width / total) - round(before * width / total))
    legend = [f"{fill} {name} {size / GIB:.2f}" for name, fill, size in shown]
    lines = [f"[{line}]", " " + legend[0]]
    for entry in legend[1:]:
        if len(lines[-1]) + 3 + len(entry) > max(width + 2, 2 * BAR_WIDTH // 3):
            lines.append(" " + entry)
        else:
            lines[-1] += "   " + entry
    return lines


def fitted(line: str, width: int) -> list[str]:
    """A line broken between words where it is longer than `width`; what follows hangs below its last column."""
    column = max((found.end() for found in re.finditer(r"\S {2,}(?=\S)", line)), default=0)
    hang = column if 0 < column <= width // 2 else len(line) - len(line.lstrip()) + 2
    wrapped = textwrap.wrap(line, width, subsequent_indent=" " * hang, break_long_words=False, break_on_hyphens=False)
    return [part.replace(_TIED, " ") for part in wrapped] or [""]


def text(plan: Plan, contexts: Sequence[int], width: int = ENDLESS) -> str:
    """width: columns that no line passes."""
    rows = [f"  {part.name:<18}{gib(part.size):>11}  {part.basis:<9} {part.note}" for part in plan.parts]
    pool = gib(plan.pool) if plan.pool > 0 else "none"
    lines = [_title(plan), "", *rows, f"  {'KV cache':<18}{pool:>11}  {_pool_basis(plan)}"]
    if plan.gpu is not None:
        lines.append(
            f"  {'outside':<18}{gib(plan.total - plan.requested):>11}  {'':<9} CUDA context {gib(CONTEXT_BYTES)}, "
            f"other programs {gib(plan.used_by_others)}; {gib(plan.outside)} free, {gib(plan.outside_need)} needed"
        )
    lines += ["", *("  " + line for line in bar(plan, min(BAR_WIDTH, width - 4))), ""]
    if plan.pool > 0:
        lines += _capacity_lines(plan, contexts)
    lines += [f"  does not fit: {problem}" for problem in plan.problems] or ["  fits"]
    return "\n".join(part for line in lines for part in (fitted(line, width) if "[" not in line[:3] else [line]))


def _title(plan: Plan) -> str:
    kv = plan.settings.kv_cache_dtype
    tail = f"KV cache {plan.model.dtype if kv == 'auto' else kv}"
    if plan.gpu is None:
        return f"{plan.model.name} on the CPU build, {tail}"
    known = "estimate" if plan.is_estimate else "pool size given"
    return (
        f"{plan.model.name} on {plan.gpu.name} (sm {plan.gpu.sm / 10}, {gib(plan.total)} as the engine sees it), "
        f"{tail}; {known}"
    )


def _pool_basis(plan: Plan) -> str:
    if not plan.is_estimate:
        return "exact     the pool's size is given"
    said = f"{'estimate':<9} {plan.settings.utilization} of {gib(plan.total)} less the above"
    if plan.pool <= 0:
        return f"{said} lacks {gib(-plan.pool)}; {max(-plan.pool_high, 0) / GIB:.2f} to {gib(-plan.pool_low)}"
    return f"{said}; {plan.pool_low / GIB:.2f} to {gib(plan.pool_high)}"


def _capacity_lines(plan: Plan, contexts: Sequence[int]) -> list[str]:
    held = plan.capacity()
    tokens = f"{held.tokens:,} tokens"
    if plan.is_estimate:
        low, high = plan.capacity(plan.pool_low).tokens, plan.capacity(plan.pool_high).tokens
        tokens += f" ({max(low, 0):,} to {high:,})"
    per_token = plan.layout.block_bytes / plan.layout.block_size * len(plan.layout.groups)
    at_most = "up to " if any(group.window for group in plan.layout.groups) else ""
    lines = [
        f"  KV cache {tokens}: {held.blocks:,} blocks of {plan.layout.block_size} tokens, one of them kept back",
        f"  a token {at_most}{per_token / 1024:g} KiB, a block {plan.layout.block_bytes / 1024:g} KiB",
        "  requests at once  "
        + "   ".join(f"{length:,}{_TIED}tokens:{_TIED}{plan.requests_at(length):.1f}" for length in contexts),
    ]
    if plan.gpu is not None and (bound := plan.decode_bound) is not None:
        lines.append(
            f"  one request alone decodes at most {bound:.0f} tokens/s: its weights at {plan.gpu.bandwidth_gb_s:,} GB/s"
        )
    limit = plan.largest_max_model_len
    own = " (the model's own limit)" if limit == plan.model.max_positions else ""
    lines.append(f"  largest safe max-model-len {limit:,}{own}")
    return lines


def verdict(plan: Plan, report: Report, error: float, tolerance: float) -> str:
    """error: planned over reported, less one."""
    held = plan.capacity()
    word = "within" if abs(error) <= tolerance else "BEYOND"
    lines = [
        f"  {'':<22}{'plan':>14}{'engine':>14}",
        f"  {'KV cache tokens':<22}{held.tokens:>14,}{report.tokens:>14,}",
        f"  {'blocks':<22}{held.blocks:>14,}{report.blocks:>14,}",
        f"  error {error * 100:+.2f} %: {word} {tolerance * 100:g} %",
    ]
    return "\n".join(lines)


def as_json(plan: Plan, contexts: Sequence[int]) -> dict[str, Any]:
    held = plan.capacity()
    settings = plan.settings
    return {
        "model": plan.model.name,
        "gpu": plan.gpu.key if plan.gpu else "cpu",
        "settings": {
            "gpu-memory-utilization": settings.utilization,
            "max-model-len": settings.max_model_len,
            "max-num-seqs": settings.max_num_seqs,
            "max-num-batched-tokens": settings.max_num_batched_tokens,
            "block-size": settings.block_size,
            "kv-cache-dtype": settings.kv_cache_dtype,
        },
        "total_bytes": plan.total,
        "requested_bytes": plan.requested,
        "parts": [{"name": p.name, "bytes": p.size, "basis": p.basis, "note": p.note} for p in plan.parts],
        "kv_cache": {
            "basis": "estimate" if plan.is_estimate else "exact",
            "bytes": plan.pool,
            "bytes_low": plan.pool_low,
            "bytes_high": plan.pool_high,
            "block_bytes": plan.layout.block_bytes,
            "blocks": held.blocks,
            "tokens": held.tokens,
            "tokens_low": plan.capacity(plan.pool_low).tokens,
            "tokens_high": plan.capacity(plan.pool_high).tokens,
            "max_concurrency": round(held.concurrency, 2),
        },
        "concurrency": {str(length): round(plan.requests_at(length), 2) for length in contexts},
        "decode_bound_tokens_per_s": plan.decode_bound,
        "largest_max_model_len": plan.largest_max_model_len,
        "problems": list(plan.problems),
        "fits": not plan.problems,
    }
