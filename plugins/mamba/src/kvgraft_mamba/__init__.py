"""Mamba and other recurrent layers for kvgraft: the state exactly at a boundary."""

from __future__ import annotations

from kvgraft_mamba import plugin

__all__ = ["plugin"]
