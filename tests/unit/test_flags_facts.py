"""Every claim of the two guides that 4090 owners follow gets the truth about it."""

import pytest

from tests.unit.flags_answers import entries, findings, verdicts

# (claim as a guide would put it, the table's entry, its verdict)
CLAIMS = [
    ("vllm serve m --enable-paged-attn", "enable-paged-attn", "never existed"),
    ("提示“不支持Paged Attention”", "paged-attention-not-supported", "never existed"),
    ("若仍报 “PagedAttention not supported”", "paged-attention-not-supported", "never existed"),
    ("引擎会回退到低效的连续显存分配模式", "contiguous-fallback", "never existed"),
    ("检查并移除可能冲突的 --enable-prefix-caching", "remove-prefix-caching", "wrong"),
    ("vllm serve m --enable-prefix-caching", "enable-prefix-caching", "harmless"),
    ("vllm serve m --disable-log-stats", "disable-log-stats", "harmful"),
    ("关闭日志缓存预留的显存", "logs-take-gpu-memory", "wrong"),
    ("vllm serve m --block-size 256", "block-size-large", "harmful"),
    ("vllm serve m --block-size 512", "block-size-large", "harmful"),
    ("256 是通用的最优值", "block-size-optimum", "wrong"),
    ("vllm serve m --block-size 32", "block-size-32", "unverifiable"),
    ("--block-size 32 能提升 12% 吞吐", "block-size-12-percent", "unverifiable"),
    ("而非默认的32768", "max-model-len-default", "wrong"),
    ("必须指定，否则默认 4096", "max-model-len-default", "wrong"),
    ("超长输入会被截断且无报错", "silent-truncation", "wrong"),
    ("long prompts are silently truncated", "silent-truncation", "wrong"),
    ("--max-model-len 4096 可减少超过75%的预分配页块", "max-model-len-75-percent", "wrong"),
    ("vllm serve m --max-model-len 4096", "max-model-len", "real"),
    ("vllm serve m --max-num-seqs 256", "max-num-seqs-256", "harmless"),
    ("vllm serve m --disable-cuda-graph", "disable-cuda-graph", "never existed"),
    ("CUDA Graph 可能锁定部分页帧", "cuda-graphs-lock-pages", "wrong"),
    ("vllm serve m --enforce-eager", "enforce-eager", "harmful"),
    ("--enforce-eager：避免某些 tokenizer 问题", "eager-for-tokenizers", "wrong"),
    ("fp8 只占 FP16 的四分之一", "fp8-a-quarter", "wrong"),
    ("vllm serve m --kv-cache-dtype fp8", "kv-cache-dtype-fp8", "real"),
    ("vllm serve m --disable-log-requests", "disable-log-requests", "removed"),
    ("vllm serve m --log-level debug", "log-level", "renamed"),
    ("日志里有 “PagedAttention backend initialized”", "log-lines", "never existed"),
    ("日志里有 “Using block size: 256”", "log-lines", "never existed"),
    ("显存增量 ≤2.1 GB 则表明生效", "nvidia-smi-delta", "wrong"),
    ('/health 应包含 "paged_attn": true', "health-json", "never existed"),
    ("回退：切换至FlashAttention-2后端", "fall-back-to-fa2", "wrong"),
    ("pip install vllm[flashattn] --no-cache-dir", "flashattn-extra", "never existed"),
    ("vllm serve m --attention-backend flash-attn", "attention-backend-spelling", "renamed"),
    ("根据FlashAttention-2对上下文长度的要求", "fa2-minimum-length", "wrong"),
    ("vllm-entrypoint --model m", "vllm-entrypoint", "never existed"),
    ("python -m awq.entry --model_name_or_path m --w_bit 4", "awq-entry", "never existed"),
    ("AWQ 模型必须带 --quantization awq", "quantization-flag-mandatory", "wrong"),
    ("vllm serve m --quantization awq", "quantization-awq", "harmless"),
    ("vllm serve m --gpu-memory-utilization 0.92", "gpu-memory-utilization-default", "harmless"),
    ("vllm serve m --swap-space 4", "swap-space", "removed"),
    ("当 vllm:cache_hit_ratio < 0.7", "cache_hit_ratio", "never existed"),
    ("当 vllm:gpu_cache_usage_ratio 高", "gpu_cache_usage_ratio", "never existed"),
    ("持续 > 0.85，就调低 --gpu-memory-utilization", "lower-utilization-when-full", "wrong"),
    ("Docker 里 --shm-size=2g 必加", "shm-mandatory", "unverifiable"),
    ("docker run --shm-size=2g vllm/vllm-openai:v0.32.0 --model m", "shm-size", "real"),
    ("BATCH_TRIGGER_MS = 15", "batching-snippet", "harmful"),
    ("驱动版本低于515.48.07", "driver-515", "wrong"),
    ("版本≥0.5.3且CUDA版本≥12.1", "fp8-needs", "wrong"),
    ("该值需为2的幂，并对齐头的维度（128）", "block-size-head-dimension", "wrong"),
    ("prompt 要有 system/user/assistant 三段式", "prefix-structure", "wrong"),
    ("设太高（如 0.95）会 OOM", "util-095-ooms", "wrong"),
    ("vLLM 0.6.2 有 bug", "llama3-tokenizer-062", "unverifiable"),
    ("FP16 占 15.6GB，量化后 6.2GB", "weights-15-6-gb", "wrong"),
    ("从 3.2 req/s 到 18.7 req/s", "unverifiable-figures", "unverifiable"),
    ("碎片率从 >65% 降到 <12%", "unverifiable-figures", "unverifiable"),
    ("二次响应快 3x", "unverifiable-figures", "unverifiable"),
]


@pytest.mark.parametrize(("paste", "entry", "verdict"), CLAIMS, ids=[f"{c[1]}-{n}" for n, c in enumerate(CLAIMS)])
def test_each_claim_gets_its_truth(paste: str, entry: str, verdict: str) -> None:
    assert entries(paste).get(entry) == verdict


def test_measured_effects_name_their_hardware() -> None:
    (eager,) = [f for f in findings("vllm serve m --enforce-eager") if f.entry == "enforce-eager"]
    assert eager.effect and "14.2 req/s" in eager.effect.en and "35.8 req/s" in eager.effect.en
    assert eager.hardware and "H200" in eager.hardware.en and "H200" in eager.hardware.zh


GUIDE_COMMANDS = {
    """vllm-entrypoint --model ./llama3-8b-awq --tensor-parallel-size 1 --pipeline-parallel-size 1 --dtype half
    --quantization awq --max-model-len 8192 --block-size 32 --gpu-memory-utilization 0.92 --swap-space 4
    --enable-prefix-caching --enforce-eager""": {
        "vllm-entrypoint": "never existed",
        "--model ./llama3-8b-awq": "real",
        "--tensor-parallel-size 1": "harmless",
        "--pipeline-parallel-size 1": "harmless",
        "--dtype half": "real",
        "--quantization awq": "harmless",
        "--max-model-len 8192": "real",
        "--block-size 32": "unverifiable",
        "--gpu-memory-utilization 0.92": "harmless",
        "--swap-space 4": "removed",
        "--enable-prefix-caching": "harmless",
        "--enforce-eager": "harmful",
    },
    """vllm serve … --enable-paged-attn --block-size 256 --max-model-len 4096 --max-num-seqs 256 --disable-cuda-graph
    --kv-cache-dtype fp8 --disable-log-requests --disable-log-stats --log-level debug""": {
        "vllm serve": "real",
        "--enable-paged-attn": "never existed",
        "--block-size 256": "harmful",
        "--max-model-len 4096": "real",
        "--max-num-seqs 256": "harmless",
        "--disable-cuda-graph": "never existed",
        "--kv-cache-dtype fp8": "real",
        "--disable-log-requests": "removed",
        "--disable-log-stats": "harmful",
        "--log-level debug": "renamed",
    },
    "vllm serve … --attention-backend flash-attn --dtype auto --enforce-eager --max-model-len 8192": {
        "vllm serve": "real",
        "--attention-backend flash-attn": "renamed",
        "--dtype auto": "harmless",
        "--enforce-eager": "harmful",
        "--max-model-len 8192": "real",
    },
}


@pytest.mark.parametrize("command", GUIDE_COMMANDS, ids=["tuning", "paged", "flash-attention"])
def test_the_guides_whole_command_lines(command: str) -> None:
    assert verdicts(command) == GUIDE_COMMANDS[command]


def test_an_engine_of_that_time_is_judged_by_its_own_flags() -> None:
    """The same line on 0.6.3, for those who still run it."""
    command = (
        "vllm serve m --swap-space 4 --enable-prefix-caching --block-size 256 --log-level debug --quantization awq"
    )
    assert verdicts(command, "0.6.3") == {
        "vllm serve": "real",
        "--swap-space 4": "harmless",
        "--enable-prefix-caching": "real",
        "--block-size 256": "wrong value",
        "--log-level debug": "not yet",
        "--quantization awq": "harmful",
    }
    assert entries("vllm serve m --log-level debug", "0.26.0")["log-level-absent"] == "not yet"
