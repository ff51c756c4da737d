"""Reports of a replay: terminal tables and one self-contained HTML page.

Both renderers read the plain dictionary described in `kvgraft_replay.report.schema`, which `--json`
also writes, so a report can be made again from a saved result.
"""

from __future__ import annotations

from kvgraft_replay.report.html import render_html, write_html
from kvgraft_replay.report.schema import ReplayResult
from kvgraft_replay.report.tables import print_tables

__all__ = ["ReplayResult", "print_tables", "render_html", "write_html"]
