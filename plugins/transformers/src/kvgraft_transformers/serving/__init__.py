"""`kvgraft serve`: an OpenAI-compatible HTTP server over the reference engine.

command    the command line
app        routes
protocol   clients' requests, checked
replies    the responses
text       prompts to tokens, tokens to text, stop strings
grammar    answers that follow a JSON schema
logprobs   log-probabilities of tokens
worker     the thread that runs the engine
inspection what the cache holds: its state, reasons, events
watching   who was hit lately
shutdown   how the server ends
metrics    counters and gauges for Prometheus
"""

from __future__ import annotations
