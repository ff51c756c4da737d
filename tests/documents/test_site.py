"""The parts of the documents' site that need no mkdocs; `make docs` builds the whole."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import kvgraft
from kvgraft import Cache, Request
from kvgraft_storage.tier import StorageTier

from ..architecture.sources import CORE
from ..architecture.test_imports import layer
from ..commands import ROOT

REFERENCE = ROOT / "docs" / "reference"


def script(name: str) -> ModuleType:
    """A script of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    return script("site_hooks")


def referenced() -> list[str]:
    """The names that the reference shows, dotted."""
    pages = [path.read_text(encoding="utf-8") for path in sorted(REFERENCE.glob("*.md"))]
    return re.findall(r"^<!-- ::: ([\w.]+)", "\n".join(pages), re.MULTILINE)


def test_the_reference_reads_in_the_repository_as_on_the_site() -> None:
    for path, text in script("reference").pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run `make docs`"
    settings = (REFERENCE / "settings.md").read_text(encoding="utf-8")
    assert "\n- `page_size`: tokens per page.\n" in settings
    assert "\n- `WRITE_THROUGH`: At the first touch: as soon as it is in the tree.\n" in settings
    calls = (REFERENCE / "cache.md").read_text(encoding="utf-8")
    assert "### `Cache.poll`\n\n```\npoll() -> int\n```\n\nProcess transfers" in calls


def test_the_drawings_are_up_to_date() -> None:
    for name, text in script("draw").drawings().items():
        path = ROOT / "docs" / "drawings" / name
        assert path.read_text(encoding="utf-8") == text, f"{name}: run `make docs`"


def test_the_architectures_table_has_the_rooms_of_the_drawing() -> None:
    drawing = script("draw")
    written = drawing.ARCHITECTURE.read_text(encoding="utf-8")
    assert written == drawing.architecture(), "run `make docs`"
    listed = re.findall(r"`(\w+)/`", drawing.floors())
    assert listed == [
        room for _, rooms in drawing.FLOORS for room in rooms if not room.endswith(".py")
    ]


def test_the_architecture_has_a_paragraph_for_every_room() -> None:
    core = CORE / "kvgraft"
    folders = {path.name for path in core.iterdir() if (path / "__init__.py").exists()}
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    told = re.findall(r"^- \*\*`(\w+)/`\*\* \w", text, re.MULTILINE)
    assert len(told) == len(set(told))
    assert {*told} == folders


def test_every_module_that_the_architecture_names_exists() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    sources = [CORE / "kvgraft", *ROOT.glob("plugins/*/src"), ROOT]
    named = re.findall(r"`([\w/]+\.py)`", text)
    assert named
    assert [each for each in named if not any((root / each).exists() for root in sources)] == []


def test_the_house_has_every_room_on_its_floor() -> None:
    """In the order in which `tests/architecture` lets rooms import each other."""
    floors = [[*rooms] for _, rooms in script("draw").FLOORS]
    core = CORE / "kvgraft"
    folders = {path.name for path in core.iterdir() if (path / "__init__.py").exists()}
    drawn = {room for rooms in floors for room in rooms if (core / room).is_dir()}
    assert drawn == folders
    heights = [[layer(f"kvgraft.{Path(room).stem}") for room in rooms] for rooms in floors]
    assert all(min(high) >= max(low) for high, low in itertools.pairwise(heights))


def test_every_document_is_in_the_sites_navigation(hooks: ModuleType) -> None:
    listed = re.findall(r"[-:] ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    docs = {str(path.relative_to(ROOT / "docs")) for path in ROOT.glob("docs/**/*.md")}
    decisions = {path for path in docs if path.startswith("adr/0")}
    assert len(listed) == len(set(listed))
    assert {*listed} == {*docs, *hooks.outside().values()} - decisions


@pytest.mark.parametrize(
    ("document", "page", "written", "shown"),
    [
        ("README.md", "index.md", "docs/embedding.md", "[x](embedding.md)"),
        ("README.md", "index.md", "docs/storage.md#settings", "[x](storage.md#settings)"),
        ("README.md", "index.md", "docs/adr", "[x](adr/README.md)"),
        ("README.md", "index.md", "#start", "[x](#start)"),
        ("README.md", "index.md", "https://a.example/b", "[x](https://a.example/b)"),
        ("README.md", "index.md", "examples/third_party", "[x](packages/third_party.md)"),
        ("README.md", "index.md", "Makefile", "x"),
        ("README.md", "index.md", "no/such.md", "[x](no/such.md)"),
        ("docs/guard.md", "guard.md", "../CHANGELOG.md", "[x](changelog.md)"),
        ("docs/adr/0014-storage-tier.md", "adr/0014-storage-tier.md", "../storage.md", None),
        ("plugins/s3/README.md", "packages/s3.md", "../../docs/storage.md", "[x](../storage.md)"),
        ("plugins/s3/README.md", "packages/s3.md", "../full/README.md", "[x](full.md)"),
    ],
)
def test_a_link_on_a_page_leads_where_it_leads_in_the_repository(
    hooks: ModuleType, document: str, page: str, written: str, shown: str | None
) -> None:
    text = hooks.as_on_site(f"a [x]({written}) b", document, page)
    assert text == f"a {shown or f'[x]({written})'} b"


def test_code_blocks_are_left_as_they_are(hooks: ModuleType) -> None:
    text = "```python\na[b](Makefile)\n```\n[x](Makefile)\n"
    assert hooks.as_on_site(text, "README.md", "index.md") == "```python\na[b](Makefile)\n```\nx\n"


def test_a_page_that_loads_from_another_host_is_found(hooks: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "good.html").write_text(
        '<script src="a.js"></script><a href="https://a.example">x</a><img src="b.svg">'
    )
    (tmp_path / "a.css").write_text("body { background: url(data:image/png;base64,AA) }")
    assert hooks.loads(tmp_path) == []
    (tmp_path / "bad.html").write_text(
        '<script src="https://a.example/a.js"></script><link rel="icon" href="//b.example/i">'
        '<pre class="mermaid">graph</pre>'
    )
    (tmp_path / "b.css").write_text("@font-face { src: url('https://c.example/f.woff') }")
    assert [found.partition(":")[0] for found in hooks.loads(tmp_path)] == [
        *("bad.html", "bad.html", "bad.html", "b.css")
    ]


def test_the_reference_has_every_public_name_once() -> None:
    names = referenced()
    assert len(names) == len(set(names))
    modules = {name for name in names if inspect.ismodule(resolved(name))}
    shown = {id(resolved(name)) for name in names} | {
        id(value)
        for name in modules
        for value in (getattr(resolved(name), each) for each in resolved(name).__all__)
    }
    missing = [name for name in kvgraft.__all__ if id(getattr(kvgraft, name)) not in shown]
    assert not missing


def resolved(name: str) -> Any:
    """The object of a dotted name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        return getattr(importlib.import_module(module), attribute)


def test_every_public_method_of_an_engines_classes_has_a_docstring() -> None:
    """The reference leaves out methods that have none."""
    silent = [
        f"{owner.__name__}.{name}"
        for owner in (Cache, Request, StorageTier)
        for name, value in inspect.getmembers(owner)
        if not name.startswith("_")
        and (inspect.isroutine(value) or isinstance(value, property))
        and not inspect.getdoc(value)
    ]
    assert not silent


def documented_attributes(owner: type) -> list[str]:
    """The names before the colons under `Attributes:` in a class's docstring."""
    section = re.search(r"^Attributes:\n((?:    .*\n?|\n)+)", inspect.getdoc(owner) or "", re.M)
    return re.findall(r"^    (\S[^:]*):", section[1], re.MULTILINE) if section else []


def attributes(owner: type) -> set[str]:
    """Attributes of a class's instances, as far as its source and its bases say."""
    ours = [base for base in owner.__mro__ if base.__module__.startswith("kvgraft")]
    assigned = re.findall(r"\bself\.(\w+)", "".join(map(inspect.getsource, ours)))
    annotated = (name for base in owner.__mro__ for name in inspect.get_annotations(base))
    return {*dir(owner), *annotated, *assigned}


def test_the_attributes_that_the_reference_names_exist() -> None:
    owners = [owner for owner in map(resolved, referenced()) if inspect.isclass(owner)]
    named = {owner: documented_attributes(owner) for owner in owners}
    assert {"computed", "storage_tokens"} <= set(named[Request])
    wrong = [
        f"{owner.__name__}.{name}"
        for owner, names in named.items()
        for name in names
        if name not in attributes(owner)
    ]
    assert not wrong, "name one attribute a line"
