"""Translates a parsed grammar to llguidance's input: named grammars, of which the first is the
root.

``whitespace_pattern`` needs a second input, since llguidance may omit whitespace anywhere. It
checks only that whitespace between JSON tokens matches the pattern. The output must satisfy both
inputs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from engine.messages.structured import Grammar
from engine.structured.decide import GrammarError
from engine.structured.plans import plan_of
from engine.structured.schemas import quoted
from engine.structured.tags import SpecialOf, lark_of, none_special

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_RULES = 5_000  # per grammar: compiling time grows at least with the square
# Whitespace between JSON tokens: a few spaces, a new line and its indentation. With no limit, a
# model now and then writes hundreds of spaces and never ends its output.
WHITESPACE = r"[ \t]{0,2}(\r?\n[ \t]{0,24})?"
# Where only one text can follow, llguidance by default allows only the tokenizer's own cut of it.
# Other cuts spell the same text, and the model's likelihoods choose between them.
UNFORCED = '%llguidance {"no_forcing": true}\n'
JSON_TOKEN = (
    r'"(\\(.|\n)|[^"\\])*"|-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null|[{}\[\]:,]'
)
# The spacing that models are trained on: a space after commas and colons, and no other whitespace.
AS_TRAINED: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}

NamedGrammar = dict[str, Any]  # a grammar of llguidance's with its name


def sources_of(grammar: Grammar, special_of: SpecialOf = none_special) -> list[str]:
    """Return the inputs for llguidance: one, or two that must both accept the output.

    special_of: returns the id of the special token with a given text. Raises ``GrammarError``."""
    found = [_source(list(_grammars(grammar, "wanted", special_of)))]
    if any(each.whitespace is not None for each in (grammar, *grammar.parts)):
        found.append(_source(list(_grammars(grammar, "wanted", special_of, is_spacing=True))))
    return found


def _source(grammars: Sequence[NamedGrammar]) -> str:
    first, *others = grammars
    if first.get("lark_grammar") is None:
        first, others = {"lark_grammar": f"start: @{first['name']}\n"}, [*grammars]
    start = f"{first['lark_grammar']}\n{UNFORCED}"
    return json_text({"grammars": [{"lark_grammar": start}, *others]})


def _grammars(
    grammar: Grammar, name: str, special_of: SpecialOf, *, is_spacing: bool = False
) -> Iterator[NamedGrammar]:
    """Yield the grammar under this name, then the grammars that it refers to.

    is_spacing: enforce only the grammar's whitespace pattern, if it has one."""

    def of_value(schema: Any, name: str) -> NamedGrammar:
        if is_spacing and grammar.whitespace is not None:
            return {"lark_grammar": _spacing(grammar.whitespace), "name": name}
        return of_schema(schema, grammar, name)

    if grammar.kind == "json_object":
        yield of_value({"type": "object"}, name)
    elif grammar.kind == "json":
        yield of_value(msgspec.json.decode(grammar.text), name)
    elif grammar.kind == "structural_tag":
        tags = msgspec.json.decode(grammar.text)
        yield {"lark_grammar": lark_of(tags, special_of, name), "name": name}
        for number, structure in enumerate(tags["structures"]):
            yield of_value(structure["schema"], f"{name}_{number}")
    elif grammar.kind in ("regex", "choice"):
        yield {"lark_grammar": _of_expression(grammar), "name": name}
    else:
        yield {"lark_grammar": _of_grammar(grammar.text), "name": name}
        for number, part in enumerate(grammar.parts):
            yield from _grammars(part, f"part_{number}", special_of, is_spacing=is_spacing)


def of_schema(schema: Any, grammar: Grammar, name: str) -> NamedGrammar:
    """Compile a schema to a grammar with this name. Raises ``SchemaError``."""
    from llguidance import LLMatcher

    options: JsonCompileOptions = {"whitespace_pattern": grammar.whitespace or WHITESPACE}
    if grammar.is_dense:
        options = {"whitespace_flexible": False}
    elif grammar.is_as_trained:
        options = {**AS_TRAINED}
    if grammar.is_lenient:
        options = {**options, "lenient": True}
    text = json_text(plan_of(schema, grammar).written)
    made = LLMatcher.grammar_from_json_schema(text, overrides=options)
    (compiled,) = msgspec.json.decode(made)["grammars"]
    return {**compiled, "name": name}


def _spacing(pattern: str) -> str:
    """Return a grammar of JSON tokens separated by the pattern. Raises ``GrammarError`` if the
    pattern is malformed."""
    from llguidance import LLMatcher

    both = [{"pattern": f"^(?:{pattern})$"}, {"pattern": "^[ \\t\\n\\r]*$"}]
    text = LLMatcher.grammar_from_json_schema({"type": "string", "allOf": both})
    if LLMatcher.validate_grammar(text):
        raise GrammarError(
            f"whitespace_pattern is {pattern!r:.80}, must be a regular expression that matches "
            "spaces, tabs or new lines"
        )
    slashed = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern).replace("\n", "\\n")
    empty = " |" if _may_be_empty(pattern) else ""
    return (
        f"start: TOKEN (between TOKEN)*\nTOKEN: /{JSON_TOKEN}/\n"
        f"between: SPACE{empty}\nSPACE: /({slashed})/ & /[ \\t\\n\\r]+/\n"
    )


def _may_be_empty(pattern: str) -> bool:
    try:
        return re.fullmatch(pattern, "") is not None
    except re.error:  # the pattern may be valid in Rust's dialect only
        return True


def _of_expression(grammar: Grammar) -> str:
    from llguidance import LLMatcher

    expression = grammar.text
    if grammar.kind == "choice":
        expression = "|".join(map(quoted, msgspec.json.decode(grammar.text)))
    (compiled,) = msgspec.json.decode(LLMatcher.grammar_from_regex(expression))["grammars"]
    found: str = compiled["lark_grammar"]
    return found


def _of_grammar(text: str) -> str:
    from llguidance import grammar_from

    if (count := len(re.findall(r"^\s*[?!]?[\w-]+[^:\n]*:", text, re.M))) > MAX_RULES:
        raise GrammarError(
            f"the grammar has {count} rules, the limit is {MAX_RULES}: use fewer rules"
        )
    try:
        return grammar_from("grammar", text)
    except ValueError as error:
        raise GrammarError(str(error)) from error


def json_text(value: Any) -> str:
    return msgspec.json.encode(value).decode()
