"""Host-resident sparse attention for kvgraft."""
