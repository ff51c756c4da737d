"""Subcommands of `kvgraft`: the suite, and packages to start from."""
