"""`python -m scripts.plan`: what it prints, its exit codes, and its one line for a mistake."""

import contextlib
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from scripts.checks.probes import ROOT
from scripts.plan import main
from scripts.planner.catalog import find_model
from scripts.planner.gpus import load_gpus
from scripts.planner.memory import plan_gpu
from scripts.planner.render import BAR_WIDTH, text
from scripts.planner.settings import default_settings

# As scraped from vLLM 0.32.0's CPU build (SmolLM2-135M, VLLM_CPU_KVCACHE_SPACE=1), labels that nothing reads left out.
LABELS_032 = {
    "block_size": "128",
    "cache_dtype": "auto",
    "engine": "0",
    "gpu_memory_utilization": "0.92",
    "kv_cache_max_concurrency": "5.6875",
    "kv_cache_memory_bytes": "1073741824",
    "kv_cache_size_tokens": "46592",
    "num_gpu_blocks": "364",
}
CPU = ["--model", "smollm2-135m-instruct", "--gpu", "cpu"]
RTX4090 = ["--model", "llama3-8b-awq", "--gpu", "rtx4090"]


@pytest.fixture(autouse=True)
def _no_models_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELS_DIR", str(tmp_path / "models"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)


def info(labels: dict[str, str]) -> str:
    inside = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return f"# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{{{inside}}} 1.0\n"


@contextmanager
def engine(metrics: str, models: str | None = '{"data":[{"id":"m","max_model_len":8192}]}') -> Iterator[str]:
    """A server on a real socket with the two pages that --verify reads."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = {"/metrics": metrics, "/v1/models": models}.get(self.path)
            self.send_response(200 if page is not None else 401)
            self.end_headers()
            self.wfile.write((page or "").encode())

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


# -- reports ----------------------------------------------------------------------------------------------------------


def test_a_plan_that_fits_exits_0_and_says_what_it_rests_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(RTX4090) == 0
    out = capsys.readouterr().out
    assert "; estimate" in out.splitlines()[0]
    assert "KV cache 125,984 tokens (121,840 to 130,128)" in out
    assert "largest safe max-model-len 8,192 (the model's own limit)" in out
    assert "profiles that ship for it: llama3-8b-awq.rtx4090, llama3-8b-awq.rtx4090.fp8kv" in out


def test_a_pair_without_a_shipped_profile_gets_one_to_start_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "qwen3-8b-awq", "--gpu", "l4"]) == 0
    assert "model: /models/qwen3-8b-awq/current" in capsys.readouterr().out


def test_the_bar_has_its_full_width_and_one_share_for_each_part(capsys: pytest.CaptureFixture[str]) -> None:
    main(RTX4090)
    (bar,) = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip().startswith("[")]
    inside = bar.strip("[]")
    assert len(inside) == BAR_WIDTH
    assert inside.count("█") == round(BAR_WIDTH * 5.334 / 23.52)
    assert inside.count("░") == pytest.approx(BAR_WIDTH * 15.38 / 23.52, abs=1)


@pytest.mark.parametrize("width", [40, 63, 80, 100])
def test_no_line_passes_the_width_and_no_word_is_lost(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    model, weights = find_model("llama3-8b-awq")
    gpu = load_gpus()["rtx4090"]
    plan = plan_gpu(model, gpu, default_settings(model, gpu), weights, 0)
    narrow, wide = text(plan, [1024, 8192], width), text(plan, [1024, 8192])
    assert max(map(len, narrow.splitlines())) <= width
    bars = re.compile(r"\[\S+\]")
    assert bars.sub("", narrow).split() == bars.sub("", wide).split()


def test_a_terminals_width_is_kept() -> None:
    """On a real pseudo-terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    environ = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    child = subprocess.Popen([sys.executable, "-m", "scripts.plan", *RTX4090], stdout=theirs, env=environ, cwd=ROOT)
    os.close(theirs)
    said = b""
    with contextlib.suppress(OSError):  # how a pseudo-terminal whose other end is closed says so
        while piece := os.read(ours, 4096):
            said += piece
    os.close(ours)
    assert child.wait() == 0
    lines = said.decode().splitlines()
    assert len(lines) > 20
    assert max(map(len, lines)) <= 60


def test_a_plan_that_does_not_fit_exits_1_and_offers_one_that_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "llama3.1-8b-awq", "--gpu", "rtx4090"]) == 1
    out = capsys.readouterr().out
    assert "does not fit" in out
    assert "max-model-len: 121584" in out.split("a profile that fits")[1]


def test_a_model_that_fits_no_setting_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "llama3-8b", "--gpu", "rtx4080"]) == 1
    assert "no setting makes llama3-8b fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "card", "says"),
    [
        (
            "llama3-8b",
            "rtx4080",
            "llama3-8b-awq.rtx4080, llama3-8b-awq.rtx4080.fp8kv (make plan PROFILE=llama3-8b-awq.rtx4080)",
        ),
        ("qwen3-8b", "rtx4080", "qwen3-8b-awq (make plan MODEL=qwen3-8b-awq GPU=rtx4080)"),
        ("llama3.1-8b", "rtx3060", "llama3.1-8b-awq (make plan MODEL=llama3.1-8b-awq GPU=rtx3060)"),
    ],
)
def test_a_model_too_large_for_its_card_says_by_how_much_and_what_fits(
    model: str, card: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is named fits, as its own plan or, for a model, a profile out of its plan says."""
    command = ["--model", model, "--gpu", card]
    assert main(command) == 1
    out = capsys.readouterr().out
    (row,) = [line for line in out.splitlines() if line.startswith("  KV cache")]
    assert re.match(r"  KV cache +none  estimate +0\.92 of .* less the above lacks \d\.\d\d GiB; ", row)
    assert " GiB too much\n" in out and f"what fits this card: {says}\n" in out
    assert main([*command, "--json"]) == 1
    for named in json.loads(capsys.readouterr().out)["instead"]:
        if "." + card in named:
            assert main(["--profile", named]) == 0
        else:
            assert main(["--model", named, "--gpu", card]) == 0 or "a profile that fits" in capsys.readouterr().out


def test_where_others_hold_the_card_nothing_is_named_that_would_not_fit_either(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--model", "llama3-8b", "--gpu", "rtx4080", "--used-gib", "13"]) == 1
    assert "fit; take a smaller or a quantized model, or a larger card" in capsys.readouterr().out


def test_json_carries_the_same_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RTX4090, "--json", "--contexts", "8192,2k"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is True
    assert found["kv_cache"]["basis"] == "estimate"
    assert found["kv_cache"]["tokens"] == 125_984
    assert found["kv_cache"]["tokens_low"] == 121_840
    assert found["concurrency"] == {"2000": 62.99, "8192": 15.38}
    assert found["suggested"][0] == "model: /models/llama3-8b-awq/current"
    assert sum(part["bytes"] for part in found["parts"]) + found["kv_cache"]["bytes"] == found["requested_bytes"]


def test_the_picture_is_well_formed_and_as_wide_as_the_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.svg"
    assert main([*RTX4090, "--svg", str(path)]) == 0
    capsys.readouterr()
    root = ET.fromstring(path.read_text())  # noqa: S314 (our own file)
    bars = [rect for rect in root.iter() if rect.tag.endswith("rect") and rect.get("height") == "44"]
    assert len(bars) == 7
    assert sum(float(str(rect.get("width"))) for rect in bars) == pytest.approx(720, abs=0.1)


def test_a_profile_names_its_own_model_and_card(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--profile", "llama3-8b-awq.rtx4090.fp8kv", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["model"], found["gpu"]) == ("llama3-8b-awq", "rtx4090")
    assert found["settings"]["kv-cache-dtype"] == "fp8"


def test_the_cpu_profile_brings_its_own_pool(capsys: pytest.CaptureFixture[str]) -> None:
    """23,296 tokens is what the engine logged with this profile."""
    assert main(["--profile", "smollm2-135m.cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kv_cache"]["tokens"] == 23_296


def test_the_command_line_wins_over_the_profile(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--profile", "llama3-8b-awq.rtx4090", "--utilization", "0.8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["gpu-memory-utilization"] == 0.8


def test_a_total_read_from_the_users_own_card_replaces_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RTX4090, "--total-gib", "23.64", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total_bytes"] == round(23.64 * (1 << 30))


def test_the_cpu_pool_may_come_from_the_engines_own_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    assert main([*CPU, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kv_cache"]["tokens"] == 46_592


# -- verify -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", "/", "/metrics"])
def test_verify_compares_with_what_the_engine_reports(suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    with engine(info(LABELS_032)) as url:
        assert main([*CPU, "--verify", url + suffix]) == 0
    assert "error +0.00 %: within 2 %" in capsys.readouterr().out


def test_verify_takes_the_engines_settings_over_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Otherwise a block size typed wrong would be reported as an error of the arithmetic."""
    with engine(info(LABELS_032)) as url:
        assert main([*CPU, "--block-size", "64", "--verify", url, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["block-size"] == 128
    assert found["verify"] == {"tokens": 46592, "blocks": 364, "error_percent": 0.0}


def test_verify_takes_the_engines_pool_over_the_shells(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    with engine(info(LABELS_032)) as url:
        assert main([*CPU, "--verify", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kv_cache"]["bytes"] == 1 << 30


def test_verify_exits_1_beyond_the_tolerance(capsys: pytest.CaptureFixture[str]) -> None:
    with engine(info(LABELS_032 | {"kv_cache_size_tokens": "40000"})) as url:
        assert main([*CPU, "--verify", url]) == 1
        assert "error +16.48 %: BEYOND 2 %" in capsys.readouterr().out
        assert main([*CPU, "--verify", url, "--tolerance", "20"]) == 0


def test_verify_reads_engines_that_report_blocks_only(capsys: pytest.CaptureFixture[str]) -> None:
    """Engines before kv_cache_size_tokens existed: tokens are blocks times their size."""
    old = {key: value for key, value in LABELS_032.items() if not key.startswith("kv_cache_")}
    with engine(info(old), models=None) as url:
        assert main([*CPU, "--kv-cache-gib", "1", "--verify", url]) == 0
    assert "46,592" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        ("# HELP node_load1 1m load average.\n# TYPE node_load1 gauge\nnode_load1 0.5\n", "not a vLLM engine's page"),
        ("<html><body>It works!</body></html>", "is not a metrics page|not a vLLM engine's page"),
        ("", "not a vLLM engine's page"),
        ("# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 0\n", "still starting"),
        (info(LABELS_032 | {"num_gpu_blocks": "None"}), "no usable num_gpu_blocks"),
        (info(LABELS_032 | {"num_gpu_blocks": "0"}), "no cache to check"),
    ],
)
def test_a_page_of_another_server_is_said_to_be_one(page: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with engine(page) as url:
        assert main([*CPU, "--kv-cache-gib", "1", "--verify", url]) == 2
    line = one_line(capsys)
    assert any(part in line for part in reason.split("|")), line


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://["])
def test_an_address_that_cannot_be_read_is_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CPU, "--kv-cache-gib", "1", "--verify", url]) == 2
    assert "cannot be read" in one_line(capsys)


@pytest.mark.parametrize("url", ["http://", "nonsense", "ftp://127.0.0.1/"])
def test_what_is_no_address_is_one_line_with_one_that_is(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*CPU, "--kv-cache-gib", "1", "--verify", url])
    assert ended.value.code == 2
    assert f"--verify: {url!r}: expected an address such as http://127.0.0.1:8000" in one_line(capsys)


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ([], "make plan MODEL=llama3-8b-awq GPU=rtx4090"),
        (["--model", "llama3-8b-awq"], "which card"),
        (["--model", "nope", "--gpu", "rtx4090"], "no model 'nope'"),
        (["--model", "./nope", "--gpu", "rtx4090"], "no model './nope'"),
        (["--model", "llama3-8b-awq", "--gpu", "rtx4091"], "did you mean rtx4090"),
        (["--profile", "no-such.rtx4090"], "no profile"),
        (["--profile", "/nowhere/a.yaml"], "no profile"),
        ([*RTX4090, "--utilization", "1.5"], "up to 1"),
        ([*RTX4090, "--utilization", "nan"], "finite"),
        ([*RTX4090, "--utilization=-0.5"], "above 0"),
        ([*RTX4090, "--max-model-len", "131072"], "write at most 8192"),
        ([*RTX4090, "--max-num-seqs", "many"], "whole number"),
        ([*RTX4090, "--kv-cache-dtype", "fp4"], "not known"),
        ([*RTX4090, "--total-gib", "-24"], "above 0"),
        ([*RTX4090, "--used-gib", "nan"], "finite"),
        ([*RTX4090, "--contexts", "1024,x"], "whole number"),
        ([*RTX4090, "--contexts", ""], "whole number"),
        ([*RTX4090, "--contexts", "9000"], "longer than max-model-len 8192"),
        ([*RTX4090, "--tolerance", "0"], "above 0"),
        ([*RTX4090, "--svg", "/nowhere/x.svg"], "cannot be written"),
        (CPU, "--kv-cache-gib"),
        ([*CPU, "--kv-cache-gib", "1", "--block-size", "16"], "multiple of 32"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(argv: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert reason in one_line(capsys)


def test_a_profile_whose_name_gives_no_card_needs_the_card_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("max-model-len: 4096")
    assert main(["--profile", str(path)]) == 2
    assert "names no known card" in one_line(capsys)
    assert main(["--profile", str(path), *RTX4090]) == 0


def test_a_profile_that_is_not_yaml_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "llama3-8b-awq.rtx4090.yaml"
    path.write_text("a: b: c")
    assert main(["--profile", str(path)]) == 2
    assert "is not YAML" in one_line(capsys)
