"""Pieces of the tree one by one, each against a definition written out token by token."""
