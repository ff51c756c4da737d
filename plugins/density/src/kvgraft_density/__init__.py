"""The policy `density`: evicts the data with the fewest expected reuses per time that it stays.

policy     the policy, and its order of a pool
learning   prefixes that were seen and how they came back; what a class of data is worth
"""
