"""Rewrites a JSON schema for llguidance: all that it allows stays allowed, and little more is."""
