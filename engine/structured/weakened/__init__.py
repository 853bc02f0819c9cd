"""Rewrites a JSON schema for llguidance. The new schema allows all that the old one allows."""
