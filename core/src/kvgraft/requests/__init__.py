"""One request's life: matched and pinned, promised, computed, published, ended.

request         a request
components      its part of a component: promises, and slots taken of them
leases          a match turned into pins, and copies from HOST that it waits for
resume_points   the boundaries it leaves for others to resume from
slots           pages and states of a running request
publishing      its data, offered to the tree and shared
backup          which nodes are copied to HOST, and when
eviction        slots freed for it in one pool
rows, stepping  page tables, and a step of all running requests
access          classes, priorities and times to live of its data
pins, pending   prefixes that stay; pages that another request computes
"""
