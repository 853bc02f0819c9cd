"""Convert a Lark grammar to one regular expression.

A string inside JSON can be constrained by a regular expression, but not by a grammar. Recursive
rules are unrolled a few times, so the expression matches only a part of the grammar's texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple, cast

MAX_NESTING = 2  # how often a recursive rule is unrolled
MAX_CHARS = 200_000  # characters of the expression
LINE = re.compile(r"(?P<name>[!?]*[A-Za-z_]\w*)(?:\.-?\d+)?\s*:(?!:)")
TOKEN = re.compile(
    r"""\s+|(?P<string>"(?:\\.|[^"\\])*"i?)|(?P<regex>/(?!/)(?:\\.|[^/\\\n])+/[a-z]*)"""
    r"""|(?P<name>[A-Za-z_]\w*)|(?P<number>\d+)|(?P<mark>->|\.\.|[()\[\]|*+?~])"""
)
COMMON = {
    "CNAME": r"[_a-zA-Z][_a-zA-Z0-9]*",
    "CR": r"\r",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "DIGIT": r"[0-9]",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
    "FLOAT": r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "HEXDIGIT": r"[0-9a-fA-F]",
    "INT": r"[0-9]+",
    "LCASE_LETTER": r"[a-z]",
    "LETTER": r"[a-zA-Z]",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_INT": r"[+-]?[0-9]+",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "UCASE_LETTER": r"[A-Z]",
    "WORD": r"[a-zA-Z]+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}
"""Expressions for ``%import common.NAME``."""
FLAGS = frozenset("ims")


class LarkError(ValueError):
    """A malformed grammar, or one with unsupported features."""


class Token(NamedTuple):
    """A token of a grammar's text; ``kind``: the name of its group in the pattern ``TOKEN``."""

    kind: str
    text: str


def regex_of_lark(grammar: str) -> str:
    """Convert a grammar to a regular expression. Raises ``LarkError`` if that fails."""
    rules, ignored = _rules_of(grammar)
    if "start" not in rules:
        raise LarkError("it has no rule named start")
    space = "|".join(COMMON.get(name) or _expand(rules, name, "", {}) or "" for name in ignored)
    space = f"(?:{space})*" if space else ""
    whole = _expand(rules, "start", space, {})
    if whole is None:
        raise LarkError("its rules are recursive without an end")
    return whole + space


Node = tuple[str, "str | list[Node] | tuple[Node, str]"]


def _rules_of(grammar: str) -> tuple[dict[str, Node], list[str]]:
    """The rules of a grammar by name, and the names given to its ``%ignore`` expressions."""
    rules: dict[str, Node] = {}
    ignored: list[str] = []
    for line in _whole_lines(grammar):
        if line.startswith("%import"):
            rules.update(_imported(line))
        elif line.startswith("%ignore"):
            ignored.append(f"ignored {len(ignored)}")
            rules[ignored[-1]] = RegexParser(line.removeprefix("%ignore")).whole()
        elif found := LINE.match(line):
            rules[found["name"].lstrip("!?")] = RegexParser(line[found.end() :]).whole()
        else:
            raise LarkError(f"{line!r:.60} is not a rule")
    return rules, ignored


def _whole_lines(grammar: str) -> Iterator[str]:
    """Yield each rule and directive of a grammar as one line, without comments."""
    whole = ""
    for line in grammar.splitlines():
        line = re.sub(r"""^\s*(//|#).*""", "", line).rstrip()
        if not line:
            continue
        begins = line.startswith("%") or LINE.match(line) is not None
        if begins and whole:
            yield whole
            whole = ""
        whole = f"{whole} {line.strip()}" if whole else line.strip()
    if whole:
        yield whole


def _imported(line: str) -> dict[str, Node]:
    found = re.fullmatch(r"%import\s+common\.(\w+)(?:\s*->\s*(\w+))?", line)
    listed = re.fullmatch(r"%import\s+common\s*\(([\w\s,]+)\)", line)
    names = [(found[1], found[2] or found[1])] if found else []
    if listed:
        names = [(each.strip(), each.strip()) for each in listed[1].split(",")]
    if not names or any(name not in COMMON for name, _ in names):
        raise LarkError(f"{line!r:.60} is not supported")
    return {alias: ("regex", COMMON[name]) for name, alias in names}


class RegexParser:
    """Parses the expression of a Lark rule, after its colon."""

    def __init__(self, text: str) -> None:
        self._tokens = list(_tokens_of(text))
        self._at = 0

    def whole(self) -> Node:
        """Parse the complete expression. Raises ``LarkError``."""
        node = self._any_of()
        if self._at < len(self._tokens):
            raise LarkError(f"{self._tokens[self._at].text!r:.40} is not expected")
        return node

    def _next(self) -> str:
        return self._tokens[self._at].text if self._at < len(self._tokens) else ""

    def _take(self, *texts: str) -> bool:
        token = self._tokens[self._at] if self._at < len(self._tokens) else None
        is_there = token is not None and token.kind == "mark" and token.text in texts
        self._at += is_there
        return is_there

    def _any_of(self) -> Node:
        nodes = [self._sequence()]
        while self._take("|"):
            nodes.append(self._sequence())
        return ("any", nodes)

    def _sequence(self) -> Node:
        nodes = []
        while self._at < len(self._tokens) and self._next() not in ("|", ")", "]"):
            if self._take("->"):
                self._at += 1
                continue
            nodes.append(self._repeated())
        return ("all", nodes)

    def _repeated(self) -> Node:
        node = self._atom()
        while self._next() in ("*", "+", "?", "~"):
            mark = self._next()
            self._at += 1
            if mark == "~":
                low = high = self._number()
                if self._take(".."):
                    high = self._number()
                mark = f"{{{low},{high}}}"
            node = ("many", (node, mark))
        return node

    def _number(self) -> str:
        text = self._next()
        if not text.isdecimal():
            raise LarkError(f"{text!r:.40} is not a number")
        self._at += 1
        return text

    def _atom(self) -> Node:
        if self._take("("):
            return self._closed(")")
        if self._take("["):
            return ("many", (self._closed("]"), "?"))
        token = self._tokens[self._at]
        self._at += 1
        if token.kind == "name":
            return ("name", token.text)
        if token.kind == "regex":
            return ("regex", _regex_in(token.text))
        if token.kind == "string" and self._take(".."):
            last = self._tokens[self._at].text if self._at < len(self._tokens) else '""'
            self._at += 1
            return ("regex", f"[{re.escape(_text_in(token.text))}-{re.escape(_text_in(last))}]")
        if token.kind == "string":
            text = re.escape(_text_in(token.text))
            return ("regex", f"(?i:{text})" if token.text.endswith("i") else text)
        raise LarkError(f"{token.text!r:.40} is not expected")

    def _closed(self, end: str) -> Node:
        node = self._any_of()
        if not self._take(end):
            raise LarkError(f"a {end} is missing")
        return node


def _tokens_of(text: str) -> Iterator[Token]:
    at = 0
    while at < len(text):
        if text.startswith("//", at):
            return
        found = TOKEN.match(text, at)
        if found is None:
            raise LarkError(f"{text[at:]!r:.40} is not supported")
        at = found.end()
        if found.lastgroup is not None:
            yield Token(found.lastgroup, found[0])


def _text_in(written: str) -> str:
    quoted = written.removesuffix("i")
    try:
        return str(json.loads(quoted))
    except ValueError:
        return quoted[1:-1].encode().decode("unicode_escape")


def _regex_in(written: str) -> str:
    body, _, flags = written[1:].rpartition("/")
    body = body.replace("\\/", "/")
    if set(flags) - FLAGS:
        raise LarkError(f"the flags of {written!r:.40} are not supported")
    return f"(?{flags}:{body})" if flags else f"(?:{body})"


def _expand(rules: dict[str, Node], name: str, space: str, inside: dict[str, int]) -> str | None:
    """Expand a grammar rule to a regular expression; ``None`` if it is nested deeper than
    ``MAX_NESTING``. space: expression for ignored text before each terminal; inside: for each rule,
    how often it encloses this one."""
    if name not in rules:
        raise LarkError(f"{name!r:.40} is not defined")
    if inside.get(name, 0) > MAX_NESTING:
        return None
    is_terminal = name.isupper() or " " in name
    inner = {**inside, name: inside.get(name, 0) + 1}
    found = _expression(rules, rules[name], "" if is_terminal else space, inner)
    if found is not None and len(found) > MAX_CHARS:
        raise LarkError("it is too large once its rules are expanded")
    return f"{space}{found}" if is_terminal and found is not None else found


def _expression(
    rules: dict[str, Node], node: Node, space: str, inside: dict[str, int]
) -> str | None:
    kind, about = node
    if kind == "name":
        return _expand(rules, str(about), space, inside)
    if kind == "regex":
        return f"{space}{about}"
    if kind == "many":
        inner, mark = cast("tuple[Node, str]", about)
        found = _expression(rules, inner, space, inside)
        if found is None:
            return None if mark == "+" or mark.startswith("{") else ""
        return f"(?:{found}){mark}"
    nodes = cast("list[Node]", about)
    parts = [_expression(rules, each, space, inside) for each in nodes]
    if kind == "all":
        return None if None in parts else "".join(filter(None, parts))
    kept = [part for part in parts if part is not None]
    if not kept:
        return None
    return f"(?:{'|'.join(kept)})" if len(kept) > 1 else kept[0]
