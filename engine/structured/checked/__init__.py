"""Enforces the parts of JSON schemas that a grammar cannot, on the JSON written so far."""
