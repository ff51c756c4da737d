"""The guard: the defects it finds, its silence without one, and its absence when off.

scene               guarded caches over components that a test makes misbehave
guarded             guarded caches over the component sets of `tests.serving`
defect              the list of defects, filled by
  hook_defects        components, and a core that calls their hooks wrongly
  request_defects     a core that breaks its promises to requests
  books_defects       a core that evicts, moves and books wrongly
  storage_defects     a storage tier that starts, counts, publishes and frees wrongly
  shadow_defects      a core whose books agree, found by a second opinion
"""
