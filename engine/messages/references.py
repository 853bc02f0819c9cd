"""Resolves references within a JSON schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

Schema = dict[str, Any]
VALUES = ("enum", "const", "default", "examples")  # keywords that hold values, not schemas
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
ANCHORS = ("$anchor", "$dynamicAnchor", "$id", "id")


class References:
    """Resolves references in one document: by path, by anchor and by ``$id``."""

    def __init__(self, document: Any) -> None:
        self._roots: dict[str, Any] = {"": document}
        self._named: dict[str, Any] = {}
        self._bases: dict[int, str] = {}
        self._known: dict[tuple[str, str], list[Any]] = {}  # targets by base and reference
        self.paths: dict[int, str] = {}
        """The path of each schema, by its ``id()``."""
        self.schemas: list[Schema] = []
        """All objects that may be schemas."""
        for schema, base, path in _schemas(document):
            self.schemas.append(schema)
            self._bases[id(schema)] = base
            self.paths[id(schema)] = path
            if "$id" in schema or "id" in schema:
                self._roots.setdefault(base, schema)
            for key in ANCHORS:
                if isinstance(name := schema.get(key), str):
                    name = name if key.endswith("id") else f"#{name}"
                    self._named.setdefault(_joined(base, name), schema)

    def targets(self, schema: Schema) -> list[Any]:
        """The schemas to which a schema refers, except those that are missing or in other files."""
        found = []
        for key in REFERENCES:
            if isinstance(reference := schema.get(key), str):
                at = self._bases.get(id(schema), ""), reference
                if at not in self._known:
                    self._known[at] = self._at(_joined(*at))
                found += self._known[at]
        return found

    def _at(self, reference: str) -> list[Any]:
        """The schema to which a reference leads, as a list with one entry, or []."""
        if reference in self._named:
            return [self._named[reference]]
        base, path = urldefrag(reference)
        if base not in self._roots or (path and not path.startswith("/")):
            return []
        found = self._roots[base]
        for part in path.split("/")[1:]:
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            else:
                return []
        return [found]


def _schemas(document: Any) -> Iterator[tuple[Schema, str, str]]:
    """All objects that may be schemas, each with its base URI and its path in the document."""
    waiting: list[tuple[Any, str, str]] = [(document, "", "#")]
    while waiting:
        found, base, path = waiting.pop()
        if isinstance(found, list):
            waiting += [(each, base, f"{path}/{at}") for at, each in enumerate(found)]
        if not isinstance(found, dict):
            continue
        for key in ("$id", "id"):
            if isinstance(found.get(key), str) and not found[key].startswith("#"):
                base = urldefrag(_joined(base, found[key]))[0]
        yield found, base, path
        waiting += [
            (each, base, f"{path}/{key}") for key, each in found.items() if key not in VALUES
        ]


def _joined(base: str, reference: str) -> str:
    """Resolve a reference against a base URI."""
    try:
        return urljoin(base, reference)
    except ValueError:  # not a URI
        return reference
