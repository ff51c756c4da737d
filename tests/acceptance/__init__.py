"""All that a GPU can show in one command."""
