"""The core with one line changed at a time, written without a look at `cores`.

Each is a piece of text in a function and its replacement. They tell whether the suite
finds mechanisms or only the examples it was written for.
"""

from __future__ import annotations
import __future__

import inspect
import textwrap
from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

import pytest

from kvgraft.admission.promises import Budget, _own_slots
from kvgraft.cache import Cache
from kvgraft.requests import slots
from kvgraft.requests.backup import Backups, CleanReserve, _with_gaps_above
from kvgraft.requests.components import Account, RequestState
from kvgraft.requests.eviction import Evictor
from kvgraft.requests.leases import Leases, LoadBacks
from kvgraft.requests.request import Request
from kvgraft.requests.slots import StateSlots
from kvgraft.serving import Serving
from kvgraft.transfers import journal
from kvgraft.transfers.journal import Journal
from kvgraft.tree import eviction, inserting, matching, operations, pinning
from kvgraft.tree.component import Candidates
from kvgraft.tree.ledger import Ledger
from kvgraft.tree.tree import Tree
from kvgraft_retention.lifetimes import Retentions
from kvgraft_retention.tenants import SharedLedger
from kvgraft_scheduling.waiting import WaitingQueue
from kvgraft_storage.tier import arriving
from kvgraft_storage.tier.fetching import Fetch

from .cores import CoreMutant, Defect
from .survivors import SURVIVORS

__all__ = ["CORES_HELD_OUT", "Defect", "edited"]

CORES_HELD_OUT: dict[str, CoreMutant] = {}

EXAMPLES = 400
"""How many examples are searched for each; most defects show in the first hundred."""

FEW_EXAMPLES = 100
"""How many are searched for one that is known to survive."""


def edited(
    function: Callable[..., Any] | property, old: str, new: str
) -> Callable[[pytest.MonkeyPatch], None]:
    """Replaces `old` by `new` in a function, also for modules that have imported it."""

    def put_in(patch: pytest.MonkeyPatch) -> None:
        inner = function.fget if isinstance(function, property) else function
        plain = cast(FunctionType, inspect.unwrap(cast("Callable[..., Any]", inner)))
        source = textwrap.dedent(inspect.getsource(plain))
        assert source.count(old) == 1, f"{plain.__qualname__} has {source.count(old)} times {old!r}"
        text = source.replace(old, new).replace("@property\n", "").replace("@staticmethod\n", "")
        flag = __future__.annotations.compiler_flag
        names = dict(plain.__globals__)
        exec(compile(text, inspect.getfile(plain), "exec", flag), names)
        patch.setattr(plain, "__code__", names[plain.__name__].__code__)

    return put_in


def change(
    name: str, kinds: str, rules: str, function: Callable[..., Any], old: str, new: str
) -> None:
    """Register one."""
    examples = FEW_EXAMPLES if name in SURVIVORS else EXAMPLES
    CORES_HELD_OUT[name] = CoreMutant(
        tuple(kinds.split("+")), tuple(rules.split()), edited(function, old, new), examples
    )


ALL = "everything+window+state"
TWO = "everything+window"
DRAWN = "everything+window+drawn"

# -- admission

change(
    "one slot more is promised than there is",
    TWO,
    "A7 A12 A2",
    Budget._shortages,
    "if need > ledger.headroom:",
    "if need > ledger.headroom + 1:",
)
change(
    "the room of a home on HOST is its capacity",
    "hosted",
    "A7 A12 A2 H7",
    Budget._shortages,
    "room = ledger.headroom",
    "room = ledger.capacity",
)
change(
    "a renewed promise ends two pages early",
    TWO,
    "A7 A12",
    Budget._remaining,
    "component.stored_between(request.allocated, end)",
    "component.stored_between(request.allocated, max(request.allocated, end - 2))",
)
change(
    "a request that never fits waits for ever",
    TWO,
    "A8",
    Budget.decide,
    "if never is None:",
    "if True:",
)
change(
    "a deferral shortens the chunk",
    TWO,
    "A9 A6 A5",
    Budget.decide,
    "        return Decision(Outcome.DEFERRED, shortages)\n",
    "        request.chunk = max(1, request.chunk - 1)\n"
    "        return Decision(Outcome.DEFERRED, shortages)\n",
)
change(
    "a deferral drops the boundaries to capture",
    ALL,
    "A9 A10 I10 I11",
    Budget.decide,
    "        return Decision(Outcome.DEFERRED, shortages)\n",
    "        request.checkpoints = []\n        return Decision(Outcome.DEFERRED, shortages)\n",
)
change(
    "a deferral gives up the reservation",
    TWO,
    "A9 A5",
    Budget.decide,
    "        return Decision(Outcome.DEFERRED, shortages)\n",
    "        request.total = request.prompt\n"
    "        return Decision(Outcome.DEFERRED, shortages)\n",
)
change(
    "a deferral forgets the transfers it waits for",
    TWO,
    "A9 R6 R7",
    Budget.decide,
    "        return Decision(Outcome.DEFERRED, shortages)\n",
    "        request.waits = []\n        return Decision(Outcome.DEFERRED, shortages)\n",
)
change(
    "a deferral forgets the data on HOST",
    TWO,
    "A9 M4 A3",
    Budget.decide,
    "        return Decision(Outcome.DEFERRED, shortages)\n",
    "        for part in request.components:\n"
    "            part.host_slots = 0\n"
    "        return Decision(Outcome.DEFERRED, shortages)\n",
)
change(
    "the load-back is promised twice",
    TWO,
    "A11 A12 A8 A3 T8",
    Budget.open,
    "peak = demand.now + demand.later - load",
    "peak = demand.now + demand.later",
)
change(
    "the load-back is not promised",
    DRAWN,
    "A7 A12 A1",
    Budget.open,
    "account.open(peak, remaining, load)",
    "account.open(peak, remaining, 0)",
)
change(
    "slots taken stay promised",
    TWO,
    "A12 A8",
    Account.take,
    "    ledger.promised -= n\n",
    "",
)
change(
    "a loaded request stays promised its load",
    TWO,
    "A12 A8",
    Account.loaded,
    "    self.ledger.promised -= self.load\n",
    "",
)
change(
    "a promise is not renewed by slots given back",
    DRAWN,
    "A7 A12 A1",
    Account.renewal,
    "target = min(target, self.remaining)",
    "target = self.promised",
)
change(
    "a promise is renewed beyond the reservation",
    TWO,
    "A11 A12 A8 A7",
    Account.renewal,
    "    target = min(target, self.remaining)\n",
    "",
)
change(
    "an ended request leaves its promise",
    TWO,
    "A12 H8",
    Account.close,
    "    self.ledger.promised -= self.promised\n",
    "",
)
change(
    "a continuing chunk takes slots promised to others",
    TWO,
    "A5 A12 A7",
    Budget.fitting_chunk,
    "max(0, account.ledger.headroom)",
    "max(0, account.ledger.free)",
)
change(
    "a chunk ends inside a page",
    TWO,
    "A6",
    Budget.next_chunk,
    "tokens = aligned if aligned > 0 else tokens",
    "pass",
)
change(
    "a chunk runs over the boundary of a state",
    ALL,
    "I7 I6 A10 M5 A6",
    Budget.next_chunk,
    "tokens = boundary - request.computed",
    "pass",
)
change(
    "its own prefix on its way is not counted",
    TWO,
    "A8 A2",
    _own_slots,
    "if slots is None and cell.incoming is not None:",
    "if False:",
)
change(
    "its own prefix counts as room",
    TWO,
    "A8 A2",
    Budget._nevers,
    "if shortage.needed + pinned <= shortage.capacity:",
    "if shortage.needed <= shortage.capacity:",
)
change(
    "a shrunk chunk is a page too long",
    TWO,
    "A6 A7 A8",
    Budget._largest_chunk,
    "return best * page_size",
    "return (best + bool(best)) * page_size",
)
change(
    "the last private row is never given",
    "private",
    "A8",
    Budget._private_shortages,
    "if need > books.free",
    "if need >= books.free",
)
change(
    "private rows are given without a look",
    "private",
    "A7 H7 A1",
    Budget._private_shortages,
    "if need > books.free",
    "if need > books.capacity",
)
change(
    "private rows stay taken",
    "private",
    "H8 T8",
    Budget.close,
    "books.give_private(slots)",
    "pass",
)
change(
    "overtaking is not counted",
    TWO,
    "A13",
    WaitingQueue.take,
    "passed.overtaken += 1",
    "passed.overtaken += 0",
)
change(
    "overtaking has no bound",
    TWO,
    "A13",
    WaitingQueue.round,
    "if place.waiting and place.overtaken >= self.max_overtakes:",
    "if False:",
)
change(
    "nobody passes the first in line",
    TWO,
    "A13",
    WaitingQueue.round,
    "if place.waiting and place.overtaken >= self.max_overtakes:",
    "if place.waiting:",
)

# -- tree

change(
    "a split forgets recency",
    TWO,
    "T10 T7",
    Tree.split,
    "above.stamp = below.stamp",
    "above.stamp = 0",
)
change(
    "a split forgets pins on HOST",
    TWO,
    "T10 L1 T6 E5 M7 L3",
    Tree.split,
    "above.host_pins = below.host_pins",
    "above.host_pins = 0",
)
change(
    "a split forgets hits",
    TWO,
    "T10 B6",
    Tree.split,
    "    upper.hits = node.hits\n",
    "",
)
change(
    "a split leaves the transfer with the lower part",
    TWO,
    "T10 B5 T3 L8",
    Tree.split,
    "operation.nodes.insert(operation.nodes.index(node), upper)",
    "pass",
)
change(
    "a split puts the lower part of a transfer first",
    TWO,
    "T10 B5 B1 R5 T5",
    Tree.split,
    "operation.nodes.index(node), upper)",
    "operation.nodes.index(node) + 1, upper)",
)
change(
    "a split in flight swaps the shares",
    TWO,
    "B5 T10 R5 B3 T9",
    Tree.split,
    "            above.incoming = below.incoming._replace(slots=slots[:cut])\n"
    "            below.incoming = below.incoming._replace(slots=slots[cut:])\n",
    "            above.incoming = below.incoming._replace(slots=slots[-cut:])\n"
    "            below.incoming = below.incoming._replace(slots=slots[:-cut])\n",
)
change(
    "DEVICE data arrives unpinned",
    TWO,
    "L4 T8",
    Tree.put,
    "ledger, n_pins = component.devices[node.tenant], cell.device_pins",
    "ledger, n_pins = component.devices[node.tenant], 0",
)
change(
    "HOST data arrives unpinned",
    "hosted+window",
    "L4 T8",
    Tree.put,
    "ledger, n_pins = component.ledger(HOST, node.tenant), cell.host_pins",
    "ledger, n_pins = component.ledger(HOST, node.tenant), 0",
)
change(
    "a node goes although a receipt is anchored there",
    ALL,
    "L1 T3 T1 L2 I8 M7 T6",
    Tree.prune,
    "        and not node.receipts\n",
    "",
)
change(
    "a node goes although a transfer is over it",
    TWO,
    "L8 T3 B3 I8 T8 R5",
    Tree.prune,
    "        and node.operations is None\n",
    "",
)
change(
    "namespaces that are false are one",
    TWO,
    "T11 T1 I8",
    Tree.root,
    "root = self.roots.get(namespace)",
    "root = self.roots.get(namespace or None)",
)
change(
    "falsy namespaces are none",
    TWO,
    "T11 I10",
    matching.match,
    "root = tree.root(key.namespace)",
    "root = tree.root(key.namespace or None)",
)
change(
    "namespaces are told apart by their text",
    TWO,
    "T11 T2 I10",
    matching.match,
    "root = tree.root(key.namespace)",
    "root = next((r for n, r in tree.roots.items() if str(n) == str(key.namespace)), None) "
    "or tree.root(key.namespace)",
)
change(
    "a key's trail is followed in a tree it left",
    TWO,
    "M1 T11 M7 T1 L1 I8 I10",
    matching._known,
    "if node is not None and node.parent is not None else root",
    "if node is not None else root",
)
change(
    "eviction takes one victim too many",
    TWO,
    "E2",
    eviction.evict_device,
    "while ledger.room < target:",
    "while ledger.room <= target:",
)
change(
    "HOST eviction takes one victim too many",
    TWO,
    "E2 T7",
    eviction.evict_host,
    "while ledger.room < target:",
    "while ledger.room <= target:",
)
change(
    "recency does not climb",
    TWO,
    "T7 E1",
    eviction.lift_recency,
    "component.restamp(parent, stamp)",
    "pass",
)
change(
    "data on its way does not count as a way to resume",
    TWO,
    "T8 E5 R5 B3 E3 E2 T3 I8",
    eviction.drop_unreachable,
    "if cell.incoming is None and cell.host is None and not on_device:",
    "if cell.host is None and not on_device:",
)
change(
    "a victim's wider neighbours go as well",
    ALL,
    "E3 E2 T7 E6",
    eviction.victim_at,
    "narrower = [other for other in held if other.index in component.narrower]",
    "narrower = held",
)

# -- the clean reserve

change(
    "the clean reserve is filled and nobody copies it",
    ALL,
    "E4",
    CleanReserve._copy,
    "unbacked = [",
    "unbacked = [] and [",
)
# -- transfers

change(
    "a load-back does not pin its source",
    TWO,
    "L8 E5 B3 R7",
    operations.begin_load_back,
    "host_from=receipt.host_from,",
    "host_from=None,",
)
change(
    "a backup does not pin its source",
    TWO,
    "L8 B3 E1",
    operations.begin_backup,
    "operation = Operation([node], receipt, to_host=True)",
    "release(tree, receipt); operation = Operation([node], None, to_host=True)",
)
change(
    "the source of a demotion is free at once",
    TWO,
    "B3 L8 T9",
    operations.begin_demotion,
    "            ledger.in_flight += len(slots) // SLOT_BYTES\n"
    "            ledger.leaving += len(slots) // SLOT_BYTES\n"
    "            operation.detached.append((component.index, slots))\n",
    "            component.device.allocator.free(slots)\n",
)
change(
    "data on its way is loaded again",
    TWO,
    "R6 R1 M4 B3",
    operations.load_plan,
    "            and cell.incoming is None\n",
    "",
)
change(
    "a request waits for the first transfer it shares",
    TWO,
    "R6 R7 M7 R5",
    operations.waits_for,
    "found.append(operation)",
    "found or found.append(operation)",
)
change(
    "a request waits for the last transfer it shares",
    TWO,
    "R6 R7 M7 R5",
    operations.waits_for,
    "operation not in found",
    "not any(found.pop() for _ in list(found))",
)
change(
    "a request waits for no transfer of others",
    TWO,
    "R6 R7 M7 R5 R1",
    operations.waits_for,
    "if receipt.host_from is None:",
    "if True:",
)
change(
    "arriving data replaces existing data",
    TWO,
    "I4 T9 T8 B3",
    operations.commit,
    "if present is not None or lacks:",
    "if lacks:",
)
change(
    "slots of a duplicate are lost",
    TWO,
    "T8 T9 R2",
    operations.commit,
    "_cancel(tree, node, component)",
    "cell.incoming = None",
)
change(
    "slots of an aborted transfer are lost",
    TWO,
    "T8 T9 R2",
    operations.abort,
    "_cancel(tree, node, component)",
    "cell.incoming = None",
)
change(
    "data hangs below a gap",
    TWO,
    "T4 T5 B1",
    operations.holds_up,
    "parent = node.parent",
    "return True",
)
change(
    "data hangs below a gap on HOST",
    TWO,
    "B1 T5",
    operations.parent_on_host,
    "return False",
    "return True",
)
change(
    "a backup does not wait for its source's computation",
    TWO,
    "B4",
    Journal.submit,
    "fence = self.fence",
    "fence = None",
)
change(
    "a finished request's fence is dropped",
    TWO,
    "B4",
    Cache.finish,
    "self.journal.set_fence(fence)",
    "pass",
)
change(
    "the first fence is kept",
    TWO,
    "B4",
    Journal.set_fence,
    "if fence is not None and fence is not self.fence:",
    "if fence is not None and self.fence is None:",
)
change(
    "a checkpoint hands no fence on",
    TWO,
    "B4",
    Serving.checkpoint,
    "self.journal.set_fence(fence)",
    "pass",
)
change(
    "a failed transfer counts as delivered",
    TWO,
    "R5 R7 M7 L6",
    Journal.acknowledge,
    "    transfer.failed = True\n",
    "",
)
change(
    "transfers are taken in out of turn",
    TWO,
    "B1 B3 T5 R5",
    Journal.poll,
    "        while queue and queue[0].ticket.done:\n"
    "            self.acknowledge(queue.popleft())\n",
    "        for each in [each for each in queue if each.ticket.done]:\n"
    "            queue.remove(each)\n            self.acknowledge(each)\n",
)
change(
    "the transfer in front ends with the one behind it",
    TWO,
    "B3 R5 R7 T9",
    Journal.poll,
    "while queue and queue[0].ticket.done:",
    "while queue and any(each.ticket.done for each in queue):",
)
change(
    "a time-out is taken for the end of a copy",
    TWO,
    "B3 T9 L8",
    Journal.settle,
    "first.late = True\n                break\n",
    "first.late = True\n",
)
change(
    "a time-out leaves the pool short",
    TWO,
    "E4 A7 E6",
    Evictor._drop,
    "if ledger.room < n_slots:\n",
    "if False:\n",
)
change(
    "an aborted transfer's component is not notified",
    "builder",
    "R2",
    journal._notify_aborted,
    "if mounted.transfer_hooks is not None:",
    "if False:",
)
change(
    "a commit is reported twice",
    "builder",
    "R2 B3 R7",
    Journal.acknowledge,
    "counters.completed += 1\n",
    "counters.completed += 1; _notify_committed(transfer.queries)\n",
)
change(
    "room for a load-back is made a page too large",
    TWO,
    "R3 E2",
    LoadBacks.start,
    "sum(component.n_slots(node) for node in nodes)",
    "sum(component.n_slots(node) for node in nodes) + 1",
)
change(
    "room for a load-back is made for all pools' slots together",
    TWO,
    "R3 E2 A7",
    LoadBacks.start,
    "sum(component.n_slots(node) for node in nodes)",
    "sum(each.n_slots(n) for each in components for n in nodes)",
)
change(
    "a load-back shared with another stays promised",
    TWO,
    "A11 A12",
    LoadBacks.start,
    "    for part in request.components:\n",
    "    for part in request.components if any(plan) else ():\n",
)
change(
    "a request restarted after a failure asks for HOST again",
    TWO,
    "R5",
    Serving.restart,
    "    if request.load_failed:\n",
    "    if False:\n",
)
change(
    "a request starts before its load-back has arrived",
    TWO,
    "R7 R5 M7 L2",
    Request.expect_loaded,
    "if not self.ready:",
    "if False:",
)
change(
    "a request restarted keeps its private slots",
    TWO,
    "H8 T8 T9",
    Serving.restart,
    "    self._give_up(parts)\n",
    "    self.budget.close(parts)\n",
)

# -- requests

change(
    "a page too many is given back behind the window",
    TWO,
    "L6 G3 M7 T9",
    slots._ahead,
    "part.component.reach_pages.spans(page)",
    "part.component.reach_pages.spans(page + 1)",
)
change(
    "pins slide a page too far",
    TWO,
    "L6 L3 M7",
    pinning.slide,
    "while node.start > position - window:",
    "while node.start > position + 1 - window:",
)
change(
    "pins do not slide",
    TWO,
    "L6 L7",
    pinning.slide,
    "if not segment or component.is_prefix_closed:",
    "if not segment or not component.is_state:",
)
change(
    "a slid pin keeps its HOST part",
    "hosted+window",
    "L6 L1 T8 T6",
    pinning.slide,
    "pin_host(tree, component, anchor, given, receipt.host_from, -1)",
    "pass",
)
change(
    "a receipt is not marked as released",
    TWO,
    "L2",
    pinning.release,
    "receipt.released = True",
    "pass",
)
change(
    "a live state is the tree's own",
    ALL,
    "M8 T9",
    StateSlots.set_up_states,
    "            self.copy(part.component, source, part.live)\n",
    "",
)
change(
    "a duplicate state is lost",
    ALL,
    "T8 H8 A12",
    StateSlots._offer,
    "        part.account.ledger.give_private(duplicate)\n",
    "",
)
change(
    "an aborted request keeps its captured states",
    ALL,
    "T8 H8",
    RequestState.give_back,
    "for slots in self.owned():",
    "for slots in self.owned()[:1]:",
)
change(
    "an existing cell takes the newcomer's slots",
    TWO,
    "I4 I2 T9 T8",
    inserting._adopt,
    "wanted = cells[component.index].device is None",
    "wanted = True",
)
change(
    "a conversation's gap on HOST is left",
    TWO,
    "B1 B7",
    _with_gaps_above,
    "chain[id(node)] = node",
    "break",
)
change(
    "the lower node is backed up first",
    TWO,
    "B1",
    _with_gaps_above,
    "key=lambda each: each.end)",
    "key=lambda each: -each.end)",
)
change(
    "inserts are backed up under any policy",
    TWO,
    "B6 B3",
    Backups.__init__,
    " and policy is WritePolicy.WRITE_THROUGH",
    "",
)
change(
    "recomputing is never cheaper",
    TWO,
    "R8",
    Leases._recompute,
    "return self.load.compute_s(tokens, rest) < load_s",
    "return False",
)
change(
    "a ledger forgets slots in flight",
    TWO,
    "T8",
    Ledger.reserve,
    "self.in_flight += n",
    "self.in_flight += 0",
)

# -- tenants, priorities, times to live, a store


change(
    "a tenant's weight does not count when it is its turn to give",
    DRAWN,
    "K5 K4",
    SharedLedger.giver,
    "rank = over / ledger.tenant.weight, index == for_tenant",
    "rank = float(over), index == for_tenant",
)
change(
    "a time to live begins with the first use",
    DRAWN,
    "T7",
    Retentions.used,
    "if request.requested_retention is not None:",
    "if request.requested_retention is not None and request.use_retention is None:",
)
change(
    "slots on their way out are not counted as such",
    DRAWN,
    "T8 K5 K4",
    operations.begin_demotion,
    "            ledger.leaving += len(slots) // SLOT_BYTES\n",
    "",
)
change(
    "a load-back brings what is on its way already",
    DRAWN,
    "R6 M4 R1 T9",
    operations.load_plan,
    "            and cell.incoming is None\n",
    "",
)
change(
    "a priority below the usual one does not leave first",
    DRAWN,
    "T7 I9",
    Candidates._next,
    "level < first",
    "level <= 0 < first",
)
change(
    "data that the tree took from a prefetch stays the prefetch's too",
    "everything+window+stored",
    "S5 T9 T8 I8",
    arriving._adopt,
    "    there[first:last] = False\n",
    "",
)
change(
    "slots of a call that was given up are free once its time is over",
    "everything+window+stored",
    "S5 T9",
    Fetch._give_up_ticket,
    "self.phase is Phase.LOOKING or ticket.done",
    "self.phase is Phase.LOOKING or ticket.settled",
)
