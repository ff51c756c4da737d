"""Requests go from one cache to another of the same process, over wires with faults (D5)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvgraft import Cache, ConfigError, LeaseError, TokenKey, TransferError
from kvgraft_nixl import HandOver, Offer, Stage, receiving
from kvgraft_nixl.memory import Rows, pieces
from kvgraft_nixl.messages import Ask, Pull, decode, encode

from .contents import PAGE, SETS, words
from .sides import Pair, Side
from .wires import Wires

pytestmark = [pytest.mark.filterwarnings("error")]

PROMPT = 300


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    given = getattr(request, "param", "hybrid")
    made = Pair(given) if isinstance(given, str) else Pair(**given)
    yield made
    made.close()


every_set = pytest.mark.parametrize("pair", [*SETS], indirect=True)


@every_set
def test_a_running_request_goes_on_in_another_cache_with_the_same_bytes(pair: Pair) -> None:
    tokens = words(PROMPT, 1)
    request = pair.sender.computed(tokens)
    offer = pair.sender.handed.offer(request)
    assert offer is not None
    assert offer.n_tokens == PROMPT // PAGE * PAGE
    arrival = pair.receiver.handed.accept(
        bytes(offer), TokenKey([*tokens, 7]), reserve=40, chunk=64
    )
    assert arrival.decision is not None
    assert arrival.decision.admitted
    assert pair.wires.written == 0, "nothing moves before it is admitted"
    pair.move(arrival)
    taken = arrival.take()
    assert taken.computed == offer.n_tokens
    pair.receiver.engine.expect(taken, offer.n_tokens // PAGE)
    pair.receiver.engine.prefill(taken)
    for token in range(30):
        taken.key.extend([token])
        pair.receiver.engine.compute(taken, 1)
    assert pair.receiver.engine.n_computed == PROMPT + 1 - offer.n_tokens + 30
    pair.receiver.cache.finish(taken)
    pair.sender.cache.finish(request)
    assert pair.receiver.engine.serve([*tokens, 7, *range(30), 5]) >= offer.n_tokens


@every_set
def test_only_what_the_reaches_need_at_the_boundary_is_read(pair: Pair) -> None:
    tokens = words(PROMPT, 2)
    request = pair.sender.computed(tokens)
    offer = pair.sender.handed.offer(request)
    assert offer is not None
    arrival = pair.receiver.handed.accept(offer, TokenKey([*tokens, 7]), chunk=64)
    pair.move(arrival)
    needed = 0
    boundary = offer.n_tokens // PAGE
    for each in pair.receiver.cache.mounted:
        component = pair.receiver.cache.tree.component(each.name)
        n_slots = 1
        if not component.is_state:
            n_slots = sum(end - start for start, end in component.reach_pages.spans(boundary))
        needed += n_slots * each.component.device.slot_nbytes
        if component.home_is_host:
            assert each.component.host is not None
            sizes = [
                spec.dtype.itemsize * int(np.prod(spec.shape)) for spec in each.component.host.specs
            ]
            needed += n_slots * sum(sizes)
    assert pair.wires.written == arrival.nbytes == needed


@every_set
def test_a_finished_request_is_fetched_by_its_tokens_behind_a_prefix_that_is_there(
    pair: Pair,
) -> None:
    tokens = words(PROMPT, 3)
    assert pair.receiver.engine.serve(tokens[:160]) == 0
    pair.sender.cache.finish(pair.sender.computed(tokens))
    address = pair.sender.handed.address
    arrival = pair.receiver.handed.fetch(address, TokenKey(tokens), chunk=64)
    pair.move(arrival)
    taken = arrival.take()
    assert taken.anchor_tokens >= 144, "its own prefix is used"
    assert taken.computed >= PROMPT // PAGE * PAGE - PAGE
    assert pair.wires.written == arrival.nbytes
    pair.receiver.engine.expect(taken, taken.computed // PAGE)
    pair.receiver.engine.prefill(taken)
    pair.receiver.cache.finish(taken)


@every_set
def test_data_that_the_sender_has_on_host_alone_is_read_from_there(pair: Pair) -> None:
    tokens = words(PROMPT, 4)
    sender = pair.sender
    sender.cache.finish(sender.computed(tokens))
    for each in sender.cache.mounted:
        if each.name != "hisparse":
            sender.cache.evict(each.name, each.component.device.capacity)
    assert sender.cache.drain()
    offer = sender.handed.offer(TokenKey(tokens))
    assert offer is not None
    arrival = pair.receiver.handed.accept(offer, TokenKey([*tokens, 7]), chunk=64)
    pair.move(arrival)
    taken = arrival.take()
    pair.receiver.engine.expect(taken, offer.n_tokens // PAGE)
    pair.receiver.cache.abort(taken)


@every_set
def test_a_damaged_payload_is_never_published_and_the_request_is_computed(pair: Pair) -> None:
    tokens = words(PROMPT, 5)
    request = pair.sender.computed(tokens)
    for chance in (1.0, 0.02):
        offer = pair.sender.handed.offer(request)
        assert offer is not None
        pair.wires.damage = chance
        arrival = pair.receiver.handed.accept(offer, TokenKey([*tokens, 7]), chunk=64)
        pair.move(arrival)
        if arrival.failed:
            assert "is not the sender's" in arrival.reason
            assert pair.receiver.handed.receiving.damaged
        else:
            pair.receiver.engine.expect(arrival.take(), offer.n_tokens // PAGE)
            continue
        assert pair.receiver.engine.serve([*tokens, 7]) == 0
        pair.wires.damage = 0.0


def test_a_request_that_is_not_admitted_moves_nothing(pair: Pair) -> None:
    tokens = words(PROMPT, 6)
    request = pair.sender.computed(tokens)
    offer = pair.sender.handed.offer(request)
    assert offer is not None
    receiver = pair.receiver
    others = [receiver.computed(words(900, seed)) for seed in (7, 8)]
    arrival = receiver.handed.accept(offer, TokenKey([*tokens, 7]), reserve=400, chunk=64)
    assert arrival.failed
    assert arrival.decision is not None
    assert not arrival.decision.admitted
    assert "not admitted: deferred" in arrival.reason
    for _ in range(5):
        pair.step()
    assert pair.wires.written == 0
    for other in others:
        receiver.cache.abort(other)
    again = receiver.handed.accept(offer, TokenKey([*tokens, 7]), reserve=400, chunk=64)
    pair.move(again)
    receiver.engine.expect(again.take(), offer.n_tokens // PAGE)


def test_a_deferred_arrival_that_is_given_up_releases_the_offer(pair: Pair) -> None:
    tokens = words(PROMPT, 6)
    offer = pair.sender.handed.offer(pair.sender.computed(tokens))
    assert offer is not None
    others = [pair.receiver.computed(words(900, seed)) for seed in (7, 8)]
    arrival = pair.receiver.handed.accept(offer, TokenKey([*tokens, 7]), reserve=400, chunk=64)
    assert arrival.failed
    pair.step()
    assert pair.sender.handed.n_offers == 1
    pair.receiver.handed.give_up(arrival)
    pair.step()
    assert pair.sender.handed.n_offers == 0
    assert others


def test_one_arrival_follows_an_offer_at_a_time(pair: Pair) -> None:
    tokens = words(PROMPT, 29)
    offer = pair.sender.handed.offer(pair.sender.computed(tokens))
    assert offer is not None
    first, second = [
        pair.receiver.handed.accept(offer, TokenKey([*tokens, 7]), chunk=64) for _ in range(2)
    ]
    assert second.failed
    assert "another arrival follows the offer" in second.reason
    pair.move(first)
    pair.receiver.engine.expect(first.take(), offer.n_tokens // PAGE)


def test_a_receiver_that_closes_tells_its_senders_while_its_transport_is_open(pair: Pair) -> None:
    tokens = words(PROMPT, 30)
    offer = pair.sender.handed.offer(pair.sender.computed(tokens))
    assert offer is not None
    arrival = pair.receiver.handed.accept(offer, TokenKey([*tokens, 7]), chunk=64)
    for _ in range(3):
        pair.step(0)
    assert arrival.stage is Stage.PULLING
    pair.receiver.handed.close()
    assert arrival.failed
    assert not pair.receiver.cache.requests
    pair.sender.handed.poll()
    assert pair.sender.handed.n_offers == 0


def test_an_answer_that_nobody_waits_for_is_released(pair: Pair) -> None:
    tokens = words(PROMPT, 31)
    pair.sender.cache.finish(pair.sender.computed(tokens))
    arrival = pair.receiver.handed.fetch(pair.sender.handed.address, TokenKey(tokens))
    pair.receiver.handed.give_up(arrival)
    pair.step()
    pair.step()
    assert pair.sender.handed.sending.offered == 1
    assert pair.sender.handed.n_offers == 0


def test_a_namespace_without_a_name_is_refused_and_pins_nothing(pair: Pair) -> None:
    tokens, strange = words(PROMPT, 32), object()
    pair.sender.cache.finish(pair.sender.computed(tokens, strange))
    with pytest.raises(ConfigError, match="no canonical bytes"):
        pair.sender.handed.offer(TokenKey(tokens, strange))
    assert not pair.sender.cache.requests


@pytest.mark.parametrize("tokens", [b"abc", np.array([-5, 3], "<i4").tobytes()])
def test_a_question_for_no_tokens_is_left_unanswered(pair: Pair, tokens: bytes) -> None:
    pair.wires.end("other").send("sender", encode(Ask("number", tokens, None, b"other")))
    pair.sender.handed.poll()
    assert not pair.wires.ends["other"].received()


def test_a_failed_read_keeps_its_slots_until_it_has_ended(pair: Pair) -> None:
    tokens = words(PROMPT, 9)
    request = pair.sender.computed(tokens)
    offer = pair.sender.handed.offer(request)
    assert offer is not None
    receiver = pair.receiver
    arrival = receiver.handed.accept(offer, TokenKey([*tokens, 7]), chunk=64)
    for _ in range(3):
        pair.step(0)
    assert arrival.stage is Stage.PULLING
    pair.wires.slow = True
    receiver.clock.now = 31.0
    pair.step()
    assert arrival.failed
    assert "longer than 30" in arrival.reason
    assert receiver.handed.n_arrivals == 1, "its reads go on"
    other = receiver.computed(words(PROMPT, 10))
    pair.wires.slow = False
    pair.step()
    receiver.engine.expect(other, PROMPT // PAGE)
    pair.step()
    assert receiver.handed.n_arrivals == 0
    receiver.cache.abort(other)


def test_a_sender_that_is_gone_fails_the_arrival(pair: Pair) -> None:
    tokens = words(PROMPT, 11)
    request = pair.sender.computed(tokens)
    for steps in (0, 1, 3):
        offer = pair.sender.handed.offer(request)
        assert offer is not None
        arrival = pair.receiver.handed.accept(offer, TokenKey([*tokens, 7]), chunk=64)
        for _ in range(steps):
            pair.step(1)
        pair.wires.dead.add("sender")
        pair.receiver.clock.now += 1.1  # it asks again then
        for _ in range(5):
            pair.receiver.handed.poll()
            pair.wires.step()
        assert arrival.failed
        assert "gone" in arrival.reason
        assert pair.receiver.handed.n_arrivals == 0
        pair.wires.dead.clear()
    assert pair.receiver.engine.serve(tokens) == 0


@pytest.mark.parametrize("pair", ["hybrid", "window"], indirect=True)
def test_lost_messages_are_asked_for_again(pair: Pair) -> None:
    pair.wires.lost = 0.5
    for seed in range(24, 28):
        tokens = words(PROMPT, seed)
        request = pair.sender.computed(tokens)
        offer = pair.sender.handed.offer(request)
        assert offer is not None
        arrival = pair.receiver.handed.accept(offer, TokenKey([*tokens, 7]), chunk=64)
        while not arrival.ended:
            pair.step()
            pair.receiver.clock.now += 0.6
        assert not arrival.failed, arrival
        taken = arrival.take()
        pair.receiver.engine.expect(taken, offer.n_tokens // PAGE)
        pair.receiver.cache.abort(taken)
        pair.sender.cache.abort(request)


def test_a_sender_keeps_its_pins_until_it_is_told_and_at_most_for_a_time(pair: Pair) -> None:
    sender = pair.sender
    tokens = words(PROMPT, 12)
    sender.cache.finish(sender.computed(tokens))
    for _ in range(3):
        offer = sender.handed.offer(TokenKey(tokens))
        assert offer is not None
        sender.cache.evict("full", 128)
        assert sender.engine.serve(tokens) >= PROMPT // PAGE * PAGE - PAGE, "it is pinned"
        assert sender.handed.withdraw(offer)
        assert not sender.handed.withdraw(offer)
    assert sender.handed.offer(TokenKey(tokens)) is not None
    sender.clock.now = 59.0
    sender.handed.poll()
    assert sender.handed.n_offers == 1
    sender.clock.now = 61.0
    sender.handed.poll()
    assert (sender.handed.n_offers, sender.handed.sending.expired) == (0, 1)
    assert all(each.device.pinned == 0 for each in sender.cache.stats().components.values())


@pytest.mark.parametrize("pair", [{"components": "full", "max_offers": 2}], indirect=True)
def test_a_sender_holds_at_most_so_many_offers(pair: Pair) -> None:
    tokens = words(PROMPT, 13)
    sender = pair.sender
    sender.cache.finish(sender.computed(tokens))
    made = [sender.handed.offer(TokenKey(tokens)) for _ in range(3)]
    assert [each is None for each in made] == [False, False, True]
    assert sender.handed.sending.refused == 1
    assert sender.handed.offer(TokenKey(words(50, 99))) is None


def test_an_offer_of_a_cleared_namespace_is_withdrawn(pair: Pair) -> None:
    tokens = words(PROMPT, 14)
    sender = pair.sender
    sender.cache.finish(sender.computed(tokens, "tenant"))
    offer = sender.handed.offer(TokenKey(tokens, "tenant"))
    assert offer is not None
    arrival = pair.receiver.handed.accept(offer, TokenKey([*tokens, 7], "tenant"), chunk=64)
    pair.step(1)
    sender.cache.clear("tenant")
    for _ in range(5):
        pair.step(1)
    assert arrival.failed
    assert "cleared" in arrival.reason
    assert sender.handed.n_offers == 0


def test_offers_of_other_tokens_models_and_lengths_are_refused(pair: Pair) -> None:
    tokens = words(PROMPT, 15)
    request = pair.sender.computed(tokens)
    receiver = pair.receiver.handed

    def refused(key: TokenKey, change: Any = bytes) -> str:
        offer = pair.sender.handed.offer(request)
        assert offer is not None
        arrival = receiver.accept(change(offer), key)
        assert arrival.failed
        pair.sender.handed.withdraw(offer)
        return arrival.reason

    other = [*tokens]
    other[3] += 1
    assert "other tokens" in refused(TokenKey([*other, 7]))
    assert "another namespace" in refused(TokenKey([*tokens, 7], "tenant"))
    assert "at least one is left" in refused(TokenKey(tokens[: PROMPT // PAGE * PAGE]))
    assert "damaged" in refused(TokenKey([*tokens, 7]), lambda each: bytes(each)[:-9])
    assert "damaged" in refused(TokenKey([*tokens, 7]), lambda each: b"")
    with pytest.raises(ConfigError, match="chunk"):
        receiver.accept(
            bytes(pair.sender.handed.offer(request) or b""), TokenKey([*tokens, 7]), chunk=0
        )
    strange = Side(pair.wires, "strange", "hybrid", weights="2")
    offer = pair.sender.handed.offer(request)
    assert offer is not None
    assert "another model" in strange.handed.accept(offer, TokenKey([*tokens, 7])).reason
    strange.close()


def test_a_peer_without_the_prefix_says_so(pair: Pair) -> None:
    address = pair.sender.handed.address
    arrival = pair.receiver.handed.fetch(address, TokenKey(words(40, 16), ("a", 1, b"x")))
    pair.move(arrival)
    assert arrival.failed
    assert "has nothing" in arrival.reason
    with pytest.raises(ConfigError, match="cannot be asked for"):
        pair.receiver.handed.fetch(address, TokenKey([1], frozenset("a")))
    nowhere = pair.receiver.handed.fetch(b"nowhere", TokenKey([1, 2]))
    assert nowhere.failed


@every_set
def test_data_is_shared_as_soon_as_all_of_it_came_up_to_the_last_whole_page(pair: Pair) -> None:
    tokens = words(20 * PAGE, 29)
    offer = pair.sender.handed.offer(pair.sender.computed(tokens))
    assert offer is not None
    assert offer.n_tokens == 20 * PAGE
    arrival = pair.receiver.handed.accept(offer, TokenKey([*tokens, 7]), chunk=64)
    other = pair.receiver.cache.begin(TokenKey([*tokens, 8]))
    assert other.anchor_tokens == 0
    pair.receiver.cache.abort(other)
    pair.move(arrival)
    other = pair.receiver.cache.begin(TokenKey([*tokens, 8]))
    assert other.anchor_tokens == 20 * PAGE
    pair.receiver.cache.abort(other)
    pair.receiver.cache.abort(arrival.take())


@pytest.mark.parametrize("pair", [{"components": "full", "max_arrivals": 2}], indirect=True)
def test_a_receiver_has_at_most_so_many_arrivals(pair: Pair) -> None:
    tokens = words(PROMPT, 30)
    pair.sender.cache.finish(pair.sender.computed(tokens))
    made = []
    for token in range(3):
        offer = pair.sender.handed.offer(TokenKey(tokens))
        assert offer is not None
        key = TokenKey([*tokens, token])
        made.append(pair.receiver.handed.accept(offer, key, chunk=64))
    assert [each.failed for each in made] == [False, False, True]
    assert "max_arrivals=2" in made[2].reason


def test_rows_become_pieces_where_they_follow_one_another_in_both_places() -> None:
    def at(*slots: int) -> Rows:
        return Rows(10, np.array(slots, np.uint64) * np.uint64(10))

    source = at(3, 2, 1, 0, 7, 6, 7, 8, 9, 20, 22)
    target = at(13, 12, 11, 10, 17, 16, 17, 18, 19, 30, 31)
    found = [side.tolist() for side in pieces([source], [target])]
    rows = {}
    for (theirs, nbytes), (ours, same) in zip(*found):
        assert nbytes == same
        for offset in range(0, nbytes, 10):
            rows[ours + offset] = theirs + offset
    expected = dict(zip(target.starts.tolist(), source.starts.tolist()))
    assert rows == expected
    assert len(found[0]) < 7
    with pytest.raises(TransferError, match="the receiver needs"):
        pieces([source], [at(1)])


def test_an_arrival_that_nobody_takes_leaves_its_data_to_the_cache(pair: Pair) -> None:
    tokens = words(PROMPT, 17)
    request = pair.sender.computed(tokens)
    offer = pair.sender.handed.offer(request)
    assert offer is not None
    receiver = pair.receiver
    arrival = receiver.handed.accept(offer, TokenKey([*tokens, 7]), chunk=64)
    with pytest.raises(LeaseError, match="is pulling"):
        arrival.take()
    pair.move(arrival)
    receiver.clock.now += 31.0
    receiver.handed.poll()
    assert arrival.stage is Stage.TAKEN
    assert receiver.handed.n_arrivals == 0
    with pytest.raises(LeaseError, match="is taken"):
        arrival.take()
    assert receiver.engine.serve([*tokens, 7]) == offer.n_tokens


@pytest.mark.parametrize("pair", ["window"], indirect=True)
def test_layers_can_be_computed_before_the_last_page_came(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiving, "NBYTES_AT_ONCE", 1)
    tokens = words(PROMPT, 18)
    request = pair.sender.computed(tokens)
    offer = pair.sender.handed.offer(request)
    assert offer is not None
    receiver = pair.receiver
    arrival = receiver.handed.accept(offer, TokenKey([*tokens, 7]), reserve=20, chunk=64)
    seen: list[list[bool]] = []
    for _ in range(400):
        pair.step(3)
        if arrival.stage is Stage.PULLING:
            ready = [arrival.layer_ready(layer) for layer in range(4)]
            if any(ready) and not seen:
                seen.append(ready)
                mine = arrival.request
                n_tokens = mine.prompt - mine.computed
                assert receiver.cache.allocate(mine, n_tokens)
                table = receiver.cache.table(mine, "full")
                assert (table[: offer.n_tokens // PAGE] >= 0).all()
                arrival.wait_layer(0, 1.0)
                with pytest.raises(TransferError, match="not here after"):
                    arrival.wait_layer(3, 0.01)
        if arrival.ended:
            break
    assert [(ready[0], ready[3]) for ready in seen] == [(True, False)]
    assert arrival.received_nbytes == arrival.nbytes
    taken = arrival.take()
    receiver.engine.expect(taken, offer.n_tokens // PAGE)
    receiver.engine.prefill(taken)
    receiver.cache.finish(taken)


def test_a_request_with_states_cannot_be_computed_before_it_is_ready(pair: Pair) -> None:
    tokens = words(PROMPT, 19)
    request = pair.sender.computed(tokens)
    offer = pair.sender.handed.offer(request)
    assert offer is not None
    arrival = pair.receiver.handed.accept(offer, TokenKey([*tokens, 7]), chunk=64)
    with pytest.raises(ConfigError, match="keeps states"):
        _ = arrival.request
    pair.receiver.handed.give_up(arrival)
    assert arrival.failed
    with pytest.raises(LeaseError, match="is failed"):
        _ = arrival.request


def test_a_measured_bandwidth_decides_between_reading_and_computing() -> None:
    pair = Pair("full", load={"prefill_tokens_s": 1000.0})
    receiver = pair.receiver
    for seed, slow_s, slower in ((20, 0.001, 0), (21, 10.0, 0), (22, 0.0, 1), (23, 0.0, 1)):
        tokens = words(PROMPT, seed)
        request = pair.sender.computed(tokens)
        offer = pair.sender.handed.offer(request)
        assert offer is not None
        if seed == 23:
            receiver.clock.now += 61.0
        arrival = receiver.handed.accept(offer, TokenKey([*tokens, 7]), chunk=64)
        pair.step()
        receiver.clock.now += slow_s
        if not arrival.ended:
            pair.move(arrival)
        assert receiver.handed.receiving.slower == slower
        assert arrival.failed is (seed == 22)
        if not arrival.failed:
            receiver.cache.abort(arrival.take())
        pair.sender.cache.abort(request)
    pair.close()


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"device_memory": "8MiB"}, "share a budget"), ({"payload": False}, "'meta'")],
)
def test_caches_that_cannot_be_read_by_address_are_refused(
    settings: dict[str, Any], said: str
) -> None:
    sizes: dict[str, Any] = {} if "device_memory" in settings else {"device_tokens": 160}
    with Cache.open(["full", "swa"], page_size=PAGE, **sizes, **settings) as cache:
        end = Wires().end("a")
        with pytest.raises(ConfigError, match=said):
            HandOver(cache, end, model="m", weights="1")


def test_bounds_that_are_none_are_refused() -> None:
    end = Wires().end("a")
    with Cache.open(["full"], page_size=PAGE, device_tokens=160) as cache:
        for name in ("timeout_s", "hold_s", "max_offers", "max_arrivals"):
            for value in (0, "a"):
                with pytest.raises(ConfigError, match=name):
                    HandOver(cache, end, model="m", weights="1", **{name: value})  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="is no transport"):
            HandOver(cache, "tcp", model="m", weights="1")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="is no Cache"):
            HandOver(None, end, model="m", weights="1")  # type: ignore[arg-type]


def test_an_offer_is_small_and_reads_back() -> None:
    offer = Offer("ab", 64, b"n" * 32, b"f" * 32, b"address")
    assert Offer.read(bytes(offer)) == offer
    assert len(bytes(offer)) < 400


@pytest.mark.parametrize("first", [-1, 1 << 63, True])
def test_a_message_with_a_number_that_no_transport_takes_is_refused_whole(first: int) -> None:
    assert decode(encode(Pull("ab", (1 << 63) - 1, b"there")))
    with pytest.raises(TransferError, match=r"a message has wrong fields: .* is no number from 0"):
        decode(encode(Pull("ab", first, b"there")))


def test_a_closed_hand_over_refuses_calls_and_its_polls_do_nothing(pair: Pair) -> None:
    handed, key = pair.receiver.handed, TokenKey([1, 2])
    handed.close()
    handed.poll()
    for call in (
        lambda: handed.offer(key),
        lambda: handed.accept(b"", key),
        lambda: handed.fetch(b"there", key),
    ):
        with pytest.raises(TransferError, match="the hand-over is closed; make another"):
            call()
