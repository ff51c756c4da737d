"""Identities of what placeholder tokens stand for."""
