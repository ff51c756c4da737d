"""What spans distributions."""
