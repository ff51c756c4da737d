"""Write the drawings of the documents: `docs/drawings/*.svg`.

Run by `make docs`; a test fails when the files differ from what this writes. Every drawing has its
own light ground, so that it reads the same on light and dark pages.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

DRAWINGS = Path(__file__).parent / "drawings"

INK, FAINT, GROUND = "#1f2733", "#6b7686", "#fbfbfd"
DEVICE, HOST, STORAGE = "#2f6fb3", "#3f8f5f", "#b07a2a"
PALE = {DEVICE: "#e3eef9", HOST: "#e3f3e9", STORAGE: "#f9efdd", FAINT: "#eef0f4"}
MARK = "#c0392b"

FONT = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"


class Drawing:
    """An SVG file in the making; all lengths are pixels.

    Args:
        width: of the whole drawing.
        height: of the whole drawing.
        title: read out by screen readers.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self.size = width, height
        self.title = title
        self.parts: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, colour: str, **more: str) -> None:
        """A rounded rectangle with a pale filling."""
        look = {"fill": PALE[colour], "stroke": colour, "stroke_width": "1.5", "rx": "7", **more}
        self._add("rect", x=f"{x:g}", y=f"{y:g}", width=f"{w:g}", height=f"{h:g}", **look)

    def page(self, x: float, y: float, colour: str | None) -> None:
        """One page: filled, or dashed where nothing is held."""
        if colour is None:
            look = {"fill": "none", "stroke": "#b9c1cd", "stroke_dasharray": "3 2.5"}
        else:
            look = {"fill": colour, "stroke": colour}
        self._add("rect", x=f"{x:g}", y=f"{y:g}", width="20", height="18", rx="3", **look)

    def dot(self, x: float, y: float, colour: str) -> None:
        """One state."""
        self._add("circle", cx=f"{x:g}", cy=f"{y:g}", r="8", fill=colour)

    def line(self, *points: tuple[float, float], colour: str = FAINT, **more: str) -> None:
        route = " ".join(f"{x:g},{y:g}" for x, y in points)
        look = {"fill": "none", "stroke": colour, "stroke_width": "1.8", **more}
        self._add("polyline", points=route, **look)

    def arrow(self, *points: tuple[float, float], colour: str = FAINT, **more: str) -> None:
        """A line along `points` with its head at the last one, which it meets straight on."""
        (x0, y0), (x1, y1) = points[-2:]
        dx, dy = (x1 > x0) - (x1 < x0), (y1 > y0) - (y1 < y0)
        self.line(*points[:-1], (x1 - 6 * dx, y1 - 6 * dy), colour=colour, **more)
        back = x1 - 9 * dx, y1 - 9 * dy
        head = (
            f"{x1:g},{y1:g} {back[0] + 5 * dy:g},{back[1] + 5 * dx:g} "
            f"{back[0] - 5 * dy:g},{back[1] - 5 * dx:g}"
        )
        self._add("polygon", points=head, fill=colour)

    def text(self, x: float, y: float, words: str, size: int = 14, **more: str) -> None:
        """One line of text; `anchor`, `fill` and `weight` as in SVG."""
        look = {"font_size": str(size), "fill": more.pop("fill", INK)}
        if "anchor" in more:
            look["text_anchor"] = more.pop("anchor")
        if "weight" in more:
            look["font_weight"] = more.pop("weight")
        self._add("text", words, x=f"{x:g}", y=f"{y:g}", **look, **more)

    def _add(self, tag: str, content: str | None = None, **attributes: str) -> None:
        pairs = "".join(f' {k.replace("_", "-")}="{escape(v)}"' for k, v in attributes.items())
        end = "/>" if content is None else f">{escape(content, quote=False)}</{tag}>"
        self.parts.append(f"<{tag}{pairs}{end}")

    def __str__(self) -> str:
        width, height = self.size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" font-family="{escape(FONT)}">\n'
            f"<title>{escape(self.title)}</title>\n"
            f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="10" '
            f'fill="{GROUND}" stroke="#dfe3ea"/>\n'
        )
        return head + "\n".join(self.parts) + "\n</svg>\n"


def life() -> Drawing:
    """A request's life over the three tiers."""
    drawing = Drawing(960, 470, "The life of a request: calls, and what moves between the tiers")
    steps = [
        ("queued", "prefetch", "asks the store"),
        ("begin", "match and pin", "the longest prefix"),
        ("admit", "promise slots", "of every pool"),
        ("load_back", "fetch the part", "that is on HOST"),
        ("run", "allocate, computed", "chunk by chunk"),
        ("share", "checkpoint, finish", "leave it as cache"),
    ]
    left, step, width = 28, 153, 138
    centres = [left + number * step + width / 2 for number in range(len(steps))]
    for number, (name, first, second) in enumerate(steps):
        x = left + number * step
        drawing.box(x, 24, width, 82, FAINT)
        drawing.text(centres[number], 50, name, 16, anchor="middle", weight="600")
        drawing.text(centres[number], 73, first, 12, anchor="middle", fill=FAINT)
        drawing.text(centres[number], 92, second, 12, anchor="middle", fill=FAINT)
        if number:
            drawing.arrow((x - step + width, 65), (x - 1, 65))
    bands = [("DEVICE", DEVICE, 160), ("HOST", HOST, 270), ("STORAGE", STORAGE, 380)]
    said = {
        "DEVICE": "the pools that kernels read",
        "HOST": "a mirror in memory",
        "STORAGE": "a directory or a server, shared between processes",
    }
    for name, colour, y in bands:
        drawing.box(left, y, 904, 62, colour)
        drawing.text(left + 14, y + 26, name, 15, fill=colour, weight="700")
        drawing.text(left + 14, y + 47, said[name], 13, fill=FAINT)
    prefetch, match, _, load, run, share = centres
    drawing.arrow((prefetch + 30, 380), (prefetch + 30, 332), colour=STORAGE)
    drawing.text(prefetch + 42, 361, "prefetch", 13, fill=STORAGE)
    drawing.line((match, 106), (match, 300), colour=FAINT, stroke_dasharray="2 4")
    drawing.dot(match + 90, 191, DEVICE)
    drawing.dot(match + 90, 301, HOST)
    drawing.line((match, 191), (match + 82, 191), colour=FAINT, stroke_dasharray="2 4")
    drawing.line((match, 301), (match + 82, 301), colour=FAINT, stroke_dasharray="2 4")
    drawing.text(match + 106, 187, "resumable on DEVICE", 12, fill=FAINT)
    drawing.text(match + 106, 203, "alone", 12, fill=FAINT)
    drawing.text(match + 106, 305, "anchor", 12, fill=FAINT)
    drawing.arrow((load, 270), (load, 222), colour=HOST)
    drawing.text(load + 12, 251, "load back", 13, fill=HOST)
    drawing.arrow((run, 106), (run, 160), colour=DEVICE)
    drawing.text(run + 10, 137, "slots", 13, fill=DEVICE)
    drawing.arrow((share - 16, 222), (share - 16, 270), colour=DEVICE)
    drawing.text(share - 4, 251, "backup", 13, fill=DEVICE)
    drawing.arrow((share - 16, 332), (share - 16, 380), colour=HOST)
    drawing.text(share - 4, 361, "store", 13, fill=HOST)
    return drawing


def strip(drawing: Drawing, x: float, y: float, pages: dict[int, str], n: int = 16) -> None:
    """A row of `n` pages, some of them held."""
    for page in range(n):
        drawing.page(x + 24 * page, y, pages.get(page))


def reach() -> Drawing:
    """The pages that each kind needs at one boundary."""
    drawing = Drawing(800, 368, "Reach: the pages each component needs to resume at boundary 11")
    left, top, boundary = 196, 74, 11
    rows = [
        ("full", "[0, b)", dict.fromkeys(range(boundary), DEVICE), "every page"),
        ("swa", "[b − window, b)", dict.fromkeys(range(8, boundary), DEVICE), "the window"),
        ("mamba", "the state at b", {}, "one state, exactly there"),
        ("hisparse", "[0, b), two pools", dict.fromkeys(range(boundary), HOST), "K/V on HOST"),
        (
            "your own",
            "any union of terms",
            dict.fromkeys([0, *range(9, boundary)], DEVICE),
            "here: sinks and a window",
        ),
    ]
    for page in (0, 4, 8, 12, 16):
        drawing.text(left + 24 * page - 2, 52, str(page), 12, anchor="middle", fill=FAINT)
    drawing.text(left - 152, 52, "component", 12, fill=FAINT)
    at = left + 24 * boundary - 2
    drawing.line((at, 58), (at, 322), colour=MARK, stroke_dasharray="5 4")
    drawing.text(at, 34, "boundary b = 11 pages", 13, anchor="middle", fill=MARK, weight="600")
    for number, (name, formula, pages, words) in enumerate(rows):
        y = top + 52 * number
        drawing.text(left - 152, y + 8, name, 15, weight="600")
        drawing.text(left - 152, y + 25, formula, 12, fill=FAINT)
        strip(drawing, left, y, pages)
        if name == "mamba":
            drawing.dot(at, y + 9, DEVICE)
        if name == "hisparse":
            for page in range(boundary):
                drawing.line(
                    (left + 24 * page, y + 23),
                    (left + 24 * page + 20, y + 23),
                    colour=DEVICE,
                    stroke_width="4",
                )
        drawing.text(left + 24 * 16 + 22, y + 14, words, 13, fill=FAINT)
    y = 342
    for x, colour, words in (
        (left, DEVICE, "needed on DEVICE"),
        (left + 172, HOST, "needed on HOST"),
        (left + 330, None, "not needed to resume at b"),
    ):
        drawing.page(x, y - 14, colour)
        drawing.text(x + 28, y, words, 12, fill=FAINT)
    return drawing


def tree() -> Drawing:
    """Cells on the path of a prompt, and where a match ends."""
    drawing = Drawing(800, 420, "The prefix tree: one path, the cells of three components, a match")
    left, gap = 142, 34
    nodes = [(0, 6, "node A", "system prompt"), (6, 11, "node B", ""), (11, 16, "node C", "")]

    def place(page: int) -> float:
        """Where a page begins."""
        return left + 24 * page + gap * sum(page >= start for start, *_ in nodes[1:])

    for start, end, name, words in nodes:
        x = place(start) - 8
        drawing.box(x, 62, 24 * (end - start) + 12, 178, FAINT)
        drawing.text(x + 8, 84, name, 14, weight="600")
        drawing.text(x + 72, 84, words, 11, fill=FAINT)
        if start:
            drawing.line((x - gap + 12, 150), (x, 150))
    rows = {
        "full": dict.fromkeys(range(16), DEVICE),
        "swa": dict.fromkeys(range(6, 11), DEVICE),
    }
    for number, name in enumerate(("full", "swa", "mamba")):
        y = 104 + 46 * number
        drawing.text(34, y + 14, name, 15, weight="600")
        for page in range(16) if name in rows else ():
            drawing.page(place(page), y, rows[name].get(page))
    drawing.text(34, 164 + 16, "window 3", 12, fill=FAINT)
    for boundary, held in ((6, False), (11, True), (16, False)):
        x, y = place(boundary - 1) + 12, 104 + 92 + 9
        if held:
            drawing.dot(x, y, DEVICE)
        else:
            look = {"fill": "none", "stroke": "#b9c1cd", "stroke_dasharray": "3 2.5"}
            drawing._add("circle", cx=f"{x:g}", cy=f"{y:g}", r="8", **look)
    at = place(11) - gap / 2 - 4
    drawing.line((at, 40), (at, 262), colour=MARK, stroke_dasharray="5 4")
    drawing.text(at, 32, "anchor: 11 pages", 13, anchor="middle", fill=MARK, weight="600")
    x = place(16) + 14
    for number, (first, second) in enumerate(
        (
            ("can resume at", "0, 1, … 16"),
            ("can resume at", "0, 9, 10, 11"),
            ("can resume at", "0 and 11"),
        )
    ):
        y = 104 + 46 * number
        drawing.text(x, y + 6, first, 12, fill=FAINT)
        drawing.text(x, y + 22, second, 13)
    # another conversation behind the same node
    x = place(6) - 8
    drawing.line((place(5) + 8, 240), (place(5) + 8, 318), (x, 318))
    drawing.box(x, 284, 24 * 3 + 12, 68, FAINT)
    drawing.text(x + 8, 304, "node D", 14, weight="600")
    for page in range(3):
        drawing.page(x + 8 + 24 * page, 320, HOST)
    drawing.text(x + 98, 306, "another conversation that begins with node A's tokens;", 12)
    drawing.text(x + 98, 325, "its pages were demoted: they are on HOST alone", 12)
    y = 392
    for x, colour, words in (
        (left, DEVICE, "on DEVICE"),
        (left + 118, HOST, "on HOST"),
        (left + 222, None, "evicted: nothing is held"),
    ):
        drawing.page(x, y - 14, colour)
        drawing.text(x + 28, y, words, 12, fill=FAINT)
    drawing.dot(left + 434, y - 5, DEVICE)
    drawing.text(left + 450, y, "a state at a boundary", 12, fill=FAINT)
    return drawing


FLOORS: tuple[tuple[str, dict[str, str]], ...] = (
    (
        "tools",
        {
            "cli": "the command",
            "testing": "the contract suite",
            "scaffold": "new packages to start from",
        },
    ),
    ("the cache", {"cache.py": "what an engine calls", "guard": "checks rules while it serves"}),
    ("decisions", {"admission": "who may run", "storage_tier": "what comes from a store"}),
    ("a request's life", {"requests": "match, pin, slots, publish, back up, evict"}),
    ("moving bytes", {"transfers": "copies between tiers", "storage": "what a store is"}),
    ("packages", {"packages": "find, validate and bind components"}),
    ("the tree", {"tree": "nodes, cells, pins, victims; no torch, no package"}),
    ("memory", {"pools": "slots and tensors"}),
    (
        "words",
        {"types.py": "", "reach.py": "", "hookspecs.py": "", "rules.py": "", "errors.py": ""},
    ),
)
"""Rooms of the core and what they are for, the highest floor first."""

NEIGHBOURS = (
    ("engines", "plugins/transformers, replay, yours", "import the cache", (1, 1)),
    ("stores", "plugins/file, valkey, s3, ...", "import kvgraft.storage", (4, 4)),
    ("components", "plugins/full, swa, ...", "import words and pools", (7, 8)),
)
"""Packages outside of the core, what they import, and the floors where that is."""


def house() -> Drawing:
    """The rooms of the core, floor by floor."""
    step, top, left, right = 54, 66, 150, 660
    height = top + step * len(FLOORS) + 26
    drawing = Drawing(960, height, "The rooms of the core, one floor above another")
    middle = (left + right) / 2
    roof = ((left - 14, top - 6), (middle, 16), (right + 14, top - 6))
    drawing.line(*roof, colour=INK, stroke_linejoin="round")
    drawing.text(middle, 48, "core/src/kvgraft", 14, anchor="middle", weight="600")
    for number, (floor, found) in enumerate(FLOORS):
        y = top + step * number
        drawing.text(left - 14, y + 27, floor, 13, anchor="end", fill=FAINT)
        width = (right - left - 8 * (len(found) - 1)) / len(found)
        for place, (room, words) in enumerate(found.items()):
            x = left + place * (width + 8)
            colour = FAINT if room.endswith(".py") else DEVICE
            drawing.box(x, y, width, step - 9, colour)
            name = room if room.endswith(".py") else f"{room}/"
            centre = x + width / 2
            if words:
                drawing.text(centre, y + 19, name, 13, anchor="middle", weight="600")
                drawing.text(centre, y + 36, words, 11, anchor="middle", fill=FAINT)
            else:
                drawing.text(centre, y + 27, name, 12, anchor="middle", weight="600")
    for name, where, words, (first, last) in NEIGHBOURS:
        y = top + step * (first + last) / 2 - 6
        drawing.box(right + 60, y, 222, step + 3, HOST)
        drawing.text(right + 74, y + 18, name, 13, weight="600", fill=HOST)
        drawing.text(right + 74, y + 34, where, 11, fill=FAINT)
        drawing.text(right + 74, y + 49, words, 11, fill=FAINT)
        drawing.arrow((right + 60, y + 28), (right + 6, y + 28), colour=HOST)
    return drawing


def drawings() -> dict[str, str]:
    """The text of every drawing, by file name."""
    made = {"life": life(), "reach": reach(), "tree": tree(), "house": house()}
    return {f"{name}.svg": str(drawing) for name, drawing in made.items()}


def main() -> None:
    DRAWINGS.mkdir(exist_ok=True)
    for name, text in drawings().items():
        (DRAWINGS / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
