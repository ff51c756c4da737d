"""Data that is kept longer, or less long, than its use alone would: tenants, pins, lifetimes.

settings    shares and namespaces of
tenants     tenants their shares of every pool, and which of them loses data for which request
pins        prefixes that stay until they are unpinned, within a share of every pool
announcing  data that waiting requests will use
lifetimes   priorities and times to live
clearing    namespaces whose data is forgotten
kv_hints    the hints that vLLM and SGLang carry with a request
stats       counts of tenants and pins
"""

from __future__ import annotations

from kvgraft_retention.announcing import Announcement
from kvgraft_retention.lifetimes import Retention
from kvgraft_retention.pins import Pin
from kvgraft_retention.settings import TenantSettings
from kvgraft_retention.stats import ClearStats

__all__ = ["Announcement", "ClearStats", "Pin", "Retention", "TenantSettings"]
