"""Pastes in all the shapes that terminals, chat programs, web pages and editors leave them in."""

import pytest

from tests.unit.flags_answers import parts, profile, verdicts

PLAIN = "vllm serve Qwen/Qwen3-8B --max-model-len 4096 --kv-cache-dtype fp8 --enforce-eager"


def given(text: str) -> list[str]:
    return [str(one) for start in parts(text).starts for one in start.given]


@pytest.mark.parametrize(
    "paste",
    [
        PLAIN,
        f"$ {PLAIN}",
        f"(venv) user@host:~/llm$ {PLAIN}",
        f"PS C:\\Users\\me> {PLAIN}",
        f"sudo nohup {PLAIN} > log.txt 2>&1 &",
        f"# {PLAIN}",
        f"`{PLAIN}`",
        f"运行 `{PLAIN}` 即可",
        "vllm serve Qwen/Qwen3-8B \\\n  --max-model-len 4096 \\\n  --kv-cache-dtype fp8 \\\n  --enforce-eager",
        "vllm serve Qwen/Qwen3-8B \\  \n  --max-model-len=4096 \\\t\n  --kv-cache-dtype=fp8 \\\n  --enforce-eager\n",
        "vllm serve Qwen/Qwen3-8B ^\r\n --max-model-len 4096 ^\r\n --kv-cache-dtype fp8 ^\r\n --enforce-eager",
        "vllm serve Qwen/Qwen3-8B `\n --max-model-len 4096 `\n --kv-cache-dtype fp8 `\n --enforce-eager",
        "vllm serve Qwen/Qwen3-8B\n    --max-model-len 4096\n    --kv-cache-dtype fp8\n    --enforce-eager",
        "vllm serve Qwen/Qwen3-8B \\\n # x\n --max-model-len 4096 \\ # n\n --kv-cache-dtype fp8 \\\n --enforce-eager",
        "vllm serve Qwen/Qwen3-8B ——max-model-len ４０９６ —kv-cache-dtype “fp8” –-enforce-eager",
        "vllm　serve　Qwen/Qwen3-8B －－max－model－len＝4096 --kv-cache-dtype ‘fp8’ --enforce‑eager",
        "vllm serve Qwen/Qwen3-8B --max_model_len 4096 --kv_cache_dtype=fp8 --enforce_eager",
        "vllm serve 'Qwen/Qwen3-8B' --max-model-len \"4096\" --kv-cache-dtype 'fp8' --enforce-eager",
        (
            "docker run --gpus all -it -p 8000:8000 -v /m:/m vllm/vllm-openai:v0.6.3 --model Qwen/Qwen3-8B "
            "--max-model-len 4096 --kv-cache-dtype fp8 --enforce-eager"
        ),
        (
            "docker run --rm --entrypoint vllm img/vllm:1 serve Qwen/Qwen3-8B --max-model-len 4096 "
            "--kv-cache-dtype fp8 "
            "--enforce-eager"
        ),
        (
            "services:\n  vllm:\n    image: vllm/vllm-openai:v0.8.5\n    command:\n      - --model\n"
            "      - Qwen/Qwen3-8B\n"
            '      - --max-model-len=4096\n      - "--kv-cache-dtype"\n      - fp8\n      - --enforce-eager\n'
        ),
        'args: ["--model", "Qwen/Qwen3-8B", "--max-model-len", "4096", "--kv-cache-dtype=fp8", "--enforce-eager"]',
        "command: >\n  --model Qwen/Qwen3-8B --max-model-len 4096\n  --kv-cache-dtype fp8 --enforce-eager",
        "model: Qwen/Qwen3-8B\nmax-model-len: 4096\nkv-cache-dtype: fp8\nenforce-eager: true\n",
        'llm = LLM(model="Qwen/Qwen3-8B", max_model_len=4096, kv_cache_dtype="fp8",\n          enforce_eager=True)',
        "uv run vllm serve Qwen/Qwen3-8B --max-model-len 4096 --kv-cache-dtype fp8 --enforce-eager",
        (
            "python3 -u -m vllm.entrypoints.openai.api_server --model Qwen/Qwen3-8B --max-model-len 4096 "
            "--kv-cache-dtype fp8 --enforce-eager"
        ),
    ],
)
def test_the_same_settings_are_read_out_of_every_shape(paste: str) -> None:
    found = verdicts(paste)
    wanted = {"--max-model-len 4096": "real", "--kv-cache-dtype fp8": "real", "--enforce-eager": "harmful"}
    dashed = {subject.replace("_", "-"): verdict for subject, verdict in found.items()}
    assert {subject: dashed.get(subject) for subject in wanted} == wanted
    starts = parts(paste).starts
    models = [start.model for start in starts] + [one.value for start in starts for one in start.given]
    assert "Qwen/Qwen3-8B" in models


def test_several_commands_in_one_paste_are_all_read() -> None:
    paste = (
        "export VLLM_USE_V1=1\nvllm serve a --swap-space 4 && vllm serve b --task embed; vllm serve c --enforce-eager"
    )
    assert [start.model for start in parts(paste).starts] == ["a", "b", "c"]
    found = verdicts(paste)
    assert (found["--swap-space 4"], found["--task embed"], found["VLLM_USE_V1=1"]) == ("removed", "renamed", "removed")


def test_variables_before_a_command_and_in_docker_are_read() -> None:
    paste = "CUDA_VISIBLE_DEVICES=0 VLLM_LOGGING_LEVEL=DEBUG vllm serve m"
    assert parts(paste).starts[0].env == [("CUDA_VISIBLE_DEVICES", "0"), ("VLLM_LOGGING_LEVEL", "DEBUG")]
    docker = "docker run -e VLLM_USE_V1=0 --env=HF_HOME=/x --shm-size 2g vllm/vllm-openai:v0.6.3 --model m"
    assert parts(docker).starts[0].env == [("VLLM_USE_V1", "0"), ("HF_HOME", "/x")]


@pytest.mark.parametrize(
    ("prose", "wanted"),
    [
        ("建议将 --block-size 设置为256或512，其中256最好", ["--block-size 256", "--block-size 512"]),
        ("应将 --max-model-len 明确设为4096", ["--max-model-len 4096"]),
        ("合理设置 --max-num-seqs 参数（例如256）", ["--max-num-seqs 256"]),
        ("启动时添加 --log-level debug 参数", ["--log-level debug"]),
        ("we set --gpu-memory-utilization to 0.95 and it works", ["--gpu-memory-utilization 0.95"]),
        ("• --swap-space 4：开启 CPU 内存交换", ["--swap-space 4"]),
        ("--enable-prefix-caching 对对话类 API 极其重要！它很好", ["--enable-prefix-caching"]),
        ("just pass --enforce-eager when it crashes.", ["--enforce-eager"]),
        ("see https://x.y/a--b-c and --dtype", ["--dtype"]),
    ],
)
def test_flags_in_prose_are_read_with_the_values_the_sentence_gives(prose: str, wanted: list[str]) -> None:
    assert [str(one) for one in parts(prose).mentions] == wanted


@pytest.mark.parametrize(
    "prose",
    [
        "随后使用 nvidia-smi --query-compute-apps=pid,used_memory --format=csv 命令观察",
        "卸载后重装：pip install vllm --no-cache-dir",
        "then run curl --silent http://localhost:8000/health",
        "在终端执行 vllm --version。",
        "python train.py --lr 1e-4 --epochs 3",
        "llama-server --ctx-size 4096 -ngl 99",
    ],
)
def test_other_programs_flags_are_left_alone(prose: str) -> None:
    assert parts(prose).mentions == []
    assert [one for one in given(prose) if one.startswith("--")] == []


def test_a_flag_that_a_command_gave_is_not_said_again_for_the_prose_around_it() -> None:
    paste = "vllm serve m --block-size 32\n\n说明：--block-size 32 很好，--block-size 要小心"
    assert list(verdicts(paste)).count("--block-size 32") == 1
    assert "--block-size" not in verdicts(paste)


def test_metric_and_variable_names_are_found_anywhere() -> None:
    paste = parts(
        "看 vllm:num_requests_running{model_name='m'} 与 vllm：cache_hit_ratio，设 VLLM_USE_V1=0；镜像 vllm:latest"
    )
    assert list(paste.metrics) == ["vllm:num_requests_running", "vllm:cache_hit_ratio"]
    assert paste.variables["VLLM_USE_V1"][0] == "0"


def test_a_blank_after_a_backslash_is_told() -> None:
    assert verdicts("vllm serve m \\ \n --enforce-eager")["blank after backslash"] == "wrong value"
    assert "blank after backslash" not in verdicts("vllm serve m \\\n --enforce-eager")


def test_a_second_free_word_is_told() -> None:
    assert verdicts("vllm serve m --enforce-eager stray")["stray"] == "wrong value"


COMPOSE = """\
services:
  vllm:
    image: vllm/vllm-openai:latest
    ipc: host

    shm_size: 2g
    environment:
      - VLLM_USE_V1=0
      - HF_TOKEN=${HF_TOKEN}
    command: >
      --model meta-llama/Meta-Llama-3-8B-Instruct
      --max-model-len 4096
      --swap-space 4
  prometheus:
    image: prom/prometheus:latest
    shm_size: 1g
    command: --config.file=/etc/prometheus/prometheus.yml
"""


def test_a_compose_file_is_read_and_the_services_beside_the_engine_are_not() -> None:
    assert verdicts(COMPOSE) == {
        "image vllm/vllm-openai:latest": "harmful",
        "--ipc=host": "harmful",
        "--shm-size=2g": "real",
        "--model meta-llama/Meta-Llama-3-8B-Instruct": "real",
        "--max-model-len 4096": "real",
        "--swap-space 4": "removed",
        "VLLM_USE_V1=0": "removed",
    }
    assert profile(COMPOSE).settings == {"model": "meta-llama/Meta-Llama-3-8B-Instruct", "max-model-len": 4096}


def test_other_programs_of_vllm_have_flags_of_their_own() -> None:
    assert verdicts("vllm bench serve --model m --num-prompts 10 --dataset-name random") == {"vllm bench": "real"}
    assert verdicts("python -m vllm.entrypoints.openai.run_batch -i in.jsonl -o out.jsonl --model m") == {
        "vllm.entrypoints.openai.run_batch": "real"
    }


def test_a_misspelt_program_is_judged_as_the_server_it_means() -> None:
    assert verdicts("vllm server m --swap-space 4") == {"vllm server": "unknown", "--swap-space 4": "removed"}


def test_an_odd_quote_does_not_hide_the_flags() -> None:
    assert "--swap-space 4" in verdicts("vllm serve m --served-model-name it's --swap-space 4")


@pytest.mark.parametrize("words", ["-O3", "-O 3", "-O=3", "--optimization-level 3"])
def test_the_optimization_level_has_four_spellings(words: str) -> None:
    assert {str(v) for v in profile(f"vllm serve m {words}").settings.values()} == {"m", "3"}
