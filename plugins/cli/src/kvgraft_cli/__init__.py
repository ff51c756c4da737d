"""The `kvgraft` command."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command, see `kvgraft_cli.app.main`; Ctrl-C ends it with one line and 130."""
    try:
        from kvgraft_cli.app import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("kvgraft: stopped\n")
        sys.exit(130)
