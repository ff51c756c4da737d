"""Options of a URL, and refusals in one line before a master is asked."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvgraft import ConfigError
from kvgraft_storage import open_storage

OPTIONS = (
    "options: protocol, devices, metadata, address, segment, buffer, replicas, admin, timeout_s"
)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("mooncake:", "'' names no master; write mooncake:HOST:PORT/NAMESPACE"),
        ("mooncake://host/x", "names no master; write mooncake:HOST:PORT/NAMESPACE"),
        ("mooncake:a_b/x", "'a_b/x' names no master"),
        ("mooncake:host:x/y", "'x' is no port; the default is 50051"),
        ("mooncake:host:65536/y", "'65536' is no port"),
        ("mooncake:host/a//b", "namespace 'a//b' is impossible; write names of letters"),
        ("mooncake:host/a,b", "namespace 'a,b' is impossible"),
        ("mooncake:host/../b", r"namespace '\.\./b' is impossible"),
        ("mooncake:host?master=x", f"no option 'master'; {OPTIONS}"),
        ("mooncake:host?protocol=udp", "option protocol='udp': give 'tcp' or 'rdma'"),
        ("mooncake:host?devices=mlx5_0", "devices 'mlx5_0' are for protocol rdma, not tcp"),
        ("mooncake:host?metadata=etcd", "option metadata='etcd': give text that matches"),
        ("mooncake:host?address=http://x", "option address='http://x': give text that matches"),
        (
            "mooncake:host?segment=some",
            "option segment='some' is no size; write for example 256MiB",
        ),
        ("mooncake:host?replicas=0", "option replicas='0': give 1 or more"),
        ("mooncake:host?admin=host:9003", "option admin='host:9003': give text that matches"),
        ("mooncake:host?timeout_s=0", "option timeout_s='0': give more than 0"),
    ],
)
def test_an_impossible_store_is_refused_in_one_line(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        open_storage(url)
    assert "\n" not in str(refused.value)


def run(code: str) -> subprocess.CompletedProcess[str]:
    """A process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )


def test_importing_the_package_loads_no_client_library() -> None:
    done = run("import sys, kvgraft_mooncake; print({'mooncake', 'torch'} & set(sys.modules))")
    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_a_client_library_that_cannot_be_loaded_is_one_line_when_a_store_is_opened() -> None:
    done = run(
        "import sys; sys.modules['mooncake'] = None\n"
        "from kvgraft_cli import main\n"
        "sys.argv = ['kvgraft', 'storage', 'stats', 'mooncake:127.0.0.1']\n"
        "main()"
    )
    assert done.returncode == 2
    assert done.stderr.startswith("kvgraft: storage 'mooncake': Mooncake's client cannot be loaded")
    assert done.stderr.endswith("such as 'kvgraft-mooncake[cpu]'\n")
    assert done.stderr.count("\n") == 1
