"""The policy `density`: data that is expected to come back least per time it stays leaves first.

policy     the policy, and its order of a pool
learning   prefixes that were seen and how they came back; what a class of data is worth
"""
