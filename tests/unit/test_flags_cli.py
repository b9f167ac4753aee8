"""make flags as its user meets it: input, exit codes, output, files."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.engine_args import History
from scripts.flags.__main__ import main, options, split
from scripts.flags.profile import Profile
from scripts.flags.render import COLOURS, Style, columns, report, wrap
from scripts.flags.text import LIMIT_BYTES
from tests.unit.flags_answers import findings, parts, profile

GUIDE = "vllm serve m --enable-paged-attn --block-size 256 --max-model-len 8k --log-level debug"


def pasted(monkeypatch: pytest.MonkeyPatch, raw: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))


def test_exit_codes_tell_nothing_something_and_unreadable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["vllm", "serve", "m", "--max-model-len", "8192"]) == 0
    assert main(["vllm", "serve", "m", "--swap-space", "4"]) == 1
    pasted(monkeypatch, b"")
    assert main([]) == 2
    assert "nothing to judge" in capsys.readouterr().err


def test_one_thing_is_one_thing(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        (["--swap-space", "4"], "1 thing found, 1"),
        (["vllm", "serve", "m", "--swap-space", "4"], "2 things found, 1"),
    ):
        main(arguments)
        assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "nothing to judge"),
        (b"   \n\n", "nothing to judge"),
        (b"It was the best of times, it was the worst of times. " * 2000, "nothing to judge"),
        ("春眠不觉晓，处处闻啼鸟。".encode() * 2000, "nothing to judge"),
        (b"\x7fELF\x02\x01\x01\x00\x00" + bytes(range(256)), "binary file"),
        (b"\x89PNG\r\n\x1a\n" + b"\x00" * 50, "binary file"),
        (b"\xff\xff\xff\x80 vllm serve", "not text"),
        (b"\x01\x02\x03\x04" * 99, "not text"),
        (b"x" * (LIMIT_BYTES + 1), "more than a guide"),
    ],
    ids=["empty", "blank", "novel", "poem", "elf", "png", "bytes", "controls", "huge"],
)
def test_input_that_cannot_be_judged_is_one_clear_message(
    raw: bytes, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pasted(monkeypatch, raw)
    assert main(["--write", "/nowhere/x.yaml"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("flags: ") and message in err and "Traceback" not in err


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "gb18030"])
def test_text_saved_on_any_system_is_read(
    encoding: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pasted(monkeypatch, "启动命令：\r\nvllm serve m --swap-space 4\r\n".encode(encoding))
    assert main([]) == 1
    assert "--swap-space 4" in capsys.readouterr().out


def test_the_three_ways_in_give_the_same_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "guide.txt").write_text(GUIDE)
    pasted(monkeypatch, GUIDE.encode())
    answers = []
    for argv in (GUIDE.split(), ["--file", str(tmp_path / "guide.txt")], []):
        assert main([*argv, "--json"]) == 1
        answers.append(json.loads(capsys.readouterr().out)["findings"])
    assert answers[0] == answers[1] == answers[2] and len(answers[0]) == 5


def test_a_file_that_is_not_there_and_two_inputs_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--file", "/nope"]) == 2
    assert capsys.readouterr().err == "flags: /nope: No such file or directory\n"
    assert main(["--file", "/nope", "vllm", "serve"]) == 2
    assert "give one of them" in capsys.readouterr().err


def test_a_release_that_was_not_captured_is_refused_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--against", "0.7.9", "vllm", "serve", "m"]) == 2
    assert "Captured: 0.2.7," in capsys.readouterr().err


def test_our_options_stand_anywhere_and_the_paste_keeps_its_order() -> None:
    assert split(["--json", "vllm", "serve", "m", "--lang", "zh", "--port", "1", "--against=0.26.0"]) == (
        ["--json", "--lang", "zh", "--against=0.26.0"],
        ["vllm", "serve", "m", "--port", "1"],
    )


def test_our_options_are_no_flag_of_any_release() -> None:
    ours = [name for action in options()._actions for name in action.option_strings if name not in ("-h", "--help")]
    assert ours
    assert [name for name in ours if History.load().flag_life(name)] == []


# -- the profile ------------------------------------------------------------------------------------------------------


def test_the_profile_holds_what_is_real_and_not_harmful() -> None:
    found = profile(GUIDE)
    assert found.settings == {"model": "m", "max-model-len": 8000}
    assert found.env == {"VLLM_LOGGING_LEVEL": "DEBUG"}


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        (
            "--no-trust-remote-code --max-num-batched-tokens 2K",
            {"no-trust-remote-code": True, "max-num-batched-tokens": 2048},
        ),
        ("--max-num-batched-tokens 2k --max-num-batched-tokens 1k", {"max-num-batched-tokens": 1000}),
        ("--served-model-name a b --dtype bfloat16", {"served-model-name": ["a", "b"], "dtype": "bfloat16"}),
        ("--limit-mm-per-prompt image=2,video=0", {"limit-mm-per-prompt": {"image": 2, "video": 0}}),
        ("--hf-overrides.a.b 1 --hf-overrides.a.c x", {"hf-overrides": {"a": {"b": 1, "c": "x"}}}),
        ("--task embed", {"runner": "pooling", "convert": "embed"}),
        ("--enforce-eager true", {}),
        ("--enforce-eager false", {"no-enforce-eager": True}),
        ("--disable-mm-preprocessor-cache", {"mm-processor-cache-gb": 0}),
        (
            '--speculative-model "[ngram]" --num-speculative-tokens 5 --ngram-prompt-lookup-max 4',
            {"speculative-config": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}},
        ),
        ("--swap-space 4 --no-such-flag 1 --max-model-len $LEN --config x.yaml --api-key abc", {}),
    ],
)
def test_flags_become_profile_keys(flags: str, settings: dict[str, object]) -> None:
    assert profile(f"vllm serve m {flags}").settings == {"model": "m", **settings}


def test_the_last_command_makes_the_profile_and_prose_does_not() -> None:
    text = "vllm serve a --port 1\n\n然后 --max-num-seqs 64\n\nvllm serve b --port 2"
    assert profile(text).settings == {"model": "b", "port": 2}


def test_without_a_model_the_profile_says_where_it_goes() -> None:
    text = profile("vllm serve … --port 1").yaml("0.32.0", "x")
    assert "# model: the paste names none" in text and "port: 1" in text


def test_a_flag_that_nothing_measured_speaks_for_is_left_out_and_named() -> None:
    found = profile("vllm serve m --max-model-len 8192 --block-size 32")
    assert found.settings == {"model": "m", "max-model-len": 8192}
    assert found.yaml("0.32.0", "x").endswith(
        "\nmax-model-len: 8192\n# left out, as nothing measured speaks for it: --block-size 32\n"
    )


@pytest.mark.parametrize(
    ("paste", "said"),
    [
        ("启动时必须添加 --enable-paged-attn 参数", "no engine is started in it"),
        ("vllm serve … --enable-paged-attn --swap-space 4", "none of its flags is one to keep"),
        ("vllm serve m", None),
        ("看 vllm:cache_hit_ratio", None),
    ],
)
def test_a_profile_that_is_none_says_why(
    paste: str, said: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A paste without flags asked for none."""
    path = tmp_path / "p.yaml"
    main(["--write", str(path), paste])
    out = " ".join(capsys.readouterr().out.split())
    assert ("No profile: " in out, (said or "") in out) == (said is not None, True), out
    assert path.exists() == (paste == "vllm serve m") == (": written." in out)
    assert (": not written, as there is no profile." in out) == (not path.exists())
    assert main(["--json", paste]) in (0, 1)
    assert (json.loads(capsys.readouterr().out)["no_profile"] is None) == (said is None)


def test_a_profile_is_written_whole_and_never_over_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.yaml"
    assert main(["--write", str(path), *GUIDE.split()]) == 1
    assert path.read_text().endswith("\nmodel: m\nmax-model-len: 8000\n")
    path.write_text("mine: 1\n")
    assert main(["--write", str(path), *GUIDE.split()]) == 2
    assert path.read_text() == "mine: 1\n" and "add --force" in capsys.readouterr().err
    assert main(["--write", str(path), "--force", *GUIDE.split()]) == 1
    assert "model: m" in path.read_text()
    assert main(["--write", str(tmp_path / "p.txt"), *GUIDE.split()]) == 2
    assert main(["--write", str(tmp_path / "no" / "p.yaml"), *GUIDE.split()]) == 2
    assert [file.name for file in tmp_path.iterdir()] == ["p.yaml"]


@pytest.mark.parametrize(
    "paste",
    [
        "vllm serve m --api-key canary-7f3",
        "HF_TOKEN=canary-7f3 vllm serve m --port 1",
        "docker run -e VLLM_API_KEY=canary-7f3 vllm/vllm-openai:v0.32.0 --model m",
    ],
)
def test_a_secret_in_a_paste_is_in_no_output(paste: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for extra in ([], ["--json"], ["--write", str(tmp_path / "p.yaml")]):
        main([*extra, paste])
    assert "canary" not in "".join(capsys.readouterr()) + (tmp_path / "p.yaml").read_text()


# -- what is printed --------------------------------------------------------------------------------------------------


def test_json_has_both_languages_and_the_profile(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--json", *GUIDE.split()])
    answer = json.loads(capsys.readouterr().out)
    assert (answer["release"], answer["origin"]) == ("0.32.0", "live parser")
    (row,) = [row for row in answer["findings"] if row["subject"] == "--enable-paged-attn"]
    assert row["verdict"] == "never existed" and row["change"] and row["why"] and row["why_zh"]
    assert answer["profile"] == {"model": "m", "max-model-len": 8000}


def test_chinese_answers_are_chinese_throughout() -> None:
    answer = printed(GUIDE, Style(lang="zh"))
    assert "从未存在" in answer and "直接删除" in answer and "需要修改 3 项" in answer
    for english in ("never existed", "harmful", "Delete it", "Claims", "found"):
        assert english not in answer


def printed(text: str, style: Style) -> str:
    return report(findings(text), profile(text), "0.32.0", "live parser", "x", style)


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("width", [50, 72, 100])
def test_no_line_is_wider_than_the_terminal(lang: str, width: int) -> None:
    """Except for the profile, which is to be copied, and a single word longer than a line."""
    found = findings(GUIDE + "\n看 vllm:num_requests_swapped，四分之一，vllm:gpu_prefix_cache_hit_rate")
    answer = report(found, Profile(), "0.32.0", "live parser", "x", Style(lang, width))
    wide = [line for line in answer.splitlines() if columns(line) > width and " " in line.strip()]
    assert wide == []


def test_colours_are_for_terminals_only() -> None:
    assert "\033[" not in printed(GUIDE, Style(colour=False))
    coloured = printed(GUIDE, Style(colour=True))
    assert f"\033[{COLOURS['red']}m" in coloured
    assert "\033[" not in coloured[coloured.index("# Made from") : coloured.index("max-model-len: 8000")]


@given(st.text(alphabet="ab 中文，。（）-", max_size=200), st.integers(10, 60))
def test_wrapping_loses_nothing_and_keeps_to_the_width(text: str, width: int) -> None:
    lines = wrap(text, width)
    assert "".join("".join(lines).split()) == "".join(text.split())
    assert all(columns(line) <= width or not set(line.strip()) & set(" 中文") for line in lines)


def test_the_whole_program_runs_from_the_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.flags", "--lang", "zh"], input=GUIDE.encode(), capture_output=True, check=False
    )
    assert done.returncode == 1 and done.stderr == b""
    assert "从未存在" in done.stdout.decode()


def test_a_terminal_without_chinese_and_a_reader_that_leaves_are_no_crash() -> None:
    command = f"{sys.executable} -m scripts.flags --lang zh {GUIDE} | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, env={"PYTHONIOENCODING": "ascii"}, check=False)
    assert done.stdout.startswith(b"vLLM 0.32.0") and done.stderr == b""


@given(st.text(max_size=300))
def test_any_text_is_judged_or_refused_without_a_crash(text: str) -> None:
    findings(text)


@given(
    st.lists(
        st.sampled_from(
            ["vllm", "serve", "--a", "--block-size", "=", "256", "\\", "\n", '"', "'", "`", "$(", "{", "--"]
        )
    )
)
def test_any_mangled_command_is_judged_without_a_crash(words: list[str]) -> None:
    parts(" ".join(words))
    findings("vllm serve m " + " ".join(words))
