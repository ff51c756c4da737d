"""The storage tier of a cache: what is stored, what comes back, and what a request sees of it."""
