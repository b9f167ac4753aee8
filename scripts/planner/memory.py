"""Where a card's memory goes, in the order in which vLLM 0.32 takes it (v1/worker/gpu_worker.py).

    pool = ceil(total * utilization) - weights - buffers - other - transient peak - CUDA graphs

weights, buffers and the pool's arithmetic follow from shapes. The three estimates carry one measured constant each,
all from one start-up log (calibration.yaml, `fit`); the points in `test` were not used to choose them.
"""

import math
from dataclasses import dataclass

from scripts.planner import PlanError
from scripts.planner.gpus import Gpu
from scripts.planner.kv import Capacity, KvLayout, capacity, kv_layout
from scripts.planner.model import Model, dtype_bytes
from scripts.planner.numbers import GIB, MIB, gib
from scripts.planner.settings import Settings

OTHER_BYTES = round(0.18 * GIB)  # CUDA libraries' workspaces, allocator slack, the engine's small buffers
GRAPH_BYTES = 5 * MIB  # reserved for one captured CUDA graph
CONTEXT_BYTES = round(0.38 * GIB)  # CUDA context: outside the engine's share, but not free either
FLASHINFER_WORKSPACE = 394 * MIB  # VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE, first touched while graphs are captured
RUNTIME_SLACK = 150 * MIB  # what the engine itself holds back when it suggests a pool size
ESTIMATE_BAND = 0.5  # every estimate may be off by half either way
EXPERTS_BAND = 1.0  # twice that for expert kernels, whose scratch differs from backend to backend


@dataclass(frozen=True)
class Part:
    """basis: read (from the checkpoint), computed (from shapes), or estimate."""

    name: str
    size: int
    basis: str
    note: str
    band: float = 0.0


@dataclass(frozen=True)
class Plan:
    """One model on one card. low and high bound the pool by the estimates' bands; the pool itself is the middle."""

    model: Model
    gpu: Gpu | None
    settings: Settings
    layout: KvLayout
    parts: tuple[Part, ...]
    total: int
    requested: int
    pool: int
    pool_low: int
    pool_high: int
    used_by_others: int = 0

    def capacity(self, pool: int | None = None) -> Capacity:
        return capacity(self.layout, self.pool if pool is None else pool, self.settings.max_model_len)

    def requests_at(self, length: int) -> float:
        """How many requests of `length` tokens the pool holds at once."""
        return self.capacity().blocks / self.layout.request_blocks(length)

    @property
    def largest_max_model_len(self) -> int:
        """The longest context that fits at the low end of the estimate, up to the model's own limit; 0 = none."""
        return self.layout.largest_length(self.capacity(self.pool_low).blocks, self.model.max_positions)

    @property
    def decode_bound(self) -> float | None:
        """Tokens a second that a lone request cannot exceed: each reads every weight but the input embedding once.

        None on the CPU build, and for a mixture of experts, which reads only some of its weights.
        """
        if self.gpu is None or self.model.experts is not None:
            return None
        table = 0 if self.model.tied else self.model.padded_vocab * self.model.hidden * dtype_bytes(self.model.dtype)
        return round(self.gpu.bandwidth_gb_s * 1e9 / (self.parts[0].size - table), 1)

    @property
    def is_estimate(self) -> bool:
        return self.pool_low != self.pool_high

    @property
    def problems(self) -> tuple[str, ...]:
        """Why the engine would not start or not last, one sentence each; empty when it fits with margin."""
        found = []
        fits_low = self.layout.largest_length(self.capacity(self.pool_low).blocks, self.settings.max_model_len)
        if self.pool_low <= 0:
            found.append(
                f"no room for a KV cache: {gib(max(self.requested, 0))} of the card is the engine's share and the "
                f"rest of it takes up to {gib(self.requested - self.pool_low)}, {gib(-self.pool_low)} too much"
            )
        elif fits_low < self.settings.max_model_len:
            found.append(
                f"one request of {self.settings.max_model_len:,} tokens may not fit: write max-model-len: "
                f"{self.largest_max_model_len // 16 * 16}"
            )
        if self.gpu is not None:
            found += self._outside_problems()
        return tuple(found)

    @property
    def outside(self) -> int:
        """Bytes of the card beyond the engine's share, its context and other programs."""
        return self.total - self.requested - CONTEXT_BYTES - self.used_by_others

    @property
    def outside_need(self) -> int:
        """What profiling does not see: sampling with top-p (two fp32 copies of the logits), and the engine's slack."""
        sampling = self.settings.max_num_seqs * self.model.padded_vocab * 8
        return max(sampling - transient_bytes(self.model, self.settings), 0) + RUNTIME_SLACK

    def _outside_problems(self) -> list[str]:
        if self.outside < 0:
            safe = (self.total - CONTEXT_BYTES - self.used_by_others - self.outside_need) / self.total
            asked = f"gpu-memory-utilization {self.settings.utilization} asks for {gib(self.requested)}"
            free = gib(self.outside + self.requested)
            return [f"{asked}, but only {free} is free at start-up: write at most {math.floor(safe * 100) / 100}"]
        if self.outside < self.outside_need:
            free, need = gib(self.outside), gib(self.outside_need)
            sampling = f"sampling {self.settings.max_num_seqs} requests with top-p may take {need}"
            fix = "lower gpu-memory-utilization or max-num-seqs"
            return [f"only {free} stays outside the engine's share; {sampling}: {fix}"]
        return []


def transient_bytes(model: Model, settings: Settings) -> int:
    """Peak of one forward pass over a full batch: the feed-forward's input, gate, up and product beside the residual.

    Or, where that is larger, the logits of max_num_seqs requests beside the hidden states.
    """
    size, tokens = dtype_bytes(model.dtype), settings.max_num_batched_tokens
    width = 3 * model.intermediate
    if model.experts is not None:
        width = model.experts.top_k * (3 * model.experts.width + model.hidden)
    attention = 2 * (model.heads + model.kv_heads) * model.head_dim
    forward = tokens * (max(width, attention) + 2 * model.hidden) * size
    sampling = (settings.max_num_seqs * model.padded_vocab + tokens * model.hidden) * size
    return max(forward, sampling)


def buffer_bytes(model: Model, settings: Settings) -> int:
    """Kept for the engine's life: penalty counts (4 bytes and one bit a sequence and token id), rotary table."""
    penalties = settings.max_num_seqs * (model.vocab * 4 + model.vocab // 8)
    return penalties + model.max_positions * model.head_dim * dtype_bytes(model.dtype)


def graph_count(settings: Settings) -> int:
    """Captured graphs: a mixed one for each batch size of the default list, a decode one up to max_num_seqs."""
    if settings.enforce_eager:
        return 0
    limit = min(settings.max_num_seqs * 2, 512, settings.max_num_batched_tokens)
    sizes = {1, 2, 4, *range(8, 256, 8), *range(256, 513, 16), settings.max_num_seqs}
    mixed = [size for size in sizes if size <= limit]
    decode = [size for size in mixed if size <= settings.max_num_seqs]
    return len(mixed) + len(decode)


def plan_gpu(model: Model, gpu: Gpu, settings: Settings, weights: Part, used_by_others: int = 0) -> Plan:
    """weights: the first part, read from a checkpoint or computed. used_by_others: bytes other programs hold."""
    _refuse_unservable(model, gpu)
    backend = attention_backend(gpu.sm, settings)
    workspace = FLASHINFER_WORKSPACE if backend == "FLASHINFER" else 0
    graphs = graph_count(settings)
    experts = EXPERTS_BAND if model.experts is not None else ESTIMATE_BAND
    parts = (
        weights,
        Part("engine buffers", buffer_bytes(model, settings), "computed", f"{settings.max_num_seqs} sequences"),
        Part("non-torch, slack", OTHER_BYTES, "estimate", "CUDA libraries, allocator", ESTIMATE_BAND),
        Part(
            "transient peak",
            transient_bytes(model, settings),
            "estimate",
            f"{settings.max_num_batched_tokens} tokens a batch",
            experts,
        ),
        Part(
            "CUDA graphs",
            graphs * GRAPH_BYTES + workspace,
            "estimate",
            f"{graphs} graphs" + (" and FlashInfer's workspace" if workspace else ""),
            ESTIMATE_BAND,
        ),
    )
    total = gpu.engine_total_bytes
    requested = math.ceil(total * settings.utilization)
    in_flight = 2 * settings.max_num_batched_tokens  # asynchronous scheduling keeps two batches under way
    layout = kv_layout(model, settings.kv_cache_dtype, settings.block_size, in_flight)
    if settings.kv_cache_bytes is not None:
        pool = low = high = settings.kv_cache_bytes
        requested = pool + sum(part.size for part in parts)
    else:
        pool = requested - sum(part.size for part in parts)
        spread = round(sum(part.size * part.band for part in parts) + requested * gpu.total_band)
        low, high = pool - spread, pool + spread
    return Plan(model, gpu, settings, layout, parts, total, requested, pool, low, high, used_by_others)


def plan_cpu(model: Model, settings: Settings, weights: Part) -> Plan:
    """The CPU build's pool is what VLLM_CPU_KVCACHE_SPACE says, so its tokens are exact."""
    if settings.kv_cache_bytes is None:
        raise PlanError(
            "on the CPU the pool is a number you choose: pass --kv-cache-gib N (the engine's VLLM_CPU_KVCACHE_SPACE)"
        )
    layout = kv_layout(model, settings.kv_cache_dtype, settings.block_size, settings.max_num_batched_tokens)
    pool = settings.kv_cache_bytes
    total = pool + weights.size
    return Plan(model, None, settings, layout, (weights,), total, total, pool, pool, pool)


def attention_backend(sm: int, settings: Settings) -> str:
    """The engine's own choice on CUDA for a plain decoder (checked against its classes in tests/engine_args)."""
    if settings.attention_backend is not None:
        return settings.attention_backend
    if sm < 80:
        return "TRITON_ATTN"
    fp8 = settings.kv_cache_dtype.startswith("fp8")
    return "FLASHINFER" if sm // 10 == 10 or (fp8 and sm // 10 != 9) else "FLASH_ATTN"


def _refuse_unservable(model: Model, gpu: Gpu) -> None:
    needed = {"awq": 75, "gptq": 60, "fp8": 75, "compressed-tensors": 75}
    if model.quant is not None and gpu.sm < needed[model.quant.method]:
        raise PlanError(
            f"{model.quant.label} needs compute capability {needed[model.quant.method] / 10}; "
            f"{gpu.name} has {gpu.sm / 10}"
        )
    if model.dtype == "bfloat16" and gpu.sm < 80:
        raise PlanError(f"{gpu.name} (compute capability {gpu.sm / 10}) has no bfloat16; use a float16 checkpoint")
