"""Events, statistics and tracers of a cache."""
