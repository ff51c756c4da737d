"""Sliding-window attention for kvgraft."""
