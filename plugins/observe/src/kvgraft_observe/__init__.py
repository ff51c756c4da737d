"""Explanations, tracers, metrics and events of a kvgraft cache, for monitoring tools.

explaining   why a match ends where it does
tracing      who is notified of the steps of requests' lives
metrics      all metrics: name, labels, and how to read each from `Cache.stats()`
steps        durations of requests' steps, and why prefixes were not longer
arguments    refusals of wrong arguments
prometheus   a collector of them; extra `prometheus`
grafana.json a dashboard of them
otel         metrics and spans for OpenTelemetry; extra `opentelemetry`
kv_events    where each page is, for routers, as vLLM publishes it; extra `kv-events`

Importing this package imports no client library; each module imports its own.
"""
