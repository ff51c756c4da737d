"""Options of a URL, and refusals in one line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvgraft import ConfigError
from kvgraft_storage import open_storage

from .moto_server import MotoServer, free_port

HERE = "endpoint=http://127.0.0.1:1"
OPTIONS = "options: endpoint, region, connections, timeout_s, retries"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3:", "no bucket; write s3:BUCKET/PREFIX"),
        ("s3:/prefix", "no bucket; write s3:BUCKET/PREFIX"),
        ("s3://bucket", "no bucket; write s3:BUCKET/PREFIX"),
        ("s3:a%2Fb", "'a/b' is no bucket; names have 3 to 63"),
        ("s3:pages/a//b", "prefix 'a//b' has a part ''; write names of letters"),
        ("s3:pages/a/../b", "prefix 'a/../b' has a part '..'"),
        ("s3:pages/a%0Ab", r"has a part 'a\\nb'"),
        ("s3:pages?bucket=x", f"no option 'bucket'; {OPTIONS}"),
        ("s3:pages?connections=0", "option connections='0': give 1 or more"),
        ("s3:pages?timeout_s=0", "option timeout_s='0': give more than 0"),
        ("s3:pages?retries=-1", "option retries='-1': give 0 or more"),
        ("s3:pages?region=", "option region='': give text of 1 or more characters"),
        ("s3:pages?endpoint=127.0.0.1:9", "endpoint '.*' is not http://HOST:PORT or https"),
        ("s3:pages?endpoint=ftp://host", "endpoint '.*' is not http://HOST:PORT or https"),
        ("s3:pages?endpoint=http://h/%23x", "endpoint '.*' is more than an address"),
        ("s3:pages?endpoint=http://key:secret@h", "endpoint has credentials; set AWS_"),
    ],
)
def test_an_impossible_store_is_refused_in_one_line(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        open_storage(url)
    assert "\n" not in str(refused.value)
    assert "secret" not in str(refused.value)


def test_a_bucket_that_is_not_there_is_refused(moto: MotoServer) -> None:
    with pytest.raises(ConfigError) as refused:
        open_storage(f"s3:nowhere/x?endpoint={moto.endpoint}")
    assert str(refused.value) == (
        f"storage 's3': GET {moto.endpoint}/nowhere/x/kvgraft-probe: 404 Not Found, NoSuchBucket: "
        "The specified bucket does not exist; check bucket, endpoint and credentials"
    )


def test_credentials_that_are_wrong_are_refused(mortal: MotoServer) -> None:
    mortal.ask("POST", "/moto-api/reset-auth", b"0")
    with pytest.raises(ConfigError, match="403 Forbidden, InvalidAccessKeyId: The AWS Access Key"):
        open_storage(mortal.url())


def test_a_server_that_is_not_there_is_refused() -> None:
    address = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ConfigError, match=f"GET {address}/pages.*Connection refused; check bucket"):
        open_storage(f"s3:pages/x?endpoint={address}")


def test_no_credentials_at_all_are_refused(
    moto: MotoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ConfigError, match=r"latest/api/token: .*; check bucket, endpoint"):
        open_storage(moto.url())


def test_the_option_decides_over_the_environment_where_the_server_is(
    moto: MotoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", elsewhere)
    with pytest.raises(ConfigError, match=f"GET {elsewhere}/pages"):
        open_storage("s3:pages/x?retries=0")
    open_storage(moto.url()).close()


def run(code: str) -> subprocess.CompletedProcess[str]:
    """A process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )


def test_importing_the_package_loads_no_client_library() -> None:
    done = run(
        "import sys, kvgraft_s3; print({'obstore', 'torch', 'numpy.distutils'} & set(sys.modules))"
    )
    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_a_client_library_that_cannot_be_loaded_is_one_line_when_a_store_is_opened() -> None:
    done = run(
        "import sys; sys.modules['obstore'] = None\n"
        "from kvgraft_cli import main\n"
        "sys.argv = ['kvgraft', 'storage', 'stats', 's3:pages']\n"
        "main()"
    )
    assert done.returncode == 2
    assert done.stderr.startswith("kvgraft: storage 's3': obstore cannot be loaded: ")
    assert done.stderr.endswith("; pip install 'obstore>=0.12,<0.13'\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.long
def test_a_process_that_ends_right_after_a_failed_request_ends_well() -> None:
    address = f"http://127.0.0.1:{free_port()}"
    code = (
        "from kvgraft import ConfigError\n"
        "from kvgraft_storage import open_storage\n"
        f"try: open_storage('s3:pages?endpoint={address}&retries=0')\n"
        "except ConfigError: pass"
    )
    assert [run(code).returncode for _ in range(20)] == [0] * 20
