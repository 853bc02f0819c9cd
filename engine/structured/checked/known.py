"""The keywords that the checker enforces: the grammar leaves them to it, and refuses the others."""

from __future__ import annotations

KNOWN: frozenset[str] = frozenset()
"""Names of keywords of JSON schema. A name is added here when the checker enforces it wholly."""
