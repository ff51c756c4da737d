"""A component as its author sees it: a package outside this repository, the core as a wheel."""
