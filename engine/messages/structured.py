"""Structured outputs: the constraints of a text as users write them, and as sent to the core."""

from __future__ import annotations

import json as json_library
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from engine.errors import RequestError, RequestTypeError

Kind = Literal["json", "regex", "choice", "grammar", "json_object", "structural_tag"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Backend = Literal["auto", "guidance", "xgrammar"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
AdditionalProperties = Literal["closed", "open"]
PropertyOrder = Literal["schema", "free"]
CHOSEN: dict[str, tuple[str, ...]] = {
    "additional_properties": get_args(AdditionalProperties),
    "property_order": get_args(PropertyOrder),
}
WITH_SCHEMAS = ("json", "json_object", "structural_tag")
OF_XGRAMMAR = ("json", "json_object", "grammar")  # kinds that the backend xgrammar supports
MAX_GRAMMAR_CHARS = 1 << 20
MAX_SCHEMA_CHARS = 4 << 20  # generated schemas can have more than two million characters
# The time to compile a regular expression grows with the square of its length, and a long literal
# slows each step down for all running requests.
MAX_REGEX_CHARS = 8192
MAX_CHOICE_CHARS = 4096  # of each text
OF_JSON = (
    *("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"),
    *CHOSEN,
)
MAX_TAGS = 256
TAG_EXAMPLE = (
    '{"structures": [{"begin": "<function=f>", "schema": {"type": "object"}, "end": "</function>"}]'
    ', "triggers": ["<function="]}'
)


class StructuredOutputsParams(
    msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """A constraint of the generated text. Exactly one of the first six fields must be given:

    * ``json``: a JSON schema, as a dict or as text.
    * ``regex``: a regular expression for the whole text, in the syntax of Rust's ``regex``.
    * ``choice``: a list of texts, one of which is generated.
    * ``grammar``: a context-free grammar in Lark or GBNF notation.
    * ``json_object``: True for any JSON object.
    * ``structural_tag``: free text with parts that follow a schema, such as tool calls, as a dict
      or text: ``{"structures": [{"begin", "schema", "end"}, ...], "triggers": [...]}``.

    Options for JSON: ``disable_any_whitespace`` forbids whitespace between tokens,
    ``whitespace_pattern`` is a regular expression for it, and ``disable_additional_properties``
    allows only properties that a schema names. ``additional_properties="closed"`` does so for
    schemas that name properties and do not set ``additionalProperties``.
    ``property_order="schema"`` requires the order of the schema. ``None`` uses the engine's option.

    ``backend``: the library that compiles the constraint: ``"guidance"`` (llguidance),
    ``"xgrammar"`` (optional; for JSON and GBNF), or ``"auto"`` (xgrammar only for what llguidance
    refuses).

    Raises ``RequestError`` (a ``ValueError``) with field, value and a way out.
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    backend: Backend = "auto"
    additional_properties: AdditionalProperties | None = None
    property_order: PropertyOrder | None = None

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise ``RequestError`` if the fields are invalid or contradict each other."""
        _text_of(self)

    @property
    def kind(self) -> Kind:
        """The name of the constraint that was given, one of the first six fields."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)


class Opening(msgspec.Struct, frozen=True, omit_defaults=True):
    """A text after which a part of the grammar begins. Special tokens are written as text."""

    text: str  # empty: the part begins the whole text
    part: int
    scope: str = ""  # the scope text that must have been generated last, if there are several
    follows: bool = False  # True if it directly follows another part


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """A grammar as sent to the core; grammars whose JSON texts are equal are the same."""

    kind: Kind
    text: str  # a schema or a tag as JSON, a choice as a JSON list of its texts
    is_dense: bool = False  # no whitespace between JSON tokens
    is_closed: bool = False  # objects have only properties that a schema names
    whitespace: str | None = None
    backend: Backend = "auto"
    is_as_trained: bool = False  # one space after commas and colons, and no other whitespace
    is_lenient: bool = False  # keywords that cannot be enforced are ignored
    parts: tuple[Grammar, ...] = ()  # which the grammar refers to as @part_0, @part_1, ...
    num_ways: int = 0  # number of alternatives at one position, if there are many
    openings: tuple[Opening, ...] = ()  # where parts begin
    additional_properties: AdditionalProperties | None = None  # None: the engine's option
    property_order: PropertyOrder | None = None

    def with_rules(self, rules: ObjectRules) -> Grammar:
        """Return a copy in which settings that are ``None`` are taken from ``rules``."""
        return msgspec.structs.replace(
            self,
            additional_properties=self.additional_properties or rules.additional_properties,
            property_order=self.property_order or rules.property_order,
            parts=tuple(part.with_rules(rules) for part in self.parts),
        )

    def plain(self) -> Grammar:
        """A copy without settings that have no effect, so that equal grammars have equal texts."""
        is_open, is_free = self.additional_properties == "open", self.property_order == "free"
        return msgspec.structs.replace(
            self,
            additional_properties="open" if is_open else None,
            property_order="free" if is_free else None,
            parts=tuple(part.plain() for part in self.parts),
        )


class ObjectRules(NamedTuple):
    """Rules for objects in JSON schemas. A rule that is ``None`` has its default."""

    additional_properties: AdditionalProperties | None = None
    property_order: PropertyOrder | None = None

    def or_else(self, others: ObjectRules) -> ObjectRules:
        """A copy in which fields that are ``None`` are taken from ``others``."""
        return ObjectRules(
            self.additional_properties or others.additional_properties,
            self.property_order or others.property_order,
        )


NO_RULES = ObjectRules()


class ComposedForm(StructuredOutputsParams, kw_only=True, omit_defaults=True):
    """A grammar with other constraints as its parts, which it names ``@part_0`` and so on."""

    parts: tuple[Grammar, ...] = ()
    num_ways: int = 0
    openings: tuple[Opening, ...] = ()


def grammar_of(params: StructuredOutputsParams, rules: ObjectRules = NO_RULES) -> str:
    """Encode a constraint as JSON text, for ``AddRequest.grammar``. ``rules`` fill settings that
    are ``None``. Raises ``RequestError`` if the constraint is too long or invalid."""
    return msgspec.json.encode(form_of(params).with_rules(rules).plain()).decode()


def with_rules(params: StructuredOutputsParams, rules: ObjectRules) -> StructuredOutputsParams:
    """A copy of the constraint in which ``rules`` fill settings that are ``None``; the constraint
    itself if it has no JSON schemas."""
    if isinstance(params, ComposedForm):
        parts = tuple(part.with_rules(rules) for part in params.parts)
        return msgspec.structs.replace(params, parts=parts)
    if params.kind not in WITH_SCHEMAS:
        return params
    return msgspec.structs.replace(
        params,
        additional_properties=params.additional_properties or rules.additional_properties,
        property_order=params.property_order or rules.property_order,
    )


def form_of(params: StructuredOutputsParams) -> Grammar:
    """The constraint as a ``Grammar``. Raises ``RequestError`` if it is too long or invalid."""
    kind, text = _text_of(params)  # checks again, since fields may have changed
    composed = params if isinstance(params, ComposedForm) else ComposedForm(grammar="-")
    parts = composed.parts
    limit = MAX_SCHEMA_CHARS if parts or kind in WITH_SCHEMAS else MAX_GRAMMAR_CHARS
    if (size := len(text) + sum(len(part.text) for part in parts)) > limit:
        raise RequestError(
            f"the {kind} of structured_outputs has {size} characters, the limit is {limit}",
            param="structured_outputs",
        )
    return Grammar(
        kind,
        text,
        # Both mean that there is no whitespace between JSON tokens.
        params.disable_any_whitespace or params.whitespace_pattern == "",
        params.disable_additional_properties,
        params.whitespace_pattern or None,
        params.backend,
        additional_properties=params.additional_properties,
        property_order=params.property_order,
        parts=parts,
        num_ways=composed.num_ways,
        openings=composed.openings,
    )


def grammar_from(text: str) -> Grammar:
    """Decode the text of ``grammar_of``. Raises ``msgspec.DecodeError`` for anything else."""
    return msgspec.json.decode(text, type=Grammar)


def _text_of(params: StructuredOutputsParams) -> tuple[Kind, str]:
    """The kind of the constraint and its text. Raises ``RequestError`` if it is invalid."""
    try:
        return _checked_text(params)
    except RequestError as error:
        error.param = "structured_outputs"
        raise


def _checked_text(params: StructuredOutputsParams) -> tuple[Kind, str]:
    if params.json_object is False:
        params.json_object = None
    given = [kind for kind in KINDS if getattr(params, kind) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise RequestError(
            f"structured_outputs has {found}, must have exactly one of: {', '.join(KINDS)}"
        )
    kind = given[0]
    _check_options(params, kind)
    return kind, _TEXTS[kind](getattr(params, kind))


def _check_options(params: StructuredOutputsParams, kind: Kind) -> None:
    _check_backend(params, kind)
    for name in OF_JSON[:2]:
        _check_type(name, getattr(params, name), bool)
    for name, values in CHOSEN.items():
        check_chosen(f"{name} of structured_outputs", getattr(params, name), values)
    if params.additional_properties == "open" and params.disable_additional_properties:
        raise RequestError(
            "additional_properties is 'open' and disable_additional_properties is True: leave one "
            "of them out"
        )
    if params.whitespace_pattern is not None:
        _check_type("whitespace_pattern", params.whitespace_pattern, str)
        _check_characters("whitespace_pattern", params.whitespace_pattern)
        if params.disable_any_whitespace and params.whitespace_pattern:
            raise RequestError(
                f"whitespace_pattern is {params.whitespace_pattern!r:.80} and "
                "disable_any_whitespace is True: leave one of them out"
            )
    if kind in WITH_SCHEMAS:
        return
    for name in OF_JSON:
        if getattr(params, name) not in (None, False):
            raise RequestError(
                f"structured_outputs has {name} with {kind}, but {name} applies only to json, "
                f"json_object and structural_tag: leave {name} out"
            )


def check_chosen(name: str, value: object, values: tuple[str, ...]) -> None:
    """Raise ``RequestError`` if the value is neither ``None`` nor one of ``values``."""
    if value is not None and value not in values:
        raise RequestError(f"{name} is {value!r:.80}, must be one of: {', '.join(values)}")


def _check_backend(params: StructuredOutputsParams, kind: Kind) -> None:
    backend = params.backend
    _check_type("backend", backend, str)
    if backend not in BACKENDS:
        raise RequestError(
            f"backend of structured_outputs is {backend!r:.80}, must be one of: "
            f"{', '.join(BACKENDS)}"
        )
    if backend != "xgrammar":
        return
    if kind not in OF_XGRAMMAR:
        raise RequestError(
            f"structured_outputs has backend 'xgrammar' with {kind}, but xgrammar supports only "
            f"{', '.join(OF_XGRAMMAR)}: leave backend out"
        )
    if params.whitespace_pattern:
        raise RequestError(
            f"whitespace_pattern is {params.whitespace_pattern!r:.80}, which backend 'xgrammar' "
            "does not support: leave one of them out"
        )


def _check_type(name: str, value: object, *kinds: type) -> None:
    if not isinstance(value, kinds):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise RequestTypeError(
            f"{name} of structured_outputs is {_shown(value)} ({type(value).__name__}), must be a "
            f"{names}"
        )


def _read_json(name: str, value: Any) -> tuple[Any, str]:
    """Parse the field ``name``, a JSON object or JSON text. Returns the parsed value and its text.
    Raises ``RequestError`` if it is not JSON."""
    _check_type(name, value, dict, str)
    try:
        return _read_quickly(value) or _read_exactly(name, value)
    except RequestError:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(
            f"the {name} of structured_outputs is {_shown(value)}, which is not JSON: {error}"
        ) from error


def _read_quickly(value: Any) -> tuple[Any, str] | None:
    """Return the parsed JSON value and its text, or ``None`` if ``_read_json`` must check it."""
    try:
        if isinstance(value, str):
            return msgspec.json.decode(value), value
        encoded = msgspec.json.encode(value)
        # msgspec would encode some values that JSON lacks as others, e.g. NaN as null.
        return (value, encoded.decode()) if msgspec.json.decode(encoded) == value else None
    except Exception:
        return None


def _read_exactly(name: str, value: Any) -> tuple[Any, str]:
    read = json_library.loads(value) if isinstance(value, str) else value
    text = json_library.dumps(read, allow_nan=False, ensure_ascii=False)
    _check_characters(name, text)
    return read, text


def _json_text(value: Any) -> str:
    schema, text = _read_json("json", value)
    if not isinstance(schema, dict):
        raise RequestError(
            f"the json of structured_outputs is {value!r:.80}, must be a JSON schema: an object, "
            "e.g. {'type': 'object'}"
        )
    return text


def _plain_text(name: str) -> Any:
    def checked(value: Any) -> str:
        _check_type(name, value, str)
        if not value:
            raise RequestError(f"the {name} of structured_outputs is empty")
        if name == "regex":
            _check_length("the regex", value, MAX_REGEX_CHARS)
        _check_characters(name, value)
        return str.__str__(value)  # also for a str Enum

    return checked


def _check_characters(name: str, text: str) -> None:
    """Raise ``RequestError`` for a lone surrogate, which no generated text can contain."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the {name} of structured_outputs has {text[error.start]!r} at {error.start}, which "
            "is not a valid character: leave it out"
        ) from error


def _shown(value: object) -> str:
    try:
        return f"{value!r:.80}"
    except RecursionError:
        return "(nested too deeply to be shown)"


def _check_length(what: str, text: str, limit: int) -> None:
    if len(text) > limit:
        raise RequestError(
            f"{what} of structured_outputs, {text!r:.40}..., has {len(text)} characters, the limit "
            f"is {limit}: make it shorter"
        )


def _choice_text(value: Any) -> str:
    _check_type("choice", value, list)
    if not value:
        raise RequestError("the choice of structured_outputs is [], must have at least one text")
    for text in value:
        _check_type("an entry of choice", text, str)
        if not text:
            raise RequestError("the choice of structured_outputs has an empty text")
        _check_length("a text of choice", text, MAX_CHOICE_CHARS)
        _check_characters("choice", text)
    return json_library.dumps(value, ensure_ascii=False)


def _tag_text(value: Any) -> str:
    tags, text = _read_json("structural_tag", value)
    if isinstance(tags, dict) and "format" in tags and "structures" not in tags:
        raise RequestError(
            "the structural_tag of structured_outputs has the field format, which is not "
            f"supported; use structures and triggers, e.g. {TAG_EXAMPLE}"
        )
    if not isinstance(tags, dict) or not {"structures", "triggers"} <= tags.keys():
        raise RequestError(
            f"the structural_tag of structured_outputs is {tags!r:.80}, must have structures and "
            f"triggers, e.g. {TAG_EXAMPLE}"
        )
    structures, triggers = tags["structures"], tags["triggers"]
    for name, entries in (("structures", structures), ("triggers", triggers)):
        _check_type(f"{name} in structural_tag", entries, list)
        if not 0 < len(entries) <= MAX_TAGS:
            raise RequestError(
                f"{name} in structural_tag of structured_outputs has {len(entries)} entries, must "
                f"have 1 to {MAX_TAGS}"
            )
    for trigger in triggers:
        _check_type("a trigger in structural_tag", trigger, str)
        if not trigger:
            raise RequestError("a trigger in structural_tag of structured_outputs is empty")
    for structure in structures:
        _check_structure(structure, triggers)
    return text


def _check_structure(structure: Any, triggers: list[str]) -> None:
    _check_type("an entry of structures in structural_tag", structure, dict)
    if structure.keys() != {"begin", "schema", "end"}:
        raise RequestError(
            "an entry of structures in structural_tag of structured_outputs has "
            f"{', '.join(map(str, structure)) or 'nothing'}, must have begin, schema and end"
        )
    for name in ("begin", "end"):
        _check_type(f"{name} in structural_tag", structure[name], str)
    _check_type("schema in structural_tag", structure["schema"], dict)
    if not any(structure["begin"].startswith(trigger) for trigger in triggers):
        raise RequestError(
            f"begin in structural_tag of structured_outputs is {structure['begin']!r:.80}, must "
            f"start with one of the triggers: {', '.join(map(repr, triggers))!s:.200}"
        )


def _json_object_text(value: Any) -> str:
    _check_type("json_object", value, bool)
    return "{}"


_TEXTS = {
    "json": _json_text,
    "regex": _plain_text("regex"),
    "choice": _choice_text,
    "grammar": _plain_text("grammar"),
    "json_object": _json_object_text,
    "structural_tag": _tag_text,
}
