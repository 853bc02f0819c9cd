"""Resolves references within a JSON schema document.

A schema with an ``$id`` starts a resource of its own, in which anchors and fragments are looked up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from engine.structured.schemas import SchemaError

Schema = dict[str, Any]
BY_NAME = (
    *("properties", "patternProperties", "$defs", "definitions"),
    *("dependentSchemas", "dependencies"),
)
IN_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
ALONE = (
    *("items", "additionalItems", "contains", "unevaluatedItems", "additionalProperties"),
    *("propertyNames", "unevaluatedProperties", "not", "if", "then", "else"),
)
# Drafts by a part of the address of their own schema. Unknown ones are read as the newest.
DRAFTS = {"draft-03": 3, "draft-04": 4, "draft-06": 6, "draft-07": 7, "2019-09": 2019}
NEWEST = 2020


class SchemaResource:
    """A part of the document that has its own address (``$id``)."""

    def __init__(self, address: str, root: Any, draft: int) -> None:
        self.address = address
        self.root = root
        self.draft = draft
        self.anchors: dict[str, Any] = {}
        self.dynamic: dict[str, Any] = {}

    @property
    def is_recursive(self) -> bool:
        """Whether a ``$recursiveRef`` to this resource may lead to an outer one instead."""
        return isinstance(self.root, dict) and self.root.get("$recursiveAnchor") is True


class Document:
    """A JSON schema document with all the resources in it."""

    def __init__(self, schema: Any) -> None:
        self._resources: dict[str, SchemaResource] = {}
        self._homes: dict[int, SchemaResource] = {}
        self.is_dynamic = False  # a reference depends on how its schema was reached
        base = ""
        if isinstance(schema, dict) and isinstance(schema.get("$id"), str):
            base = urldefrag(_joined("", schema["$id"]))[0]
        self.root = self._resource(base, schema, NEWEST)
        self._resources.setdefault("", self.root)
        self._walk(schema, self.root)

    @property
    def resources(self) -> list[SchemaResource]:
        """All resources, each once."""
        return list(dict.fromkeys(self._resources.values()))

    def home(self, schema: Schema) -> SchemaResource:
        return self._homes[id(schema)]

    def found(self, schema: Schema, reference: str, keyword: str) -> Any:
        """Return the target of a reference. Raises ``SchemaError`` if it is not in the document."""
        home = self.home(schema)
        if reference.startswith("#"):
            resource: SchemaResource | None = home
            fragment = reference[1:]
        else:
            address, fragment = urldefrag(_joined(home.address, reference))
            resource = self._resources.get(address)
        if resource is None:
            raise SchemaError(
                f"{keyword} is {reference!r:.120}, which is another file: copy it into $defs"
            )
        fragment = unquote(fragment)
        target = (
            resource.anchors.get(fragment)
            if fragment and not fragment.startswith("/")
            else self._at(resource, fragment)
        )
        if not isinstance(target, dict | bool):
            raise SchemaError(
                f"{keyword} is {reference!r:.120}, which is not a schema in the document"
            )
        if isinstance(target, dict) and id(target) not in self._homes:
            self._walk(target, resource)
        return target

    def _at(self, resource: SchemaResource, pointer: str) -> Any:
        found = resource.root
        for part in pointer.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict):
                found = found.get(name)
            elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            else:
                return None
        return found

    def _resource(self, address: str, root: Any, draft: int) -> SchemaResource:
        if isinstance(root, dict) and isinstance(named := root.get("$schema"), str):
            draft = next((each for key, each in DRAFTS.items() if key in named), NEWEST)
        return self._resources.setdefault(address, SchemaResource(address, root, draft))

    def _walk(self, schema: Any, home: SchemaResource) -> None:
        waiting = [(schema, home)]
        while waiting:
            each, resource = waiting.pop()
            if not isinstance(each, dict) or id(each) in self._homes:
                continue
            if each is not resource.root:
                resource = self._entered(each, resource)
            self._homes[id(each)] = resource
            self._note_anchors(each, resource)
            waiting.extend((part, resource) for part in parts(each))

    def _entered(self, schema: Schema, resource: SchemaResource) -> SchemaResource:
        """Return the resource to which a schema inside ``resource`` belongs: a new one if the
        schema has an ``$id``."""
        named = schema.get("$id", schema.get("id") if resource.draft <= 4 else None)
        is_hidden = resource.draft <= 7 and "$ref" in schema
        if not isinstance(named, str) or is_hidden:
            return resource
        if named.startswith("#"):
            resource.anchors.setdefault(named[1:], schema)
            return resource
        address = urldefrag(_joined(resource.address, named))[0]
        return self._resource(address, schema, resource.draft)

    def _note_anchors(self, schema: Schema, resource: SchemaResource) -> None:
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(name := schema.get(key), str):
                resource.anchors.setdefault(name, schema)
        if isinstance(name := schema.get("$dynamicAnchor"), str):
            resource.dynamic.setdefault(name, schema)
        if "$dynamicRef" in schema or "$recursiveRef" in schema:
            self.is_dynamic = True


def parts(schema: Schema) -> Iterator[Any]:
    """Yield the schemas that are directly inside this schema."""
    for key, value in schema.items():
        if key in BY_NAME and isinstance(value, dict):
            yield from value.values()
        elif key in IN_LISTS and isinstance(value, list):
            yield from value
        elif key in ALONE:
            yield value


def _joined(base: str, reference: str) -> str:
    """Resolve an address relative to a base address."""
    if base.startswith("urn:") and not reference.startswith("#"):
        return reference
    if base.startswith("urn:"):
        return base + reference
    try:
        return urljoin(base, reference)
    except ValueError:  # malformed
        return reference
