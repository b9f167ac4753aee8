"""The prompt estimate against the real engine's own count, on text the estimator did not learn from."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from gateway.limits import TokenEstimator
from gateway.protocol import Kind, PromptSize, parse
from gateway.settings import Limits, Policy
from tests.engine.conftest import Stack

ENGLISH = """A server that refuses early is kinder than one that accepts everything and answers nothing. The queue in
front of it should be short, and whoever waits in it should know for how long. When the machine is asked for more than
it can do, somebody has to be told no; the only question is whether they hear it now, or after a minute of silence. Most
clients can come back later, and many will, if they are told when. Those that can't are helped by a fast answer."""
CHINESE = """早一点拒绝请求的服务器，比什么都接受却什么都不回答的服务器更友好。前面的队列应该很短，
等待的人应该知道要等多久。当机器被要求做超出能力的事情时，总有人要被拒绝；
唯一的问题是他们现在就听到，还是在沉默一分钟之后才听到。大多数客户端可以稍后再来，
如果告诉它们时间，许多确实会再来。不能再来的，得到一个快速的答复也好过没有答复。
显存有限，请求无限，排队要公平。"""
CODE = Path(__file__).parents[2].joinpath("gateway", "admission.py").read_text()


def pieces(text: str, size: int) -> list[str]:
    """Consecutive pieces of different lengths, so that the constant and the slope can be told apart."""
    lengths = itertools.cycle((size // 4, size // 2, size))
    found, start = [], 0
    while start < len(text):
        length = next(lengths)
        found.append(text[start : start + length])
        start += length
    return found[:14]


def counted(stack: Stack, text: str) -> tuple[PromptSize, int]:
    answer = stack.chat(text, max_tokens=1)
    assert answer.status_code == 200, answer.text
    body = answer.request.read()
    return parse(Kind.CHAT, body, Limits(), Policy()).size, answer.json()["usage"]["prompt_tokens"]


@pytest.fixture(scope="module")
def samples(stack: Stack) -> dict[str, list[tuple[PromptSize, int]]]:
    texts = {"English": pieces(ENGLISH, 200), "Chinese": pieces(CHINESE, 80), "code": pieces(CODE, 400)}
    return {name: [counted(stack, text) for text in parts if text.strip()] for name, parts in texts.items()}


def test_after_a_few_answers_of_each_the_estimate_is_within_a_quarter(
    samples: dict[str, list[tuple[PromptSize, int]]],
) -> None:
    estimator = TokenEstimator()
    for learned in zip(*(rows[::2] for rows in samples.values()), strict=False):
        for size, tokens in learned:
            estimator.observe(size, tokens)
    for name, rows in samples.items():
        unseen = rows[1::2]
        estimated = sum(estimator.estimate(size) for size, _ in unseen)
        real = sum(tokens for _, tokens in unseen)
        assert estimated == pytest.approx(real, rel=0.25), (name, estimated, real)
        within = sum(abs(estimator.estimate(size) - tokens) <= 0.25 * tokens for size, tokens in unseen)
        assert within >= 0.8 * len(unseen), (name, [(estimator.estimate(size), tokens) for size, tokens in unseen])
