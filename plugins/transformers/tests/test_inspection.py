"""Looks into the cache of a server: its state, reasons, events; and forgetting it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvgraft import TokenKey
from kvgraft_observe.events import Evicted, Moved, Stored
from kvgraft_transformers.serving.app import ServedModel
from kvgraft_transformers.serving.inspection import MOST_READERS, Inspection
from kvgraft_transformers.serving.protocol import ApiError
from kvgraft_transformers.serving.watching import WATCHED_S, HitLog
from kvgraft_transformers.tiny import build_tiny_model

from .serving_inside import Inside, serve_inside


@pytest.fixture(scope="module")
def model() -> Any:
    return build_tiny_model("gemma3_text", dtype=torch.float64)


@pytest.fixture
def inside(model: Any) -> Iterator[Inside]:
    with serve_inside(model, device_tokens=512, host_tokens=1024, load=None) as served:
        yield served


PROMPT = list(range(3, 203))


def cached(inside: Inside, prompt: list[int] = PROMPT, **fields: Any) -> int:
    """Tokens of a prompt that a request for it need not compute."""
    usage = inside.complete(prompt, max_tokens=1, **fields)["usage"]
    n_tokens: int = usage["prompt_tokens_details"]["cached_tokens"]
    return n_tokens


def test_a_prompt_is_explained_before_anybody_computes_it(inside: Inside) -> None:
    def explain(**body: Any) -> dict[str, Any]:
        reply = inside.post("/explain", body)
        assert reply.status_code == 200, reply.text
        why: dict[str, Any] = reply.json()
        return why

    assert explain(prompt=PROMPT)["anchor"] == 0
    cached(inside, cache_salt="a")
    why = explain(prompt=[*PROMPT, 5, 6], cache_salt="a")
    assert (why["tokens"], why["anchor"], why["device_anchor"]) == (202, 192, 192)
    assert {each["component"] for each in why["components"]} == {"full", "swa"}
    assert all(each["accepts"] == 192 and each["reason"] for each in why["components"])
    assert why["text"].startswith("202 tokens: anchor 192")
    assert explain(prompt=PROMPT, cache_salt="b")["anchor"] == 0
    assert inside.served.worker.engine.totals.requests == 1, "to explain is no request"

    messages = [{"role": "user", "content": "What is a page? " * 8}]
    inside.post("/v1/chat/completions", {"messages": messages})
    assert explain(messages=messages)["anchor"] > 0


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({}, 400, "missing required argument: prompt"),
        ({"prompt": [[1], [2]]}, 400, "2 prompts; send one of at least 1 token"),
        ({"prompt": ""}, 400, "1 prompts; send one of at least 1 token"),
        ({"prompt": "x", "model": "other"}, 404, "model 'other' is not served here"),
        ({"prompt": [-1]}, 400, "-1"),
    ],
)
def test_a_question_that_cannot_be_answered_is_refused(
    inside: Inside, body: Any, status: int, message: str
) -> None:
    reply = inside.post("/explain", body)
    assert reply.status_code == status, reply.text
    assert message in reply.json()["error"]["message"]


def test_the_state_shows_who_was_hit_and_why_not_deeper(inside: Inside) -> None:
    assert inside.get("/cache").json()["hits"] == []
    cached(inside)
    cached(inside)
    cached(inside, [*PROMPT[:100], *range(300, 350)])
    state = inside.get("/cache").json()
    assert [hit["resumed"] for hit in state["hits"]] == [96, 192, 0]
    assert [hit["prompt"] for hit in state["hits"]] == [150, 200, 200]
    assert [hit["device"] for hit in state["hits"]] == [96, 192, 0]
    latest = {each["component"]: each for each in state["hits"][0]["components"]}
    assert latest["full"]["accepts"] == latest["swa"]["accepts"] == 96
    assert "tree" in latest["full"]["reason"] or "page" in latest["full"]["reason"]
    assert state["page_size"] == 16
    assert set(state["components"]) == {"full", "swa"}
    full = state["components"]["full"]
    assert full["hits"]["device"] == 18
    owners = ("free", "evictable", "pinned", "private", "in_flight")
    for pool in full["tiers"].values():
        assert sum(pool[owner] for owner in owners) == pool["capacity"]
    assert full["tiers"]["device"]["evictable"] > 0
    lines = ("fetching", "waiting", "following", "loading", "running")
    assert state["requests"] == dict.fromkeys(lines, 0)


def test_requests_are_noted_only_while_somebody_looks(model: Any) -> None:
    now = [0.0]
    with serve_inside(model) as inside:
        cache = inside.served.worker.engine.memory.cache
        log = HitLog(cache, lambda: now[0])

        def look() -> list[dict[str, Any]]:
            return asyncio.run(inside.served.worker.call(log.look))

        cached(inside)
        assert look() == []
        cached(inside)
        now[0] = WATCHED_S + 1
        asyncio.run(inside.served.worker.call(cache.poll))
        cached(inside)
        assert [hit["number"] for hit in look()] == [1]
        cached(inside)
        assert [hit["number"] for hit in look()] == [2, 1]


def test_a_trial_of_admission_is_no_hit(inside: Inside) -> None:
    worker = inside.served.worker
    inside.get("/cache")

    def begin_and_give_up() -> None:
        cache = worker.engine.memory.cache
        request = cache.begin(TokenKey(PROMPT))
        assert cache.admit(request).admitted
        cache.abort(request)

    asyncio.run(worker.call(begin_and_give_up))
    assert inside.get("/cache").json()["hits"] == []


def blocks(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The kind and the data of each server-sent event."""
    for block in text.split("\n\n")[:-1]:
        kind, data = block.split("\n")
        yield kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def test_events_that_are_replayed_give_what_the_cache_holds(inside: Inside) -> None:
    worker, last = inside.served.worker, 7
    cache = worker.engine.memory.cache

    def use() -> None:
        cached(inside)
        cached(inside, list(range(210, 400)))
        asyncio.run(worker.call(lambda: cache.evict("full", 1)))
        inside.post("/reset_prefix_cache", {})
        cached(inside, PROMPT[:100])
        asyncio.run(worker.call(cache.drain))  # or copies end behind the last event
        cached(inside, PROMPT[:last])

    async def follow() -> list[tuple[str, dict[str, Any]]]:
        events = Inspection(worker).events()
        seen = list(blocks(await anext(events)))
        assert seen[0] == ("cleared", {"lost": 0, "page_size": 16})
        await asyncio.get_running_loop().run_in_executor(None, use)
        while not any(kind == "hit" and data["prompt"] == last for kind, data in seen):
            seen += blocks(await anext(events))
        await events.aclose()
        return seen

    held: set[Any] = set()
    seen = asyncio.run(follow())
    for kind, data in seen:
        pages = {(data["component"], data["tier"], each) for each in data.get("hashes", ())}
        if kind == "cleared":
            held.clear()
        elif kind == "evicted":
            assert pages <= held
            held -= pages
        else:
            assert not pages & held
            held |= pages
    assert {kind for kind, _ in seen} == {"cleared", "stored", "moved", "evicted", "hit"}

    def residency() -> set[Any]:
        stream, found = cache.events(), set()
        for event in stream.take():
            if isinstance(event, Stored | Moved | Evicted):
                found |= {(event.component, event.tier.value, h.hex()) for h in event.pages.hashes}
        stream.close()
        return found

    assert held == asyncio.run(worker.call(residency))


def test_readers_of_events_are_bounded_and_leave_nothing(inside: Inside) -> None:
    inspection = Inspection(inside.served.worker)

    async def talk() -> None:
        readers = [inspection.events() for _ in range(MOST_READERS)]
        for reader in readers:
            assert (await anext(reader)).startswith("event: cleared\n")
        with pytest.raises(ApiError, match="8 event streams are open, the most at a time"):
            await anext(inspection.events())
        for reader in readers:
            await reader.aclose()
        again = inspection.events()
        await anext(again)
        inside.served.worker.draining = True
        assert [each async for each in again] == []
        await inside.served.worker.call(lambda: None)  # behind the closing of the streams
        assert inside.served.worker.engine.memory.cache.tree.observers == ()

    asyncio.run(talk())


def test_a_reset_forgets_what_no_request_holds(inside: Inside) -> None:
    assert [cached(inside), cached(inside)] == [0, 192]
    reply = inside.post("/reset_prefix_cache", {})
    assert reply.status_code == 200
    freed, held = (reply.json()[f"{name}_slots"]["device"]["full"] for name in ("freed", "held"))
    assert freed > 0
    assert held == 0
    assert cached(inside) == 0


def test_all_of_it_asks_for_the_key_and_the_engine(inside: Inside) -> None:
    served = inside.served
    locked = Inside(ServedModel("tiny", served.worker, served.tokenizer, 8192, 8192, "secret"))
    asked = [("GET", "/cache"), ("GET", "/events"), ("POST", "/explain")]
    for method, path in [*asked, ("POST", "/reset_prefix_cache")]:
        assert locked.request(method, path).status_code == 401, path
    key = {"Authorization": "Bearer secret"}
    assert locked.request("GET", "/cache", headers=key).status_code == 200
    served.worker.stop()
    reply = locked.request("GET", "/cache", headers=key)
    assert (reply.status_code, reply.json()["error"]["message"]) == (503, "the engine has stopped")
