"""What an engine's start-up log says of its KV cache, its attention backend and its kernels. Pure; vLLM 0.6 to 0.33.

Read in the releases' sources:
- blocks    V0 `# GPU blocks: N, # CPU blocks: M` (from 0.7 `# cuda blocks`), V1 in 0.7 its first half; V1 from 0.8 on
            `GPU KV cache size: T tokens` and a second line with the concurrency; from 0.28 on both in one line
- backend   up to 0.6.5 a line only where it is not FlashAttention; then `Using Flash Attention backend[ on V1 engine]`;
            from 0.12 on `Using FLASH_ATTN attention backend out of potential backends: [...]`; none on the CPU
- AWQ       up to 0.23 `Using awq_marlin kernel` or `forcing awq`; `Using X for ...Method` names the kernel itself
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from scripts.checks.proof import ProofError

_START = re.compile(r"vLLM API server version (\d\S*)|█.*\bversion (\d\S*)")
_ENGINE = re.compile(r"Initializing (?:a |an )?(?:(V\d) )?LLM engine \(v([^)]+)\) with config: (.*)")
_BLOCKS = re.compile(r"# (\w+) blocks: (\d+)(?:, # CPU blocks: (\d+))?")
_TOKENS = re.compile(r"KV cache size: ([\d,]+) tokens")
_CONCURRENCY = re.compile(r"Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x")
_POOL = re.compile(
    r"Available KV cache memory: ([\d.]+) GiB|reserved for KV Cache is ([\d.]+)GiB|set \(([\d.]+)/[\d.]+\) GiB for KV"
)
_OUT_OF = re.compile(r"Using (\S+) attention backend out of potential backends: (\[.*?\]|\(.*?\))")
_BACKEND = re.compile(r"Using (.+?) backend(?: with \S+ KV cache layout)?(?: on V1 engine(?: by default\b.*)?)?\.?\s*$")
_REFUSED = re.compile(r"(Cannot use \S+ backend .*|FP8 KV [Cc]ache .*not .*)")
_KERNEL = re.compile(
    r"Using (\w+) for (\w*(?:LinearMethod|mixed-precision linear))|Using (\w+) for mixed-precision linear"
)
_MARLIN = re.compile(r"is convertible to (\w+) during runtime")
_FORCED = re.compile(r"so forcing (\w+)\.")
_READY = re.compile(r"Application startup complete|Uvicorn running on|Starting vLLM (?:API )?server")
_PID = re.compile(r"\(APIServer pid=(\d+)\)")
# "Using X backend" is said of other things too.
_OTHER_BACKENDS = re.compile(
    r"MLA|layout for|vit attention|structured|guided|distributed|all2all|[Cc]ompil|init_method"
)
_NAMES = {
    "flash attention": "FLASH_ATTN",
    "flashattention": "FLASH_ATTN",
    "flashinfer": "FLASHINFER",
    "xformers": "XFORMERS",
    "triton": "TRITON_ATTN",
    "triton attention": "TRITON_ATTN",
    "flexattention": "FLEX_ATTENTION",
    "torch sdpa": "TORCH_SDPA",
}


@dataclass(frozen=True)
class StartLog:
    """The last start in a log. What it does not say is None or empty; `whole` means the server came up.

    tokens: as the line says, or from V0's blocks once the block size is known (blocks alone is None in newer logs).
    """

    version: str | None
    pid: int | None
    engine: str | None
    device: str | None
    quantization: str | None
    kv_cache_dtype: str | None
    prefix_caching: bool | None
    blocks: int | None
    tokens: int | None
    concurrency: float | None
    concurrency_length: int | None
    pool_gib: float | None
    backend: str | None
    potential: tuple[str, ...]
    refusals: tuple[str, ...]
    kernels: tuple[str, ...]
    forced: str | None
    convertible: str | None
    kv_line: str
    whole: bool


def parse_log(text: str) -> StartLog:
    """Raises ProofError for a text that holds no start of a vLLM."""
    starts = list(_START.finditer(text))
    engines = list(_ENGINE.finditer(text))
    if not starts and not engines:
        raise ProofError("no start of a vLLM in it (no version line): give the engine's own log, from its beginning")
    # Logs of several starts lie one behind the other; the last one is the engine that runs.
    begin = max((starts or engines)[-1].start(), 0)
    text = text[text.rfind("\n", 0, begin) + 1 :]
    engine = _ENGINE.search(text)
    config = engine[3] if engine else ""
    start = _START.search(text)
    version = (start and (start[1] or start[2])) or (engine[2] if engine else None)
    pid, tokens, concurrency, pool = (pattern.search(text) for pattern in (_PID, _TOKENS, _CONCURRENCY, _POOL))
    blocks = _BLOCKS.search(text)
    backend, potential = _backend(text)
    caching = _said(config, "enable_prefix_caching")
    kv_lines = [line.strip() for line in text.splitlines() if _TOKENS.search(line) or _BLOCKS.search(line)]
    convertible, forced = _MARLIN.search(text), _FORCED.search(text)
    return StartLog(
        version=version.rstrip(",;") if version else None,
        pid=int(pid[1]) if pid else None,
        engine=(engine[1] or "V0") if engine else None,
        device=_said(config, "device_config"),
        quantization=_said(config, "quantization"),
        kv_cache_dtype=_said(config, "kv_cache_dtype"),
        prefix_caching=None if caching is None else caching == "True",
        blocks=int(blocks[2]) if blocks else None,
        tokens=_number(tokens[1]) if tokens else None,
        concurrency=float(concurrency[2]) if concurrency else None,
        concurrency_length=_number(concurrency[1]) if concurrency else None,
        pool_gib=float(pool[1] or pool[2] or pool[3]) if pool else None,
        backend=backend,
        potential=potential,
        refusals=tuple(dict.fromkeys(match[1].strip() for match in _REFUSED.finditer(text))),
        kernels=tuple(dict.fromkeys(match[1] or match[3] for match in _KERNEL.finditer(text))),
        forced=forced[1] if forced else None,
        convertible=convertible[1] if convertible else None,
        kv_line=kv_lines[0] if kv_lines else "",
        whole=_READY.search(text) is not None,
    )


def _backend(text: str) -> tuple[str | None, tuple[str, ...]]:
    """The decoder's backend under its present name, and the candidates where the log lists them."""
    if found := _OUT_OF.search(text):
        return _canonical(found[1]), tuple(re.findall(r"[A-Z][A-Z0-9_]+", found[2]))
    for line in text.splitlines():
        found = _BACKEND.search(line)
        if found and not _OTHER_BACKENDS.search(line):
            return _canonical(found[1]), ()
    return None, ()


def _canonical(name: str) -> str:
    bare = name.rpartition(".")[2] if "Enum." in name or name.startswith("_Backend.") else name
    return _NAMES.get(bare.lower().strip(), bare)


def _said(config: str, key: str) -> str | None:
    """A value of the engine's config line; None where it is not there."""
    found = re.search(rf"\b{key}='?([^,'\s)]+)", config)
    return found[1] if found else None


def _number(text: str) -> int:
    return int(text.replace(",", ""))
