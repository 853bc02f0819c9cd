"""Compiles schemas and grammars with xgrammar, for requests that llguidance refuses.

xgrammar is optional (https://github.com/mlc-ai/xgrammar); it loads torch and pydantic, and is
imported for the first grammar that needs it. Its compiling cannot be interrupted, so its input is
limited in size, and a request whose grammar still takes too long fails.
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
from engine.structured.tokens import Eos, before_end, tokenized
from engine.structured.xgrammar.narrowed import narrowed, readable

if TYPE_CHECKING:
    from llguidance import LLTokenizer

logger = logging.getLogger("engine.structured")


MAX_CHARS = {"grammar": 50_000, "json": 100_000}
MAX_WHITESPACE = 24  # characters between two JSON tokens: a new line and its indentation
# A literal, class or comment of a grammar; then xgrammar's extensions of GBNF.
_LITERAL = re.compile(r'"(?:[^"\\\n]|\\.)*"|\[(?:[^\]\\\n]|\\.)*\]|#[^\n]*')
_EXTENSION = re.compile(r"\(\s*=|\b(?:\w*TagDispatch|\w*Token)\s*\(")


class GrammarSource(NamedTuple):
    """A parsed grammar, as input for xgrammar."""

    written: Any
    """A JSON schema, or the text of a grammar."""
    checker: Checker | None = None
    """The checker of the schema, if xgrammar does not enforce all of it."""


def source_of(grammar: Grammar) -> GrammarSource:
    """Convert a grammar to xgrammar's input. Raises ``SchemaError`` if xgrammar would ignore it."""
    if grammar.kind not in OF_XGRAMMAR:
        raise SchemaError(f"{grammar.kind} is not supported by xgrammar: leave backend out")
    if len(grammar.text) > (limit := MAX_CHARS.get(grammar.kind, len("{}"))):
        raise SchemaError(
            f"{grammar.kind} has {len(grammar.text)} characters, for xgrammar the limit is {limit}"
        )
    if grammar.kind == "grammar":
        return GrammarSource(_grammar(grammar.text))
    if grammar.whitespace is not None:
        raise SchemaError("whitespace_pattern is not supported by xgrammar: leave it out")
    if grammar.kind == "json_object":
        return GrammarSource(narrowed({"type": "object"}, is_closed=grammar.is_closed).schema)
    schema = without_endless(readable(grammar.text), is_closed=grammar.is_closed)
    found = narrowed(schema, is_closed=grammar.is_closed)
    return GrammarSource(found.schema, Checker(schema) if found.needs_checker else None)


def _grammar(text: str) -> str:
    bare = _LITERAL.sub('""', text)
    if not re.search(r"^\s*root\s*::=", bare, re.M):
        raise SchemaError("the grammar has no rule 'root ::= ...', which xgrammar's GBNF requires")
    if found := _EXTENSION.search(bare):
        raise SchemaError(f"the grammar has {found[0]!r}, which is not GBNF: leave it out")
    return text


class XGrammars:
    """xgrammar's compilers for the vocabulary of one model."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._compilers: dict[Eos, Any] = {}
        self._making = Lock()

    def prepare(self, tokenizer: LLTokenizer, eos: Eos) -> None:
        """Import xgrammar and make its compiler, once for each set of end-of-text ids."""
        with self._making:
            if eos in self._compilers:
                return
            began = time.perf_counter()
            tokens = [_bytes_of(tokenizer, each) for each in range(tokenizer.vocab_size)]
            self._compilers[eos] = _compiler(tokens[: self._vocab_size], self._vocab_size, eos)
            seconds = time.perf_counter() - began
            logger.info("xgrammar was made ready for grammars in %.1f s", seconds)

    def source_of(self, grammar: Grammar) -> GrammarSource:
        """Convert a grammar to xgrammar's input. Raises ``SchemaError``."""
        return source_of(grammar)

    def compiled(self, grammar: Grammar, source: GrammarSource, eos: Eos) -> CompiledGrammar:
        """Compile a grammar's source. Raises ``GrammarError``."""
        return compiled(self._compilers[eos], grammar, source)

    def clear(self) -> None:
        """Drop all compilers."""
        self._compilers.clear()


class CompiledGrammar:
    """A compiled grammar, from which each request gets its own matcher."""

    def __init__(self, grammar: Any) -> None:
        self._grammar = grammar
        self.num_bytes = int(grammar.memory_size_bytes)

    def matcher(self, tokenizer: LLTokenizer, eos: Eos) -> XGrammarMatcher:
        """Return a new matcher."""
        from xgrammar import GrammarMatcher

        return XGrammarMatcher(GrammarMatcher(self._grammar), tokenizer, eos)


class XGrammarMatcher:
    """A ``Matcher`` that uses xgrammar."""

    def __init__(self, matcher: Any, tokenizer: LLTokenizer, eos: Eos) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._eos = eos

    def num_allowed(self, tokens: Sequence[int]) -> int:
        text = before_end(tokens, self._eos)
        taken = self._take(text)
        may_end = taken == len(text) < len(tokens) and self._matcher.is_completed()
        self._go_back(taken)
        return taken + may_end

    def advance(self, tokens: Sequence[int]) -> None:
        text = before_end(tokens, self._eos)
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
        return tokenized(self._tokenizer, text, recent, most)

    def _take(self, tokens: Sequence[int]) -> int:
        """Advance the matcher until it refuses a token. Returns the number of accepted tokens."""
        for index, token in enumerate(tokens):
            if not self._is_text(token) or not self._matcher.accept_token(token):
                return index
        return len(tokens)

    def _is_text(self, token: int) -> bool:
        """Whether a token is text. xgrammar prints a warning for any other token."""
        is_known = 0 <= token < self._tokenizer.vocab_size
        return is_known and not self._tokenizer.is_special_token(token)

    def _go_back(self, num_tokens: int) -> None:
        if num_tokens:
            self._matcher.rollback(num_tokens)


def wrong_in(grammar: Grammar) -> str:
    """Return the reason why xgrammar refuses a grammar, or "" if it accepts it."""
    try:
        source = source_of(grammar)
        tokens = [bytes([each]) for each in range(256)]
        compiled(_compiler([*tokens, b""], 257, (256,)), grammar, source)
    except EngineError as error:
        return str(error)
    return ""


def compiled(compiler: Any, grammar: Grammar, source: GrammarSource) -> CompiledGrammar:
    """Compile a grammar's source. Raises ``GrammarError`` with xgrammar's message."""
    options: dict[str, Any] = {"max_whitespace_cnt": MAX_WHITESPACE}
    if grammar.is_dense:
        options = {"any_whitespace": False, "separators": (",", ":")}
    try:
        if grammar.kind == "grammar":
            return CompiledGrammar(compiler.compile_grammar(source.written))
        text = json.dumps(source.written)
        return CompiledGrammar(compiler.compile_json_schema(text, strict_mode=False, **options))
    except Exception as error:  # whatever xgrammar raises
        # Without the time and source line in the message.
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
    # Our compiler caches grammars itself; more threads would compete with the model.
    return GrammarCompiler(info, max_threads=1, cache_enabled=False)


def _bytes_of(tokenizer: LLTokenizer, token: int) -> bytes:
    """Return the bytes of a token; none for a special token, so that it is never allowed."""
    if tokenizer.is_special_token(token):
        return b""
    found: bytes = tokenizer.decode_bytes([token])
    return found
