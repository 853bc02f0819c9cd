"""Structured output: text that must match a schema, an expression or a grammar."""
