"""What the sources may say: who imports whom, and what is public."""
