"""What the sources may say: who imports whom, what is public, how long a module gets."""
