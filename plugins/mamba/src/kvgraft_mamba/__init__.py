"""Mamba and other state-space layers for kvgraft."""
