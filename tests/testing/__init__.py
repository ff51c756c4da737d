"""The contract suite itself: its reports and refusals."""
