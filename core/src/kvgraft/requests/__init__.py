"""One request's life: matched and pinned, promised, computed, published, ended.

request         a request and the slots it owns
account         slots promised of one pool, and slots taken of them
leases          a match turned into pins
resume_points   the boundaries it leaves for others to resume from
page_slots      pages of a running request
state_slots     its states
runs            divisions of its runs of pages
offers          what of its own it offers to the tree
tables          those slots as the engine reads them
load_back       copies from HOST that it waits for
publishing      its data, shared through the tree
backup          which nodes are copied to HOST, and when
eviction        slots freed for it in one pool
"""
