"""Structured output: text that must match a JSON schema, a regular expression or a grammar."""
