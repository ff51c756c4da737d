"""Making room in one pool, under the cache's write policy (R3, E4)."""

from __future__ import annotations

from kvgraft.config import WritePolicy
from kvgraft.transfers.journal import Journal, Transfer
from kvgraft.tree import eviction, operations
from kvgraft.tree.eviction import Victim
from kvgraft.tree.track import Track
from kvgraft.tree.tree import Tree
from kvgraft.types import Direction

__all__ = ["Room"]


class Room:
    """Evicts for exact shortfalls, one pool at a time.

    Args:
        tree: decides on victims.
        journal: copies them out first under write-back.
        policy: the write policy.
        timeout_s: longest wait for a victim's copy; then it is dropped instead (E4).
    """

    def __init__(self, tree: Tree, journal: Journal, policy: WritePolicy, timeout_s: float) -> None:
        self.tree = tree
        self.journal = journal
        self.timeout_s = timeout_s
        self.write_back = policy is WritePolicy.WRITE_BACK

    def on_device(self, track: Track, n_slots: int) -> bool:
        """Free DEVICE slots of one component until `n_slots` are free; whether they are.

        Takes nothing from a pool that is not short (E2), and nothing at all if they are free.
        """
        shortfall = n_slots - track.device.free
        if shortfall <= 0:
            return True
        if self.write_back:
            self._demote(track, n_slots)
        else:
            eviction.evict_device(self.tree, track, shortfall)
        return track.device.free >= n_slots

    def on_host(self, track: Track, n_slots: int) -> bool:
        """Free HOST slots of one component until `n_slots` are free; whether they are."""
        assert track.host is not None
        shortfall = n_slots - track.host.free
        if shortfall > 0:
            eviction.evict_host(self.tree, track, shortfall)
        return track.host.free >= n_slots

    def _demote(self, track: Track, n_slots: int) -> None:
        """Evict with a backup first; what HOST cannot take is dropped, so that room is made."""
        leaving: list[Transfer] = []
        on_their_way = 0
        while track.device.free + on_their_way < n_slots:
            victim = eviction.next_device_victim(self.tree, track)
            if victim is None:
                break
            before = track.device.free
            operation = self._begin(victim)
            if operation is None:
                eviction.evict_victim(self.tree, victim)
                continue
            on_their_way += sum(
                pair.track.n_slots(victim.node) for pair in operation.pairs if pair.track is track
            )
            assert track.device.free >= before
            leaving.append(self.journal.submit(operation, Direction.BACKUP))
        for transfer in leaving:
            self.journal.settle(transfer, self.timeout_s)

    def _begin(self, victim: Victim) -> operations.Operation | None:
        """Reserve HOST for what is not there yet; None if all of it is, or HOST is full."""
        node = victim.node
        unbacked = [t for t in operations.needs_backup(self.tree, node) if t in victim.tracks]
        if not unbacked:
            return None
        for track in unbacked:
            if not self.on_host(track, track.n_slots(node)):
                return None
        parent = node.parent
        assert parent is not None
        operation = operations.begin_demotion(self.tree, node, victim.tracks)
        if operation is not None:
            eviction.lift_recency(self.tree, node, parent)
        return operation
