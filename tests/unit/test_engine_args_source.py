"""Reading a release's flags out of its source, on small packages laid out the ways vLLM's releases are."""

from pathlib import Path

import pytest

from scripts.engine_args import source
from scripts.engine_args.vocabulary import Flag, Metric

REQUIRED = """
    parser.add_argument("--model", type=str, default="facebook/opt-125m")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-model-len", type=int, default=None)
"""


def package(folder: Path, files: dict[str, str]) -> Path:
    """A vllm package of these files."""
    for name, text in files.items():
        path = folder / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "vllm"


def flag(root: Path, name: str) -> Flag:
    return next(flag for flag in source.flags(root) if flag.name == name)


def test_an_explicit_argument_is_read_with_its_choices_and_default(tmp_path: Path) -> None:
    root = package(
        tmp_path,
        {
            "engine/arg_utils.py": f"""
class EngineArgs:
    block_size: int = 16
def add(parser):{REQUIRED}
    parser.add_argument("--block-size", type=int, default=EngineArgs.block_size, choices=[8, 16, 32])
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    parser.add_argument("--enforce-eager", action="store_true")
""",
        },
    )
    assert flag(root, "--block-size") == Flag(("--block-size",), "value", "int", (8, 16, 32), (), 16)
    assert flag(root, "--tensor-parallel-size").names == ("--tensor-parallel-size", "-tp")
    assert flag(root, "--enforce-eager").form == "switch"


def test_a_config_field_gives_type_choices_and_negative_form_through_imports(tmp_path: Path) -> None:
    root = package(
        tmp_path,
        {
            "config/cache.py": """
from typing import Literal
CacheDType = Literal["auto", "fp8"]
class CacheConfig:
    cache_dtype: CacheDType = "auto"
    enable_prefix_caching: bool | None = None
    sizes: list[int] | None = None
""",
            "config/__init__.py": "from vllm.config.cache import CacheConfig",
            "engine/arg_utils.py": f"""
from vllm.config import CacheConfig
def add(parser):
    cache_kwargs = get_kwargs(CacheConfig)
    group = parser.add_argument_group(){REQUIRED}
    group.add_argument("--kv-cache-dtype", **cache_kwargs["cache_dtype"])
    group.add_argument("--enable-prefix-caching", **{{**cache_kwargs["enable_prefix_caching"], "default": None}})
    group.add_argument("--sizes", **cache_kwargs["sizes"])
""",
        },
    )
    assert flag(root, "--kv-cache-dtype") == Flag(("--kv-cache-dtype",), "value", "str", ("auto", "fp8"), (), "auto")
    assert flag(root, "--enable-prefix-caching").negative == "--no-enable-prefix-caching"
    assert flag(root, "--sizes").form == "list"


def test_each_field_of_the_frontend_classes_is_a_flag(tmp_path: Path) -> None:
    root = package(
        tmp_path,
        {
            "entrypoints/openai/cli_args.py": """
class BaseFrontendArgs:
    chat_template: str | None = None
class FrontendArgs(BaseFrontendArgs):
    model: str = ""
    port: int = 8000
    max_model_len: int = 0
    allowed_origins: list[str] = []
    @classmethod
    def add_cli_args(cls, parser):
        del frontend_kwargs["allowed_origins"]["nargs"]
def make_arg_parser(parser): ...
""",
        },
    )
    assert flag(root, "--chat-template").form == "value"
    assert flag(root, "--allowed-origins").form == "value"


def test_a_layout_that_hides_the_known_flags_is_refused(tmp_path: Path) -> None:
    root = package(tmp_path, {"engine/arg_utils.py": 'parser.add_argument("--model")'})
    with pytest.raises(source.LayoutError, match="--max-model-len --port"):
        source.flags(root)


def test_metrics_are_named_as_exported(tmp_path: Path) -> None:
    root = package(
        tmp_path,
        {
            "engine/metrics.py": """
a = Gauge(name="vllm:num_requests_running", documentation="x")
b = self._counter_cls(name="vllm:prompt_tokens", documentation="x")
c = Histogram("vllm:time_to_first_token_seconds")
d = f"vllm:{name}"
""",
            "benchmarks/serve.py": 'prefix = "vllm:spec_decode"',
        },
    )
    assert source.metrics(root) == [
        Metric("vllm:num_requests_running", "gauge"),
        Metric("vllm:prompt_tokens_total", "counter"),
        Metric("vllm:time_to_first_token_seconds", "histogram"),
    ]


def test_programs_are_the_subcommands_and_the_runnable_modules(tmp_path: Path) -> None:
    root = package(
        tmp_path,
        {
            "entrypoints/api_server.py": 'if __name__ == "__main__":\n    main()',
            "entrypoints/cli/serve.py": 'class ServeSubcommand(CLISubcommand):\n    name = "serve"',
        },
    )
    assert source.programs(root) == ["vllm serve", "vllm.entrypoints.api_server"]


def test_variables_come_from_the_release_s_own_table(tmp_path: Path) -> None:
    root = package(
        tmp_path, {"envs.py": 'environment_variables = {"VLLM_USE_V1": lambda: os.getenv("VLLM_USE_V1", "1")}'}
    )
    assert source.environment(root) == ["VLLM_USE_V1"]
