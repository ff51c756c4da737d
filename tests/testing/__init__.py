"""The contract suite itself: what it reports, and what it refuses."""
