"""The documents' claims: commands run, examples print their output, links lead somewhere."""
