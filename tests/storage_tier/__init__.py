"""The storage tier of a cache: storing, fetching, and their effect on requests."""
