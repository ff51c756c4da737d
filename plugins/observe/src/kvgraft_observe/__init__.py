"""Metrics and events of a kvgraft cache, for the tools that operators have.

metrics      all metrics: name, labels, and how to read each from `Cache.stats()`
steps        durations of requests' steps, and why prefixes were not longer
prometheus   a collector of them; extra `prometheus`

Importing this package imports no client library; each module imports its own.
"""
