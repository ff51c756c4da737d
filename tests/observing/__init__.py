"""What a cache tells of itself: events, statistics, tracers."""
