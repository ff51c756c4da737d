"""The `kvgraft` command."""

from __future__ import annotations

from kvgraft_cli.app import main

__all__ = ["main"]
