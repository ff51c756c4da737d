"""The cache against the brute-force model that `kvgraft_testing.machine` ships.

setups      the built-in components and third-party ones, as sets
"""
