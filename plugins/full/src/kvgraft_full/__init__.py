"""Full attention for kvgraft."""
