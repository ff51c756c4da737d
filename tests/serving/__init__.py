"""A small engine over real caches, for tests across modules.

components      third-party components: any reach, states
setups          component sets and the caches over them
server          prefill and decode with bytes that say which tokens they were computed from
"""
