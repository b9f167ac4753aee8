"""Three real engines behind one gateway. In order: one of them is killed near the end, another model comes after it."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx

from scripts import demo
from tests.engine.conftest import until
from tests.engine_replicas.conftest import START_S, Engine, Fleet

FAILOVER_S = 2.0
CONVERSATIONS, TURNS = 13, 4  # 13 is no multiple of 3: in turn, no conversation comes back to the engine it had before
CLIENTS = 12
Messages = list[dict[str, str]]


class Load:
    """Clients that ask one short question after another until told to stop; each answer's status is kept."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._over = threading.Event()
        self.answers: list[tuple[float, int]] = []  # when, status
        self.lost: Counter[int] = Counter()  # by client
        self._pool = ThreadPoolExecutor(CLIENTS)

    def __enter__(self) -> Load:
        self._clients = [self._pool.submit(self._client, number) for number in range(CLIENTS)]
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for client in self._clients:
            client.result(120)
        self._pool.shutdown()

    def _client(self, number: int) -> None:
        for turn in itertools.count():
            if self._over.is_set():
                return
            question = [{"role": "user", "content": f"Client {number} asks for the {turn}th time: who are you?"}]
            status = self._fleet.ask(question, 8).status_code
            self.answers.append((time.monotonic(), status))
            self.lost[number] += status != 200

    def after(self, count: int) -> None:
        """Until so many more have been answered."""
        goal = len(self.answers) + count
        until(lambda: len(self.answers) >= goal, f"{count} more answers", 120)


def test_an_engine_that_the_file_names_joins_without_a_restart(fleet: Fleet) -> None:
    new = fleet.engines[2]
    assert fleet.state(new) == "unknown"
    begin = time.monotonic()
    fleet.name(*fleet.engines)
    until(lambda: fleet.state(new) == "ready", "the third engine ready", 60)
    fleet.measured["join_s"] = round(time.monotonic() - begin, 2)
    before = new.metric("vllm:prompt_tokens_total")
    with Load(fleet) as load:
        load.after(40)
    assert new.metric("vllm:prompt_tokens_total") > before + 100, "it takes part"
    assert {status for _, status in load.answers} == {200}


def test_conversations_stay_with_their_replica_and_its_cache(fleet: Fleet) -> None:
    """The prefix cache's hit ratio, against engines asked in turn."""

    def by_affinity(name: str, messages: Messages) -> httpx.Response:
        return fleet.ask(messages, 16)

    turn = itertools.count()

    def in_turn(name: str, messages: Messages) -> httpx.Response:
        return fleet.ask(messages, 16, at=fleet.engines[next(turn) % len(fleet.engines)].url)

    figures = {}
    for name, ask in (("in turn", in_turn), ("affinity", by_affinity)):
        before = _cache(fleet)
        begin = time.monotonic()
        _converse(name, ask)
        hits, queries = (after - earlier for after, earlier in zip(_cache(fleet), before, strict=True))
        figures[name] = {
            "hit_ratio": round(hits / queries, 3),
            "prompt_tokens": int(queries),
            "seconds": round(time.monotonic() - begin, 1),
        }
    fleet.measured["prefix_cache"] = figures
    # Where each comes back, of four turns' tokens nearly six tenths are there already; an engine that drew more
    # conversations than its pool holds, which chance brings about, has some of them gone.
    assert figures["affinity"]["hit_ratio"] > 0.35, figures
    assert figures["affinity"]["hit_ratio"] > figures["in turn"]["hit_ratio"] + 0.2, figures


def _cache(fleet: Fleet) -> tuple[float, float]:
    def total(name: str) -> float:
        return sum(engine.metric(f"vllm:prefix_cache_{name}_total") for engine in fleet.engines)

    return total("hits"), total("queries")


def _converse(name: str, ask: Callable[[str, Messages], httpx.Response]) -> None:
    """All conversations, turn by turn, three at a time."""
    histories: list[Messages] = [[] for _ in range(CONVERSATIONS)]

    def turn(number: int) -> None:
        history = histories[number]
        said = " ".join(f"{name} {number} fact {len(history)}-{fact}." for fact in range(6))
        history.append({"role": "user", "content": f"{said} Remember them."})
        answer = ask(name, history)
        assert answer.status_code == 200, answer.text
        history.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"] or "Yes."})

    for _ in range(TURNS):
        with ThreadPoolExecutor(3) as clients:
            list(clients.map(turn, range(CONVERSATIONS)))


def test_a_replica_that_is_drained_loses_nothing(fleet: Fleet) -> None:
    leaving = fleet.engines[0]
    with Load(fleet) as load:
        until(lambda: fleet.status()[leaving.url]["calls"], "calls to it", 30)
        begin = time.monotonic()
        assert fleet.admin.post("/drain", json={"replica": leaving.url}).status_code == 200
        until(lambda: not fleet.status()[leaving.url]["calls"], "its calls to end", 60)
        fleet.measured["drain_s"] = round(time.monotonic() - begin, 2)
        assert fleet.state(leaving) == "draining"
        load.after(30)
        assert fleet.status()[leaving.url]["calls"] == 0
        assert fleet.admin.post("/drain", json={"replica": leaving.url, "on": False}).status_code == 200
        until(lambda: fleet.status()[leaving.url]["calls"], "calls to it again", 30)
    assert {status for _, status in load.answers} == {200}
    fleet.measured["drain_answers"] = len(load.answers)


def test_one_that_is_killed_under_load_loses_only_what_it_had_begun(fleet: Fleet) -> None:
    doomed = fleet.engines[0]
    with Load(fleet) as load:
        until(lambda: fleet.status()[doomed.url]["calls"], "calls to it", 30)
        begun = _calls(fleet, doomed)
        killed = time.monotonic()
        doomed.kill()
        until(lambda: fleet.state(doomed) == "down", "the gateway to notice", 30)
        noticed_s = time.monotonic() - killed
        load.after(60)
    later = [(at - killed, status) for at, status in load.answers if at > killed]
    lost = [at for at, status in later if status != 200]
    fleet.measured["killed"] = {
        "in_flight_there": begun,
        "lost": len(lost),
        "answered_after": len(later) - len(lost),
        "noticed_s": round(noticed_s, 3),
        "last_loss_s": round(max(lost, default=0.0), 3),
    }
    assert {status for _, status in load.answers} <= {200, 502}
    assert len(lost) <= 6, "no more than max_in_flight can have begun"
    assert max(load.lost.values()) <= 1, "nobody loses a second one"
    assert noticed_s < FAILOVER_S
    assert max(lost, default=0.0) < FAILOVER_S


def test_an_embedding_model_on_a_pooling_engine_of_its_own_joins_the_chat_models(fleet: Fleet) -> None:
    embedder = fleet.start_engine(
        "embedder", "--served-model-name", "embedder", "--runner", "pooling", "--convert", "embed"
    )
    until(embedder.healthy, "a healthy embedding engine", START_S)
    fleet.name(*fleet.engines[1:], embedder)
    until(lambda: fleet.state(embedder) == "ready", "the embedding engine ready", 60)
    until(lambda: fleet.state(fleet.engines[0]) == "unknown", "the killed engine forgotten", 30)
    listed = {entry["id"] for entry in fleet.http.get("/v1/models").json()["data"]}
    assert listed == {demo.MODEL, "embedder"}
    with Load(fleet) as load:
        for text in ("one text", "another text"):
            answer = fleet.http.post("/v1/embeddings", json={"model": "embedder", "input": text})
            assert answer.status_code == 200, answer.text
            assert len(answer.json()["data"][0]["embedding"]) > 100
        load.after(20)
    assert {status for _, status in load.answers} == {200}
    assert fleet.ask([{"role": "user", "content": "hi"}], 4, model="embedder").status_code == 404
    refused = fleet.ask([{"role": "user", "content": "hi"}], 4, model="smollm")
    assert refused.status_code == 404
    assert refused.json()["error"]["message"].endswith(f"these do: embedder, {demo.MODEL}")
    assert {"embedder"} in [set(pool["models"]) for pool in fleet.admin.get("/status").json()["admission"]["pools"]]


def _calls(fleet: Fleet, engine: Engine) -> int:
    return int(fleet.status()[engine.url]["calls"])
