"""Collective operations of the ranks that compute one model together."""
