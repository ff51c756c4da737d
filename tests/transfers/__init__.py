"""Transfers by the real engine: worker threads, fences, failures."""
