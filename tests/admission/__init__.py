"""Admission on real caches: sound, live, and without a trace when it says no."""
