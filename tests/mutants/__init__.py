"""Known-bad components and cores, one defect each; the contract suite must find every one.

packages     a correct component whose parts can be replaced
components   components with one defect
cores        the core with one defect
guarded_cores, busy_replays, under_guard    bad cores for the guard alone
legal        unusual components that keep the contract, and must pass
killing      looking for a defect
table        the kill table
by_tests, put_in    the tests on bad cores that the suite does not find
"""
