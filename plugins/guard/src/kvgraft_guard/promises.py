"""Checks demands, promises and refusals against need (A1, A4, A6, A8, A10, A13).

Demands are compared with a request's simulated life, step by step; decisions with the ledgers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from kvgraft.admission.decision import Decision, Outcome, Shortage
from kvgraft.cache import Cache
from kvgraft.errors import ContractViolation
from kvgraft.pools.allocator import SLOT_BYTES
from kvgraft.requests.components import Due, RequestState
from kvgraft.requests.request import ADMITTED, Request
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.keys import TokenKey
from kvgraft.tree.ledger import Ledger
from kvgraft_guard.paths import needed
from kvgraft_guard.tenancy import most_for, room_for

if TYPE_CHECKING:
    from kvgraft.requests.components import Account

__all__ = ["Promises"]

MOST_STEPS = 4096
"""Most steps of a request's life that are simulated."""

SPARE_PAGES = 2
"""Pages by which a default demand may exceed the request's actual need: slack and rounding."""

MOST_OVERTAKEN = 32
"""How often a waiting request may be deferred and passed: many times the queue's bound."""


class Place:
    """The place in line of a deferred key.

    Attributes:
        arrived: its number in the order of arrival.
        n_tokens: its length; another length means a new request.
        passed: whether a later one was admitted since its last try.
        times: how often it was deferred again after that.
    """

    __slots__ = ("arrived", "n_tokens", "passed", "times")

    def __init__(self, arrived: int, n_tokens: int) -> None:
        self.arrived, self.n_tokens = arrived, n_tokens
        self.passed, self.times = False, 0


class Promises:
    """Checks the demands, promises and decisions of one cache.

    Attributes:
        follows: whether every operation is checked, so that the effects of one are known at the
            next.
    """

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.tree = cache.tree
        self._default = [each.budget_contribution is None for each in cache.mounted]
        self._default_names = {
            component.name for component in self.tree.components if self._default[component.index]
        }
        self.follows = True
        # A key is forgotten with the engine's last reference to it: it comes no more.
        self._waiting: WeakKeyDictionary[TokenKey, Place] = WeakKeyDictionary()
        self._arrived: WeakKeyDictionary[TokenKey, int] = WeakKeyDictionary()
        self._arrivals = 0
        self._asked: set[int] = set()
        self._beyond: set[int] = set()

    # -- demands

    def check_demands(self, request: Request) -> None:
        """Demands cover the request's life (A1, A10), and not much more (A4)."""
        for part in request.components:
            component, demand, load = part.component, part.demand, part.host_slots
            if not self._default[component.index]:
                continue
            total = demand.now + demand.later - load
            if component.is_state:
                # Its own, one for each point ahead, and one that follows a decode.
                alone = 1 + (request.total > request.prompt and request.keeps_decoded)
                least = most = alone + len(request.checkpoints)
                rule = "I12" if alone <= total < least else "A10"
            else:
                pages = self._peak(request, component)
                if pages is None:
                    continue
                alone = pages * component.slots_per_page
                last = -(-request.total // self.tree.page_size) + 1
                pages += component.stored_between(last, last + request.draft_pages)
                least = pages * component.slots_per_page
                most = least + SPARE_PAGES * component.slots_per_page
                rule = "G1" if alone <= total < least else "A1"
                if not component.is_prefix_closed:
                    most = max(most, total)  # how uneven chunks may be is rule A4's, see admission
            if not least <= total <= most:
                raise ContractViolation(
                    rule,
                    component.name,
                    f"{demand} with {load} host hits for a request of {request.prompt} + "
                    f"{request.total - request.prompt} tokens at {request.computed}, in chunks of "
                    f"{request.chunk}: its life takes {least} slots, slack included, {most} would "
                    "do",
                )

        self._check_drafts(request)

    def _check_drafts(self, request: Request) -> None:
        """Pages for drafts are among its demand, or could never fit (G1)."""
        drafts = self.cache.config.max_drafts if request.total > request.prompt else 0
        pages, given = -(-drafts // self.tree.page_size), request.draft_pages
        if given == pages or self.cache.arenas is not None:
            return
        whole = request.chunk >= request.prompt - request.computed  # a smaller one needs less
        if given or (whole and not self._never_fit(request, pages)):
            raise ContractViolation(
                "G1",
                None,
                f"the request of {request.prompt} tokens has {given} pages for drafts in its "
                f"demand, passes of {drafts} drafts take {pages}",
            )

    def _never_fit(self, request: Request, pages: int) -> bool:
        """Whether so many pages beside its demand are more than a pool could ever have for it."""
        short = []
        for part in request.components:
            name, load = part.component.name, part.host_slots
            if not part.component.is_state:
                more = part.demand.now + part.demand.later + pages * part.component.slots_per_page
                short.append(Shortage(name, "device", more, 0, most_for(part.account.ledger)))
                if (host := part.host_account) is not None:
                    short.append(Shortage(name, "host", more - load, 0, most_for(host.ledger)))
        return any(self._never(request, each) for each in short)

    def _peak(self, request: Request, component: TreeComponent) -> int | None:
        """Most pages of its own it holds at a time, from here to the end of its reservation.

        Slack included: a step may compute one token more than foreseen, and the last one a page
        more of a prefix-closed component. Its chunks are as large as they may be; the odd one comes
        last, or first.
        """
        size, chunk = self.tree.page_size, max(1, request.chunk)
        left = request.prompt - request.computed
        if left // chunk + (request.total - request.prompt) // size > MOST_STEPS:
            return None
        odd = (request.computed + left % chunk) // size * size - request.computed
        return max(self._life(request, component, first) for first in (chunk, odd) if first > 0)

    def _life(self, request: Request, component: TreeComponent, step: int) -> int:
        """The same for chunks of which the first has `step` tokens."""
        size, chunk = self.tree.page_size, max(1, request.chunk)
        first = position = request.computed
        owned = first // size  # pages before it are the tree's
        allocated = -(-first // size)
        peak = 0
        while position < request.total:
            page = position // size
            held = component.stored_between(max(owned, page), max(owned, page, allocated))
            for low, high in needed(component, page, size):
                held += max(0, min(high, page, allocated) - max(low, owned))
            if position < request.prompt:
                end, step = min(position + step, request.prompt), chunk
                whole = end // size * size
                position = whole if position < whole and end < request.prompt else end
            else:
                position = min((position // size + 1) * size, request.total)
            end = max(allocated, -(-position // size))
            ends = component.is_prefix_closed and position == request.total
            slack = end + 1 if ends else max(end, position // size + 1)
            peak = max(peak, held + component.stored_between(allocated, slack))
            allocated = end
        return peak

    # -- decisions

    def check_decision(self, request: Request, decision: Decision) -> None:
        """The decision follows from the ledgers (A8), and no request waits for ever (A13)."""
        short = {(each.component, each.pool): each for each in self._shortages(request)}
        said = {
            (each.component, each.pool): each._replace(tenant=None) for each in decision.shortages
        }
        outcome = decision.outcome
        if outcome is Outcome.ADMITTED:
            wrong = bool(short)
        elif outcome is Outcome.DEFERRED:
            wrong = said != short or any(self._never(request, each) for each in short.values())
        else:
            wrong = not all(self._never(request, each) for each in decision.shortages)
        if wrong:
            raise ContractViolation(
                "A8",
                next(iter([*decision.shortages, *short.values()])).component,
                f"the request of {request.prompt} tokens is {decision}; by the ledgers "
                f"{'; '.join(map(str, short.values())) or 'no pool is short, 0 slots lack'}",
            )
        if decision.pending is not None:
            self._waiting.pop(request.key, None)  # it waits by its own wish
        elif self.follows:
            self._check_line(request, decision)

    def _shortages(self, request: Request) -> list[Shortage]:
        """Pools that have less room than is demanded, the request's own promises apart."""
        found = []
        admitted = request.stage is ADMITTED

        def compare(
            component: TreeComponent, ledger: Ledger, name: str, need: int, mine: int
        ) -> None:
            room = room_for(ledger, mine)
            if need > room:
                found.append(Shortage(component.name, name, need, max(0, room), most_for(ledger)))

        for part in request.components:
            component, demand, load = part.component, part.demand, part.host_slots
            need = demand.now + demand.later
            mine = part.account.promised if admitted else 0
            compare(component, part.account.ledger, "device", need, mine)
            account = part.host_account
            if account is not None:
                mine = account.promised if admitted else 0
                compare(component, account.ledger, "host", need - load, mine)
            pools = self.cache.mounted[component.index].component.private
            for at, (pool, wanted) in enumerate(zip(pools, demand.private)):
                ledger = self.cache.private[component.index][at]
                own = len(part.private[at]) // SLOT_BYTES if admitted else 0
                if wanted > ledger.free + own:
                    found.append(
                        Shortage(component.name, pool.name, wanted, ledger.free, ledger.capacity)
                    )
        return found

    def _never(self, request: Request, shortage: Shortage) -> bool:
        """Whether the pool would be short with nothing in it but the request's prefix."""
        component = self.tree.by_name[shortage.component]
        pinned = 0
        if shortage.pool in ("device", "host"):
            on_device = shortage.pool == "device"
            segment = request.receipt.segments[component.index]
            node = request.receipt.anchor
            while node.parent is not None:
                inside = any(low < node.end and node.start < high for low, high in segment)
                if component.is_state:
                    inside = bool(segment) and node is request.receipt.anchor
                cell = node.cells[component.index]
                slots = cell.device if on_device else cell.host
                if slots is None and cell.incoming is not None:
                    coming = cell.incoming.to_host is not on_device
                    slots = cell.incoming.slots if coming else None
                if inside and slots is not None:
                    pinned += len(slots) // SLOT_BYTES
                node = node.parent
        return shortage.needed + pinned > shortage.capacity and not self._could_move(
            request, shortage
        )

    def _could_move(self, request: Request, shortage: Shortage) -> bool:
        """Whether it fits with the boundaries between pools elsewhere."""
        arenas = self.cache.arenas
        if arenas is None or shortage.pool != "device":
            return False
        return arenas.could_hold(shortage.component, self.cache.budget.needs(request))

    def _check_line(self, request: Request, decision: Decision) -> None:
        """Count how often a request that waits asks in vain after others passed it (A13).

        One whose client left asks no more, though the engine keeps its key.
        """
        key = request.key
        self._asked.add(id(request))
        place = self._waiting.get(key)
        if place is not None and place.n_tokens != key.n_tokens:
            del self._waiting[key], self._arrived[key]
            place = None
        mine = self._arrived.get(key)
        if mine is None:
            self._arrivals += 1
            mine = self._arrived[key] = self._arrivals
        if decision.outcome is Outcome.DEFERRED:
            if place is None:
                place = self._waiting[key] = Place(mine, key.n_tokens)
            place.times += place.passed
            place.passed = False
            if place.times > MOST_OVERTAKEN:
                del self._waiting[key]
                raise ContractViolation(
                    "A13",
                    None,
                    f"a request of {key.n_tokens} tokens waits: {place.times} times it asked again "
                    "after one that came later was admitted",
                )
            return
        self._waiting.pop(key, None)
        if decision.outcome is Outcome.NEVER_FITS:
            self._arrived.pop(key, None)
            return
        for other in self._waiting.values():
            other.passed = other.passed or other.arrived < mine

    def unpromised(self, request: Request) -> None:
        """A request runs without a promise: all that it takes is beyond one."""
        self._beyond.add(id(request))

    def ended(self, request: Request) -> None:
        """A request that had run has ended; if its key comes again, it comes last in line."""
        self._beyond.discard(id(request))
        if id(request) in self._asked and request.key not in self._waiting:
            self._arrived.pop(request.key, None)
        self._asked.discard(id(request))

    # -- promises

    def accounts(self, request: Request) -> list[Account]:
        """The request's promises on DEVICE and HOST."""
        others = [part.host_account for part in request.components if part.host_account is not None]
        return [*(part.account for part in request.components), *others]

    def check_accounts(self, request: Request) -> None:
        """Promises cover the slots still to be taken, at most those held at a time (A1, A12)."""
        if request.stage is not ADMITTED:
            return
        for account in self.accounts(request):
            most = max(0, account.peak - account.held)
            least = min(most, account.remaining)
            if account.ledger.component in self._default_names:
                most = least
            if not least <= account.promised - account.load <= most or account.remaining < 0:
                raise ContractViolation(
                    "A1",
                    account.ledger.component,
                    f"the request of {request.prompt} tokens holds {account.held} of at most "
                    f"{account.peak} {account.ledger.tier.value} slots and takes "
                    f"{account.remaining} more; it is promised {account.promised}, "
                    f"{account.load} of them for its load-back",
                )
        for part in request.components:
            component, account = part.component, part.account
            held = (
                len(part.owned())
                if isinstance(part, RequestState)
                else sum(len(run.device) for run in part.runs) // SLOT_BYTES
            )
            if held != account.held:
                raise ContractViolation(
                    "A1",
                    component.name,
                    f"the request of {request.prompt} tokens owns {held} slots, {account.held} "
                    "are counted",
                )
            if isinstance(part, RequestState) and component.name in self._default_names:
                self._check_states_ahead(request, part)

    def _check_states_ahead(self, request: Request, part: RequestState) -> None:
        """States are promised for what is ahead, and for nothing that was passed (I12)."""
        account, decodes = part.account, request.total > request.prompt and request.keeps_decoded
        ahead = len(request.checkpoints) + (part.live is None)
        ahead += bool(part.due) and part.due_as is Due.POINT
        ahead += decodes and part.tracked is None
        promised = account.promised - account.load
        if promised > ahead:
            raise ContractViolation(
                "I12",
                part.component.name,
                f"the request of {request.prompt} tokens at {request.computed} is promised "
                f"{promised} states; ahead are {ahead}, its points among them: "
                f"{request.checkpoints}",
            )

    def peaks(self, request: Request) -> list[int]:
        """Most slots it was promised to hold at a time."""
        return [account.peak for account in self.accounts(request)]

    def check_within(
        self, request: Request, n_tokens: int, peaks: list[int], *, spare: bool
    ) -> None:
        """Admitted slots come out of the promise, not out of the rest (A7, A1).

        `spare` if a state beyond the demand was due: it takes a spare slot.
        """
        position, end = request.computed, request.computed + n_tokens
        size = self.tree.page_size
        drafts = self.cache.config.max_drafts if request.draft_pages else 0
        promised = end <= request.total + drafts and (
            n_tokens <= request.chunk
            if position < request.prompt
            else position // size >= (end - 1) // size or n_tokens <= 1 + drafts
        )
        if not promised or (position < request.prompt < end):
            self._beyond.add(id(request))
        if id(request) in self._beyond or not self.follows:
            return
        for account, peak in zip(self.accounts(request), peaks):
            by_name = self.tree.by_name[account.ledger.component]
            if account.peak > peak + int(spare and by_name.is_state):
                raise ContractViolation(
                    "A1",
                    account.ledger.component,
                    f"{n_tokens} tokens at {position} of {request.prompt} + "
                    f"{request.total - request.prompt} were admitted and take "
                    f"{account.peak - peak} slots beyond the promise of {peak}",
                )

    # -- chunks

    def check_chunk(self, request: Request, limit: int | None, given: int) -> None:
        """A chunk ends where states are captured (I6), on a page, and no earlier (A5, A6)."""
        size, position = self.tree.page_size, request.computed
        left = request.prompt - position
        wanted = min(left, request.chunk if limit is None else limit)
        marks = [page * size for page in request.checkpoints if page * size > position]
        if marks and position + wanted > min(marks):
            wanted = min(marks) - position
        if wanted < left:
            whole = (position + wanted) // size * size - position
            wanted = whole if whole > 0 else wanted
        room = wanted
        for component in self.tree.components:
            if component.is_state:
                continue
            part = request.components[component.index]
            for account in (part.account, part.host_account):
                if account is None:
                    continue
                slots = account.promised + max(0, account.ledger.headroom)
                pages, end = slots // component.slots_per_page, -(-(position + room) // size)
                if component.stored_between(request.allocated, end) > pages:
                    room = min(room, max(0, (request.allocated + pages) * size - position))
        if given != max(0, room):
            raise ContractViolation(
                "A6",
                None,
                f"a chunk of {given} tokens at {position} of {request.prompt}, limit {limit}, "
                f"states captured at {marks[:1]}: {max(0, room)} tokens are due",
            )
