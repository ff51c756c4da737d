"""Known-bad cores for the guard alone: one line of the core each, replaced in its source.

They were written without a look at the state machine's own (`cores.py`), and are played under three
busy replays with the guard on; see `under_guard.py`.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["GUARDED_CORES", "BadCore"]


class BadCore(NamedTuple):
    """A defect.

    Attributes:
        rules: the rules it breaks, and others a guard may rightly name for it.
        module: below `core/src/kvgraft`, or from `plugins` on.
        old, new: a text that stands once in the module, and its replacement.
    """

    rules: tuple[str, ...]
    module: str
    old: str
    new: str


GUARDED_CORES: dict[str, BadCore] = {
    # -- matching
    "a match skips a node after each gap": BadCore(
        ("M1", "M3"),
        "tree/matching.py",
        "                node = gap\n",
        "                node = gap if boundary > gap.start or gap.parent is None else gap.parent\n"
        "                node = node.parent if node.end == boundary and node.parent else node\n"
        "                boundary = min(boundary, node.end)\n",
    ),
    "a match takes a window a page short for whole": BadCore(
        ("M1", "M3"),
        "tree/matching.py",
        "low, hosted = max(0, boundary - component.window_pages), component.home_is_host\n",
        "low, hosted = max(0, boundary - component.window_pages + 1), component.home_is_host\n",
    ),
    "a match takes the state at a node's end for one inside it": BadCore(
        ("M1", "M3"),
        "tree/matching.py",
        "return None if there and node.end == boundary else node",
        "return None if there else node",
    ),
    "a match leaves no token to compute": BadCore(
        ("M2",),
        "serving.py",
        "return (request.prompt - 1) // self.tree.page_size",
        "return request.prompt // self.tree.page_size",
    ),
    "the device anchor counts data on HOST": BadCore(
        ("M3",),
        "tree/matching.py",
        "device_anchor = _deepest(tree.checks, node, end, device_only=True)",
        "device_anchor = _deepest(tree.checks, node, end, device_only=False)",
    ),
    "a match follows where the key was found last beyond its limit": BadCore(
        ("M1", "M2"),
        "tree/matching.py",
        "while node is not None and node.end > limit:",
        "while node is not None and not node.end:",
    ),
    "falsy namespaces share a tree": BadCore(
        ("T11",),
        "tree/matching.py",
        "root = tree.root(key.namespace)\n    node, end = walk(",
        "root = tree.root(key.namespace or None)\n    node, end = walk(",
    ),
    "an explanation names the shallowest boundary": BadCore(
        ("M9",),
        "plugins/observe/src/kvgraft_observe/explaining.py",
        "accepted[device_only] = boundary\n                break",
        "accepted[device_only] = boundary",
    ),
    # -- splits
    "a split leaves the upper part one pin": BadCore(
        ("T10", "L1", "T6", "T8"),
        "tree/tree.py",
        "above.device_pins = below.device_pins",
        "above.device_pins = min(1, below.device_pins)",
    ),
    "a split forgets when the upper part was used": BadCore(
        ("T10", "T7"), "tree/tree.py", "above.stamp = below.stamp", "above.stamp = 0"
    ),
    "a split forgets how often the node was hit": BadCore(
        ("T10",), "tree/tree.py", "upper.hits = node.hits", "upper.hits = 0"
    ),
    "a split crosses the HOST slots of the parts": BadCore(
        ("T10",),
        "tree/tree.py",
        "above.host, below.host = host[:cut], host[cut:]",
        "above.host, below.host = below.host[-cut:], below.host[:-cut]",
    ),
    # -- pins
    "a state's pin is given up and released again": BadCore(
        ("L1", "L6", "T6", "T8"),
        "tree/pinning.py",
        "receipt.segments[component.index] = ()\n",
        "pass\n",
    ),
    "pages behind the window stay on the receipt": BadCore(
        ("L1", "L6", "T6", "T8"),
        "tree/pinning.py",
        "receipt.segments[component.index] = kept\n",
        "pass\n",
    ),
    "a running request gives up all of its window's pins": BadCore(
        ("L3", "L6", "T6", "L1"),
        "tree/pinning.py",
        "given = pages_without(segment, kept)",
        "given = segment",
    ),
    "a load-back holds HOST from its last gap only": BadCore(
        ("L3", "M7"),
        "tree/matching.py",
        "return min(starts, default=None)",
        "return max(starts, default=None)",
    ),
    "a backup releases its pins at once": BadCore(
        ("L8",),
        "tree/operations.py",
        "operation = Operation([node], receipt, to_host=True)",
        "operation = Operation([node], None, to_host=True)\n    release(tree, receipt)",
    ),
    "data arriving on a pinned node is evictable": BadCore(
        ("L4", "T8"),
        "tree/tree.py",
        "ledger, n_pins = component.devices[node.tenant], cell.device_pins",
        "ledger, n_pins = component.devices[node.tenant], 0",
    ),
    "a dead node stays when its last receipt is released": BadCore(
        ("T3",),
        "tree/pinning.py",
        "if anchor.parent is not None and not anchor.live_device and not anchor.live_host:",
        "if False:",
    ),
    "a node whose pins are gone is no candidate": BadCore(
        ("T7",),
        "tree/pinning.py",
        "if tree.is_leaf(lowest, DEVICE):",
        "if False:",
    ),
    # -- eviction
    "the youngest of a span goes first": BadCore(
        ("T7", "T12"),
        "policies/recency.py",
        (
            "        entry = self.entry(0, 0)\n"
            "        if entry is not None:\n"
            "            self._remove(0, 0)\n"
        ),
        (
            "        last = max(0, len(self._firsts) - 1)\n"
            "        entry = self.entry(last, 0)\n"
            "        if entry is not None:\n"
            "            self._remove(last, 0)\n"
        ),
    ),
    "a candidate keeps the place it was entered with": BadCore(
        ("T7", "T12"),
        "tree/component.py",
        "        cell.stamp = stamp\n        for queue in queues:",
        "        cell.stamp = cell.stamp or stamp\n        for queue in queues:",
    ),
    "a prefix does not count as used with nodes below it": BadCore(
        ("T7", "T12"),
        "tree/eviction.py",
        "if stamp > own and (",
        "if False and (",
    ),
    "eviction frees one slot too many": BadCore(
        ("E2",),
        "tree/eviction.py",
        "before = component.device.free\n    target = ledger.room + n_slots",
        "before = component.device.free\n    target = ledger.room + n_slots + 1",
    ),
    "inside the tree contained components stay behind": BadCore(
        ("E3", "T4"),
        "tree/eviction.py",
        "narrower = [other for other in held if other.index in component.narrower]",
        "narrower = [component]",
    ),
    "at a leaf a narrow component leaves the wide ones": BadCore(
        ("E3",),
        "tree/eviction.py",
        "at_leaf = node.live_device == len(held) + below and not pinned",
        "at_leaf = node.live_device == len(held) and not pinned and component.is_prefix_closed",
    ),
    "HOST eviction does not count the slots it freed": BadCore(
        ("E6", "I2"),
        "tree/tree.py",
        "pool.evicted[cause] += n_slots",
        "pool.evicted[cause] += n_slots if on_device else 0",
    ),
    "a load-back makes room for its pages in the state's pool": BadCore(
        ("R3",),
        "requests/leases.py",
        "sum(component.n_slots(node) for node in nodes)",
        "sum(node.end - node.start for node in nodes)",
    ),
    "data leaving the device leaves its states behind": BadCore(
        ("B2", "E4"),
        "tree/operations.py",
        "unbacked = [component for component in needs_backup(tree, node) if component in victims]",
        "unbacked = [t for t in needs_backup(tree, node) if t in victims and not t.is_state]",
    ),
    # -- inserts and requests' own slots
    "pages computed twice are not freed": BadCore(
        ("I1", "T9", "H8", "T8"),
        "tree/inserting.py",
        "            tree.touch(node, component)\n"
        "        component.devices[node.tenant].give_private(slots)\n",
        "            tree.touch(node, component)\n",
    ),
    "adjoining runs are joined the wrong way round": BadCore(
        ("T9", "I4", "I1"),
        "tree/inserting.py",
        "self.device + run.device",
        "run.device + self.device",
    ),
    "a page inside the window is given back": BadCore(
        ("L6", "I3"),
        "requests/slots.py",
        "part.take_out(_ahead(part, page))",
        "part.take_out(_ahead(part, page + 1))",
    ),
    "a finished request is cached beyond its last state": BadCore(
        ("I6", "I7"),
        "requests/publishing.py",
        "page = min(page, self.states.offered_page(request, part))",
        "page = max(page, self.states.offered_page(request, part))",
    ),
    "a finished request keeps the state it followed the decode with": BadCore(
        ("I7", "I6"), "requests/slots.py", "elif part.tracked is not None:", "elif False:"
    ),
    "a request begins with an empty state": BadCore(
        ("M8",), "requests/slots.py", "self.copy(part.component, source, part.live)", "pass"
    ),
    "a captured state is never written": BadCore(
        ("I7", "M8"), "requests/slots.py", "self.copy(component, part.live, slot)", "pass"
    ),
    "a state due is kept as the decode's": BadCore(
        ("I6", "I7", "A6"),
        "requests/slots.py",
        "part.due, part.due_as = page, due_as",
        "part.due, part.due_as = page, Due.DECODED",
    ),
    "a chunk runs past the boundary where a state is captured": BadCore(
        ("A6", "I6", "I7"),
        "admission/promises.py",
        "if request.computed < boundary < request.computed + tokens:",
        "if boundary < 0:",
    ),
    # -- resume points, and data that running requests leave behind
    "a point lies a page early": BadCore(
        ("I10",),
        "requests/resume_points.py",
        "ahead[repeat] = REPEAT",
        "ahead[max(anchor + 1, repeat - 1)] = REPEAT",
    ),
    "a branch is no point": BadCore(
        ("I10",),
        "requests/resume_points.py",
        "if anchor < found.base < repeat:",
        "if repeat < found.base < anchor:",
    ),
    "a point is kept for states only": BadCore(
        ("I10", "I9"),
        "requests/publishing.py",
        "kept, behind = divided(runs, worth)",
        "kept, behind = [], runs",
    ),
    "a point keeps its pages and no state": BadCore(
        ("I10", "I7", "I11"),
        "requests/slots.py",
        "                part.captured[page] = slot\n        # Last",
        "                component.device.give_private(slot)\n"
        "                part.account.held -= 1\n        # Last",
    ),
    "pages are published after they went": BadCore(
        ("I9", "I10", "I1"),
        "requests/publishing.py",
        "        others = self._others(request, end)\n        parts",
        "        self.pages.give_back_behind(request, position)\n"
        "        others = self._others(request, end)\n        parts",
    ),
    "points are counted twice in the demand": BadCore(
        ("I12", "A10"),
        "admission/decision.py",
        "query.checkpoints + decodes,",
        "2 * query.checkpoints + decodes,",
    ),
    "a grid is never thinned": BadCore(
        ("I12",),
        "requests/resume_points.py",
        "self.spacing = max([",
        "self.spacing = min([1, ",
    ),
    "left behind data counts as used": BadCore(
        ("I9",),
        "tree/inserting.py",
        "    stamp = tree.clock - LEFT_BEHIND if behind else tree.clock\n    if",
        "    stamp = tree.clock\n    if",
    ),
    "left behind data goes last": BadCore(
        ("I9", "T7"),
        "tree/component.py",
        "LEFT: Final = EXPIRED - 1\n",
        "LEFT: Final = 1 << 16\n",
    ),
    "the clean reserve is not copied": BadCore(
        ("E4",),
        "requests/backup.py",
        "operation = operations.begin_backup(tree, node, unbacked)",
        "operation = None",
    ),
    "the clean reserve has no bound": BadCore(
        ("B6",),
        "requests/backup.py",
        "lacking = wanted - component.device.free - component.clean.n_slots",
        "lacking = wanted",
    ),
    "the clean reserve takes all but the next": BadCore(
        ("T7",),
        "requests/backup.py",
        "victim = eviction.next_victim(self.tree, component, in_order)",
        "victim = eviction.next_victim(self.tree, component, lambda: in_order() and in_order())",
    ),
    "used data stays in the clean reserve": BadCore(
        ("T7",),
        "tree/component.py",
        "            if node.cells[self.index].stamp == stamp:\n",
        "            if node.cells[self.index].stamp >= stamp:\n",
    ),
    "the clean reserve goes last": BadCore(
        ("T7",),
        "tree/component.py",
        "        if self.clean and self.device.queue.next_level() != LEFT:\n",
        "        if self.clean and self.device.queue.next_level() is None:\n",
    ),
    "HOST that is full admits nothing": BadCore(
        ("E4",),
        "tree/eviction.py",
        "    return score is None or score >= floor\n",
        "    return False\n",
    ),
    "HOST admits what is worth less than its last victim": BadCore(
        ("E4",),
        "tree/eviction.py",
        "    return score is None or score >= floor\n",
        "    return True\n",
    ),
    "HOST keeps what DEVICE has, too": BadCore(
        ("T7",),
        "tree/eviction.py",
        "while ledger.room < target and (node := component.pop_double()) is not None:",
        "while False and (node := component.pop_double()) is not None:",
    ),
    "left behind data is given back": BadCore(
        ("I9", "I10"),
        "requests/publishing.py",
        "        if named:\n            self.publish(request, named, page)",
        "        if named:\n            self.pages.give_back_behind(request, page)",
    ),
    "slots handed over are promised again": BadCore(
        ("I12", "A1", "A12"),
        "requests/components.py",
        "target = self.peak - self.held + n\n",
        "target = self.peak - self.held + 2 * n\n",
    ),
    # -- admission
    "a demand has no slack": BadCore(
        ("A1",),
        "admission/decision.py",
        "total = component.stored_between(held, last + SLACK_PAGES)",
        "total = component.stored_between(held, last)",
    ),
    "a window's demand leaves out the pages it holds": BadCore(
        ("A1", "A4", "A7"),
        "admission/decision.py",
        "peak = min(total, reach + chunk + 1)",
        "peak = min(total, chunk + 1)",
    ),
    "a demand leaves out the host hits": BadCore(
        ("A3", "A1"),
        "admission/decision.py",
        "(now * per_page + host_slots,",
        "(now * per_page,",
    ),
    "a demand leaves out the states to capture": BadCore(
        ("A10", "A1"),
        "admission/decision.py",
        "query.checkpoints + decodes,",
        "decodes,",
    ),
    "admission forgets earlier promises": BadCore(
        ("A2", "A12"),
        "admission/promises.py",
        "            if need > ledger.headroom:\n",
        "            if need > ledger.free + ledger.evictable:\n",
    ),
    "a window is promised slots for the rest of the request": BadCore(
        ("A1", "A4"),
        "requests/components.py",
        "target = min(target, self.remaining)",
        "target = max(target, self.remaining)",
    ),
    "a load-back's slots stay promised": BadCore(
        ("A11", "A12", "A1"),
        "requests/components.py",
        "self.ledger.promised -= self.load\n",
        "pass\n",
    ),
    "smaller requests pass a large one for ever": BadCore(
        ("A13",),
        "plugins/scheduling/src/kvgraft_scheduling/waiting.py",
        "if place.waiting and place.overtaken >= self.max_overtakes:",
        "if False:",
    ),
    # -- transfers
    "children are backed up before their parents": BadCore(
        ("B1",),
        "requests/backup.py",
        "return sorted(chain.values(), key=lambda each: each.end)",
        "return sorted(chain.values(), key=lambda each: -each.end)",
    ),
    "only the first node that gained data is backed up": BadCore(
        ("B6",),
        "requests/backup.py",
        "_with_gaps_above(self.tree, anchor, nodes, since))",
        "_with_gaps_above(self.tree, anchor, nodes, since)[:1])",
    ),
    "a component that gained data later is not backed up": BadCore(
        ("B7", "B6", "B2"),
        "tree/operations.py",
        "        and cell.host is None\n        and cell.incoming is None\n        and not is_left",
        "        and all(c.host is None for c in node.cells)\n        and cell.incoming is None\n"
        "        and not is_left",
    ),
    "transfers are acknowledged without waiting": BadCore(
        ("B3",),
        "transfers/journal.py",
        "if not first.ticket.wait(max(0.0, deadline - time.monotonic())):",
        "if first.ticket is None:",
    ),
    "rows of a backup are crossed": BadCore(
        ("B3",),
        "pools/component.py",
        "lanes, partner, device_rows, host_rows)",
        "lanes, partner, device_rows, host_rows.flip(0))",
    ),
    "a load-back leaves out the first node": BadCore(
        ("R1", "M4"),
        "tree/operations.py",
        "            for node in segment_nodes(component, receipt)\n            if (cell",
        "            for node in segment_nodes(component, receipt)[1:]\n            if (cell",
    ),
    "a load-back fetches data on its way already": BadCore(
        ("R6", "M4"),
        "tree/operations.py",
        "            and cell.host is not None\n            and cell.incoming is None\n",
        "            and cell.host is not None\n",
    ),
    "a request does not wait for others' loads": BadCore(
        ("R5", "R6", "R7", "R1"),
        "tree/operations.py",
        "cell.incoming is not None and not cell.incoming.to_host:",
        "cell.incoming is not None and cell.incoming.to_host:",
    ),
    "states that were loaded are thrown away": BadCore(
        ("R5", "T8"),
        "tree/operations.py",
        "if present is not None or lacks:",
        "if present is not None or lacks or (component.is_state and not operation.to_host):",
    ),
    "loading and computing are weighed the wrong way round": BadCore(
        ("R8",),
        "requests/leases.py",
        "return self.load.compute_s(tokens, rest) < load_s",
        "return self.load.compute_s(tokens, rest) > load_s",
    ),
    # -- storage
    "page hashes are not chained": BadCore(
        ("S8", "T10"),
        "plugins/storage/src/kvgraft_storage/tier/naming.py",
        "parent = page_hash(parent, tokens[start : start + size])\n"
        "            found.append(parent)",
        "found.append(page_hash(parent, tokens[start : start + size]))",
    ),
    "states are stored under the first page of their node": BadCore(
        ("S8", "S9"),
        "plugins/storage/src/kvgraft_storage/tier/storing.py",
        "np.arange(first, node.end)",
        "np.arange(node.start, node.start + node.end - first)",
    ),
    "pages that arrive change places": BadCore(
        ("S5", "S9", "S4"),
        "plugins/storage/src/kvgraft_storage/tier/arriving.py",
        "arrival.slots[component.index][first:last].tobytes()",
        "arrival.slots[component.index][first:last][::-1].tobytes()",
    ),
    "a prefetch keeps its unpublished slots": BadCore(
        ("S5", "T8", "R2"),
        "plugins/storage/src/kvgraft_storage/tier/fetching.py",
        "            self._free(component, arrived)\n",
        "            each = self.context.slabs.nbytes[component.index]\n"
        "            self.nbytes -= each * self.slots[component.index][arrived].size\n"
        "            arrived[:] = False\n",
    ),
    "a prefetch does not pin where it begins": BadCore(
        ("S1", "L8"),
        "plugins/storage/src/kvgraft_storage/tier/fetching.py",
        "tree.hold_root(self.key.namespace)\n        self.phase = Phase.LOOKING",
        "tree.hold_root(self.key.namespace)\n        release(tree, self.receipt)\n"
        "        self.receipt = hold_host(tree, tree.root(self.key.namespace))\n"
        "        self.phase = Phase.LOOKING",
    ),
    # -- written later, and apart from the guard as well
    "a request keeps its match of a namespace that was cleared": BadCore(
        ("M1", "T11", "L3", "A9"),
        "serving.py",
        "request.limited is CROWDED or self.tree.is_cleared(request.root):",
        "request.limited is CROWDED:",
    ),
    "a restart keeps the request's own slots": BadCore(
        ("H8", "T8", "T9"),
        "serving.py",
        ("        self._give_up(parts)\n        pinning"),
        ("        self.budget.close(parts)\n        pinning"),
    ),
    "a request that has to wait is refused for ever": BadCore(
        ("A8",),
        "admission/promises.py",
        ("            return Decision(Outcome.DEFERRED, shortages)\n        wanted"),
        ("            return Decision(Outcome.NEVER_FITS, shortages)\n        wanted"),
    ),
    "a shortage counts free slots alone as room": BadCore(
        ("A8",),
        "admission/promises.py",
        "found.append(_short(ledger, need, ledger.headroom))",
        "found.append(_short(ledger, need, ledger.free))",
    ),
    "a request waits for room that its own prefix takes": BadCore(
        ("A8",),
        "admission/promises.py",
        "if shortage.needed + pinned <= shortage.capacity:",
        "if shortage.needed <= shortage.capacity:",
    ),
    "host hits are counted in pages": BadCore(
        ("M4", "A3"),
        "requests/leases.py",
        "each.host_slots = sum([each.component.n_slots(node) for node in nodes])",
        "each.host_slots = sum([node.end - node.start for node in nodes])",
    ),
    "one component of a victim is copied alone": BadCore(
        ("E4", "B2"),
        "requests/eviction.py",
        "return unbacked if admitted else []",
        "return unbacked[:1] if admitted else []",
    ),
    "data is published on HOST below a gap": BadCore(
        ("B1", "T5", "T4"),
        "tree/operations.py",
        "gap = operation.to_host and not parent_on_host(tree, node)",
        "gap = False",
    ),
    "a copy that failed keeps its slots": BadCore(
        ("R2", "T8", "S5", "L1", "E6"),
        "tree/operations.py",
        ("                _cancel(tree, node, component)\n    _leave(tree, operation)\n"),
        ("                cell.incoming = None\n    _leave(tree, operation)\n"),
    ),
    "a request shares its deepest state alone": BadCore(
        ("I7", "I10", "T8", "T9"),
        "requests/publishing.py",
        "        if offered and (base or max(offered) > end):\n",
        (
            "        if offered:\n"
            "            offered = {max(offered): offered[max(offered)]}\n"
            "        if offered and (base or max(offered) > end):\n"
        ),
    ),
    "the state that follows a decode is named a page late": BadCore(
        ("I7", "I6"),
        "requests/slots.py",
        "                part.tracked_page = page\n",
        "                part.tracked_page = page + 1\n",
    ),
    "the last state slot is kept for nobody": BadCore(
        ("I7", "I10", "I11"),
        "requests/slots.py",
        ("spare = ledger.headroom > 0\n            if due_as"),
        ("spare = ledger.headroom > 1\n            if due_as"),
    ),
    "a state that was passed stays promised": BadCore(
        ("A1", "I12", "A12", "I11"),
        "requests/slots.py",
        "self.points.skip(request, part.due, PASSED)\n                part.account.forgo(1)\n",
        "self.points.skip(request, part.due, PASSED)\n",
    ),
    "the bound of pins is asked of each alone": BadCore(
        ("K6",),
        "plugins/retention/src/kvgraft_retention/pins.py",
        "if added and held + added > bound:",
        "if added and added > bound:",
    ),
    "a tenant takes beyond its limit": BadCore(
        ("K5", "A12", "K4", "E6", "E2"),
        "plugins/retention/src/kvgraft_retention/tenants.py",
        "return min(self.allocator.n_free, self.limit - self.used)",
        "return self.allocator.n_free",
    ),
    "the tenant that borrowed least gives up data": BadCore(
        ("K5", "K4", "E6"),
        "plugins/retention/src/kvgraft_retention/tenants.py",
        "if found is None or rank > most:",
        "if found is None or rank < most:",
    ),
    "data whose time is over is of its priority's level": BadCore(
        ("T7",),
        "plugins/retention/src/kvgraft_retention/lifetimes.py",
        "return EXPIRED if self.is_over(retention) else retention.priority",
        "return retention.priority",
    ),
    "a priority that comes later leaves first": BadCore(
        ("T7",),
        "tree/component.py",
        "(first is None or level < first):",
        "(first is None or level != LEFT):",
    ),
    "no time passes between two polls": BadCore(
        ("T7",),
        "plugins/retention/src/kvgraft_retention/lifetimes.py",
        "        self.now_s = max(self.now_s, self._clock())\n",
        "",
    ),
    "evictions from HOST are no events": BadCore(
        ("V2", "V1"),
        "tree/tree.py",
        "            each.leaving(node, component, tier, cause)\n",
        "            if on_device:\n                each.leaving(node, component, tier, cause)\n",
    ),
    "a loss of events counts as one": BadCore(
        ("V3",),
        "plugins/observe/src/kvgraft_observe/events/stream.py",
        "        self.lost += lost\n",
        "        self.lost += 1\n",
    ),
    "a row is not read anew after other calls": BadCore(
        ("T9", "K7", "N1", "L1", "I4"),
        "serving.py",
        "            self.stepper.rows.touch(request.row)\n",
        "            pass\n",
    ),
    "pages computed again do not count as used": BadCore(
        ("T7", "T12"),
        "tree/inserting.py",
        (
            "        if not run.is_left:\n"
            "            tree.touch(node, component)\n"
            "        component.devices"
        ),
        "        component.devices",
    ),
    "data that comes back keeps its last use": BadCore(
        ("T7", "I9", "T12", "I10"),
        "tree/inserting.py",
        "    stamp = tree.clock - LEFT_BEHIND if behind else tree.clock\n    if",
        "    stamp = tree.clock - LEFT_BEHIND if behind else cell.stamp\n    if",
    ),
    "a sliding window keeps its pins on HOST": BadCore(
        ("L1", "T8", "L6", "T6"),
        "tree/pinning.py",
        (
            "            pin_host(tree, component, anchor, given, receipt.host_from, -1)\n"
            "        _unpin"
        ),
        ("            pass\n        _unpin"),
    ),
    "a load is weighed without its latency": BadCore(
        ("R8",),
        "requests/leases.py",
        "load_s = self.load.latency_s + nbytes",
        "load_s = nbytes",
    ),
    "a request waits for pages of another namespace": BadCore(
        ("T11", "M1", "A8"),
        "plugins/scheduling/src/kvgraft_scheduling/pending.py",
        "if by.stage is not ADMITTED or by.root is not request.root:",
        "if by.stage is not ADMITTED:",
    ),
    "deferrals never end": BadCore(
        ("A8",),
        "serving.py",
        "        request.deferrals_left -= 1\n",
        "",
    ),
    "private slots are lost with their request": BadCore(
        ("H8", "T8"),
        "admission/promises.py",
        "                    books.give_private(slots)\n",
        "                    pass\n",
    ),
    "a promise is renewed beyond what is left to take": BadCore(
        ("A1", "I12", "A12"),
        "requests/components.py",
        "        target = min(target, self.remaining)\n",
        "",
    ),
    "HOST eviction frees one slot too many": BadCore(
        ("E2",),
        "tree/eviction.py",
        ("    before = ledger.free\n    target = ledger.room + n_slots\n    held"),
        ("    before = ledger.free\n    target = ledger.room + n_slots + 1\n    held"),
    ),
    "a component's shorter match is ignored": BadCore(
        ("M1", "M5"),
        "requests/leases.py",
        "                if answer.limit_pages < found.anchor:\n",
        "                if False:\n",
    ),
    "a known key is followed where it was found in another tree": BadCore(
        ("T11", "M1"),
        "tree/matching.py",
        "if node is None or key.trail_root is not root:",
        "if node is None:",
    ),
    "a load-back starts a page late": BadCore(
        ("R1", "R5", "M4", "L3", "M7"),
        "requests/leases.py",
        "                host_from = matching.missing_from(tree, found)\n",
        ("                host_from = (matching.missing_from(tree, found) or 0) + 1\n"),
    ),
    "an expired pin on HOST outlives the load-back": BadCore(
        ("L1", "T8", "L3", "H8", "H4"),
        "serving.py",
        "            if not self.tree.homes_on_host:\n",
        "            if self.tree.homes_on_host:\n",
    ),
    "a step takes no notice of states that are due": BadCore(
        ("I7", "M8", "I10"),
        "plugins/scheduling/src/kvgraft_scheduling/stepping.py",
        (
            "        if not n_pages and not batch.n_slow:\n"
            "            self._keep_states(batch, None)"
        ),
        ("        if not n_pages and not batch.n_slow:\n            pass"),
    ),
    "a step makes room for one page alone": BadCore(
        ("A7", "T9", "E6", "E2", "A1"),
        "plugins/scheduling/src/kvgraft_scheduling/stepping.py",
        "all(n_pages * each.slots_per_page <= each.device.room",
        "all(each.slots_per_page <= each.device.room",
    ),
    "a demand asks for the prompt's states alone": BadCore(
        ("A10", "A1", "I12"),
        "admission/promises.py",
        "            if component.is_state and not request.keeps_decoded:\n",
        "            if component.is_state:\n",
    ),
    "points that are left out are not counted": BadCore(
        ("I11",),
        "admission/promises.py",
        "            self.points.skip_left_out(request)\n",
        "            request.points_left_out = None\n",
    ),
    "a canonical copy goes before the data that depends on it": BadCore(
        ("E5", "E3", "T4", "T5", "E6", "T8"),
        "tree/eviction.py",
        "if other.index in component.narrower and (other is component or not other.home_is_host)",
        "if other is component",
    ),
    "data of a victim's tenant is cut a page too deep": BadCore(
        ("K4", "E2"),
        "tree/eviction.py",
        "component.ledger(tier, node.tenant).over)",
        "component.ledger(tier, node.tenant).over + component.slots_per_page)",
    ),
    "copies to HOST run before the fence of the data": BadCore(
        ("B4", "B3"),
        "transfers/journal.py",
        ("            fence = self.fence\n        queries"),
        ("            fence = None\n        queries"),
    ),
    "a priority lasts for the next request's data, too": BadCore(
        ("T7",),
        "plugins/retention/src/kvgraft_retention/lifetimes.py",
        "        if request.requested_retention is not None:\n",
        "        if request.requested_retention is None:\n"
        "            request.use_retention = self.tree.use_retention\n"
        "        else:\n",
    ),
    "a request given up leaves its row to nobody": BadCore(
        ("T9", "H8"),
        "serving.py",
        ("        request.stage, request.waits = CLOSED, []\n        if request.row >= 0:\n"),
        "        request.stage, request.waits = CLOSED, []\n        if False:\n",
    ),
    "unpinning lets a node's pages go that another pin holds": BadCore(
        ("K6", "L1", "T6"),
        "plugins/retention/src/kvgraft_retention/pins.py",
        (
            "            if not pins[node]:\n"
            "                del pins[node]\n"
            "                self.slots"
        ),
        (
            "            if pins[node] or not pins[node]:\n"
            "                del pins[node]\n"
            "                self.slots"
        ),
    ),
    "a victim at home on HOST leaves its DEVICE data": BadCore(
        ("E5", "T4", "T5", "E3", "M1", "T8"),
        "tree/eviction.py",
        "            _lose_home(tree, node, other, cause)\n",
        "            pass\n",
    ),
    "a waiting request's prefetched data is never given way": BadCore(
        ("A8", "S3", "A13"),
        "serving.py",
        "while decision.outcome is DEFERRED and _lacks_host(decision) and self._gives_way(gave):",
        "while False:",
    ),
    "the first of several points alone is kept in the tree": BadCore(
        ("I10", "I9"),
        "tree/inserting.py",
        ("    for page in sorted(points, reverse=True) if len(points) > 1 else points:\n"),
        "    for page in sorted(points)[:1]:\n",
    ),
    "a page on HOST is taken for one on DEVICE where a reach is checked": BadCore(
        ("M3", "M1", "R5"),
        "tree/matching.py",
        ("    return cell.device is not None or (not device_only and cell.host is not None)"),
        "    return cell.device is not None or cell.host is not None",
    ),
    "data left behind is backed up as other data": BadCore(
        ("I9", "B6", "T7", "B2", "B7"),
        "tree/operations.py",
        ("        and cell.incoming is None\n        and not is_left_behind(cell.stamp)\n    ]"),
        "        and cell.incoming is None\n    ]",
    ),
    "an ended copy is published where its data came otherwise, too": BadCore(
        (
            "T9",
            "T8",
            "B3",
            "R2",
            "S5",
        ),
        "tree/operations.py",
        "if present is not None or lacks:",
        "if lacks:",
    ),
    "a demotion deletes what was demoted with it": BadCore(
        ("E4",),
        "tree/operations.py",
        "needs_backup(tree, node) if component in victims]\n    reserved",
        "needs_backup(tree, node) if component is short]\n    reserved",
    ),
    "a page slot too few is taken for a run of pages": BadCore(
        (
            "A1",
            "T9",
            "H8",
            "T8",
        ),
        "requests/slots.py",
        "stored_between(first, end) * component.slots_per_page\n            beyond",
        "stored_between(first, end) * component.slots_per_page\n"
        "            n = max(1, n - 1)\n            beyond",
    ),
    "a restart forgets that a load failed": BadCore(
        ("R5", "M1", "R8"),
        "serving.py",
        ("        if request.load_failed:\n            limit = min("),
        ("        if False:\n            limit = min("),
    ),
    "a window slides a page too early": BadCore(
        ("L6", "L3"),
        "tree/pinning.py",
        "            while node.start > position - window:\n",
        "            while node.start > position - window + 1:\n",
    ),
    "host pins are taken of the first component alone": BadCore(
        ("L3", "M7", "T6", "L1"),
        "tree/pinning.py",
        (
            "            pin_host(tree, component, anchor, segment, host_from, 1)\n"
            "            on_host"
        ),
        (
            "            if component.index == 0:\n"
            "                pin_host(tree, component, anchor, segment, host_from, 1)\n"
            "            on_host"
        ),
    ),
    "what a request is promised counts once for two pools": BadCore(
        ("A11", "A12", "A1"),
        "requests/components.py",
        "        self.ledger.promised += peak + load\n",
        "        self.ledger.promised += peak\n",
    ),
    "a stamp is the same for two uses": BadCore(
        (
            "T7",
            "T12",
            "M1",
        ),
        "tree/tree.py",
        "((self.clock >> CLASS_BITS) + 1 << CLASS_BITS)",
        "((self.clock >> CLASS_BITS) + (self.clock >> CLASS_BITS) % 2 << CLASS_BITS)",
    ),
    "a namespace is cleared and its root kept": BadCore(
        ("T1", "M1", "T3", "T11"),
        "tree/tree.py",
        "            self.cleared[root] = self._namespaces[root.ident]\n",
        "            self.cleared.setdefault(root, None)\n",
    ),
    "slots move before their data exists": BadCore(
        ("K7", "B4"),
        "plugins/arena/src/kvgraft_arena/moving.py",
        "        if tier is Tier.DEVICE and self._is_behind():",
        "        if tier is Tier.HOST and self._is_behind():",
    ),
    "a captured state stays in a closed extent": BadCore(
        ("K7", "T9"),
        "plugins/arena/src/kvgraft_arena/moving.py",
        "        for page, slots in part.captured.items()\n",
        "        for page, slots in list(part.captured.items())[1:]\n",
    ),
    "a request loads though a load that it relied on failed": BadCore(
        ("R5", "R2"),
        "serving.py",
        "        if request.load_failed or request.load_started:",
        "        if request.load_started:",
    ),
    "a fence that was named before is forgotten": BadCore(
        ("B4",),
        "transfers/journal.py",
        "            self.fence = self._fences.ahead",
        "            self.fence = fence",
    ),
    "a fetch keeps its pins on the data that it counted on": BadCore(
        ("L1", "T6"),
        "plugins/storage/src/kvgraft_storage/tier/fetching.py",
        "for receipt in (self._tip_held, self._counted_on, self.receipt):",
        "for receipt in (self._tip_held, self.receipt):",
    ),
    "a state kept in a step keeps its first name": BadCore(
        ("I7",),
        "plugins/scheduling/src/kvgraft_scheduling/stepping.py",
        "                part.tracked_page = page\n        for component",
        "                part.tracked_page = part.tracked_page or page\n        for component",
    ),
    "the reserve is filled while a request that fits waits": BadCore(
        ("A8", "E4"),
        "requests/backup.py",
        "        if waited_for and all(needed <= pool.headroom for pool, needed in waited_for):\n"
        "            return\n",
        "",
    ),
    "a load-back holds no pins on HOST": BadCore(
        ("L8", "R7", "E5"),
        "tree/operations.py",
        "        receipt.anchor,\n        host_from=receipt.host_from,\n",
        "        receipt.anchor,\n        host_from=None,\n",
    ),
}
"""By name, which says what is wrong."""
