"""`explain()` says, component by component, why the anchor is not deeper (M9)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvgraft import Cache, TokenKey
from kvgraft.tree import eviction, matching
from kvgraft.tree.tree import Tree
from kvgraft_observe.explaining import Explanation, explain
from kvgraft_testing.stepped import SteppedTransferEngine

from .books import PAGE, back_up, insert, open_tree

SEQUENCE = list(range(1, 13))


def told(tree: Tree, tokens: list[int], limit: int | None = None) -> Explanation:
    return explain(tree, TokenKey(tokens), len(tokens) // PAGE if limit is None else limit)


def reasons(explanation: Explanation) -> dict[str, str]:
    return {each.component: each.reason for each in explanation.components}


def test_where_everything_is_cached_the_limit_is_the_reason() -> None:
    tree = open_tree("full", "window")
    insert(tree, SEQUENCE)
    explanation = told(tree, SEQUENCE, limit=5)
    assert (explanation.anchor, explanation.known, explanation.limit) == (10, 10, 10)
    assert set(reasons(explanation).values()) == {
        "nothing deeper may be matched; one token is always computed"
    }


def test_a_page_that_the_sequence_does_not_fill_is_the_reason() -> None:
    tree = open_tree("full")
    for tokens, n_cached in ([7], 0), (SEQUENCE[:5], 4):
        insert(tree, tokens[:n_cached])
        explanation = told(tree, tokens)
        assert explanation.anchor == n_cached
        assert reasons(explanation) == {
            "full": "nothing deeper may be matched; fewer tokens follow, 1, than a page of 2 has"
        }


def test_data_is_told_apart_that_a_copy_under_way_holds_and_that_was_cleared() -> None:
    transfers = SteppedTransferEngine()
    with Cache.open(
        {"full": {}, "swa": {"window": 4}},
        page_size=4,
        device_tokens=64,
        host_tokens=64,
        load=None,
        write_policy="write-through",
        transfers=transfers,
    ) as cache:
        key = TokenKey(range(9))
        request = cache.begin(key)
        assert cache.admit(request).admitted
        assert cache.allocate(request, 9)
        cache.computed(request, 9)
        cache.finish(request)
        assert transfers.pending
        assert "held by a copy under way" in str(cache.explain(key))
        assert "pinned" not in str(cache.explain(key))
        again = cache.begin(key)
        assert cache.explain(key).kept[0].pinned
        assert not cache.explain(key).kept[0].copied
        cache.abort(again)
        transfers.run_all()
        cache.poll()
        assert not any(each.pinned for each in cache.explain(key).kept)
        cache.clear()
        cache.drain()
        told = str(cache.explain(key))
        assert "resume points evicted or cleared in this cache: 1 (repeat)" in told


def test_where_the_sequence_is_new_the_tree_holds_no_node_beyond() -> None:
    tree = open_tree("full")
    insert(tree, SEQUENCE[:6])
    explanation = told(tree, SEQUENCE)
    assert (explanation.anchor, explanation.known) == (6, 6)
    assert reasons(explanation) == {"full": "the tree holds no node beyond 6"}


def test_a_window_names_the_pages_of_its_reach_that_are_gone() -> None:
    tree = open_tree("full", "window")
    insert(tree, SEQUENCE[:8], without=["window"])
    insert(tree, SEQUENCE, behind={"window": 5})
    explanation = told(tree, SEQUENCE)
    assert (explanation.anchor, explanation.device_anchor) == (0, 0)
    assert reasons(explanation) == {
        "full": "nothing deeper may be matched; one token is always computed",
        "window": "at 8: tokens [4, 8) of its reach are not on any tier",
    }
    full = explanation.components[0]
    assert (full.accepts, full.device_accepts) == (12, 12)


def test_a_state_that_was_not_captured_is_missed_at_its_boundary() -> None:
    tree = open_tree("full", "state")
    insert(tree, SEQUENCE[:8])
    insert(tree, SEQUENCE, without=["state"])
    explanation = told(tree, SEQUENCE)
    assert explanation.anchor == 8
    assert reasons(explanation)["state"] == "at 12: no state on any tier at this boundary"


def test_pages_on_the_host_shorten_the_device_boundary() -> None:
    tree = open_tree("full")
    node = insert(tree, SEQUENCE)
    back_up(tree, node)
    eviction.evict_device(tree, tree.by_name["full"], 6)
    explanation = told(tree, SEQUENCE)
    assert (explanation.anchor, explanation.device_anchor) == (12, 0)
    (full,) = explanation.components
    assert (full.accepts, full.device_accepts) == (12, 0)


def test_the_explanation_is_printed_line_by_line() -> None:
    tree = open_tree("full", "state")
    insert(tree, SEQUENCE, without=["state"])
    assert str(told(tree, SEQUENCE)).splitlines() == [
        "12 tokens: anchor 0, device anchor 0, tree knows 12, limit 12",
        "  full: accepts 12 (device 12): "
        "nothing deeper may be matched; one token is always computed",
        "  state: accepts 0 (device 0): at 12: no state on any tier at this boundary",
    ]


@given(
    stored=st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=PAGE, max_size=12), st.booleans()),
        max_size=4,
    ),
    asked=st.lists(st.integers(0, 1), max_size=14),
)
def test_every_component_accepts_the_anchor_and_explaining_changes_nothing(
    stored: list[tuple[list[int], bool]], asked: list[int]
) -> None:
    tree = open_tree("full", "window", "state", capacity=128)
    for tokens, with_state in stored:
        whole = tokens[: len(tokens) // PAGE * PAGE]
        insert(tree, whole, without=[] if with_state else ["state"])
    key, limit = TokenKey(asked), len(asked) // PAGE
    before = matching.match(tree, key, limit)
    explanation = explain(tree, key, limit)
    assert explanation.anchor == before.anchor * PAGE
    assert all(each.accepts >= explanation.anchor for each in explanation.components)
    assert all(each.device_accepts <= each.accepts for each in explanation.components)
    assert all(each.reason for each in explanation.components)
    after = matching.match(tree, key, limit)
    assert (after.anchor, after.device_anchor) == (before.anchor, before.device_anchor)
