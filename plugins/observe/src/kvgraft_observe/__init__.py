"""Metrics and events of a kvgraft cache, for the tools that operators have.

metrics      all metrics: name, labels, and how to read each from `Cache.stats()`
prometheus   a collector of them; extra `prometheus`

Importing this package imports no client library; each module imports its own.
"""
