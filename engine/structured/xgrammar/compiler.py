"""Schemas and grammars compiled by xgrammar, for requests whose form llguidance refuses.

The library is optional (https://github.com/mlc-ai/xgrammar); it brings torch and pydantic, and is
imported for the first grammar that needs it. Its compiling cannot be interrupted: what it is given
is limited before, and a request whose grammar takes longer all the same fails.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from engine.errors import EngineError
from engine.messages.finite import without_endless
from engine.messages.step import Column
from engine.messages.structured import OF_XGRAMMAR, Grammar
from engine.structured.checked.checker import Checker
from engine.structured.decide import GrammarError
from engine.structured.schemas import SchemaError
from engine.structured.xgrammar.narrowed import narrowed, readable

if TYPE_CHECKING:
    from llguidance import LLTokenizer

logger = logging.getLogger("engine.structured")

Eos = tuple[int, ...]

MAX_CHARS = {"grammar": 50_000, "json": 100_000}
MAX_WHITESPACE = 24  # characters between two tokens of JSON: a new line and its indentation
# A literal or a class of a grammar; after them what the library has beyond GBNF.
_LITERAL = re.compile(r'"(?:[^"\\\n]|\\.)*"|\[(?:[^\]\\\n]|\\.)*\]|#[^\n]*')
_EXTENSION = re.compile(r"\(\s*=|\b(?:\w*TagDispatch|\w*Token)\s*\(")


class GrammarSource(NamedTuple):
    """A form for the library."""

    written: Any
    """A JSON schema, or the text of a grammar."""
    checker: Checker | None = None
    """A checker of the schema, where the library enforces less of it."""


def source_of(form: Grammar) -> GrammarSource:
    """The form for the library. Raises ``SchemaError`` for what would not be enforced."""
    if form.kind not in OF_XGRAMMAR:
        raise SchemaError(f"{form.kind} is not offered with xgrammar")
    if len(form.text) > (limit := MAX_CHARS.get(form.kind, len("{}"))):
        raise SchemaError(
            f"the {form.kind} has {len(form.text)} characters, for xgrammar the limit is {limit}"
        )
    if form.kind == "grammar":
        return GrammarSource(_grammar(form.text))
    if form.whitespace is not None:
        raise SchemaError("whitespace_pattern is not offered with xgrammar: leave it out")
    if form.kind == "json_object":
        return GrammarSource(narrowed({"type": "object"}, is_closed=form.is_closed).schema)
    schema = without_endless(readable(form.text), is_closed=form.is_closed)
    found = narrowed(schema, is_closed=form.is_closed)
    return GrammarSource(found.schema, Checker(schema) if found.needs_checker else None)


def _grammar(text: str) -> str:
    bare = _LITERAL.sub('""', text)
    if not re.search(r"^\s*root\s*::=", bare, re.M):
        raise SchemaError("the grammar has no rule 'root ::= ...': xgrammar reads GBNF")
    if found := _EXTENSION.search(bare):
        raise SchemaError(f"the grammar has {found[0]!r}, which is no GBNF")
    return text


class XGrammars:
    """The library with the tokens of one model."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._compilers: dict[Eos, Any] = {}
        self._making = Lock()

    def prepare(self, tokenizer: LLTokenizer, eos: Eos) -> None:
        """Import the library and make its view of the tokens, once for the ids that end text."""
        with self._making:
            if eos in self._compilers:
                return
            began = time.perf_counter()
            tokens = [_bytes_of(tokenizer, each) for each in range(tokenizer.vocab_size)]
            self._compilers[eos] = _compiler(tokens[: self._vocab_size], self._vocab_size, eos)
            seconds = time.perf_counter() - began
            logger.info("xgrammar was made ready for grammars in %.1f s", seconds)

    def source_of(self, form: Grammar) -> GrammarSource:
        """See ``source_of``."""
        return source_of(form)

    def compiled(self, form: Grammar, source: GrammarSource, eos: Eos) -> CompiledGrammar:
        """See ``compiled``."""
        return compiled(self._compilers[eos], form, source)

    def clear(self) -> None:
        """Let go of what was prepared."""
        self._compilers.clear()


class CompiledGrammar:
    """A grammar that every request gets a matcher of."""

    def __init__(self, grammar: Any) -> None:
        self._grammar = grammar
        self.num_bytes = int(grammar.memory_size_bytes)

    def matcher(self, tokenizer: LLTokenizer, eos: Eos) -> XGrammarMatcher:
        """One at the beginning."""
        from xgrammar import GrammarMatcher

        return XGrammarMatcher(GrammarMatcher(self._grammar), tokenizer, eos)


class XGrammarMatcher:
    """A ``Matcher``. The library follows texts only up to their end."""

    def __init__(self, matcher: Any, tokenizer: LLTokenizer, eos: Eos) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._eos = eos

    def num_allowed(self, tokens: Sequence[int]) -> int:
        text = self._without_end(tokens)
        taken = self._take(text)
        may_end = taken == len(text) < len(tokens) and self._matcher.is_completed()
        self._go_back(taken)
        return taken + may_end

    def advance(self, tokens: Sequence[int]) -> None:
        text = self._without_end(tokens)
        taken = self._take(text)
        if taken < len(text):
            self._go_back(taken)
            raise GrammarError(f"token {text[taken]} is not allowed there")

    def fill(self, masks: Column, drafts: Sequence[int]) -> None:
        num_taken = 0
        for index in range(len(masks)):
            words = np.ascontiguousarray(masks[index : index + 1])
            self._matcher.fill_next_token_bitmask(words, 0)
            masks[index] = words[0]
            if index == len(drafts) or drafts[index] in self._eos or drafts[index] < 0:
                break
            if not self._matcher.accept_token(drafts[index]):
                break
            num_taken += 1
        self._go_back(num_taken)

    def forced(self, recent: Sequence[int], most: int) -> list[int]:
        text = self._matcher.find_jump_forward_string().encode()
        if not text:
            return []
        # Less the end of the text, which may be one token with what follows it.
        tokens, _ = self._tokenizer.tokenize_partial(text, recent_tokens=list(recent))
        return list(tokens[:most])

    def _take(self, tokens: Sequence[int]) -> int:
        """How many of them the library takes; it then stands after those."""
        for index, token in enumerate(tokens):
            if not self._is_text(token) or not self._matcher.accept_token(token):
                return index
        return len(tokens)

    def _is_text(self, token: int) -> bool:
        """Whether the library knows it: it prints a warning for any other."""
        is_known = 0 <= token < self._tokenizer.vocab_size
        return is_known and not self._tokenizer.is_special_token(token)

    def _without_end(self, tokens: Sequence[int]) -> list[int]:
        """The tokens before the first that ends text."""
        ends = [place for place, token in enumerate(tokens) if token in self._eos]
        return list(tokens[: ends[0]] if ends else tokens)

    def _go_back(self, num_tokens: int) -> None:
        if num_tokens:
            self._matcher.rollback(num_tokens)


def wrong_in(form: Grammar) -> str:
    """What is wrong with a form, by a tokenizer of bytes; nothing if it can be compiled."""
    try:
        source = source_of(form)
        tokens = [bytes([each]) for each in range(256)]
        compiled(_compiler([*tokens, b""], 257, (256,)), form, source)
    except EngineError as error:
        return str(error)
    return ""


def compiled(compiler: Any, form: Grammar, source: GrammarSource) -> CompiledGrammar:
    """A form and its source, compiled. Raises ``GrammarError`` with what the library says."""
    options: dict[str, Any] = {"max_whitespace_cnt": MAX_WHITESPACE}
    if form.is_dense:
        options = {"any_whitespace": False, "separators": (",", ":")}
    try:
        if form.kind == "grammar":
            return CompiledGrammar(compiler.compile_grammar(source.written))
        text = json.dumps(source.written)
        return CompiledGrammar(compiler.compile_json_schema(text, strict_mode=False, **options))
    except Exception as error:  # whatever the library raises
        # Without the time and the place in its source.
        reason = re.sub(r"^\[[\d:]+\] \S+: ", "", str(error).strip())[:2000]
        raise GrammarError(reason) from error


def _compiler(tokens: list[bytes], vocab_size: int, eos: Eos) -> Any:
    from xgrammar import GrammarCompiler, TokenizerInfo, VocabType

    info = TokenizerInfo(
        tokens,
        VocabType.RAW,
        vocab_size=vocab_size,
        stop_token_ids=list(eos),
        add_prefix_space=False,
    )
    # Compiled grammars are kept elsewhere; more threads would take the processor from the model.
    return GrammarCompiler(info, max_threads=1, cache_enabled=False)


def _bytes_of(tokenizer: LLTokenizer, token: int) -> bytes:
    """The bytes of a token that text can spell; none of another, so that it is never allowed."""
    if tokenizer.is_special_token(token):
        return b""
    found: bytes = tokenizer.decode_bytes([token])
    return found
