"""`kvgraft plan`: replays one trace at many sizes, to choose hardware.

command          the command
models           a model's components, from its configuration file
sizes            pools of each size: tokens, bytes, and what they are compared with
sweep, workers   the replays, side by side in processes of their own
worker           one of these processes
lru_curve        the hit rate of every size of an LRU cache, in one pass
schema, tables   the result, and its tables
"""
