"""Checks JSON while it is generated, by the parts of its schema that a grammar cannot enforce."""
