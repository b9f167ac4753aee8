"""The gate's judgement and its figures, on distributions that are known whole."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
import yaml

from scripts.quantization import QuantizeError, gate_config, report
from scripts.quantization.figures import TOP, Figures, Position, compare, divergence
from scripts.quantization.gate import Answer, Talk, judge, talk
from scripts.quantization.gate_config import Chat, GateConfig
from scripts.quantization.gate_engine import ComposeRun, Local, cause, mount
from scripts.quantization.language import speaks
from scripts.quantization.manifest import read
from scripts.quantization.scoring import cut, position
from tests.quantize import versions

CONFIG = gate_config.load()
SMALL = CONFIG.sizes[0]


def distribution(random_: random.Random, size: int, sharpness: float) -> list[float]:
    weights = [math.exp(sharpness * random_.gauss(0, 1)) for _ in range(size)]
    total = sum(weights)
    return [weight / total for weight in weights]


def told(p: list[float], listed: int, token: int = 0) -> Position:
    """What an engine tells of a distribution: its most likely tokens and the text's own."""
    best = sorted(range(len(p)), key=lambda index: -p[index])[:listed]
    return Position(token, math.log(p[token]), {index: math.log(p[index]) for index in {*best, token}})


def exactly(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def test_with_the_whole_vocabulary_listed_kl_is_that_of_the_stated_partition() -> None:
    random_ = random.Random(1)
    p, q = distribution(random_, 300, 2), distribution(random_, 300, 2)
    union = {index for each in (p, q) for index in sorted(range(300), key=lambda i: -each[i])[:TOP]}
    tail_p, tail_q = (1 - sum(each[index] for index in union) for each in (p, q))
    expected = sum(p[i] * math.log(p[i] / q[i]) for i in union) + tail_p * math.log(tail_p / tail_q)
    assert divergence(told(p, 300), told(q, 300))[0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("seed", range(40))
def test_kl_never_exceeds_the_true_one(seed: int) -> None:
    random_ = random.Random(seed)
    p = distribution(random_, 200, random_.uniform(0.5, 4))
    noise = random_.uniform(0.01, 3)
    q = [weight * math.exp(noise * random_.gauss(0, 1)) for weight in p]
    q = [weight / sum(q) for weight in q]
    kl, guessed = divergence(told(p, 30), told(q, 30))
    assert kl <= exactly(p, q) + 1e-6
    assert 0 <= guessed <= 1


def test_equal_sides_have_no_divergence_and_disjoint_ones_a_large_one() -> None:
    p = distribution(random.Random(2), 500, 4)
    turned = p[250:] + p[:250]
    assert divergence(told(p, 64), told(p, 64))[0] == 0
    assert divergence(told(p, 64), told(turned, 64))[0] > 2


def test_perplexity_and_agreement_are_of_the_texts_own_tokens() -> None:
    half = Position(1, math.log(0.5), {1: math.log(0.5), 2: math.log(0.3)})
    quarter = Position(1, math.log(0.25), {1: math.log(0.25), 2: math.log(0.6)})
    found = compare([[half, half]], [[half, quarter]])
    assert found.ppl_original == pytest.approx(2)
    assert found.ppl_artifact == pytest.approx(math.sqrt(8))
    assert (found.top1, found.tokens, sum(found.kl_histogram)) == (0.5, 2, 2)


def test_sides_scored_on_different_tokens_are_not_compared() -> None:
    one, other = (Position(token, -1.0, {token: -1.0}) for token in (1, 2))
    with pytest.raises(ValueError, match="same tokens"):
        compare([[one]], [[other]])


def test_an_engines_answer_is_read_as_it_is_sent() -> None:
    found = position(7, {"7": {"logprob": -2.5, "rank": 40}, "3": {"logprob": -0.1, "rank": 1}})
    assert (found.logprob, found.best, found.listed) == (-2.5, 3, {7: -2.5, 3: -0.1})


def test_windows_hold_every_token_once_and_no_more_than_asked_for() -> None:
    texts = [list(range(700)), list(range(700, 1000))]
    assert [len(window) for window in cut(texts, 512, 10_000)] == [512, 188, 300]
    assert sum(map(len, cut(texts, 512, 600))) == 600
    assert cut([[1]], 512, 600) == []  # nothing is predicted in it


def figures(rise: float = 0.15, kl: float = 0.15, top1: float = 0.82, tokens: int = 8000) -> Figures:
    return Figures(tokens, 16, 8.0, 8.0 * (1 + rise), kl, 0.01, kl / 2, 1.0, top1, 0.001, (tokens,) + (0,) * 8)


GOOD = Answer("The capital of France is Paris, which lies in the north of the country.", "stop")


def talks(*artifact: Answer, original: Answer = GOOD) -> list[Talk]:
    return [talk(Chat(ask="What is the capital of France?", expect=("Paris",)), original, each) for each in artifact]


WELL = talks(GOOD, GOOD, GOOD, GOOD)


def test_what_is_within_every_limit_passes() -> None:
    found = judge(CONFIG, SMALL, figures(), WELL, None)
    assert (found.verdict, found.reasons) == ("PASS", ())


@pytest.mark.parametrize(
    ("measured", "named"),
    [
        (figures(rise=30_000), "perplexity"),
        (figures(kl=10.33), "KL 10.330 nats"),
        (figures(top1=0.011), "top-1 agreement 0.011"),
    ],
)
def test_a_figure_beyond_its_limit_fails_and_is_named(measured: Figures, named: str) -> None:
    found = judge(CONFIG, SMALL, measured, WELL, None)
    assert found.verdict == "FAIL"
    assert named in found.reasons[0]


def test_another_tokenizer_fails_whatever_the_figures_are() -> None:
    found = judge(CONFIG, SMALL, figures(), WELL, "3 of 4 texts become other tokens")
    assert found.verdict == "FAIL"
    assert "tokenizer" in found.reasons[0]


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [
        (Answer("Paris Paris Paris", "length"), "did not end by itself (finish_reason length)"),
        (Answer(" \n", "stop"), "is empty"),
        (Answer("It is Lyon, as everybody knows who has been to the place.", "stop"), "does not say 'Paris'"),
        (Answer("法国的首都是巴黎。", "stop"), "is not in the language"),
        (Answer("Die Hauptstadt von Frankreich ist nicht weit, und es ist Paris.", "stop"), "is not in the language"),
    ],
)
def test_a_chat_that_goes_wrong_is_told_why(answer: Answer, wrong: str) -> None:
    (found,) = talks(answer)
    assert found.artifact_wrong.startswith(wrong)
    verdict = judge(CONFIG, SMALL, figures(), talks(GOOD, answer, answer, answer), None)
    assert (verdict.verdict, verdict.reasons[0][:6]) == ("FAIL", "3 of 4")


def test_what_the_original_can_not_do_itself_does_not_count_against_the_artifact() -> None:
    rambling = Answer("Paris and Paris and Paris", "length")
    odd = talks(rambling, rambling, original=rambling)
    assert judge(CONFIG, SMALL, figures(), [*WELL, *odd], None).verdict == "PASS"


def test_too_little_text_or_too_few_chats_is_an_abstention_with_the_way_out() -> None:
    little = judge(CONFIG, SMALL, figures(tokens=900), WELL, None)
    assert little.verdict == "ABSTAIN"
    assert "900 held-out tokens" in little.reasons[0]
    assert "held_out_tokens" in little.reasons[0]
    assert judge(CONFIG, SMALL, None, WELL, None).verdict == "ABSTAIN"
    assert judge(CONFIG, SMALL, figures(), WELL[:1], None).verdict == "ABSTAIN"


def test_a_failure_on_little_text_is_still_a_failure() -> None:
    assert judge(CONFIG, SMALL, figures(kl=9, tokens=900), WELL, None).verdict == "FAIL"


def test_limits_that_were_not_measured_are_said_to_be_provisional() -> None:
    large = CONFIG.size(16 * 2**30)
    assert large.measured is None
    assert "provisional" in judge(CONFIG, large, figures(0.01, 0.01, 0.99), WELL, None).notes[0]


@pytest.mark.parametrize(
    ("text", "language", "right"),
    [
        ("The sea is a vast body of water that covers most of the earth.", "en", True),
        ("Das Meer ist eine große Wassermasse, die einen Teil der Erde bedeckt.", "de", True),
        ("La mer est une grande étendue d'eau qui couvre la terre.", "fr", True),
        ("El mar es una gran masa de agua que cubre la mayor parte de la tierra.", "es", True),
        ("海是覆盖地球大部分表面的水体。", "zh", True),
        ("海は地球の表面の大部分を覆う水です。", "ja", True),
        ("Море покрывает большую часть земли.", "ru", True),
        ("Paris.", "en", True),
        ("7", "en", True),
        ("Das Meer ist eine große Wassermasse, die einen Teil der Erde bedeckt.", "en", False),
        ("The sea is a vast body of water that covers most of the earth.", "de", False),
        ("The sea is a vast body of water that covers most of the earth.", "zh", False),
        ("海是覆盖地球大部分表面的水体。", "en", False),
        ("ormal vine ĠĠ quart elbow pre sulf Kinder magn ther oxid plain trop", "en", False),
        ("!!! ... ???", "en", False),
    ],
)
def test_languages_are_told_apart(text: str, language: str, right: bool) -> None:
    assert speaks(text, language) is right


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"text": {"window_tokens": 600}}, "text.window_tokens"),
        ({"text": {"max_tokens": 1000}}, "max_tokens is below min_tokens"),
        ({"chats": [{"ask": "Hi", "language": "xx"}]}, "chats.0.language: one of de, en"),
        ({"chats": []}, "chats"),
        ({"sizes": []}, "sizes"),
        ({"engine": {"max_model_len": 256}}, "engine.max_model_len must be above"),
        ({"lmits": {}}, "lmits"),
    ],
)
def test_a_mistake_in_the_configuration_is_one_line_that_names_it(
    tmp_path: Path, change: dict[str, object], told: str
) -> None:
    found = yaml.safe_load(Path(gate_config.PATH).read_text(encoding="utf-8"))
    path = tmp_path / "gate.yaml"
    path.write_text(yaml.safe_dump({**found, **change}), encoding="utf-8")
    with pytest.raises(QuantizeError) as raised:
        gate_config.load(path)
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_size_class_follows_the_originals_weights() -> None:
    assert [CONFIG.size(gib * 2**30).name for gib in (0, 1, 16, 5000)] == [
        "up to 1 GiB",
        "up to 1 GiB",
        "above 8 GiB",
        "above 8 GiB",
    ]


def test_both_launchers_serve_one_model_with_the_gates_own_settings(tmp_path: Path) -> None:
    local = Local(more=("--quantization", "awq")).launch(tmp_path, 1234, 64, CONFIG.engine)
    assert local.command[1:3] == ("serve", str(tmp_path))
    assert "--max-logprobs 64" in " ".join(local.command)
    assert " ".join(local.command).endswith("--enforce-eager --quantization awq")
    inside = ComposeRun("engine").launch(tmp_path, 1234, 64, CONFIG.engine)
    line = " ".join(inside.command)
    assert f"--publish 127.0.0.1:1234:8000 --volume {tmp_path}:/gate:ro --entrypoint vllm engine serve /gate " in line
    assert "--gpu-memory-utilization 0.85" in line
    assert "--rm" in inside.command
    assert inside.environ["COMPOSE_FILE"] == "compose.yaml:docker/gate.yaml"


def test_a_snapshot_of_the_hubs_cache_is_bound_with_the_files_its_links_lead_to(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b/snapshots/abc"
    snapshot.mkdir(parents=True)
    assert mount(snapshot) == (tmp_path / "models--a--b", "snapshots/abc")


def test_the_engines_own_reason_is_found_in_its_log() -> None:
    log = (
        "(APIServer pid=7) INFO 01-01 starting\n"
        "(EngineCore pid=9) ValueError: The input size is not aligned with the quantized weight shape.\n"
        "(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert cause(log).startswith("ValueError: The input size")
    assert cause("") == "it said nothing"


@pytest.mark.parametrize("verdict", ["PASS", "FAIL", "ABSTAIN"])
def test_the_report_needs_nothing_from_elsewhere_and_holds_verdict_and_figures(tmp_path: Path, verdict: str) -> None:
    manifest = read(versions.make(tmp_path, "m", "0123456789ab"))
    gate = versions.gate(manifest, verdict)
    if verdict == "ABSTAIN":
        gate |= {"figures": None, "speed": {"original": None, "artifact": None}}
    answer = {"text": "<script>alert(1)</script>", "finish": "stop", "wrong": ""}
    gate["chats"] = [{"ask": "Hi", "original": answer, "artifact": {**answer, "wrong": "is empty"}}]
    text = report.html(manifest, gate)
    assert f"<b>{verdict}</b>" in text
    assert ("9.5 (+15.9%)" in text) is (verdict != "ABSTAIN")
    assert "<script>" not in text
    assert "src=" not in text
    assert text.count("http") == text.count("http://www.w3.org/2000/svg")
    json.dumps(gate)  # what the manifest keeps


def test_the_shipped_configuration_asks_for_what_it_judges() -> None:
    assert isinstance(CONFIG, GateConfig)
    assert CONFIG.text.listed >= TOP
    assert len(CONFIG.chats) >= CONFIG.chats_min
