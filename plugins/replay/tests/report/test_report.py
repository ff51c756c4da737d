"""The replay report: the same numbers in the terminal and on the page, for any input."""

from __future__ import annotations

import io
import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from rich.console import Console

from kvgraft_replay.report import ReplayResult, print_tables, render_html, write_html
from kvgraft_replay.report.icicle import icicle
from kvgraft_replay.report.plot import ticks
from kvgraft_replay.report.schema import TreeNode
from kvgraft_replay.report.summary import cpu_table, headline

if TYPE_CHECKING:
    from collections.abc import Iterator

HOSTILE = "<script>alert(1)</script>\"'&[bold]"
VOID = {"meta", "path", "line", "rect", "input", "br"}


class Page(HTMLParser):
    """Visible text, elements and attributes of a page, and whether its tags balance."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.visible: list[str] = []
        self.hidden: list[str] = []
        self.unbalanced: list[str] = []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        if not self.open or self.open.pop() != tag:
            self.unbalanced.append(tag)

    def handle_data(self, data: str) -> None:
        inside = self.open[-1] if self.open else ""
        (self.hidden if inside in ("script", "style") else self.visible).append(data)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.visible))

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def terminal(result: ReplayResult, width: int = 80, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    print_tables(result, Console(file=stream, width=width, color_system=None))
    return raw.getvalue().decode(encoding)


def hover_data(source: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', source, re.S)
    assert found is not None
    data: dict[str, Any] = json.loads(found.group(1))
    return data


@pytest.fixture
def nothing(result: ReplayResult) -> ReplayResult:
    """A replay of nothing: no requests, no samples, no components."""
    result.update(
        {
            "requests": 0,
            "input_tokens": 0,
            "output_tokens": 0,
            "token_hit_rate": 0.0,
            "hit_tokens": {"device": 0, "host": 0, "storage": 0},
            "saved_tokens": 0,
            "computed_tokens": 0,
            "unserved_tokens": 0,
            "served": 0,
            "notices": [],
            "component_hits": {},
            "evictions": {},
            "payloads_verified": 0,
            "cpu_us_per_request": {},
            "timeline": [],
            "sources": [],
            "tree": {"nodes": [], "truncated": 0},
        }
    )
    result["load_backs"]["slots"] = {}
    result["backups"]["slots"] = {}
    return result


def scalars(value: object, path: str = "") -> list[tuple[str, int | float]]:
    """Every number in the result but the samples and the tree, which are drawn, not printed."""
    if isinstance(value, dict):
        return [
            found
            for key, inner in value.items()
            if key not in ("timeline", "sources", "tree", "settings")
            for found in scalars(inner, f"{path}.{key}")
        ]
    return [(path, value)] if isinstance(value, (int, float)) else []


def formatted(path: str, value: int | float) -> str:
    if path == ".token_hit_rate":
        return f"{100 * value:.1f} %"
    if path.startswith(".cpu_us"):
        return f"{value:,.1f}"
    if path in (".wall_s", ".virtual_s"):
        return f"{value:,.2f} s" if value < 10 else f"{value:,.1f} s"
    return f"{value:,}"


def renumber(value: dict[str, Any], fresh: Iterator[int]) -> None:
    """Give every counter and time a number of its own, so that none can stand in for another."""
    for key, inner in value.items():
        if key in ("timeline", "sources", "tree", "settings", "token_hit_rate"):
            continue
        if isinstance(inner, dict):
            renumber(inner, fresh)
        elif isinstance(inner, (int, float)):
            value[key] = type(inner)(next(fresh))


def assert_all_numbers_in(text: str, result: ReplayResult, *, but: tuple[str, ...] = ()) -> None:
    for path, value in scalars(result):
        wanted = rf"(?<![\d,.]){re.escape(formatted(path, value))}(?!\d|,\d)"
        assert path in but or re.search(wanted, text), f"{path} = {value} is missing"


def test_every_number_of_the_result_is_on_the_page(result: ReplayResult) -> None:
    renumber(cast("dict[str, Any]", result), itertools.count(1_000_003, 7_919))
    assert_all_numbers_in(Page(render_html(result)).text, result)


def test_every_number_but_the_traces_size_is_in_the_terminal(result: ReplayResult) -> None:
    renumber(cast("dict[str, Any]", result), itertools.count(1_000_003, 7_919))
    text = terminal(result, width=120).replace("\u00a0", " ")
    assert_all_numbers_in(text, result, but=(".workload.input_tokens", ".workload.output_tokens"))


def test_a_changed_number_changes_in_both_reports(result: ReplayResult) -> None:
    result["load_backs"]["shared"] = 7_654_321
    assert "7,654,321" in Page(render_html(result)).text
    assert "7,654,321" in terminal(result)


def test_every_setting_is_on_the_page_by_its_dotted_name(result: ReplayResult) -> None:
    text = Page(render_html(result)).text
    for row in ("components.swa.window 4,096", "components.full defaults", "concurrency users:8"):
        assert row in text


def test_the_page_is_well_formed(result: ReplayResult) -> None:
    page = Page(render_html(result))
    assert page.unbalanced == []
    assert page.open == []


def test_the_page_loads_nothing(result: ReplayResult) -> None:
    source = render_html(result)
    page = Page(source)
    assert not re.search(r"https?:|//[a-z]|@import|url\(", source)
    for tag in ("link", "img", "iframe", "object", "embed", "base", "use", "image"):
        assert page.named(tag) == []
    for _, attributes in page.elements:
        assert not {"src", "href", "srcset", "xlink:href", "action"} & set(attributes)
    policy = [meta["content"] for meta in page.named("meta") if "http-equiv" in meta]
    assert policy
    assert (policy[0] or "").startswith("default-src 'none'")


def test_hostile_names_stay_text(result: ReplayResult) -> None:
    result["workload"]["name"] = HOSTILE
    result["workload"]["format"] = HOSTILE
    result["settings"]["components"] = {HOSTILE: {HOSTILE: HOSTILE}}
    result["component_hits"][HOSTILE] = {"device_slots": 1, "host_slots": 1, "storage_slots": 1}
    result["evictions"][HOSTILE] = {"device": {HOSTILE: 3}, "host": {}}
    result["cpu_us_per_request"][HOSTILE] = {"p50": 1.0, "p99": 2.0, "mean": 1.0}
    for point in result["timeline"]:
        point["occupancy"][HOSTILE] = point["occupancy"]["full"]
    for node in result["tree"]["nodes"]:
        node["residency"][HOSTILE] = "device"
    source = render_html(result)
    page = Page(source)
    assert len(page.named("script")) == 2
    assert page.unbalanced == []
    assert "<script>alert" not in source
    assert HOSTILE in page.text
    assert hover_data(source)["tree"]["components"][-1] == HOSTILE
    assert not any(name.startswith("on") for _, attrs in page.elements for name in attrs)


def test_names_are_not_read_as_terminal_markup(result: ReplayResult) -> None:
    result["component_hits"]["[red]x[/red]"] = {
        "device_slots": 1,
        "host_slots": 1,
        "storage_slots": 1,
    }
    result["workload"]["name"] = "[/nothing open]"
    text = terminal(result, width=100)
    assert "[red]x[/red]" in text
    assert "[/nothing open]" in text


def test_tables_hold_at_80_columns(result: ReplayResult) -> None:
    lines = terminal(result).splitlines()
    assert max(map(len, lines)) <= 80
    for heading in ("direction", "admitted", "component", "out of memory"):
        assert sum(line.lstrip().startswith(heading) for line in lines) >= 1
    one_line = [line for line in lines if line.startswith("load-back, host to device")]
    assert len(one_line) == 1
    assert one_line[0].rstrip().endswith("17")
    # The longest row fits: nothing but the causes may ever wrap.
    assert any("demoted\u00a05,113, cascade\u00a01,033, deleted\u00a0347" in line for line in lines)


def test_numbers_never_wrap_when_the_names_are_long(result: ReplayResult) -> None:
    name = "a_component_with_a_name_of_more_than_sixty_characters_in_one_word"
    result["component_hits"][name] = {
        "device_slots": 123_456_789,
        "host_slots": 98_765_432,
        "storage_slots": 0,
    }
    lines = terminal(result).splitlines()
    assert max(map(len, lines)) <= 80
    assert any("123,456,789" in line and "98,765,432" in line for line in lines)


def test_a_terminal_too_narrow_for_a_number_never_shows_part_of_it_as_the_number(
    result: ReplayResult,
) -> None:
    def numbers(width: int) -> set[str]:
        return set(re.findall(r"(?<!\S)\d[\d,.]*(?!\S)", terminal(result, width)))

    assert numbers(52) == numbers(120)
    assert numbers(36) <= numbers(120)
    assert "…" in terminal(result, 24)


@pytest.mark.parametrize("width", [24, 32, 40, 46, 50, 56])
def test_a_row_keeps_its_name_however_narrow_the_terminal_is(
    result: ReplayResult, width: int
) -> None:
    table = terminal(result, width).partition("Components")[2].partition("Transfers")[0]
    for name in result["component_hits"]:
        assert re.search(rf"^{name[:8]}", table, re.MULTILINE), table


def test_piped_tables_have_no_escape_codes_and_no_colour_is_needed(result: ReplayResult) -> None:
    result["ledger_violations"] = 3
    text = terminal(result)
    assert "\x1b" not in text
    assert re.search(r"0 ok +0 ok +3 FAIL", text)


def test_tables_print_on_an_ascii_terminal(result: ReplayResult) -> None:
    text = terminal(result, encoding="ascii")
    assert "in us" in text
    assert "demoted 8,231" in text


@pytest.mark.parametrize("counter", ["out_of_memory", "payload_mismatches", "ledger_violations"])
def test_a_counter_that_must_be_zero_fails_loudly(result: ReplayResult, counter: str) -> None:
    assert "FAIL" not in Page(render_html(result)).text
    result.update({counter: 2})  # type: ignore[misc]
    page = Page(render_html(result))
    assert "✗ 2 " + counter.replace("_", " ") + ": FAIL" in page.text
    assert [attrs for attrs in page.named("li") if attrs.get("class") == "v-FAIL"]
    colour = io.StringIO()
    print_tables(
        result,
        Console(
            file=colour, width=80, force_terminal=True, color_system="standard", no_color=False
        ),
    )
    assert re.search(r"\x1b\[1;31m *2 FAIL", colour.getvalue())
    assert re.search(r"\x1b\[32m *0 ok", colour.getvalue())


def test_payloads_nobody_compared_are_not_called_correct(result: ReplayResult) -> None:
    result["payloads_verified"] = 0
    assert "? 0 payload mismatches: not checked" in Page(render_html(result)).text
    assert "0 not checked" in terminal(result)


def test_tooltips_hold_the_samples_of_the_result(result: ReplayResult) -> None:
    plots = hover_data(render_html(result))["plots"]
    rate, load = plots[0], plots[1]
    assert rate["rows"][0]["values"] == [
        round(point["cumulative_hit_rate"], 4) for point in result["timeline"]
    ]
    stored = next(row for row in rate["rows"] if row["name"] == "of it from storage")
    assert stored["values"] == [round(point["storage_hit_rate"], 4) for point in result["timeline"]]
    assert max(stored["values"]) > 0
    waiting = next(row for row in load["rows"] if row["name"] == "waiting")
    assert waiting["values"] == [point["waiting"] for point in result["timeline"]]
    pinned = next(row for row in plots[3]["rows"] if row["name"] == "pinned")
    assert pinned["values"] == [
        point["occupancy"]["full"]["device"]["pinned"] for point in result["timeline"]
    ]


def test_long_request_lists_are_averaged_without_losing_tokens(result: ReplayResult) -> None:
    rows = hover_data(render_html(result))["plots"][2]["rows"]
    n_bars = len(rows[0]["values"])
    per_bar = -(-len(result["sources"]) // n_bars)
    assert n_bars <= 96
    tail = len(result["sources"]) - per_bar * (n_bars - 1)
    for row in rows:
        values = row["values"]
        total = sum(values[:-1]) * per_bar + values[-1] * tail
        kind = row["name"]
        tokens = sum(source[kind] for source in result["sources"])  # type: ignore[literal-required]
        assert total == pytest.approx(tokens, rel=1e-5)


def test_every_pool_that_exists_is_drawn_and_the_missing_one_is_named(result: ReplayResult) -> None:
    page = Page(render_html(result))
    labels = [attrs.get("aria-label") or "" for attrs in page.named("div")]
    for name, tier in (("full", "device"), ("full", "host"), ("swa", "host"), ("mamba", "device")):
        assert any(label.startswith(f"{name}, {tier} pool") for label in labels)
    assert not any(label.startswith("mamba, host") for label in labels)
    assert "No host pool: nothing of this component is backed up." in page.text


def test_a_stacked_pool_fills_its_capacity(result: ReplayResult) -> None:
    source = render_html(result)
    page = Page(source)
    free = [attrs["d"] or "" for attrs in page.named("path") if attrs.get("class") == "t-free"]
    assert free
    for outline in free:
        heights = [float(y) for y in re.findall(r",(-?[\d.]+)", outline)]
        upper = heights[: len(heights) // 2]
        assert upper == pytest.approx([0.0] * len(upper), abs=0.11)


def test_a_replay_of_nothing_says_so(nothing: ReplayResult) -> None:
    source = render_html(nothing)
    page = Page(source)
    assert page.unbalanced == []
    assert page.named("rect") == []
    for words in (
        "No input tokens",
        "No requests",
        "The tree never held any tokens",
        "No samples were taken",
        "No operation was timed",
        "nothing to report",
    ):
        assert words in page.text
    assert not re.search(r"\b(nan|inf|None|Undefined)\b", page.text, re.I)
    text = terminal(nothing)
    assert "token hit rate –" in text
    assert "Components (in slots): nothing to report" in text


def test_one_request_with_one_sample_is_visible(result: ReplayResult) -> None:
    result["sources"] = result["sources"][:1]
    result["timeline"] = result["timeline"][:1]
    result["timeline"][0]["time_s"] = 0.0
    result["tree"]["nodes"] = result["tree"]["nodes"][:2]
    page = Page(render_html(result))
    assert page.unbalanced == []
    assert "One bar per request." in page.text
    line = [
        attrs["d"] or "" for attrs in page.named("path") if attrs.get("class") == "line l-overall"
    ]
    assert re.fullmatch(r"M0\.0,[\d.]+L1000\.0,[\d.]+", line[0])
    assert len(page.named("rect")) == 1
    assert not re.search(r"\bnan\b", " ".join(str(attrs) for _, attrs in page.elements))


def test_requests_without_tokens_draw_nothing_and_divide_by_nothing(
    nothing: ReplayResult,
) -> None:
    nothing["requests"] = 2
    nothing["sources"] = [
        {
            "index": index,
            "time_s": 0.0,
            "device": 0,
            "host": 0,
            "storage": 0,
            "computed": 0,
            "unserved": 0,
        }
        for index in range(2)
    ]
    page = Page(render_html(nothing))
    assert page.named("path") == []
    assert "–" in page.text


def test_samples_without_input_tokens_have_no_hit_rate(result: ReplayResult) -> None:
    result["input_tokens"] = 0
    assert "No input tokens" in Page(render_html(result)).text


def test_without_a_host_tier_no_host_pool_is_drawn(result: ReplayResult) -> None:
    for point in result["timeline"]:
        for pools in point["occupancy"].values():
            pools["host"] = None
    page = Page(render_html(result))
    assert page.text.count("No host pool:") == 3
    assert page.unbalanced == []


def tree_node(number: int, parent: int | None, start: int, end: int) -> TreeNode:
    return {
        "id": number,
        "parent": parent,
        "start": start,
        "end": end,
        "residency": {"full": "device"},
        "hits": 0,
        "pinned": False,
    }


def test_children_stand_to_the_right_of_their_parent_and_share_its_height(
    result: ReplayResult,
) -> None:
    drawn = icicle(result["tree"])
    assert drawn is not None
    rects = {drawn.nodes[rect.node]["id"]: rect for rect in drawn.rects}
    for rect in drawn.rects:
        parent = drawn.nodes[rect.node]["parent"]
        if parent not in rects:
            continue
        above = rects[parent]
        assert rect.x == pytest.approx(above.x + above.width, abs=0.05)
        assert rect.y >= above.y - 0.05
        assert rect.y + rect.height <= above.y + above.height + 0.05


def test_no_two_blocks_of_the_tree_overlap(result: ReplayResult) -> None:
    drawn = icicle(result["tree"])
    assert drawn is not None
    rects = list(drawn.rects)
    for index, one in enumerate(rects):
        for other in rects[index + 1 :]:
            wide = min(one.x + one.width, other.x + other.width) - max(one.x, other.x)
            high = min(one.y + one.height, other.y + other.height) - max(one.y, other.y)
            assert wide < 0.05 or high < 0.05


def test_a_node_whose_parent_was_left_out_is_still_drawn_at_its_depth() -> None:
    nodes = [tree_node(1, None, 0, 64), tree_node(9, 5, 128, 256)]
    drawn = icicle({"nodes": nodes, "truncated": 1})
    assert drawn is not None
    assert [(rect.x, rect.width) for rect in drawn.rects] == [(0.0, 250.0), (500.0, 500.0)]


def test_residency_counts_add_up_to_the_nodes(result: ReplayResult) -> None:
    drawn = icicle(result["tree"])
    assert drawn is not None
    assert {sum(numbers) for numbers in drawn.shares.values()} == {len(drawn.nodes)}


@pytest.mark.parametrize("limit", [1, 3, 7, 192, 4_096, 10_560, 999_999, 2**31])
def test_ticks_stay_on_the_axis_and_are_few(limit: int) -> None:
    marks = ticks(limit, 4, least=1.0)
    assert marks[0].at == 0
    assert 2 <= len(marks) <= 5
    assert all(0 <= mark.at <= 100 for mark in marks)
    assert len({mark.label for mark in marks}) == len(marks)


def test_without_a_storage_tier_no_report_mentions_one(result: ReplayResult) -> None:
    result["storage"] = None
    for text in (Page(render_html(result)).text, terminal(result)):
        for word in ("storage", "Store", "Prefetch"):
            assert word not in text


def test_a_result_of_a_version_without_a_storage_tier_is_still_reported(
    result: ReplayResult,
) -> None:
    old = cast("dict[str, Any]", result)
    del old["storage"], old["hit_tokens"]["storage"]
    for hits in old["component_hits"].values():
        del hits["storage_slots"]
    for source in old["sources"]:
        del source["storage"]
    for point in old["timeline"]:
        del point["storage_hit_rate"]
    assert "cached on host" in Page(render_html(result)).text
    assert "cached on host" in terminal(result)


def test_the_report_tells_storage_events_with_their_reasons(result: ReplayResult) -> None:
    pages = Page(render_html(result)).text, terminal(result, width=100)
    for text in (text.replace("\u00a0", " ") for text in pages):
        for words in (
            "fetched from storage",
            "storage hits",
            "nothing of full, swa is stored",
            "dropped, too many in flight",
            "miss 40,127, ok 2,203, timeout 512, timeouts 2",
            "half-open",
            "No space left on device",
            "811 records, 53,477,377 bytes of 1,073,741,827",
        ):
            assert words in text


def test_a_store_that_told_nothing_and_has_no_limit_is_reported(result: ReplayResult) -> None:
    storage = result["storage"]
    assert storage is not None
    storage["before"] = None
    storage["after"] = {"records": 3, "bytes": 5, "capacity_bytes": None, "details": {}}
    assert re.search(r"before +–\s", terminal(result))
    assert re.search(r"after +3 records, 5 bytes\s", terminal(result))


def test_the_result_survives_json_and_renders_the_same(result: ReplayResult) -> None:
    assert render_html(json.loads(json.dumps(result, allow_nan=False))) == render_html(result)


def test_a_written_page_is_the_rendered_page(result: ReplayResult, tmp_path: Path) -> None:
    write_html(result, tmp_path / "report.html")
    written = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert written == render_html(result)


def test_requests_that_were_not_served_stand_beside_the_hit_rate(result: ReplayResult) -> None:
    served, requests = result["served"], result["requests"]
    notice, tokens = result["notices"][0], f"{result['unserved_tokens']:,}"
    for text in (Page(render_html(result)).text, terminal(result, width=120)):
        assert f"{requests} of 655 requests, {served} served" in text
        assert notice in text
        assert re.search(rf"not served\s+[\d.% ]*{tokens}", text)


def test_a_result_of_a_version_that_did_not_count_them_is_still_reported(
    result: ReplayResult,
) -> None:
    for field in ("notices", "served", "unserved_tokens", "recomputed_tokens"):
        del result[field]  # type: ignore[misc]
    for source in result["sources"]:
        del source["unserved"]  # type: ignore[misc]
    for text in (Page(render_html(result)).text, terminal(result)):
        assert "of 655 requests" in text
        assert "served" not in text.replace("A request that is not served counts as a miss.", "")


def test_an_interval_without_requests_has_no_hit_rate(result: ReplayResult) -> None:
    for point in result["timeline"][40:60]:
        point.update({"requests": 0, "token_hit_rate": 0.0, "storage_hit_rate": 0.0})
    rate, load = hover_data(render_html(result))["plots"][:2]
    assert len(load["at"]) == len(result["timeline"])
    assert len(rate["at"]) == len(result["timeline"]) - 20
    assert rate["at"] == load["at"][:40] + load["at"][60:]


def test_work_that_all_requests_share_has_a_mean_and_no_percentiles(result: ReplayResult) -> None:
    result["cpu_us_per_request"] = {
        "match": {"p50": 1.0, "p99": 2.0, "mean": 1.5},
        "poll": {"p50": 3.0, "p99": 3.0, "mean": 3.0},
    }
    assert cpu_table(result).rows == (("match", "1.0", "2.0", "1.5"), ("poll", "–", "–", "3.0"))


def test_one_request_is_counted_in_the_singular(result: ReplayResult) -> None:
    result["workload"]["requests"] = result["requests"] = result["served"] = 1
    assert headline(result) == "1 of 1 request"


def test_resume_points_are_reported_by_kind_with_their_slots(result: ReplayResult) -> None:
    text = terminal(result)
    assert re.search(r"branch +41 +3 +88 +4\s", text)
    assert re.search(r"swa +1,311 +742\s", text)


def test_kinds_of_resume_points_that_never_came_up_are_left_out(result: ReplayResult) -> None:
    points = result["resume_points"]
    assert points is not None
    points["made"]["unheard-of"] = points["lost"]["unheard-of"] = 0
    for text in (Page(render_html(result)).text, terminal(result)):
        assert "grid" in text
        assert "unheard-of" not in text


@pytest.mark.parametrize("version", ["without bounded components", "before resume points"])
def test_where_there_are_no_resume_points_no_report_mentions_them(
    version: str, result: ReplayResult
) -> None:
    if version == "before resume points":
        del cast("dict[str, Any]", result)["resume_points"]
    else:
        result["resume_points"] = None
    for text in (Page(render_html(result)).text, terminal(result)):
        assert "Resume points" not in text
        assert "left behind" not in text
        assert "Scheduling" in text
