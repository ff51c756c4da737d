"""What the documents claim: commands run, examples print what they say, links lead somewhere."""
