"""Resume points: boundaries at which requests keep every component's data (I9 to I12).

They are decided here, once, for all components together: a window without a state at the same
boundary, or the reverse, is useless. Some are known when a request is matched; the regular ones of
a long prompt follow as it runs. Data between them is evict-first.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from kvgraft.compiled import mypyc_attr
from kvgraft.config import CacheConfig
from kvgraft.packages.dispatch import Mounted
from kvgraft.requests.request import NO_PAGES, Request
from kvgraft.sizes import expect_count
from kvgraft.stats import PointStats
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.matching import Match
from kvgraft.tree.node import KINDS, Node
from kvgraft.tree.tree import Tree
from kvgraft.types import PointKind

REPEAT: Final = PointKind.REPEAT
PROMPT_END: Final = PointKind.PROMPT_END
BRANCH: Final = PointKind.BRANCH
END: Final = PointKind.END
ASKED: Final = PointKind.ASKED
GRID: Final = PointKind.GRID
"""As globals, see `kvgraft.types`."""

GRID_SHARE: Final = 1 / 8
"""Most bytes a grid of points takes, per byte of the base component that it lies on (I12).

And the most slots of a state component's pool, where the base component fills its own.
"""

DRAFTED_TOKENS: Final = 64
"""Tokens between states of a decode with drafts, beside windows: a pass ends early for each."""

REPEAT_SHARE: Final = 1 / 4
"""Least part of a page-aligned prompt that a state before its last page must save repetitions.

An identical prompt cannot use the end of such a prompt, because it must compute a token; a longer
prompt uses it without the point. The point costs an extra pass of the model, or at least a state.
It is always made if the same prompt was computed before, since repetitions are likely then, or if
the engine names it, or if there are only windows, for which it costs a page and no pass.
"""

NOTHING = range(0)


@mypyc_attr(allow_interpreted_subclasses=True)
class ResumePoints:
    """Where the requests of one cache make resume points, and how many they made.

    If every component needs every page, each boundary can be resumed from and there is nothing to
    decide.

    Args:
        tree: the components' reaches.
        mounted: the components, for the bytes of their slots.
        config: its `cut_tokens`, `decode_interval_tokens` and `max_drafts`.

    Attributes:
        made: points by kind: boundaries whose data went to the tree; one that was lost and made
            again counts twice.
        used: admitted requests that resume there.
        skipped: points left out: a state found no slot, or could never fit (I11).
        reasons: why the last one was skipped, by kind.
        spacing: pages between points of a grid.
        state_spacing: pages between states that are left behind at the ends of chunks.
        decode_pages: while decoding, states are kept at multiples of this many pages.
        late_pages: most pages behind its window that a decode keeps until the next state.
        draft_pages: pages of the drafts of a pass, at most.
    """

    def __init__(self, tree: Tree, mounted: Sequence[Mounted], config: CacheConfig) -> None:
        self.tree = tree
        self.matter = len(tree.prefix_closed) < len(tree.components)
        self.cuts = tree.has_state
        self.made: dict[PointKind, int] = dict.fromkeys(PointKind, 0)
        self.used: dict[PointKind, int] = dict.fromkeys(PointKind, 0)
        self.skipped: dict[PointKind, int] = dict.fromkeys(PointKind, 0)
        self.reasons: dict[PointKind, str] = {}
        self.cut_pages = -(-config.cut_tokens // tree.page_size)
        nbytes = [each.component.device.slot_nbytes for each in mounted]
        base = tree.components[0]
        per_page = nbytes[0] * base.slots_per_page
        if base.home_is_host:
            host = mounted[0].component.host
            per_page += 0 if host is None else host.slab_nbytes * base.slots_per_page
        bounded = [component for component in tree.components if not component.is_prefix_closed]
        states = [component for component in bounded if component.is_state]
        # A decode drops pages behind a window, and a state without its window is useless.
        decode_tokens, max_drafts = config.decode_interval_tokens, config.max_drafts
        if states != bounded:
            decode_tokens = min(decode_tokens, DRAFTED_TOKENS) if max_drafts and states else 0
        self.decode_pages = max(1, -(-decode_tokens // tree.page_size))
        self.late_pages = 0 if states == bounded else self.decode_pages - 1
        self.draft_pages = -(-max_drafts // tree.page_size)
        self.state_spacing = _pages_for(states, nbytes, per_page)
        # Even if states are small: the grid leaves most slots to the other points.
        base_pages = base.device.capacity / base.slots_per_page
        for_slots = [base_pages / (component.device.capacity * GRID_SHARE) for component in states]
        self.spacing = max([_pages_for(bounded, nbytes, per_page), *map(math.ceil, for_slots)])

    def __repr__(self) -> str:
        names = ("made", "used", "skipped", "lost")
        counts = [(name, getattr(self, name)) for name in names]
        said = [f"{name} {sum(kinds.values())}" for name, kinds in counts]
        return f"<ResumePoints: {', '.join(said)}; a grid every {self.spacing} pages>"

    @property
    def lost(self) -> dict[PointKind, int]:
        """Points by kind that lost a component's data from its last tier, used before or not."""
        return self.tree.lost_points

    def stats(self) -> dict[PointKind, PointStats]:
        """The counts by kind, copied."""
        return {
            kind: PointStats(self.made[kind], self.used[kind], self.skipped[kind], self.lost[kind])
            for kind in PointKind
        }

    def ahead(
        self, request: Request, found: Match, asked: Collection[int]
    ) -> tuple[dict[int, PointKind], list[int]]:
        """The points ahead of a match, by boundary, and those at which states are captured.

        For caches where points matter. Boundaries in pages. `asked` are the components' own (M5);
        the engine's are the request's.
        """
        #   anchor ──── base ──────── repeat ── last ── prompt      repeat < last: an aligned prompt
        #               BRANCH        REPEAT    PROMPT_END          ASKED at any asked page
        # A state is captured where asked for, or if it saves `cut_pages` against the one before.
        size, anchor = self.tree.page_size, found.anchor
        last, repeat = request.prompt // size, (request.prompt - 1) // size
        named = {*asked, *request.resume_at} if asked or request.resume_at else NO_PAGES
        ahead = {page: ASKED for page in named if anchor < page <= last} if named else {}
        if anchor < repeat:
            if anchor < found.base < repeat:
                ahead[found.base] = BRANCH
            ahead[repeat] = REPEAT
        if anchor < last != repeat:
            ahead[last] = PROMPT_END
        has_state = self.tree.has_state
        if named:
            ahead = dict(sorted(ahead.items()))
        if not has_state:
            return ahead, []
        repeats_alone = repeat if repeat != last and found.base < repeat else -1
        before = anchor
        checkpoints: list[int] = []
        for page in ahead:
            gain = page - before
            if page not in named and (
                (self.cuts and gain < self.cut_pages and page * size != request.prompt)
                or (page == repeats_alone and gain < repeat * REPEAT_SHARE)
            ):
                continue
            checkpoints.append(page)
            before = page
        if len(checkpoints) < len(ahead):
            ahead = {page: ahead[page] for page in checkpoints}
        return ahead, checkpoints

    def grid_between(self, request: Request, start: int, end: int) -> range:
        """Pages in `(start, end]` of the prompt at which the grid has a point."""
        end = min(end, (request.prompt - 1) // self.tree.page_size)
        spacing = self.spacing
        if end // spacing <= start // spacing:
            return NOTHING
        return range((start // spacing + 1) * spacing, end + 1, spacing)

    def on_grid(self, request: Request, page: int) -> bool:
        """Whether the end of a chunk is a point of the grid: far enough from the point before."""
        return page - request.last_point >= self.spacing

    def reached_from(self, request: Request, page: int) -> int:
        """The boundary whose reaches a request at page `page` keeps: its last state's (I10)."""
        if not self.late_pages or request.computed <= request.prompt:
            return page
        return max(page - page % self.decode_pages, request.prompt // self.tree.page_size)

    def leaves_state(self, request: Request, page: int) -> bool:
        """Whether a state is left behind at the end of a chunk: an eighth of the base's bytes."""
        return page - max(request.last_point, request.last_left) >= self.state_spacing

    def most_useful(self, request: Request) -> list[int]:
        """The points ahead at which states are captured, the most useful first.

        A repetition resumes at the deepest before the prompt's end; a longer prompt mostly resumes
        where the request ended.
        """
        repeat = (request.prompt - 1) // self.tree.page_size
        return sorted(request.points, key=lambda page: (page > repeat, -page))

    def skip_left_out(self, request: Request) -> None:
        """Skip, for all components, the points that were left out so that the request fits.

        No request is rejected because of a point.
        """
        for page in request.points.keys() - request.checkpoints:
            self.skip(request, page, str(request.points_left_out))

    def skip(self, request: Request, page: int, reason: str) -> None:
        """A point found no slot: it is dropped for all components (I11).

        It is counted once for its request; `explain` reports `reason` for its kind.
        """
        kind = request.points.pop(page, None)
        if kind is not None and (page, kind) not in request.skipped:
            request.skipped |= {(page, kind)}
            self.skipped[kind] += 1
            self.reasons[kind] = reason

    def used_at(self, anchor: Node) -> None:
        """Count the use of a point: an admitted request resumes at the end of `anchor`."""
        points = anchor.points
        if len(points) == anchor.end - anchor.start:  # the node ends with a point
            self.used[KINDS[points[-1]]] += 1


def _pages_for(components: Sequence[TreeComponent], nbytes: Sequence[int], base_nbytes: int) -> int:
    """Pages of the base on which one point of `components` takes at most its share."""
    far = 1 << 20
    cost = 0
    for component in components:
        slots = (
            1 if component.is_state else component.reach_pages.width(far) * component.slots_per_page
        )
        cost += slots * nbytes[component.index]
    return max(1, math.ceil(cost / (base_nbytes * GRID_SHARE)))


def resume_pages(resume_at: object, prompt: int, page_size: int) -> tuple[int, ...]:
    """The whole pages up to positions that the engine names, in tokens: one or several.

    Raises:
        ConfigError: one that is no position of the prompt.
    """
    try:
        named = [resume_at] if isinstance(resume_at, (str, bytes, Mapping)) else list(resume_at)  # type: ignore[call-overload]
    except TypeError:  # one number, or a tensor of no dimension
        named = [resume_at]
    said = f"resume_at in a prompt of {prompt} tokens"
    return tuple(sorted({expect_count(said, each, most=prompt) // page_size for each in named}))
