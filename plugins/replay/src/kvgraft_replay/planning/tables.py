"""A plan's tables, for terminal and page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from kvgraft.sizes import format_nbytes
from kvgraft_replay.planning.schema import NOTICEABLE
from kvgraft_replay.report.summary import ABSENT, SummaryTable, count, percent, seconds
from kvgraft_replay.report.tables import print_table, writer

if TYPE_CHECKING:
    from rich.console import Console

    from kvgraft_replay.planning.schema import PlanResult, SizeResult, Target

__all__ = ["in_order", "plan_tables", "print_plan"]

Column = Literal["device", "host", "policy"]


def print_plan(plan: PlanResult, console: Console) -> None:
    """Print the whole plan."""
    text = writer(console)
    workload = plan["workload"]
    console.print(text(f"Plan for {workload['name']} ({workload['format']})", "bold"))
    first, n_sizes = plan["sizes"][0], len(plan["sizes"])
    console.print(
        text(
            f"{count(first['requests'], 'request')}, "
            f"{count(first['input_tokens'], 'input token')}, {count(n_sizes, 'size')}"
        )
    )
    if plan["model"] is not None:
        console.print(text(f"model {plan['model']}"))
    console.print(text(f"{seconds(plan['wall_s'])}, {seconds(plan['cpu_s'])} of CPU time", "dim"))
    for notice in plan["notices"]:
        console.print(text(f"note: {notice}", "yellow"), soft_wrap=True)
    console.print()
    for table in plan_tables(plan):
        print_table(table, console)


def plan_tables(plan: PlanResult) -> tuple[SummaryTable, ...]:
    """All tables, in reading order."""
    tables = [_reach_table(plan)]
    if "policy" in _columns(plan):
        tables.append(_policy_table(plan))
    tables += [_hit_table(plan), _saving_table(plan)]
    if len(plan["reaches"]) > 1:
        tables.append(_share_table(plan))
    if any(size["split"] is not None for size in plan["sizes"]):
        tables.append(_split_table(plan))
    if any(size["growth"] for size in plan["sizes"]):
        tables += [_limit_table(plan), _growth_table(plan)]
    if plan["target"] is not None:
        tables.append(_target_table(plan, plan["target"]))
    return tuple(tables)


def in_order(plan: PlanResult) -> list[SizeResult]:
    """All sizes as given for DEVICE, then for HOST, including those of a search.

    Splits of equal bytes differ slightly in size; all count as the smallest.
    """
    device: dict[str, int] = {}
    host: dict[str, int] = {}
    for size in plan["sizes"]:
        asked, nbytes = size["device"], size["device_nbytes"]
        device[asked] = min(device.get(asked, nbytes), nbytes)
        asked, nbytes = size["host"], size["host_nbytes"]
        host[asked] = min(host.get(asked, nbytes), nbytes)
    return sorted(plan["sizes"], key=lambda size: (device[size["device"]], host[size["host"]]))


def _columns(plan: PlanResult) -> tuple[Column, ...]:
    """Columns that identify sizes; the policy only if there are several."""
    several = len({size["policy"] for size in plan["sizes"]}) > 1
    return ("device", "host", "policy") if several else ("device", "host")


def _names(plan: PlanResult, size: SizeResult) -> tuple[str, ...]:
    return tuple(size[column] for column in _columns(plan))


def _prefill_rate(plan: PlanResult) -> float:
    """Prompt tokens per second of the simulated engine."""
    rate = plan["settings"]["prefill_tokens_s"]
    assert isinstance(rate, (int, float))
    return rate


def _hit_table(plan: PlanResult) -> SummaryTable:
    has_curve = any(size["lru_hit_rate"] is not None for size in plan["sizes"])
    rows = []
    target = plan["target"]
    for size in in_order(plan):
        whole, hits = size["input_tokens"], size["hit_tokens"]
        exact = size["lru_hit_rate"]
        rows.append(
            (
                *_names(plan, size),
                count(size["device_tokens"]),
                percent(size["saved_tokens"], whole),
                percent(hits["device"], whole),
                percent(hits["host"], whole),
                *((ABSENT if exact is None else percent(exact, 1),) if has_curve else ()),
                *((_reached(size, target),) if target is not None else ()),
            )
        )
    return SummaryTable(
        "Hit rates",
        "of input tokens; LRU: of DEVICE alone, exact" if has_curve else "of input tokens",
        (
            *(*_columns(plan), "device tokens", "hit rate", "on device", "on host"),
            *(("LRU",) if has_curve else ()),
            *((f"{100 * target['token_hit_rate']:g} %",) if target is not None else ()),
        ),
        tuple(rows),
        n_labels=len(_columns(plan)),
    )


def _reached(size: SizeResult, target: Target) -> str:
    return "reached" if size["token_hit_rate"] >= target["token_hit_rate"] else "missed"


def _reach_table(plan: PlanResult) -> SummaryTable:
    return SummaryTable(
        "Layers",
        plan["model"] or "",
        ("component", "keeps", "layers", "a token", "a state"),
        tuple(
            (
                each["component"],
                each["keeps"],
                count(each["n_layers"]),
                *(
                    format_nbytes(each["nbytes"]) if each["per"] == per else ABSENT
                    for per in ("token", "state")
                ),
            )
            for each in plan["reaches"]
        ),
        n_labels=2,
    )


def _policy_table(plan: PlanResult) -> SummaryTable:
    """Hit rates of the policies side by side, at the sizes that all of them have."""
    policies = list(dict.fromkeys(size["policy"] for size in plan["sizes"]))
    rates: dict[tuple[str, str], dict[str, str]] = {}
    for size in in_order(plan):
        row = rates.setdefault((size["device"], size["host"]), {})
        row[size["policy"]] = percent(size["saved_tokens"], size["input_tokens"])
    return SummaryTable(
        "Policies",
        "hit rates",
        ("device", "host", *policies),
        tuple(
            (*names, *(row[policy] for policy in policies))
            for names, row in rates.items()
            if len(row) == len(policies)
        ),
        n_labels=2,
    )


def _saving_table(plan: PlanResult) -> SummaryTable:
    return SummaryTable(
        "Savings and waiting",
        f"prefill: time at {count(int(_prefill_rate(plan)))} tokens/s",
        (*_columns(plan), "tokens saved", "prefill", "loaded back", "deferred", "rejected"),
        tuple(
            (
                *_names(plan, size),
                count(size["saved_tokens"]),
                seconds(size["prefill_s_saved"]),
                format_nbytes(size["load_back_nbytes"]),
                count(size["deferrals"]),
                count(size["rejections"]),
            )
            for size in in_order(plan)
        ),
        n_labels=len(_columns(plan)),
    )


def _share_table(plan: PlanResult) -> SummaryTable:
    rows = []
    for size in in_order(plan):
        for pool in size["pools"]:
            mates = [each["nbytes"] for each in size["pools"] if each["tier"] == pool["tier"]]
            holds = f"{count(pool['tokens'])} tokens" if pool["tokens"] else "states"
            rows.append(
                (
                    *_names(plan, size),
                    f"{pool['component']}, {pool['tier']}",
                    count(pool["slots"]),
                    holds,
                    format_nbytes(pool["nbytes"]),
                    percent(pool["nbytes"], sum(mates)),
                )
            )
    shared = plan["settings"]["one_budget"]
    return SummaryTable(
        "Shares of one budget" if shared else "Shares of the memory",
        "at the end of the trace" if shared else "",
        (*_columns(plan), "pool", "slots", "hold", "bytes", "share"),
        tuple(rows),
        n_labels=len(_columns(plan)) + 1,
    )


def _split_table(plan: PlanResult) -> SummaryTable:
    """Other splits of the same bytes, and the chosen one."""
    rows = []
    for size in in_order(plan):
        split = size["split"]
        if split is None:
            continue
        (rule,) = (each for each in split["tried"] if each["points"] == 1)
        for each in split["tried"]:
            taken = " (taken)" if each["points"] == split["points"] else ""
            rows.append(
                (
                    *_names(plan, size),
                    f"{each['points']:g}{taken}",
                    percent(each["token_hit_rate"], 1),
                    _points(each["token_hit_rate"] - rule["token_hit_rate"]),
                    f"{each['rejections']:,}",
                )
            )
    return SummaryTable(
        "Splits of the bytes",
        "by resume points, as multiples of the rule's",
        (*_columns(plan), "split", "hit rate", "points", "rejected"),
        tuple(rows),
        n_labels=len(_columns(plan)) + 1,
    )


def _limit_table(plan: PlanResult) -> SummaryTable:
    """The pool whose tenth gains most, by size."""
    rows = []
    for size in in_order(plan):
        if not size["growth"]:
            continue
        limiting = size["limiting"]
        best = max(size["growth"], key=lambda each: each["gained_tokens"])
        pool = (
            _not_by_a_tenth(plan, size)
            if limiting is None
            else f"{best['component']}, {best['tier']}"
        )
        cells = (
            (ABSENT, ABSENT, ABSENT)
            if limiting is None
            else (
                format_nbytes(best["extra_nbytes"]),
                _points(best["token_hit_rate"] - size["token_hit_rate"]),
                seconds(best["gained_tokens"] / _prefill_rate(plan)),
            )
        )
        rows.append((*_names(plan, size), pool, *cells))
    return SummaryTable(
        "Limiting pools",
        "and the gain of a tenth more",
        (*_columns(plan), "limited by", "a tenth is", "points", "prefill saved"),
        tuple(rows),
        n_labels=len(_columns(plan)) + 1,
    )


def _not_by_a_tenth(plan: PlanResult, size: SizeResult) -> str:
    """A note that no tenth gains anything, though more memory may: rates do not rise evenly."""
    for larger in in_order(plan):
        grown = (
            (larger["device"] != size["device"])
            * (larger["device_nbytes"] - size["device_nbytes"]),
            (larger["host"] != size["host"]) * (larger["host_nbytes"] - size["host_nbytes"]),
        )
        gained = larger["saved_tokens"] - size["saved_tokens"]
        is_larger = larger["policy"] == size["policy"] and min(grown) >= 0 and max(grown) > 0
        if is_larger and gained >= NOTICEABLE * size["input_tokens"]:
            tiers = zip((larger["device"], larger["host"]), grown, ("device", "host"))
            more = ", ".join(f"{tier} {name}" for name, extra, tier in tiers if extra)
            return f"no tenth; {more} gains"
    return "no pool"


def _points(share: float) -> str:
    """A difference of two rates, in percentage points."""
    return f"{100 * share:+.2f}"


def _target_table(plan: PlanResult, target: Target) -> SummaryTable:
    wanted = f"{100 * target['token_hit_rate']:g} %"
    tokens, curve = target["lru_device_tokens"], plan["curve"]
    exact = "" if tokens is None else f"LRU on DEVICE alone, exact: {count(tokens)} tokens"
    if not target["cheapest"]:
        highest = max(size["token_hit_rate"] for size in plan["sizes"])
        notes = [exact] if exact else []
        notes.append(f"highest: {percent(highest, 1)}")
        if curve["points"]:
            notes.append(f"of any size under LRU: {percent(curve['highest_hit_rate'], 1)}")
        exact = "; ".join(notes)
    rows = []
    for place in target["cheapest"]:
        size = plan["sizes"][place]
        rate = percent(size["saved_tokens"], size["input_tokens"])
        rows.append((*_names(plan, size), count(size["device_tokens"]), rate))
    return SummaryTable(
        f"Smallest sizes that reach {wanted}",
        exact,
        (*_columns(plan), "device tokens", "hit rate"),
        tuple(rows),
        n_labels=len(_columns(plan)),
    )


def _growth_table(plan: PlanResult) -> SummaryTable:
    return SummaryTable(
        "A tenth more of each pool",
        "the most telling first",
        (*_columns(plan), "pool", "more", "hit rate", "points", "points per GB"),
        tuple(row for size in in_order(plan) for row in _growth_rows(plan, size)),
        n_labels=len(_columns(plan)) + 1,
    )


def _growth_rows(plan: PlanResult, size: SizeResult) -> Iterator[tuple[str, ...]]:
    for pool in sorted(size["growth"], key=lambda each: -each["gained_tokens"]):
        points = 100 * (pool["token_hit_rate"] - size["token_hit_rate"])
        yield (
            *_names(plan, size),
            f"{pool['component']}, {pool['tier']}",
            format_nbytes(pool["extra_nbytes"]),
            percent(pool["token_hit_rate"], 1),
            _points(points / 100),
            f"{points / (pool['extra_nbytes'] / 1e9):+,.2f}",
        )
