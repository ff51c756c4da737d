"""The cache against a brute-force model that shares no code with it.

brute_force     which boundary, which hits: from the declared definition, token by token
observing       what the tree holds, as plain dictionaries
legality        whether what vanished was allowed to
payloads        bytes that say which tokens they were computed from
engines         transfers that run, fail and are waited for on demand
components      third-party components of the tests
setups          component sets, page sizes, policies, sizes
driver          an engine that uses the cache and checks it against all of the above
machine         the Hypothesis state machine around the driver
"""
