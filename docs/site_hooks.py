"""Hooks of mkdocs: pages from outside docs/, and no page that loads from other hosts.

A page's links lead where they lead in the repository: to another page, or nowhere if their target
is a file that the site does not have, such as a module.
"""

from __future__ import annotations

import posixpath
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks.md",
    "examples/gallery/README.md": "packages/gallery.md",
    "examples/third_party/README.md": "packages/third_party.md",
    "examples/draft_layer/README.md": "packages/draft_layer.md",
}
"""Pages by the document, seen from the root of the repository, that they show."""

LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
"""References that a browser fetches on its own."""


def outside() -> dict[str, str]:
    """The pages that show a document from outside docs/, by the document."""
    plugins = sorted(ROOT.glob("plugins/*/README.md"))
    found = {f"plugins/{path.parent.name}/README.md": path.parent.name for path in plugins}
    return {**OUTSIDE, **{path: f"packages/{name}.md" for path, name in found.items()}}


def page_of(path: str) -> str | None:
    """The page that shows a file or folder of the repository, if one does."""
    pages = outside()
    for document in (path, posixpath.join(path, "README.md")):
        if document in pages:
            return pages[document]
        inside = document.removeprefix("docs/")
        if inside != document and (ROOT / document).is_file():
            return inside
    return None


def as_on_site(markdown: str, document: str, page: str) -> str:
    """A document's text with links as they are on its page.

    Args:
        markdown: the text.
        document: where it is in the repository, such as `plugins/full/README.md`.
        page: where it is on the site, such as `packages/full.md`.
    """

    def moved(link: re.Match[str]) -> str:
        words, target, anchor = link[1], link[2], link[3] or ""
        if not target or "://" in target:
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(document), target))
        found = page_of(path)
        if found is not None:
            return f"[{words}]({posixpath.relpath(found, posixpath.dirname(page))}{anchor})"
        return words if (ROOT / path).exists() else link[0]

    parts: list[str] = []
    end = 0
    for fence in FENCE.finditer(markdown):
        parts += [LINK.sub(moved, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(moved, markdown[end:])])


class Loads(HTMLParser):
    """Addresses on other hosts that a page makes a browser fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        address = dict(attrs).get(LOADED.get(tag, "")) or ""
        if address.startswith(("http:", "https:", "//")):
            self.found.append(f"<{tag}> {address}")
        if "mermaid" in (dict(attrs).get("class") or "").split():
            self.found.append(f"<{tag}> a diagram that a script from elsewhere would draw")


def loads(site: Path) -> list[str]:
    """URLs that the pages and style sheets of a built site load from other hosts."""
    found: list[str] = []
    for path in sorted(site.rglob("*.html")):
        parser = Loads()
        parser.feed(path.read_text(encoding="utf-8"))
        found += [f"{path.relative_to(site)}: {each}" for each in parser.found]
    for path in sorted(site.rglob("*.css")):
        addresses = re.findall(r"url\(\s*['\"]?((?:https?:)?//[^)]*)\)", path.read_text("utf-8"))
        found += [f"{path.relative_to(site)}: {each}" for each in addresses]
    return found


def on_files(files: Any, config: Any) -> Any:
    """Add the documents from outside docs/."""
    from mkdocs.structure.files import File

    for document, page in outside().items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / document)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point a page's links at pages."""
    shown = {place: document for document, place in outside().items()}
    place = page.file.src_uri
    return as_on_site(markdown, shown.get(place, f"docs/{place}"), place)


def on_post_build(config: Any) -> None:
    """Refuse a site that loads from other hosts."""
    from mkdocs.exceptions import PluginError

    found = loads(Path(config["site_dir"]))
    if found:
        raise PluginError("the site loads from other hosts: " + "; ".join(found))
