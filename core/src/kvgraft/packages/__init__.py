"""Installed packages: found, checked, and their components bound to one cache.

registry        the packages that may be used, and why others may not
dispatch        the hooks of one cache's components, as plain callables whose answers are checked
"""
