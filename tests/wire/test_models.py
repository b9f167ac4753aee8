"""Several models behind one gateway: a request goes to engines that serve its model, and models are in nobody's way."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest

from gateway.replicas import State
from tests.fakes.engine import MODEL, FakeEngine, Script
from tests.wire.conftest import Running, serve, until

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
EMBEDDINGS = "/v1/embeddings"


@contextlib.asynccontextmanager
async def several(*engines: FakeEngine, **settings: object) -> AsyncIterator[Running]:
    """A gateway in front of engines that are started here."""
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine)
        up = await stack.enter_async_context(serve([engine.url for engine in engines], **settings))
        await until(lambda: len(up.gateway.replicas.ready()) == len(engines))
        yield up
        await up.settled()


async def test_a_models_requests_go_only_to_engines_that_serve_it() -> None:
    one, other, third = FakeEngine(), FakeEngine(models=("other",)), FakeEngine(models=("other", "third"))
    async with several(one, other, third) as up:
        for number in range(20):
            for model in (MODEL, "other", "third"):
                assert (await up.completion(f"p{number}", model=model)).status_code == 200
        asked = [{seen.json["model"] for seen in engine.asked(COMPLETIONS)} for engine in (one, other, third)]
        assert asked == [{MODEL}, {"other"}, {"other", "third"}]


async def test_the_models_of_all_engines_are_listed_once_each() -> None:
    async with several(FakeEngine(), FakeEngine(models=("other",)), FakeEngine(models=("other", "third"))) as up:
        listed = (await up.client.get("/v1/models")).json()["data"]
        assert sorted(entry["id"] for entry in listed) == sorted([MODEL, "other", "third"])
        assert (await up.client.get("/v1/models/third")).json()["id"] == "third"


async def test_an_unknown_model_is_404_with_the_names_there_are() -> None:
    async with several(FakeEngine(), FakeEngine(models=("other",)), aliases={"nick": "other"}) as up:
        refused = await up.completion("p", model="othr")
        assert refused.status_code == 404
        error = refused.json()["error"]
        assert error["code"] == "model_not_found"
        assert error["message"].endswith(f"does not exist here; these do: {MODEL}, nick, other")
        assert (await up.client.get("/v1/models/othr")).json()["error"]["message"] == error["message"]


def no_such_route(model: str, path: str, others: str) -> dict[str, str]:
    message = f"the model '{model}' is not served at {path}; {others}"
    return {"message": message, "type": "invalid_request_error", "param": "model", "code": "route_not_served"}


@pytest.mark.parametrize("window_ms", [0, 15], ids=["alone", "merged"])
async def test_a_chat_model_asked_to_embed_is_404_with_the_models_that_do(window_ms: int) -> None:
    chat, pooling = FakeEngine(), FakeEngine(models=("embedder", "adapter"), kv_tokens=0)
    chat.only, pooling.only = {COMPLETIONS, CHAT}, {EMBEDDINGS}
    settings = {"aliases": {"ada": "embedder", "nick": MODEL}, "batching": {"window_ms": window_ms}}
    async with several(chat, pooling, **settings) as up:
        some = "these are: ada, adapter, embedder"
        for model in (MODEL, "nick"):
            bodies = [{"model": model, "input": words} for words in ("text", [1, 2], [3, 4], [5, 6])]
            for answer in await asyncio.gather(*(up.client.post(EMBEDDINGS, json=body) for body in bodies)):
                assert answer.status_code == 404
                assert answer.json() == {"error": no_such_route(model, EMBEDDINGS, some)}
        refused = await up.chat(model="embedder", stream=True)
        assert refused.status_code == 404
        assert refused.json()["error"] == no_such_route("embedder", CHAT, f"these are: {MODEL}, nick")
        assert up.gateway.replicas.ready(MODEL)


@pytest.mark.parametrize("shape", [None, "vllm"])
async def test_where_no_model_embeds_that_is_said_whatever_the_engines_own_404_looks_like(shape: str | None) -> None:
    engine = FakeEngine()
    if shape is None:
        engine.only = {COMPLETIONS, CHAT}
    async with several(engine) as up:
        if shape:
            told = {"error": {"message": "Not Found", "type": "Not Found", "param": None, "code": 404}}
            engine.default = Script(status=404, body=json.dumps(told).encode())
        answer = await up.client.post(EMBEDDINGS, json={"model": MODEL, "input": "text"})
        assert answer.json()["error"] == no_such_route(MODEL, EMBEDDINGS, "no model here is")


async def test_an_engines_own_word_on_a_model_stays_as_it_is() -> None:
    engine = FakeEngine()
    async with several(engine) as up:
        told = {"error": {"message": "The adapter is gone", "type": "NotFoundError", "param": "model", "code": 404}}
        engine.default = Script(status=404, body=json.dumps(told).encode())
        assert (await up.completion("p")).json() == told


async def test_of_many_models_only_some_are_named() -> None:
    async with several(FakeEngine(models=tuple(f"m{number:02}" for number in range(30)))) as up:
        message = (await up.completion("p", model="x")).json()["error"]["message"]
        assert message.endswith("m18, m19 and 10 more (GET /v1/models lists them)")


async def test_an_engine_that_never_came_up_makes_unknown_names_unknown_only_after_its_time() -> None:
    async with FakeEngine() as one, FakeEngine(models=("late",)) as late:
        await late.stop()
        async with serve([one.url, late.url], timeouts={"reload_wait_s": 0.5}) as up:
            assert (await up.completion("p", model="late")).status_code == 503
            await asyncio.sleep(0.5)  # its time is what is waited for here
            assert (await up.completion("p", model="late")).status_code == 404
            await late.start()
            await until(lambda: up.gateway.replicas.ready("late"))
            assert (await up.completion("p", model="late")).status_code == 200


@pytest.mark.parametrize("otherwise", [404, 501])
async def test_embeddings_have_an_engine_of_their_own_that_completes_nothing(otherwise: int) -> None:
    chat, pooling = FakeEngine(), FakeEngine(models=("embedder",), kv_tokens=0)
    pooling.only, pooling.otherwise = {EMBEDDINGS}, otherwise
    async with several(chat, pooling) as up:
        for number in range(5):
            answer = await up.client.post(EMBEDDINGS, json={"model": "embedder", "input": f"text {number}"})
            assert answer.status_code == 200
            assert len(answer.json()["data"]) == 1
            assert (await up.chat(f"c{number}")).status_code == 200
        inputs = [seen.json["input"] for seen in pooling.asked(EMBEDDINGS)]
        assert inputs == ["Hi", *(f"text {number}" for number in range(5))]  # the first is the gateway's own
        assert chat.asked(EMBEDDINGS) == []
        assert pooling.asked(CHAT) == []
        refused = await up.completion("p", model="embedder")
        assert refused.status_code == otherwise  # the engine's own answer
        assert up.gateway.replicas.ready("embedder")


async def test_a_full_model_refuses_its_own_requests_and_no_others() -> None:
    one, other = FakeEngine(kv_tokens=100), FakeEngine(models=("other",), kv_tokens=100)
    async with several(one, other, admission={"max_queue_tokens": 100}) as up:
        one.gate = asyncio.Event()
        streams = [asyncio.create_task(_read(up, f"s{number}")) for number in range(12)]
        await until(lambda: up.gateway.admission.queued)
        await until(lambda: any(stream.done() for stream in streams))  # refused: in flight and queue are full
        answers = [await up.completion(f"p{number}", model="other", max_tokens=20) for number in range(10)]
        assert {answer.status_code for answer in answers} == {200}
        assert (await up.completion("more", max_tokens=60)).status_code == 429
        pools = {tuple(pool["models"]): pool for pool in up.gateway.health.status()["admission"]["pools"]}
        assert pools[(MODEL,)]["queued"] > 0
        assert pools[("other",)]["queued"] == 0
        one.gate.set()
        assert {200, 429} == set(await asyncio.gather(*streams))


async def _read(up: Running, text: str) -> int:
    async with up.stream(text, max_tokens=40) as answer:
        await answer.aread()
        return int(answer.status_code)


async def test_a_model_whose_engine_restarts_is_waited_for_while_the_other_is_served() -> None:
    one, other = FakeEngine(), FakeEngine(models=("other",))
    async with several(one, other) as up:
        await one.stop()
        await until(lambda: up.gateway.replicas.all[0].state is State.DOWN)
        waiting = asyncio.create_task(up.completion("p"))
        assert (await up.completion("p", model="other")).status_code == 200
        assert not waiting.done()
        await one.start()
        assert (await waiting).status_code == 200


async def test_a_retry_goes_only_to_an_engine_of_the_same_model() -> None:
    one, two, other = FakeEngine(), FakeEngine(), FakeEngine(models=("other",))
    async with several(one, two, other, health={"interval_s": 60}) as up:
        await one.stop()
        answers = [await up.completion(f"p{number}") for number in range(10)]
        assert {answer.status_code for answer in answers} == {200}
        assert len(two.asked(COMPLETIONS)) == 10
        assert other.asked(COMPLETIONS) == []


async def test_the_same_model_on_engines_of_two_lengths_is_listed_with_the_shorter() -> None:
    one, two = FakeEngine(), FakeEngine()
    two.models_page = json.dumps({"data": [{"id": MODEL, "max_model_len": 100}]})
    async with several(one, two) as up:
        assert up.gateway.replicas.models == {MODEL: 100}


async def test_merged_calls_never_mix_models_or_replicas() -> None:
    one, other = FakeEngine(models=("a",)), FakeEngine(models=("b",))
    one.default = other.default = Script(delay_s=0.05)
    async with several(one, other) as up:
        answers = await asyncio.gather(
            *(up.completion(f"p{number}", model="ab"[number % 2], max_tokens=2) for number in range(40))
        )
        assert {answer.status_code for answer in answers} == {200}
        assert {seen.json["model"] for seen in one.asked(COMPLETIONS)} == {"a"}
        assert {seen.json["model"] for seen in other.asked(COMPLETIONS)} == {"b"}
        assert await up.metric("gateway_merged_requests_total") > 0
