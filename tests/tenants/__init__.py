"""Tenants that share a cache (K4, K5)."""
