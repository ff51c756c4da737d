"""Rules for the sources: imports and public names."""
