"""A scanner beside a trace, and tenants that keep it from taking what the trace's users need."""

from __future__ import annotations

import re
from typing import Any

import click
import pytest

from kvgraft.errors import ConfigError
from kvgraft_cli.cache_options import parse_tenants
from kvgraft_replay.command import replay as replay_command
from kvgraft_replay.payload import Verify
from kvgraft_replay.replay import ReplaySettings, replay
from kvgraft_replay.synthetic import synthetic_workload
from kvgraft_replay.tenants import SCANNER, TRACE, unused_tenants, with_scanner
from kvgraft_replay.workload import Workload
from tests.commands import KVGRAFT, run_forked

CHAT = synthetic_workload("chat", requests=100, seed=0)
SCANNED = with_scanner(CHAT, 30_000, None)


def shares(workload: Workload, *tenants: str, policy: str = "lru") -> dict[str, float]:
    """The saved share of the prompts' tokens by namespace."""
    cache: dict[str, Any] = {"components": ["full"], "device_tokens": 120_000, "policy": policy}
    cache |= {"tenants": parse_tenants(tenants), "guard": "off"}
    result = replay(workload, ReplaySettings(cache=cache, verify=Verify.OFF))
    assert not result["ledger_violations"] + result["out_of_memory"] + result["rejections"]
    parts = result["namespaces"] or {TRACE: result}
    return {name: each["saved_tokens"] / each["input_tokens"] for name, each in parts.items()}


def test_a_scanner_costs_users_their_hits_unless_they_have_a_guarantee() -> None:
    alone = shares(CHAT)[TRACE]
    crowded = shares(SCANNED)
    kept = shares(SCANNED, "trace:guarantee=0.9")
    assert crowded[SCANNER] == kept[SCANNER] == 0, "it reads nothing twice"
    assert crowded[TRACE] < 0.75 * alone
    assert kept[TRACE] > 0.95 * alone
    assert shares(SCANNED, "trace:weight=9", "scanner")[TRACE] > 0.9 * alone
    assert shares(SCANNED, "scanner:limit=0.2")[TRACE] > crowded[TRACE]


def test_the_scanner_reads_new_documents_by_the_clock_until_the_last_request() -> None:
    theirs = [each for each in SCANNED.requests if each.namespace == SCANNER]
    users = [each for each in SCANNED.requests if each.namespace == TRACE]
    assert [each.content for each in users] == [each.content for each in CHAT.requests]
    assert len({each.content for each in theirs}) == len(theirs)
    first = min(each.content[0].first for each in theirs)
    assert first >= max(span.first + span.length for each in users for span in each.content)
    tokens = sum(each.prompt_tokens for each in theirs)
    end_s = max(each.arrival_s for each in users)
    assert tokens / end_s == pytest.approx(30_000, rel=0.02)
    assert theirs[-1].arrival_s <= end_s
    assert [each.index for each in SCANNED.requests] == list(range(len(SCANNED.requests)))
    assert (
        len([each for each in with_scanner(CHAT, 100, 7).requests if each.namespace == TRACE]) == 7
    )


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (
            ["a", "a:limit=1"],
            "--tenant 'a:limit=1': namespace 'a' is given twice; give one --tenant",
        ),
        (
            ["a:limit=1,limit=2"],
            "--tenant 'a:limit=1,limit=2': option 'limit' is given twice; keep one",
        ),
        ([":limit=1"], "--tenant ':limit=1': has no namespace; name one"),
        (
            ["a:half"],
            "--tenant 'a:half': 'half' is not OPTION=VALUE; write for example a:guarantee",
        ),
    ],
)
def test_a_tenant_that_is_not_of_that_form_is_refused(texts: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_tenants(texts)
    assert str(refused.value).startswith(said)


def test_a_tenant_that_no_request_is_of_is_noted() -> None:
    assert unused_tenants(["trace", "default"], SCANNED) == []
    assert unused_tenants(["trace", "foo"], SCANNED) == [
        "no request is of tenant 'foo'; its rights change nothing but the room of others. "
        "Namespaces of the requests: scanner, trace"
    ]
    assert "requests: none, as they have with --scanner alone" in unused_tenants(["foo"], CHAT)[0]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--policy", "lru,lru"), "policy 'lru' is given 2 times; give it once"),
        (
            ("--tenant", "trace", "--device-memory", "1GB"),
            "--tenant and --device-memory: tenants have shares of pools of a fixed size; give the "
            "bytes as --device-tokens, such as --device-tokens 1GB",
        ),
        (("--policy", "lru,density", "--html", "a.html"), "--policy lru,density and --html: the"),
    ],
)
def test_options_that_do_not_go_together_are_refused_before_a_trace_is_read(
    given: tuple[str, ...], said: str
) -> None:
    with pytest.raises((ConfigError, click.UsageError), match=re.escape(said)):
        replay_command.main(["no such trace", *given], standalone_mode=False)


def test_the_command_prints_each_namespaces_share_and_refuses_what_a_cache_refuses() -> None:
    small = ["replay", "--synthetic", "chat", "--requests", "20", "--component", "full"]
    small += ["--verify", "off", "--scanner", "5000", "--tenant"]
    done = run_forked(KVGRAFT, *small, "trace:guarantee=0.5")
    assert done.returncode == 0
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[1] for row in rows if row[:1] == [TRACE]] == ["20"]
    assert any(row[:1] == [SCANNER] and row[-2:] == ["0.0", "%"] for row in rows)
    done = run_forked(KVGRAFT, *small, "trace:guarantee=1.5")
    assert done.returncode == 2
    assert done.stderr == "kvgraft: setting tenants.trace.guarantee='1.5': give 1 or less\n"
