"""Which attention backend and which AWQ kernel run, and why this one on this card. Pure.

The rules are those of ENGINES, read in the releases' sources: every backend of vLLM reads the block table, so none of
them is "without paged attention"; what differs is speed, and which KV dtypes have a kernel.
"""

from __future__ import annotations

from scripts.checks import Check, judged, ok, skip, warn
from scripts.checks.proof.log import StartLog

ATTENTION, AWQ = "attention", "AWQ kernel"
_FAST = ("Marlin", "Machete", "Cutlass", "CutlassW4A8", "Exllama", "Conch", "AllSpark", "CPU", "Dynamic4bit", "XPU")


def attention(log: StartLog | None, version: str | None, sm: int | None, cache_dtype: str | None) -> Check:
    """sm: the card's compute capability times ten, None where it is not known."""
    expected = "the log names the backend"
    if log is None:
        return skip(ATTENTION, expected, "no start-up log was given (--log FILE)")
    release = _release(log.version or version)
    named = log.backend or _silent(log, release)
    if named is None:
        return skip(ATTENTION, expected, f"the log of vLLM {log.version} names none")
    candidates = f" out of {', '.join(log.potential)}" if log.potential else ""
    found = f"{named}{candidates}"
    if log.refusals:
        found += f"; the engine's reason: {log.refusals[0]}"
    return ok(ATTENTION, expected, f"{found}; {explain(named, log, release, sm, cache_dtype)}")


def _silent(log: StartLog, release: tuple[int, ...]) -> str | None:
    """A backend told by silence: the CPU build has no choice, and up to 0.6.5 FlashAttention was not announced."""
    if log.device == "cpu":
        return "CPU_ATTN" if release >= (0, 11) else "TORCH_SDPA"
    if log.device == "cuda" and (0, 6) <= release < (0, 6, 6) and not log.refusals:
        return "FLASH_ATTN"
    return None


def explain(named: str, log: StartLog, release: tuple[int, ...], sm: int | None, cache_dtype: str | None) -> str:
    """Why this backend. Says so where no rule is known, rather than guess."""
    if log.device == "cpu":
        return "the CPU build's one backend for decoders; it reads the block table like every other"
    if log.device is not None and log.device != "cuda":
        return f"no rule is known for device {log.device}"
    fp8 = (log.kv_cache_dtype or cache_dtype or "auto").startswith("fp8")
    if named == "FLASH_ATTN":
        if log.backend is None:
            return "this release announces every backend but FlashAttention, the default from sm 8.0 on"
        if fp8:
            return "FlashAttention 3 has the fp8 kernels (sm 9.0)" if sm in (None, 90) else _unknown(sm)
        return "the default from sm 8.0 on; its kernels are paged"
    if release and release < (0, 8) and log.engine == "V0":
        return _explain_v0(named, fp8, sm)
    if sm is None:
        return "why this one is not told: the card's compute capability is not known here"
    if sm < 80:
        return (
            f"FlashAttention needs sm 8.0 and this card has {sm / 10}: a fallback by architecture, paged all the same"
        )
    if named in ("FLASHINFER", "TRITON_ATTN") and fp8 and sm // 10 in (8, 12):
        other = "FlashInfer can't build or isn't there" if named == "TRITON_ATTN" else "FlashInfer has one"
        if named == "TRITON_ATTN" and sm < 89:
            return _unknown(sm)
        return f"FlashAttention has no fp8 kernel on sm {sm / 10}: {other}, and it is paged all the same"
    if named == "FLASHINFER" and sm // 10 == 10:
        return "the first choice on sm 10.x"
    return _unknown(sm)


def _explain_v0(named: str, fp8: bool, sm: int | None) -> str:
    if named == "XFORMERS" and fp8:
        return "V0's FlashAttention has no fp8 KV kernel; XFormers runs V0's own paged kernels"
    if named == "XFORMERS" and sm is not None and sm < 80:
        return f"FlashAttention 2 needs sm 8.0 and this card has {sm / 10}; XFormers runs V0's own paged kernels"
    return "chosen by a flag or variable, or for a reason the log does not give; its kernels are paged"


def _unknown(sm: int | None) -> str:
    where = "this card" if sm is None else f"sm {sm / 10}"
    return f"no rule is known that picks it on {where}: was it asked for by --attention-backend?"


def awq(log: StartLog | None) -> Check:
    """Marlin or Machete where the card has them; `forcing awq` is the slow kernel of releases up to 0.23."""
    expected = "an AWQ model runs on a fast kernel (Marlin, Machete)"
    if log is None:
        return skip(AWQ, expected, "no start-up log was given (--log FILE)")
    if log.quantization in (None, "None"):
        why = "the model is not quantized" if log.quantization else "the log does not say how the model is quantized"
        return skip(AWQ, expected, why)
    if "awq" not in log.quantization:
        return skip(AWQ, expected, f"the model is quantized by {log.quantization}")
    if log.forced:
        fix = "start it without --quantization awq: it is found in config.json, and Marlin is taken by itself"
        return warn(AWQ, expected, "the slow one: --quantization awq forced it", fix)
    if log.kernels:
        fast = any(kernel.startswith(_FAST) for kernel in log.kernels)
        fix = "see which cards and group sizes Marlin takes; `make doctor` names the card"
        return judged(fast, AWQ, expected, ", ".join(log.kernels), fix, "warn")
    if log.convertible:
        return ok(AWQ, expected, f"{log.convertible} (found convertible at the start)")
    if log.quantization == "awq_marlin":
        return ok(AWQ, expected, "awq_marlin, as the engine's configuration says")
    return skip(AWQ, expected, f"quantization {log.quantization}, but the log names no kernel")


def _release(version: str | None) -> tuple[int, ...]:
    """(0, 6, 3) of "0.6.3.post1"; empty where it is not known."""
    parts = (version or "").split("+")[0].split(".")
    numbers = []
    for part in parts:
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)
