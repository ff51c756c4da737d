"""The life of a request: what an engine calls, in any order, and what is refused."""
