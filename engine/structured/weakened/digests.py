"""Digests of schemas: equal for schemas that differ only in titles, descriptions and the like."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import msgspec

from engine.structured.keywords import ANNOTATIONS

_BY_NAME = frozenset(
    {"properties", "patternProperties", "dependentSchemas", "dependentRequired", "dependencies"}
)
_VALUES = frozenset({"enum", "const"})
Entry = tuple[bytes, Any, bool]  # key, value, and whether the value maps names to schemas


class Digests:
    """Digests of schemas, cached by ``id()``: the schemas must outlive this object."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bool], bytes] = {}

    def of(self, schema: Any) -> bytes:
        """Return a digest. Annotations such as titles do not change it, the order of keys does."""
        waiting = [(schema, False)]
        while waiting:
            each, has_names = waiting[-1]
            parts = [] if self._is_known(each, has_names) else [*_parts(each, has_names)]
            missing = [
                (part, is_map) for _, part, is_map in parts if not self._is_known(part, is_map)
            ]
            waiting += missing
            if not missing:
                waiting.pop()
                if parts or not self._is_known(each, has_names):
                    self._known[id(each), has_names] = self._joined(parts)
        return self._one(schema, False)

    def _is_known(self, part: Any, has_names: bool) -> bool:
        return not isinstance(part, dict | list) or (id(part), has_names) in self._known

    def _one(self, part: Any, has_names: bool) -> bytes:
        if isinstance(part, dict | list):
            return self._known[id(part), has_names]
        return part if isinstance(part, bytes) else msgspec.json.encode(part)

    def _joined(self, parts: list[Entry]) -> bytes:
        made = blake2b(digest_size=20)
        for key, value, has_names in parts:
            for text in (key, self._one(value, has_names)):
                made.update(b"%d:" % len(text))
                made.update(text)
        return made.digest()


def _parts(each: Any, has_names: bool) -> Iterator[Entry]:
    if isinstance(each, list):
        yield from ((b"", part, False) for part in each)
        return
    for key, value in each.items():
        if has_names:
            yield key.encode(), value, False
        elif key in _VALUES:
            yield key.encode(), msgspec.json.encode(value), False
        elif key not in ANNOTATIONS:
            yield key.encode(), value, key in _BY_NAME and isinstance(value, dict)
