from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

import pytest

from .moto_server import MotoServer
from .scripted_server import Answer, ScriptedServer

if importlib.util.find_spec("kvgraft_s3") is None:
    collect_ignore_glob = ["test_*.py"]  # not installed on Python 3.10


@pytest.fixture(autouse=True, scope="session")
def credentials() -> Iterator[None]:
    """Any will do for moto; nothing of the environment's is used."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "tests")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "tests")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        yield


@pytest.fixture(scope="session")
def moto() -> Iterator[MotoServer]:
    """A server that all tests share, each with its own prefix."""
    server = MotoServer()
    yield server
    server.kill()


@pytest.fixture
def mortal() -> Iterator[MotoServer]:
    """A server to be stopped, killed and started again."""
    server = MotoServer()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def environment(moto: MotoServer) -> Iterator[None]:
    """The server's address where the client library looks for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", moto.endpoint)
        yield


@pytest.fixture
def scripted() -> Iterator[Callable[[Callable[[str, str], Answer | None]], ScriptedServer]]:
    """Starts servers that answer as they are told."""
    servers: list[ScriptedServer] = []

    def start(script: Callable[[str, str], Answer | None]) -> ScriptedServer:
        servers.append(ScriptedServer(script))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
