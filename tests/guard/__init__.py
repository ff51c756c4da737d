"""The guard: what it finds, what it leaves alone, what it is when it is off.

scene           guarded caches over components that can be told to misbehave
defects         every guarded rule, broken on purpose
serving         many requests at a time, in a random order
"""
