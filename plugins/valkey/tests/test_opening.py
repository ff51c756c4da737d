"""Servers that cannot be used are refused in one line, in time, without a word of the password."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from kvgraft.errors import ConfigError
from kvgraft_storage import Status, open_storage
from kvgraft_testing.storage.traffic import addresses, fetched, opened, stored, supervised

from . import shared
from .servers import HOST, Cluster, Server, needs_server
from .tls_front import tls_front

pytestmark = needs_server

PASSWORD = "open-sesame"


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    server = Server(requirepass=PASSWORD)
    yield server
    server.close()


def refusal(url: str) -> str:
    """Why a store cannot be opened; one line, from us to the client's own message."""
    with pytest.raises(ConfigError) as refused:
        open_storage(url)
    told = str(refused.value)
    assert "\n" not in told
    assert told.startswith("storage 'valkey': ")
    error: BaseException | None = refused.value
    while error is not None:
        assert PASSWORD not in str(error)
        error = error.__cause__
    return told


@pytest.mark.parametrize("more", ["", "&cluster=true"])
def test_nobody_listens(more: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    told = refusal(f"valkey:127.0.0.1:{port}?connect_timeout_s=1{more}")
    assert f"127.0.0.1:{port} cannot be reached: " in told
    assert "refused" in told
    assert told.endswith("see that it runs and that address and tls are right")


def test_a_server_that_hangs_is_given_up_in_time() -> None:
    server = Server()
    try:
        server.stop()
        begin = time.monotonic()
        told = refusal(f"{server.url}?connect_timeout_s=0.3&timeout_s=0.3")
        assert time.monotonic() - begin < 30
        assert "cannot be reached" in told
    finally:
        server.resume()
        server.close()


def test_a_password_comes_from_the_environment(
    guarded: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORE_PASSWORD", PASSWORD)
    with supervised(f"{guarded.url}?password_env=STORE_PASSWORD") as storage:
        assert stored(storage, addresses(2), 900) == [Status.OK] * 2
        assert fetched(storage, addresses(2), 900) == [Status.OK] * 2
    with opened(f"{guarded.url}?username=default&password_env=STORE_PASSWORD") as store:
        assert PASSWORD not in repr(store) + repr(vars(store)) + repr(store.stats())


def test_a_missing_or_wrong_password_is_reported(
    guarded: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "asks for a password; give password_env=VARIABLE" in refusal(guarded.url)
    monkeypatch.setenv("STORE_PASSWORD", PASSWORD + "!")
    told = refusal(f"{guarded.url}?password_env=STORE_PASSWORD")
    assert "refuses user 'default' and the password in $STORE_PASSWORD; correct them" in told
    told = refusal(f"{guarded.url}?username=ali&password_env=STORE_PASSWORD")
    assert "refuses user 'ali'" in told
    monkeypatch.setenv("STORE_PASSWORD", "")
    assert "empty" in refusal(f"{guarded.url}?password_env=STORE_PASSWORD")


def test_a_server_that_is_no_cluster_and_one_that_is_are_told_apart() -> None:
    told = refusal(f"{shared.single().url}?cluster=true&connect_timeout_s=0.5")
    assert "is no cluster; leave out cluster=true" in told
    told = refusal(shared.cluster().servers[0].url)
    assert "is part of a cluster; add cluster=true" in told


def test_a_cluster_without_slots_cannot_be_reached() -> None:
    server = Server(**{"cluster-enabled": "yes"})
    try:
        told = refusal(f"{server.url}?cluster=true&connect_timeout_s=0.5")
        assert "cannot be reached" in told
    finally:
        server.close()


def test_a_server_that_tells_nothing_of_its_settings_is_taken_at_its_defaults() -> None:
    server = Server()
    try:
        server.ask("ACL", "SETUSER", "default", "-config")
        with opened(server.url) as store:
            assert store.capabilities.max_payload_nbytes == 512 << 20
            assert not store.capabilities.durable
    finally:
        server.close()


def test_a_database_is_a_store_of_its_own() -> None:
    url = f"{shared.single().url}?prefix=base:"
    with supervised(url) as zero, supervised(f"{url}&database=3") as three:
        assert stored(zero, addresses(1), 500) == [Status.OK]
        assert fetched(three, addresses(1), 500) == [Status.MISS]


def test_tls_is_spoken_and_verified(tmp_path: Path) -> None:
    authority, certificate, ours = trustme.CA(), tmp_path / "server.pem", tmp_path / "authority.pem"
    authority.issue_cert(HOST).private_key_and_cert_chain_pem.write_to_path(certificate)
    authority.cert_pem.write_to_path(ours)
    with tls_front(shared.single().port, certificate) as port:
        url = f"valkey:{HOST}:{port}?prefix=tls:&connect_timeout_s=1"
        assert "cannot be reached" in refusal(url)
        assert "cannot be reached" in refusal(f"{url}&tls=true")
        with supervised(f"{url}&tls=true&tls_ca={ours}") as storage:
            assert stored(storage, addresses(3), 70_000) == [Status.OK] * 3
            assert fetched(storage, addresses(3), 70_000) == [Status.OK] * 3


def test_a_cluster_with_a_password_is_reported_too(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster()
    try:
        for server in cluster.servers:
            server.ask("CONFIG", "SET", "requirepass", PASSWORD)
        assert "asks for a password" in refusal(cluster.url)
        monkeypatch.setenv("STORE_PASSWORD", PASSWORD)
        with supervised(f"{cluster.url}&password_env=STORE_PASSWORD") as storage:
            assert stored(storage, addresses(9), 900) == [Status.OK] * 9
    finally:
        cluster.close()
