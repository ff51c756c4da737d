"""Why the anchor is not deeper (M9)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvgraft.errors import ContractViolation
from kvgraft.policies.policy import class_of, is_left_behind
from kvgraft.tree import matching
from kvgraft.tree.component import Candidates, TreeComponent
from kvgraft.tree.keys import TokenKey
from kvgraft.tree.node import Node
from kvgraft.tree.operations import segment_nodes
from kvgraft.tree.pinning import Receipt
from kvgraft.tree.tree import Tree
from kvgraft.types import PointKind, Tier

if TYPE_CHECKING:
    from kvgraft import Cache, Prefetch

__all__ = ["ComponentReason", "Explanation", "Keeping", "SkippedPoints", "explain", "explain_key"]


class ComponentReason(NamedTuple):
    """One component's part in where a match ends; token counts.

    Attributes:
        component: its name.
        accepts: deepest boundary it would accept on its own.
        device_accepts: the same from DEVICE alone.
        reason: why it accepts nothing deeper.
    """

    component: str
    accepts: int
    device_accepts: int
    reason: str


class SkippedPoints(NamedTuple):
    """Resume points that were not made since the cache was opened, of all requests.

    Attributes:
        kind: their kind.
        n_points: how many.
        reason: why the last of them was skipped.
    """

    kind: PointKind
    n_points: int
    reason: str


class Keeping(NamedTuple):
    """How the eviction policy ranks the data at the anchor.

    Attributes:
        component: its name.
        tier: DEVICE or HOST.
        pinned: whether a request, a pinned prefix or a copy in flight holds it, so that it is not
            evicted.
        use_class: the class of its last use.
        words: that class in words; empty if the policy has only one.
        score: data of the lowest score is evicted first; None if the least recently used data is.
        priority: priority of its last use; data of a lower priority is evicted first, before scores
            count.
        expires: when it expires, in words; empty if it does not.
        copied: whether only copies in flight hold it.
    """

    component: str
    tier: Tier
    pinned: bool
    use_class: int
    words: str
    score: float | None
    priority: int = 0
    expires: str = ""
    copied: bool = False

    def __str__(self) -> str:
        said = [f"{self.component} on {self.tier.name}"]
        if self.words:
            said.append(f"class {self.use_class} ({self.words})")
        if self.score is not None:
            said.append(f"score {self.score:.3g}")
        if self.priority:
            said.append(f"priority {self.priority}")
        if self.expires:
            said.append(self.expires)
        if self.pinned:
            said.append("held by a copy under way" if self.copied else "pinned")
        return ", ".join(said)


class Explanation(NamedTuple):
    """Where a match ends and why, by component; token counts.

    Attributes:
        tokens: the key's length.
        limit: deepest boundary a request with this key may resume from.
        known: how far the tree has nodes for the key.
        anchor: deepest boundary all components accept.
        device_anchor: the same from DEVICE alone.
        components: one entry per component, widest reach first.
        points: resume points on the way, by position, with their kinds; at those deeper than the
            anchor, data is missing as `components` says.
        storage: the result of a prefetch and why it was not more; empty without one.
        skipped: resume points that requests of this cache left out, by kind.
        lost: resume points of this cache of which data was evicted or cleared, by kind.
        policy: the eviction policy's name.
        kept: how it ranks the data at the anchor, by component and tier.
    """

    tokens: int
    limit: int
    known: int
    anchor: int
    device_anchor: int
    components: tuple[ComponentReason, ...]
    storage: str = ""
    points: tuple[tuple[int, PointKind], ...] = ()
    skipped: tuple[SkippedPoints, ...] = ()
    lost: tuple[tuple[PointKind, int], ...] = ()
    policy: str = ""
    kept: tuple[Keeping, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"{self.tokens} tokens: anchor {self.anchor}, device anchor {self.device_anchor}, "
            f"tree knows {self.known}, limit {self.limit}"
        ]
        lines += [
            f"  {each.component}: accepts {each.accepts} (device {each.device_accepts}): "
            f"{each.reason}"
            for each in self.components
        ]
        if self.points:
            named = ", ".join(f"{position} ({kind})" for position, kind in self.points)
            lines.append(f"  resume points: {named}")
        lines += [
            f"  resume points skipped in this cache: {each.n_points} ({each.kind}), the last "
            f"because {each.reason}"
            for each in self.skipped
        ]
        if self.lost:
            named = ", ".join(f"{n_points} ({kind})" for kind, n_points in self.lost)
            lines.append(f"  resume points evicted or cleared in this cache: {named}")
        if self.kept:
            lines.append(f"  kept by {self.policy}: {'; '.join(map(str, self.kept))}")
        if self.storage:
            lines.append(f"  storage: {self.storage}")
        return "\n".join(lines)


def explain_key(cache: Cache, key: TokenKey, prefetch: Prefetch | None = None) -> Explanation:
    """As `Cache.explain`."""
    root = cache.tree.hold_root(key.namespace)
    try:
        limit = max(0, key.n_tokens - 1) // cache.tree.page_size
        copies = [each.receipt for each in cache.journal.operations()]
        found = explain(cache.tree, key, limit, [each for each in copies if each is not None])
    finally:
        cache.tree.release_root(root)
    points = cache.points
    return found._replace(
        skipped=tuple(
            SkippedPoints(kind, points.skipped[kind], why) for kind, why in points.reasons.items()
        ),
        lost=tuple((kind, n) for kind, n in points.lost.items() if n),
        storage="" if prefetch is None else str(prefetch),
    )


def explain(tree: Tree, key: TokenKey, limit: int, copies: Sequence[Receipt] = ()) -> Explanation:
    """Explain a match of at most `limit` pages; changes nothing.

    Slower than matching: every boundary is tried for every component on its own. `copies` are the
    pins of transfers in flight.
    """
    nodes, known = matching.follow(tree, tree.root(key.namespace), key.data, limit)
    found = matching.match(tree, key, limit)
    size = tree.page_size
    rest = key.n_tokens - limit * size
    at_limit = "nothing deeper may be matched; " + (
        f"fewer tokens follow, {rest}, than a page of {size} has"
        if 0 < rest < size
        else "one token is always computed"
    )
    reasons = tuple(
        _reason(tree, component, nodes, known, None if known < limit else at_limit)
        for component in tree.components
    )
    return Explanation(
        key.n_tokens,
        limit * size,
        known * size,
        found.anchor * size,
        found.device_anchor * size,
        reasons,
        points=tuple(
            (page * size, kind)
            for node in nodes
            for page, kind in node.each_point()
            if page <= known
        ),
        policy=tree.policy.name,
        kept=tuple(_kept(tree, nodes, found.anchor, copies)),
    )


def _kept(
    tree: Tree, nodes: list[Node], anchor: int, copies: Sequence[Receipt]
) -> Iterator[Keeping]:
    """The rank of the data on the node before the anchor."""
    for node in nodes:
        if not node.start < anchor <= node.end:
            continue
        for component, cell in zip(tree.components, node.cells):
            for tier, slots, pins in (
                (Tier.DEVICE, cell.device, cell.device_pins),
                (Tier.HOST, cell.host, cell.host_pins),
            ):
                if slots is not None and not is_left_behind(cell.stamp):
                    words, score = ranked(tree, component.pool(tier).queue, cell.stamp)
                    its_class = class_of(cell.stamp)
                    n_copies = sum(_holds(each, component, node, tier) for each in copies)
                    kept = Keeping(component.name, tier, pins > 0, its_class, words, score)
                    kept = kept._replace(copied=0 < pins <= n_copies)
                    term = tree.lifetimes.of(cell.stamp) if tree.lifetimes is not None else None
                    if tree.lifetimes is not None and term is not None:
                        expires = tree.lifetimes.describe(term)
                        kept = kept._replace(priority=term.priority, expires=expires)
                    yield kept


def _holds(receipt: Receipt, component: TreeComponent, node: Node, tier: Tier) -> bool:
    """Whether a receipt pins a component's data on a node."""
    since = 0 if tier is Tier.DEVICE else receipt.host_from
    if since is None or (node.end <= since and not component.is_state):
        return False
    return node in segment_nodes(component, receipt)


def ranked(tree: Tree, order: Candidates, stamp: int) -> tuple[str, float | None]:
    """The policy's words for a class, and its score.

    Raises:
        ContractViolation: K1, the policy raised.
    """
    policy: Any = tree.policy  # one of others gives anything
    asked: Any = order
    try:
        words, score = policy.describe(class_of(stamp)), asked.score(stamp)
    except Exception as error:  # noqa: BLE001 - whatever a policy of others raises
        said = f"{type(error).__name__}: {error}"
    else:
        if isinstance(words, str) and (score is None or isinstance(score, (int, float))):
            return words, score
        said = f"words {words!r:.40}, score {score!r:.40}; give a str, and a number or None"
    raise ContractViolation("K1", None, f"policy {tree.policy.name!r} cannot rank data: {said}")


def _gap(
    component: TreeComponent, nodes: list[Node], boundary: int, size: int, *, device_only: bool
) -> str | None:
    """The pages that the component lacks at a boundary; None if it can resume there."""
    tiers = "on DEVICE" if device_only else "on any tier"
    if component.is_state:
        for node in nodes:
            if node.end == boundary:
                if matching.readable(
                    node.cells[component.index], component, device_only=device_only
                ):
                    return None
                break
        return f"no state {tiers} at this boundary"
    for span in component.reach_pages.spans(boundary):
        for node in nodes:
            inside = node.start < span.end and node.end > span.start
            if inside and not matching.readable(
                node.cells[component.index], component, device_only=device_only
            ):
                start, end = max(node.start, span.start), min(node.end, span.end)
                return f"tokens [{start * size}, {end * size}) of its reach are not {tiers}"
    return None


def _reason(
    tree: Tree, component: TreeComponent, nodes: list[Node], known: int, at_limit: str | None
) -> ComponentReason:
    if component.ends_at_boundary:
        boundaries = [known, *(node.end for node in reversed(nodes) if node.end < known)]
    else:
        boundaries = list(range(known, 0, -1))
    accepted = {True: 0, False: 0}
    size = tree.page_size
    for device_only in accepted:
        for boundary in boundaries:
            if boundary and _gap(component, nodes, boundary, size, device_only=device_only) is None:
                accepted[device_only] = boundary
                break
    deeper = [boundary for boundary in boundaries if boundary > accepted[False]]
    if deeper:
        gap = _gap(component, nodes, deeper[-1], size, device_only=False)
        reason = f"at {deeper[-1] * size}: {gap}"
    elif at_limit is None:
        reason = f"the tree holds no node beyond {known * size}"
    else:
        reason = at_limit
    return ComponentReason(component.name, accepted[False] * size, accepted[True] * size, reason)
