"""Asks the pinned engine's own attention classes which backend a card would get. Runs under .venv-engine's Python.

The CPU wheel carries the same Python sources as the CUDA wheel, but none of its compiled kernels. Their modules are
stood in for by empty ones so that the classes can be imported; every verdict is the engine's own code, asked for a
card of the given compute capability. One JSON request a line on stdin, one JSON answer a line on stdout.
"""

import importlib.machinery
import json
import sys
import types

KERNELS = (
    "flashinfer",
    "flashinfer.decode",
    "flashinfer.prefill",
    "flashinfer.utils",
    "vllm._C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)


class Kernels(types.ModuleType):
    """Stands for a module of compiled kernels: any name can be imported from it, none does anything."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


answers = sys.stdout
sys.stdout = sys.stderr  # the engine prints while it is imported
for module_name in KERNELS:
    module = Kernels(module_name)
    module.__spec__ = importlib.machinery.ModuleSpec(module_name, None, is_package=True)
    module.__path__ = []
    sys.modules[module_name] = module

import vllm.platforms  # noqa: E402
from vllm.platforms.cuda import CudaPlatformBase  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402


class Card(CudaPlatformBase):
    sm = 90

    @classmethod
    def get_device_capability(cls, device_id=0):
        return DeviceCapability(*divmod(cls.sm, 10))

    @classmethod
    def get_device_name(cls, device_id=0):
        return f"a card of compute capability {cls.sm / 10}"

    @classmethod
    def num_compute_units(cls, device_id=0):
        return 128


vllm.platforms._current_platform = Card()

import torch  # noqa: E402
from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.utils.import_utils import resolve_obj_by_qualname  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402
from vllm.v1.attention.selector import AttentionSelectorConfig  # noqa: E402

HEADS = 32


def answer(request):
    """valid: backends in the engine's order. chosen: the one it takes. refusal: why it would not start."""
    Card.sm = request["sm"]
    config = AttentionSelectorConfig(
        head_size=request["head_size"],
        dtype=getattr(torch, request["dtype"]),
        kv_cache_dtype=request["kv_cache_dtype"],
        block_size=request["block_size"],
    )
    valid, invalid = Card.get_valid_backends(Card.get_device_capability(), config, HEADS)
    found = {
        "valid": [candidate.backend.name for candidate in sorted(valid, key=lambda c: c.priority)],
        "invalid": {backend.name: reasons for backend, (_, reasons) in invalid.items()},
        "chosen": None,
        "refusal": None,
    }
    wanted = request["attention_backend"]
    try:
        selected = AttentionBackendEnum[wanted] if wanted else None
        backend = resolve_obj_by_qualname(Card.get_attn_backend_cls(selected, config, HEADS))
        found["chosen"] = backend.get_name()
        if found["chosen"] == "TRITON_ATTN":  # checks the card once more where its layers are built
            with set_current_vllm_config(VllmConfig()):
                backend.get_impl_cls()(HEADS, config.head_size, 1.0, HEADS, None, None, config.kv_cache_dtype)
    except ValueError as error:
        found["refusal"] = str(error)
    return found


for line in sys.stdin:
    print(json.dumps(answer(json.loads(line))), file=answers, flush=True)
