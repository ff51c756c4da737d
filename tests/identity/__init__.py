"""Placeholder tokens that stand for images, sounds and results of tools (T11)."""
