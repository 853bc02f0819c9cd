"""The JSON-Schema-Test-Suite, of which each instance is followed token by token.

Schemas that refer to other documents and the folder ``optional/`` are left aside. An instance is
written in several spellings of the same value: a right one counts as accepted if one of them is, a
wrong one as refused only if all are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urldefrag, urljoin

from engine import RequestError
from engine.structured.decide import GrammarError
from structured.checks import Bench

# Folders of the suite, and what a schema of that draft calls itself.
DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
}
PART = Path(__file__).parent / "suite"  # a part of the suite, with its licence
# Options of ``StructuredOutputsParams`` with which objects are as JSON schema has them.
OPENED: dict[str, Any] = {"additional_properties": "open", "property_order": "free"}
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_NO_SCHEMAS = ("enum", "const", "default", "examples")


@dataclass(frozen=True)
class Instance:
    description: str
    value: Any
    is_valid: bool


@dataclass(frozen=True)
class Group:
    """A schema of the suite and its instances."""

    draft: str
    keyword: str
    description: str
    schema: dict[str, Any]
    instances: tuple[Instance, ...]

    @property
    def name(self) -> str:
        return f"{self.draft}, {self.keyword}, {self.description}"


@dataclass
class Followed:
    """What became of a group. Each list has descriptions of instances."""

    group: Group
    refusal: str = ""  # why the schema was refused, if it was
    accepted: list[str] = field(default_factory=list)
    respelled: list[str] = field(default_factory=list)  # accepted, but not as the suite spells it
    not_accepted: list[str] = field(default_factory=list)  # valid
    not_refused: list[str] = field(default_factory=list)  # invalid
    refused: list[str] = field(default_factory=list)  # invalid


def groups_of(suite: Path, drafts: Sequence[str] = tuple(DRAFTS)) -> list[Group]:
    """All of the suite's groups that refer to nothing outside their own schema.

    suite: the folder that has one folder for each draft, or one file as ``PART`` has.
    """
    found = []
    for draft in drafts:
        for path in sorted((suite / draft).glob("*.json")):
            groups = json.loads(path.read_text(encoding="utf-8"))
            found += [_group(draft, path.stem, group) for group in groups]
        if (kept := suite / f"{draft}.jsonl").is_file():
            groups = [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()]
            found += [_group(draft, group["keyword"], group) for group in groups]
    return [group for group in found if not refers_elsewhere(group.schema)]


def _group(draft: str, keyword: str, group: dict[str, Any]) -> Group:
    schema = group["schema"]
    if isinstance(schema, bool):  # a request's schema is an object
        schema = {"allOf": [schema]}
    instances = tuple(
        Instance(each["description"], each["data"], each["valid"]) for each in group["tests"]
    )
    schema = {"$schema": DRAFTS[draft], **schema}
    return Group(draft, keyword, group["description"], schema, instances)


def refers_elsewhere(schema: Any) -> bool:
    """Whether a schema refers to a document that is not within it, by any of its references."""
    own, asked = {""}, set()
    for base, part in _schemas(schema, ""):
        own.add(urldefrag(base).url)
        for key in ("$ref", "$dynamicRef", "$recursiveRef"):
            if isinstance(part.get(key), str):
                asked.add(urldefrag(urljoin(base, part[key])).url)
    declared = schema.get("$schema") if isinstance(schema, dict) else None
    is_own_dialect = declared is not None and declared not in DRAFTS.values()
    return is_own_dialect or not asked <= own


def _schemas(schema: Any, base: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each schema within this one, with its base address."""
    if isinstance(schema, list):
        for each in schema:
            yield from _schemas(each, base)
    if not isinstance(schema, dict):
        return
    if isinstance(name := schema.get("$id"), str):
        base = urljoin(base, name)
    yield base, schema
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, dict):
            yield from _schemas([*value.values()], base)
        elif key not in _NO_SCHEMAS:
            yield from _schemas(value, base)


def spellings(value: Any) -> list[str]:
    """JSON texts of this value, the suite's own spelling first."""
    values = [value]
    if (whole := _whole(value)) is not value and json.dumps(whole) != json.dumps(value):
        values.append(whole)
    separators = ((", ", ": "), (",", ":"))
    texts = [
        json.dumps(each, ensure_ascii=False, separators=pair)
        for each in values
        for pair in separators
    ]
    return list(dict.fromkeys(texts))


def _whole(value: Any) -> Any:
    """The value with numbers such as 1.0 written as integers."""
    if isinstance(value, list):
        return [_whole(each) for each in value]
    if isinstance(value, dict):
        return {name: _whole(each) for name, each in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def follow(bench: Bench, group: Group, options: dict[str, Any]) -> Followed:
    """options: of ``StructuredOutputsParams``, besides the schema."""
    found = Followed(group)
    try:
        compilation = bench.compiled({"json": group.schema, **options})
    except (RequestError, GrammarError) as error:
        found.refusal = str(error)
        return found
    for instance in group.instances:
        texts = spellings(instance.value)
        taken = [text for text in texts if _is_taken(bench, compilation, text)]
        if instance.is_valid:
            first = json.loads(taken[0]) if taken else None
            is_own = bool(taken) and json.dumps(first) == json.dumps(instance.value)
            kind = found.accepted if is_own else found.respelled if taken else found.not_accepted
        else:
            kind = found.not_refused if taken else found.refused
        kind.append(instance.description)
    return found


def _is_taken(bench: Bench, compilation: Any, text: str) -> bool:
    """Whether every way to cut the text into tokens passes the masks to its end."""
    found = set()
    for tokens in bench.tokenisations(text):
        whole = [*tokens, bench.eos[0]]
        passed = bench.num_accepted(compilation.wait(), tokens)
        if passed != compilation.wait().num_allowed(whole):
            raise AssertionError(f"masks let {passed} tokens pass, num_allowed another: {text!r}")
        found.add(passed == len(whole))
    assert len(found) == 1, f"it depends on how the text is cut into tokens: {text!r}"
    return found.pop()
