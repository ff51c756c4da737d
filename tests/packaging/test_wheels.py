"""The content of the wheels; each component works alone with the core (P1)."""

from __future__ import annotations

import email
import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvgraft

from .conftest import Environment, with_needs

Environments = Callable[..., Environment]

COMPONENTS = ("full", "swa", "mamba", "hisparse")
STORES = ("file", "valkey", "s3", "mooncake")
REPLAY = with_needs("kvgraft-replay")
PARTS = (
    "cli",
    "ranks",
    "nixl",
    "dynamo",
    "testing",
    "guard",
    "storage",
    "accelerator",
    "arena",
    "observe",
    "identity",
    "retention",
    "density",
    "scheduling",
)


def listed(environment: Environment) -> list[dict[str, Any]]:
    done = environment.kvgraft("components", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_there_is_a_wheel_of_every_distribution_and_version(wheels: dict[str, Path]) -> None:
    names = (*COMPONENTS, *STORES, *PARTS, "replay", "transformers", "vllm", "sglang")
    assert wheels.keys() == {"kvgraft", *(f"kvgraft-{name}" for name in names)}
    assert {path.name.split("-")[1] for path in wheels.values()} == {kvgraft.__version__}


def test_a_wheel_holds_its_package_typed_and_licensed_and_no_tests(wheels: dict[str, Path]) -> None:
    for name, path in wheels.items():
        module = name.replace("-", "_")
        members = zipfile.ZipFile(path).namelist()
        assert f"{module}/py.typed" in members
        assert any(member.endswith("licenses/LICENSE") for member in members)
        info = f"{module}-{kvgraft.__version__}.dist-info/"
        assert all(member.startswith((f"{module}/", info)) for member in members)
        files = [member.split("/")[-1] for member in members]
        assert not any(re.match(r"(test_|conftest).*py$", file) for file in files)


def test_replay_brings_its_pages_templates(wheels: dict[str, Path]) -> None:
    members = zipfile.ZipFile(wheels["kvgraft-replay"]).namelist()
    pages = ("report/page", "report/parts", "report/report", "planning/plan")
    assert {f"kvgraft_replay/{page}.html.j2" for page in pages} <= set(members)


def test_observe_brings_its_dashboard(wheels: dict[str, Path]) -> None:
    members = zipfile.ZipFile(wheels["kvgraft-observe"]).namelist()
    assert "kvgraft_observe/grafana.json" in members


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_component_asks_for_the_core_and_publishes_its_name(
    wheels: dict[str, Path], component: str
) -> None:
    wheel = zipfile.ZipFile(wheels[f"kvgraft-{component}"])
    (metadata,) = (name for name in wheel.namelist() if name.endswith("METADATA"))
    (points,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    fields = email.message_from_bytes(wheel.read(metadata))
    assert fields.get_all("Requires-Dist") == ["kvgraft>=0.1"]
    assert wheel.read(points).decode().split() == [
        "[kvgraft.components]",
        component,
        "=",
        f"kvgraft_{component}:plugin",
    ]


@pytest.mark.long
@pytest.mark.parametrize("component", COMPONENTS)
def test_a_component_alone_with_the_core_is_found_replays_and_is_removed_cleanly(
    environment: Environments, component: str
) -> None:
    alone = environment("kvgraft", *REPLAY, f"kvgraft-{component}")
    (row,) = listed(alone)
    assert (row["name"], row["distribution"], row["status"]) == (
        component,
        f"kvgraft-{component}",
        "ok",
    )
    done = alone.kvgraft(
        *("replay", "--synthetic", "chat", "--requests", "20", "--component", component),
        *("--device-tokens", "200000", "--host-tokens", "200000", "--json", "result.json"),
    )
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads((alone.directory / "result.json").read_text())
    assert result["requests"] == 20
    assert result["token_hit_rate"] > 0
    assert result["payloads_verified"] > 0
    assert list(result["component_hits"]) == [component]

    alone.uninstall(f"kvgraft-{component}")
    assert listed(alone) == []
    refused = alone.kvgraft("replay", "--synthetic", "chat", "--component", component)
    assert refused.returncode == 2
    assert f"component {component!r} is not installed; installed: none" in refused.stderr


@pytest.mark.long
def test_the_core_alone_says_that_no_component_is_installed(environment: Environments) -> None:
    core = environment("kvgraft", "kvgraft-cli")
    assert (
        "no component is installed; install a component package"
        in core.kvgraft("components").stdout
    )
    for command, stderr in (
        (("check", "full"), NO_SUITE),
        (("replay", "--synthetic", "chat"), NO_REPLAY),
        (("storage", "stats", "file:."), NO_STORAGE),
        (("doctor", "file:."), NO_TIER),
    ):
        refused = core.kvgraft(*command)
        assert (refused.returncode, refused.stderr) == (2, stderr)


@pytest.mark.long
def test_a_part_that_is_not_installed_is_named_with_the_way_to_get_it(
    environment: Environments,
) -> None:
    made = environment("kvgraft", "kvgraft-full")
    wanted = {
        "guard='on'": (
            "guard",
            "./plugins/storage ./plugins/observe ./plugins/retention ./plugins/scheduling "
            "./plugins/guard",
        ),
        "tenants={'a': {'namespaces': ['a']}}": ("tenants_settings", "./plugins/retention"),
        "device_memory='50MB'": ("sizes", "./plugins/arena"),
        "host_tokens=4096, storage={'model': 'm', 'weights': '1'}": (
            "storage_settings",
            "./plugins/storage",
        ),
        "device='simulated'": ("simulated", "-r plugins/testing/requirements.txt"),
        "": ("steps", "./plugins/scheduling"),
    }
    program = ["import kvgraft"]  # one process: most of its time goes into importing torch
    for settings in wanted:
        sizes = "" if "device_memory" in settings else "device_tokens=4096, "
        call = "" if settings else ".step([])"
        program += [
            "try:",
            f"    kvgraft.Cache.open(['full'], {sizes}{settings}){call}",
            "except kvgraft.ConfigError as error:",
            "    print(error)",
        ]
    done = made.run_python("\n".join(program))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"part {part!r} is not installed; in a clone of kvgraft, pip install {folders}"
        for part, folders in wanted.values()
    ]


ADVICE = "in a clone of kvgraft, pip install ./plugins"
NO_SUITE = (
    "kvgraft: command 'check' is not installed; in a clone of kvgraft, "
    "pip install -r plugins/testing/requirements.txt\n"
)
NO_STORAGE = f"kvgraft: command 'storage' is not installed; {ADVICE}/storage\n"
NO_TIER = (
    "kvgraft: doctor file:.: stores are checked by a package that is not installed; "
    f"{ADVICE}/storage\n"
)
NO_REPLAY = (
    f"kvgraft: command 'replay' is not installed; {ADVICE}/density ./plugins/storage "
    "./plugins/observe ./plugins/retention ./plugins/scheduling ./plugins/guard ./plugins/arena "
    "./plugins/replay\n"
)
NO_FILE_STORE = f"storage 'file' is not installed; installed: none; {ADVICE}/file\n"


@pytest.mark.long
def test_without_their_packages_replay_and_the_file_store_name_them(
    environment: Environments,
) -> None:
    made = environment("kvgraft", "kvgraft-cli", "kvgraft-storage", "kvgraft-full")
    refused = made.kvgraft("replay", "--synthetic", "chat")
    assert (refused.returncode, refused.stderr) == (2, NO_REPLAY)
    assert "replay" not in made.kvgraft("--help").stdout
    refused = made.kvgraft("storage", "stats", "file:.")
    assert (refused.returncode, refused.stderr) == (2, f"kvgraft: {NO_FILE_STORE}")
    sizes = "device_tokens=4096, host_tokens=4096"
    storage = "{'url': 'file:.', 'model': 'm', 'weights': '1'}"
    program = f"import kvgraft; kvgraft.Cache.open(['full'], {sizes}, storage={storage}).close()"
    done = made.run_python(program)
    assert done.returncode == 1
    assert done.stderr.endswith(f"kvgraft.errors.ConfigError: {NO_FILE_STORE}")

    made.install("kvgraft-replay", "kvgraft-file")
    assert "  replay " in made.kvgraft("--help").stdout
    assert made.run_python(program).returncode == 0
    assert made.kvgraft("storage", "stats", "file:.").returncode == 0


@pytest.mark.long
def test_all_components_together_replay_from_their_wheels(environment: Environments) -> None:
    together = environment("kvgraft", *REPLAY, *(f"kvgraft-{name}" for name in COMPONENTS))
    assert {row["name"] for row in listed(together)} == set(COMPONENTS)
    done = together.kvgraft(
        *("replay", "--synthetic", "agents", "--requests", "60", "--host-tokens", "2000000"),
        *(part for name in COMPONENTS for part in ("--component", name)),
        *("--json", "result.json", "--html", "report.html"),
    )
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads((together.directory / "result.json").read_text())
    assert set(result["component_hits"]) == set(COMPONENTS)
    assert (together.directory / "report.html").stat().st_size > 10_000


@pytest.mark.long
@pytest.mark.parametrize(
    "store",
    [pytest.param(name, marks=() if name == "valkey" else pytest.mark.long) for name in STORES],
)
def test_a_store_alone_with_the_core_is_found_without_its_client_and_removed_cleanly(
    environment: Environments, store: str
) -> None:
    alone = environment("kvgraft", "kvgraft-storage", f"kvgraft-{store}")
    code = (
        "import sys; from kvgraft_storage import discover_storage\n"
        "print(*sorted(each.name for each in discover_storage()))\n"
        "clients = {'glide_sync', 'obstore', 'mooncake', 'torch'} & {*sys.modules}\n"
        "assert not clients, clients\n"
    )
    assert alone.run_python(code).stdout.split() == [store]
    alone.uninstall(f"kvgraft-{store}")
    assert alone.run_python(code).stdout.split() == []
