"""Options of a URL, and refusals before any server is asked."""

from __future__ import annotations

import subprocess
import sys
from inspect import cleandoc

import pytest

from kvgraft.errors import ConfigError
from kvgraft_storage import discover_storage, open_storage
from kvgraft_valkey import ValkeyOptions
from kvgraft_valkey.options import Server, parse_location


@pytest.mark.parametrize(
    ("location", "servers"),
    [
        ("localhost", [("localhost", 6379)]),
        ("10.0.0.1:7000", [("10.0.0.1", 7000)]),
        ("a:1,b:2,c", [("a", 1), ("b", 2), ("c", 6379)]),
        ("//localhost:7000", [("localhost", 7000)]),
        ("[::1]:7000,[fe80::1]", [("::1", 7000), ("fe80::1", 6379)]),
    ],
)
def test_a_location_names_servers(location: str, servers: list[tuple[str, int]]) -> None:
    found = parse_location(location)
    assert found == [Server(*each) for each in servers]
    assert parse_location(",".join(map(str, found))) == found


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("valkey:", "the location is no list of servers; write valkey:HOST:PORT"),
        ("valkey://localhost:6379/0", "the port of localhost is not 1 to 65535"),
        ("valkey:a:1,", "the location is no list of servers"),
        ("valkey:::1", "the location is no list of servers"),
        ("valkey:a:port", "the port of a is not 1 to 65535"),
        ("valkey:a:0", "the port of a is not 1 to 65535"),
        ("valkey:a:65536", "the port of a is not 1 to 65535"),
        ("valkey:a:٣", "the port of a is not 1 to 65535"),
        ("valkey:a,b", "a:6379, b:6379 are several servers; add cluster=true"),
        ("valkey:a?clustr=true", "no option 'clustr'; did you mean 'cluster'\\? options: cluster"),
        ("valkey:a?cluster=perhaps", "option cluster='perhaps': give true or false"),
        (
            "valkey:a?tls_ca=/nowhere&tls=true",
            "option tls_ca='/nowhere': give a file that is there",
        ),
        ("valkey:a?tls_ca=/etc/hostname", "option tls_ca needs tls=true"),
        ("valkey:a?username=u", "option username needs password_env"),
        ("valkey:a?username=&password_env=A", "option username='': give text of 1 or more"),
        ("valkey:a?password_env=a-b", "option password_env='a-b': give text that matches"),
        ("valkey:a?cluster=1&database=2", "option database=2: a cluster has only database 0"),
        ("valkey:a?database=-1", "option database='-1': give 0 or more"),
        ("valkey:a?prefix=", "option prefix='': give text that matches"),
        ("valkey:a?prefix=a*", r"option prefix='a\*': .*match"),
        ("valkey:a?ttl_s=0", "option ttl_s='0': give 0.001 or more"),
        ("valkey:a?ttl_s=nan", "option ttl_s='nan': "),
        ("valkey:a?timeout_s=-1", "option timeout_s='-1': give 0.001 or more"),
        ("valkey:a?connect_timeout_s=inf", "option connect_timeout_s='inf': give 3600 or less"),
        ("valkey:a?password_env=KVGRAFT_NO_SUCH", "password_env='KVGRAFT_NO_SUCH': there is no"),
    ],
)
def test_an_impossible_option_is_one_line_that_names_the_field(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        open_storage(url)
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith("storage 'valkey': ")


@pytest.mark.parametrize(
    "url", ["valkey:user:sesame@a:1", "valkey::sesame@a", "valkey:a?password=sesame"]
)
def test_a_password_in_a_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match="password_env") as refused:
        open_storage(url)
    error: BaseException | None = refused.value
    while error is not None:
        assert "sesame" not in str(error)
        error = error.__cause__


def test_every_option_is_documented() -> None:
    told = cleandoc(ValkeyOptions.__doc__ or "")
    assert [name for name in ValkeyOptions.model_fields if f"\n    {name}: " not in told] == []


def test_it_is_found_and_its_import_needs_neither_client_nor_torch() -> None:
    (found,) = [each for each in discover_storage() if each.name == "valkey"]
    assert found.problem is None
    assert found.distribution == "kvgraft-valkey"
    program = (
        "import sys, kvgraft_valkey;"
        "print([name for name in ('glide_sync', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout.strip() == b"[]"
