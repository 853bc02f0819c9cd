"""A JSON schema in the words of a grammar: all that it allows, and as little more as can be."""
