"""Installed packages: found, checked, and their components bound to one cache.

entry_points    what installed distributions publish
registry        the packages that may be used, and why others may not
validation      what a package implements, held to the contract
hook_results    what a hook may return
dispatch        the hooks of one cache's components, as plain callables
"""
