"""Write the docstrings of public names into the pages of `docs/reference`.

A page says where: between `<!-- ::: kvgraft.Cache -->` and `<!-- end -->`. What is between the two
is written anew; the headings before it say how deep its own are. Docstrings are Google's.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

__all__ = ["filled", "pages", "resolved"]

PAGES = Path(__file__).parent / "reference"

PLACE = re.compile(
    r"^<!-- ::: (?P<name>[\w.]+)(?: members: (?P<members>[\w, ]+))? -->\n.*?^<!-- end -->$",
    re.MULTILINE | re.DOTALL,
)
HEADING = re.compile(r"^(#+) ", re.MULTILINE)
SECTION = re.compile(
    r"^(Args|Attributes|Raises|Returns|Yields):\n((?:    .*\n?|\n)+)", re.MULTILINE
)
ENTRY = re.compile(r"^ {4}(\S[^:]*): *((?:.*\n?)(?:^ {5,}.*\n?|\n)*)", re.MULTILINE)
LINE = 118


def pages() -> dict[Path, str]:
    """Every page of the reference with what is to be in it."""
    return {path: filled(path.read_text(encoding="utf-8")) for path in sorted(PAGES.glob("*.md"))}


def filled(page: str) -> str:
    """A page with its docstrings."""
    written, end = [], 0
    for place in PLACE.finditer(page):
        before = page[end : place.start()]
        written.append(before)
        own = HEADING.findall(PLACE.sub("", page[: place.start()]))
        members = place["members"].split(", ") if place["members"] else None
        text = "\n".join(_object(place["name"], len(own[-1]) + 1, members))
        mark = place[0].partition("\n")[0]
        written.append(f"{mark}\n\n{text.strip()}\n\n<!-- end -->")
        end = place.end()
    return "".join([*written, page[end:]])


def resolved(name: str) -> Any:
    """The object of a dotted name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        return getattr(importlib.import_module(module), attribute)


def _object(name: str, level: int, members: list[str] | None = None) -> Iterator[str]:
    """Markdown of a module's public names, a class with its methods, a function or a constant."""
    found, short = resolved(name), name.rpartition(".")[2]
    if isinstance(found, ModuleType):
        own = [each for each, value in vars(found).items() if _is_of(value, found)]
        for each in dict.fromkeys([*own, *found.__all__]):
            kept = each in own or inspect.isclass(getattr(found, each))
            if kept or each in _constants(found):
                yield from _object(f"{name}.{each}", level)
    elif inspect.isclass(found):
        yield f"{'#' * level} `{short}`\n"
        if "\nArgs:\n" in (inspect.getdoc(found) or ""):
            yield _signature(short, found.__init__)
        yield _markdown(inspect.getdoc(found) or "")
        yield from _values(found)
        for each, method in _methods(found):
            if members is None or each in members:
                yield from _callable(f"{short}.{each}", method, level + 1)
    elif callable(found) and inspect.getdoc(found) and hasattr(found, "__code__"):
        yield from _callable(short, found, level)
    else:
        yield f"{'#' * level} `{short}`\n"
        yield _markdown(_constants(_home(name)).get(short, ""))


def _is_of(value: object, module: ModuleType) -> bool:
    """Whether it is a public function of a module."""
    own = isinstance(value, FunctionType) and value.__module__ == module.__name__
    return own and not value.__name__.startswith("_")  # type: ignore[attr-defined]


def _callable(name: str, found: Any, level: int) -> Iterator[str]:
    yield f"{'#' * level} `{name}`\n"
    if isinstance(found, FunctionType):
        yield _signature(name.rpartition(".")[2], found)
    yield _markdown(inspect.getdoc(found) or "")


def _methods(owner: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties with docstrings, inherited ones of ours too, in order."""
    found: dict[str, Any] = {}
    for base in reversed(owner.__mro__):
        if base.__module__.startswith("kvgraft"):
            found |= vars(base)
    for name, value in found.items():
        method = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        shown = isinstance(method, (FunctionType, property)) and inspect.getdoc(method)
        if shown and not name.startswith("_"):
            yield name, method


def _signature(name: str, function: Any) -> str:
    """`name(a: int, *, b: str = "x") -> None` as code, a line for each argument if it is long."""
    signature = inspect.signature(function)
    given, kinds = [], [each.kind for each in signature.parameters.values()]
    for index, (argument, each) in enumerate(signature.parameters.items()):
        if argument in ("self", "cls"):
            continue
        if each.kind is each.KEYWORD_ONLY and not {each.KEYWORD_ONLY, each.VAR_POSITIONAL} & {
            *kinds[:index]
        }:
            given.append("*")
        stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        typed = f": {each.annotation}" if isinstance(each.annotation, str) else ""
        default = "" if each.default is each.empty else f" = {_default(each.default)}"
        given.append(stars + argument + typed + default)
    result = signature.return_annotation
    is_call = isinstance(result, str) and function.__name__ != "__init__"
    arrow = f" -> {result}" if is_call else ""
    line = f"{name}({', '.join(given)}){arrow}"
    if len(line) > 88:
        line = f"{name}(\n    " + ",\n    ".join(given) + f",\n){arrow}"
    return f"```\n{line}\n```\n"


def _default(value: object) -> str:
    named = getattr(value, "name", None)
    if named is not None and hasattr(type(value), "__members__"):
        return f"{type(value).__name__}.{named}"
    text = repr(value)
    return "..." if " at 0x" in text or text.startswith("<") else text


def _values(owner: type) -> Iterator[str]:
    """The members of an enumeration, with the text below each."""
    texts = _constants(owner) if hasattr(owner, "__members__") else {}
    if texts:
        yield "".join(f"{_item(f'`{name}`', text)}\n" for name, text in texts.items())


@lru_cache
def _constants(where: Any) -> dict[str, str]:
    """The text below each assignment of a module or a class."""
    body: list[ast.stmt] = ast.parse(textwrap.dedent(inspect.getsource(where))).body
    if inspect.isclass(where):
        (definition,) = body
        assert isinstance(definition, ast.ClassDef)
        body = definition.body
    found = {}
    for each, after in itertools.pairwise(body):
        target = each.target if isinstance(each, ast.AnnAssign) else None
        if isinstance(each, ast.Assign):
            target = each.targets[0]
        text = after.value if isinstance(after, ast.Expr) else None
        if isinstance(target, ast.Name) and isinstance(text, ast.Constant):
            found[target.id] = inspect.cleandoc(str(text.value))
    return found


def _home(name: str) -> ModuleType:
    """The module that assigns a constant, followed from the package that shows it."""
    module, _, short = name.rpartition(".")
    shown = importlib.import_module(module)
    for each in ast.walk(ast.parse(inspect.getsource(shown))):
        names = [alias.name for alias in each.names] if isinstance(each, ast.ImportFrom) else []
        if short in names:
            return _home(f"{each.module}.{short}")
    return sys.modules[module]


def _markdown(docstring: str) -> str:
    """A docstring's text, with its sections as lists."""
    written, end = [], 0
    for section in SECTION.finditer(docstring):
        written.append(docstring[end : section.start()].strip())
        written.append(f"**{section[1]}**")
        if section[1] in ("Returns", "Yields"):
            written.append(_wrapped(textwrap.dedent(section[2])))
        else:
            items = [(name, text) for name, text in ENTRY.findall(section[2])]
            names = [
                ", ".join(f"`{each.strip()}`" for each in name.split(",")) for name, _ in items
            ]
            written.append("\n".join(_item(name, text) for name, (_, text) in zip(names, items)))
        end = section.end()
    written.append(docstring[end:].strip())
    return "\n\n".join(filter(None, written)) + "\n"


def _item(name: str, text: str) -> str:
    """`- name: text`, wrapped."""
    return textwrap.indent(_wrapped(f"{name}: {text}", LINE - 2), "  ").replace("  ", "- ", 1)


def _wrapped(text: str, width: int = LINE) -> str:
    joined = " ".join(text.split())
    return "\n".join(textwrap.wrap(joined, width, break_long_words=False, break_on_hyphens=False))
