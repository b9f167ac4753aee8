"""Calibration texts: what is read, what is said of what can't be, how long texts are cut, what is held out."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts.quantization import QuantizeError, calibration, config, datasets, texts
from scripts.quantization.source import Hashes


class Words:
    """A tokenizer of words: each word has the number of its first use. Refuses what holds "refuse"."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        if any("refuse" in message["content"] for message in messages):
            raise ValueError("roles must\nalternate")
        return " ".join(f"<{message['role']}> {message['content']}" for message in messages)

    def encode(self, text: str) -> list[int]:
        return [self.known.setdefault(word, len(self.known)) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        names = list(self.known)
        return " ".join(names[token] for token in ids)

    def end_of_turn(self) -> int | None:
        return 7


def wanted(**change: Any) -> config.Calibration:
    given: dict[str, Any] = {"source": "t", "blocks": 4, "block_tokens": 32, "held_out_tokens": 1024}
    return config.Calibration(**given | change)


def words(*lengths: int, name: str = "w") -> list[texts.Text]:
    """Texts of so many different words, each a conversation of its own; with the role a token more."""
    made = []
    for index, length in enumerate(lengths):
        said = " ".join(f"{name}{index}x{n}" for n in range(length - 1))
        made.append(texts.Text(f"{name}{index}", ({"role": "user", "content": said},), f"{name}{index}"))
    return made


def prepared(found: Sequence[texts.Text], vocab: int = 1 << 30, **change: Any) -> calibration.Prepared:
    return calibration.prepare(wanted(**change), found, "text", Words(), vocab=vocab)


def test_all_blocks_have_one_length_and_the_same_seed_gives_the_same_ones() -> None:
    found = words(*[40] * 80)
    first = prepared(found)
    assert [len(block) for block in first.blocks] == [32] * 4
    assert first == prepared(found)
    assert first.held_out != prepared(found, seed=1).held_out
    assert first.calibration.tokens == 128
    assert first.calibration.texts == 4
    assert first.calibration.texts_found == 80


def test_one_long_text_is_cut_into_pieces_and_none_is_lost() -> None:
    tokenizer = Words()
    made = calibration.prepare(
        wanted(), [*words(1100, name="held"), *words(1100, name="cut")], "text", tokenizer, vocab=1 << 30
    )
    stream = [token for block in made.blocks for token in block]
    said = tokenizer.decode(stream).split()
    assert said[0] == "<user>"
    assert [word.rpartition("x")[2] for word in said[1:]] == [str(n) for n in range(127)]


def test_every_text_has_its_first_piece_in_before_any_has_its_second() -> None:
    made = prepared(words(*[1100] * 6), blocks=5)
    assert made.calibration.texts == 5


def test_parts_of_one_conversation_are_held_out_together() -> None:
    parts = [
        texts.Text(f"c{n // 2}_{n % 2}", ({"role": "user", "content": f"part{n} " + "w " * 98},), f"c{n // 2}")
        for n in range(60)
    ]
    tokenizer = Words()
    made = calibration.prepare(wanted(blocks=20), parts, "sharegpt", tokenizer, vocab=1 << 30)
    held = {json.loads(line)["id"].partition("_")[0] for line in made.held_out.decode().splitlines()}
    seen = {word for block in made.blocks for word in tokenizer.decode(block).split() if word.startswith("part")}
    assert held
    assert seen
    assert not {f"c{int(word.removeprefix('part')) // 2}" for word in seen} & held


def test_what_is_held_out_is_said_with_its_tokens() -> None:
    made = prepared(words(*[40] * 80))
    lines = [json.loads(line)["text"].split() for line in made.held_out.decode().splitlines()]
    assert sum(map(len, lines)) == made.held_out_info.tokens >= 1024
    assert len(lines) == made.held_out_info.texts


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (words(50, 50, 50), ["3 texts give 150 tokens", "1,152 are needed", "add texts"]),
        (words(*[40] * 28), ["28 texts give 1,120 tokens", "or set calibration.blocks to 3"]),
        (
            [texts.Text("a", ({"role": "user", "content": "refuse"},), "a")],
            ["the chat template refused 1 of them (roles must alternate)"],
        ),
    ],
)
def test_too_little_text_says_how_far_it_goes(found: list[texts.Text], says: list[str]) -> None:
    with pytest.raises(QuantizeError) as raised:
        prepared(found)
    assert all(part in str(raised.value) for part in says), str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_tokenizer_of_another_model_is_told_by_its_ids() -> None:
    with pytest.raises(QuantizeError, match="tokenizer and weights are not of one model"):
        prepared(words(*[40] * 80), vocab=5)


SHAREGPT: list[dict[str, Any]] = [
    {"id": "a_0", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
    {"id": "a_1", "conversations": [{"from": "gpt", "value": "went on"}, {"from": "human", "value": "more, ünï"}]},
    {"id": "b", "conversations": []},
    {"id": "c_0", "conversations": [{"from": "human", "value": "hi"}, {"from": "tool", "value": "x"}]},
    {"id": "d_0", "conversations": [{"from": "system", "value": "be"}, {"from": "human", "value": "so"}]},
]


def test_sharegpt_keeps_roles_drops_leading_answers_and_groups_the_parts(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps(SHAREGPT))
    kind, found = texts.read(path, "auto", None)
    assert kind == "sharegpt"
    assert [(text.key, text.group) for text in found] == [("a_0", "a"), ("a_1", "a"), ("d_0", "d")]
    assert found[0].messages == ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"})
    assert found[1].messages == ({"role": "user", "content": "more, ünï"},)
    assert [message["role"] for message in found[2].messages] == ["system", "user"]


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_of_a_cut_off_file_every_whole_object_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """However the pieces in which it is read fall."""
    monkeypatch.setattr(texts, "_CHUNK", chunk)
    whole = json.dumps(SHAREGPT, indent=2)
    path = tmp_path / "s.json"
    path.write_text(whole[: whole.index('"d_0"') + 20])
    assert [text.key for text in texts.read(path, "sharegpt", None)[1]] == ["a_0", "a_1"]
    path.write_text(whole)
    assert [text.key for text in texts.read(path, "sharegpt", None)[1]] == ["a_0", "a_1", "d_0"]


def test_jsonl_takes_messages_texts_and_pairs(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
        {"text": "plain"},
        {"text": "  "},
        {"instruction": "do", "output": "done"},
        {"text": "plain"},
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    kind, found = texts.read(path, "auto", None)
    assert kind == "jsonl"
    assert [[message["content"] for message in text.messages] for text in found] == [
        ["q", "a"],
        ["plain"],
        ["do", "done"],
    ]


def test_a_blank_line_parts_two_plain_texts(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("one\ntwo\n\n\nthree\n")
    kind, found = texts.read(path, "auto", None)
    assert kind == "text"
    assert [text.messages[0]["content"] for text in found] == ["one\ntwo", "three"]


@pytest.mark.parametrize(
    ("name", "content", "column", "says"),
    [
        ("t.txt", b"", None, "no text in it"),
        ("t.txt", b"\n \n\n", None, "no text in it"),
        ("t.txt", b"caf\xe9 au lait", None, "is not UTF-8 (byte 3)"),
        ("t.jsonl", b'{"text": "a"}\n{"text": ', None, "line 2 is no JSON"),
        ("t.jsonl", b'{"body": "a"}', None, "line 1: none of messages, conversations, text, prompt, instruction"),
        ("t.jsonl", b'{"text": "a"}', "body", "line 1: there is no 'body' (calibration.column); there are text"),
        ("t.jsonl", b'{"text": 5}', None, "text should be a text or a list of messages, found int"),
        ("t.jsonl", b"[1]", None, "expected an object, found list"),
        ("t.json", b"[1, 2]", None, "object 0: expected an object, found int"),
        ("t.json", b"[", None, "no text in it"),
    ],
)
def test_what_cannot_be_read_is_one_line_with_the_place(
    tmp_path: Path, name: str, content: bytes, column: str | None, says: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(QuantizeError) as raised:
        texts.read(path, "auto", column)
    assert says in str(raised.value), str(raised.value)
    assert "\n" not in str(raised.value)
    assert str(path) in str(raised.value)


# -- a pattern of files ----------------------------------------------------------------------------------------------


def look(tmp_path: Path, **change: Any) -> datasets.Found:
    return datasets.find(
        wanted(**{"source": f"{tmp_path}/*.txt"} | change), Hashes(tmp_path / "hashes.json"), lambda line: None
    )


def test_a_pattern_stands_for_plain_texts_a_file_each_in_their_names_order(tmp_path: Path) -> None:
    for name, said in {
        "b.txt": "second\n\nand its next part",
        "a.txt": "first",
        "c.txt": "\n",
        "d.md": "other",
    }.items():
        (tmp_path / name).write_text(said)
    before = look(tmp_path)
    kind, read = before.read()
    assert kind == "text"
    assert [text.messages[0]["content"] for text in read] == ["first", "second\n\nand its next part"]
    (tmp_path / "d.md").write_text("changed")
    assert look(tmp_path).identity == before.identity
    (tmp_path / "a.txt").write_text("changed")
    assert look(tmp_path).identity != before.identity


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"source": "no/such/*.txt"}, "no file is called no/such/*.txt"),
        ({"sha256": "0" * 64}, "leave sha256, column and format away"),
        ({"format": "jsonl"}, "leave sha256, column and format away"),
    ],
)
def test_a_pattern_that_can_not_be_read_is_one_line(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    (tmp_path / "a.txt").write_text("first")
    with pytest.raises(QuantizeError, match=re.escape(told)):
        look(tmp_path, **change)


def test_a_file_of_a_pattern_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(QuantizeError, match=r"a\.txt is not UTF-8"):
        look(tmp_path).read()
