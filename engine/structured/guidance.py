"""Grammars compiled by llguidance, in threads of their own.

The library works out which tokens may follow with an Earley parser over lexemes whose automata are
built as they are met (https://github.com/guidance-ai/llguidance), so compiling takes milliseconds
and what it may take is bounded: it refuses what is too large with words that a user understands.

Its own view of the tokenizer takes half a second or more, during which no other thread of Python
runs. It is made for the first grammar that comes, so that an engine without any never pays.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread, stack_size
from typing import TYPE_CHECKING, Any

from engine.errors import EngineError
from engine.messages.step import Column
from engine.messages.structured import Grammar, grammar_from
from engine.structured.decide import ALL, Compiled
from engine.structured.schemas import prepared
from engine.structured.tags import SpecialOf, lark_of, none_special

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from llguidance._lib import JsonCompileOptions

logger = logging.getLogger("engine.structured")

MAX_SECONDS = 10.0  # for compiling one grammar, waiting for others included
NUM_THREADS = 2
_GLANCE = 0.05  # seconds between two looks at whether a compilation is late
# The library calls itself for each rule or reference that a chain of them goes through; too deep
# a chain ends the process. Enough for MAX_GRAMMAR_CHARS of them; what is not used takes no memory.
STACK_BYTES = 512 << 20
MAX_RULES = 5_000  # of a grammar, whose compiling takes time by their square or more
# Compiling takes time by the square of the symbols: a second for these. A state takes 1 to 2 KB.
MAX_SYMBOLS = 20_000
MAX_LEXER_STATES = 50_000
# Between tokens of JSON: a few spaces, a new line and its indentation. A model that may write any
# number of them writes some hundred, now and then, and never comes to an end.
WHITESPACE = r"[ \t]{0,2}(\r?\n[ \t]{0,24})?"
# Where only one text can follow, the library would allow its tokenizer's tokens for it and no
# others. What other tokens spell is as right, and the model says how likely each is.
UNFORCED = '%llguidance {"no_forcing": true}\n'
MAX_KEPT = 512  # compiled grammars
MAX_KEPT_CHARS = 8 << 20  # of their texts

Eos = tuple[int, ...]


class GrammarError(EngineError):
    """What is wrong with a grammar, or with how it went on."""


class GuidanceCompiler:
    """A ``GrammarCompiler``; equal grammars are compiled once."""

    def __init__(
        self, make_tokenizer: Callable[[Eos], LLTokenizer], max_seconds: float = MAX_SECONDS
    ) -> None:
        """make_tokenizer: called once for the ids that end text, when they are first needed."""
        self._make_tokenizer = make_tokenizer
        self.max_seconds = max_seconds  # for what comes from now on
        self._tokenizers: dict[Eos, LLTokenizer] = {}
        self._ready: dict[Eos, float] = {}  # since when
        self._making = Lock()
        # Threads that the end of the program does not wait for, as it would for an executor's.
        self._waiting: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[Thread] = []
        self._kept: OrderedDict[tuple[str, Eos], GuidanceCompilation] = OrderedDict()
        self._kept_chars = 0

    def submit(self, grammar: str, eos_token_ids: Sequence[int]) -> GuidanceCompilation:
        """Begin to compile and return at once."""
        key = grammar, tuple(eos_token_ids)
        if (found := self._kept.get(key)) is not None and not found.is_void:
            self._kept.move_to_end(key)
            return found
        compilation = GuidanceCompilation(key[1], self._ready, self.max_seconds)
        self._waiting.put(partial(self._compile, compilation, *key))
        if len(self._threads) < NUM_THREADS:
            self._threads.append(started(self._serve))
        self._keep(key, compilation)
        return compilation

    def shutdown(self) -> None:
        """Let go of tokenizers and threads; what is being compiled is finished for nobody."""
        for _ in self._threads:
            self._waiting.put(None)
        self._threads = []
        self._kept.clear()
        self._tokenizers.clear()

    def _serve(self) -> None:
        while (work := self._waiting.get()) is not None:
            work()

    def _keep(self, key: tuple[str, Eos], compilation: GuidanceCompilation) -> None:
        if self._kept.pop(key, None) is None:
            self._kept_chars += len(key[0])
        self._kept[key] = compilation
        while len(self._kept) > 1 and (
            len(self._kept) > MAX_KEPT or self._kept_chars > MAX_KEPT_CHARS
        ):
            (grammar, _), _ = self._kept.popitem(last=False)
            self._kept_chars -= len(grammar)

    def _compile(self, compilation: GuidanceCompilation, grammar: str, eos: Eos) -> None:
        if compilation.is_late:  # every request that asked for it has been told so
            compilation.is_void = True
            compilation.future.set_exception(compilation.lateness)
            return
        try:
            from llguidance import LLMatcher

            tokenizer = self._tokenizer(eos)
        except BaseException as error:  # no fault of the grammar
            compilation.is_void = True
            compilation.future.set_exception(GrammarError(str(error)))
            return
        try:
            source = source_of(grammar_from(grammar), partial(special_of, tokenizer))
            matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits())
            if matcher.is_error():
                raise GrammarError(_words(matcher.get_error()))
        except RecursionError:
            compilation.future.set_exception(GrammarError("it is nested too deeply"))
        except BaseException as error:  # the library may panic, which is no Exception
            compilation.future.set_exception(GrammarError(str(error)))
        else:
            compilation.future.set_result((matcher, tokenizer))

    def _tokenizer(self, eos: Eos) -> LLTokenizer:
        with self._making:
            if eos not in self._tokenizers:
                began = time.perf_counter()
                made = self._make_tokenizer(eos)
                seconds = time.perf_counter() - began
                logger.info("the tokenizer was made ready for grammars in %.1f s", seconds)
                self._tokenizers[eos] = made
                self._ready[eos] = time.monotonic()
            return self._tokenizers[eos]


class GuidanceCompilation:
    """A ``Compilation``: every request that asks gets a matcher of its own."""

    def __init__(self, eos: Eos, ready: Mapping[Eos, float], max_seconds: float) -> None:
        """ready: since when there is a tokenizer; seconds count from then, or from now."""
        self.future: Future[tuple[LLMatcher, LLTokenizer]] = Future()
        self.is_void = False  # it says nothing of the grammar: the next request is to try again
        self._eos = eos
        self._ready = ready
        self._max_seconds = max_seconds
        self._asked = time.monotonic()

    @property
    def is_late(self) -> bool:
        ready = self._ready.get(self._eos)
        if self.future.done() or ready is None:
            return False
        return time.monotonic() - max(ready, self._asked) > self._max_seconds

    @property
    def lateness(self) -> GrammarError:
        limit = f"{self._max_seconds:g}"
        return GrammarError(f"it was not compiled within {limit} seconds: make it smaller")

    def poll(self) -> GuidanceMatcher | None:
        if self.is_late:
            raise self.lateness
        if not self.future.done():
            return None
        matcher, tokenizer = self.future.result()
        return GuidanceMatcher(matcher.deep_copy(), tokenizer, self._eos)

    def wait(self) -> GuidanceMatcher:
        while (matcher := self.poll()) is None:
            wait_for([self.future], timeout=_GLANCE)
        return matcher


class GuidanceMatcher:
    """A ``Matcher``. The library follows texts only up to their end."""

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, eos: Eos) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._eos = eos

    def num_allowed(self, tokens: Sequence[int]) -> int:
        text = self._without_end(tokens)
        found: int = self._matcher.validate_tokens(text) if text else 0
        self._check()
        return found + (found == len(text) < len(tokens) and self._may_end_behind(text))

    def advance(self, tokens: Sequence[int]) -> None:
        if text := self._without_end(tokens):
            self._matcher.consume_tokens(text)
            self._check()

    def fill(self, masks: Column, drafts: Sequence[int]) -> None:
        _fill_one(self._matcher, masks[0])
        self._check()
        # An error stays with a matcher, and drafts may lead to one that the text never meets.
        ahead = self._matcher.deep_copy() if len(drafts) else self._matcher
        for draft, words in zip(drafts, masks[1:], strict=True):
            if draft in self._eos or draft < 0 or ahead.try_consume_tokens([draft]) == 0:
                break
            _fill_one(ahead, words)
            if ahead.is_error():
                words[:] = 0
                break

    def forced(self, recent: Sequence[int], most: int) -> list[int]:
        text = self._matcher.compute_ff_bytes()
        self._check()
        if not text:
            return []
        # Less the end of the text, which may be one token with what follows it.
        tokens, _ = self._tokenizer.tokenize_partial(text, recent_tokens=list(recent))
        return list(tokens[:most])

    def _without_end(self, tokens: Sequence[int]) -> list[int]:
        """The tokens before the first that ends text."""
        ends = [place for place, token in enumerate(tokens) if token in self._eos]
        return list(tokens[: ends[0]] if ends else tokens)

    def _may_end_behind(self, text: list[int]) -> bool:
        ahead = self._matcher.deep_copy() if text else self._matcher
        if text:
            ahead.consume_tokens(text)
            _check_one(ahead)
        may_end: bool = ahead.is_accepting()
        return may_end

    def _check(self) -> None:
        _check_one(self._matcher)


def _fill_one(matcher: LLMatcher, words: Column) -> None:
    matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)


def _check_one(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise GrammarError(_words(matcher.get_error()))


class CheckedOnly:
    """A ``GrammarCompiler`` for a replay, which has no tokenizer: it refuses what is refused, and
    its matchers take the tokens as they were."""

    def submit(self, grammar: str, eos_token_ids: Sequence[int]) -> Compiled:
        if wrong := elsewhere(partial(_wrong_in, grammar)):
            raise GrammarError(_words(wrong))
        return Compiled(Follower())

    def shutdown(self) -> None:
        """Nothing is kept."""


def _wrong_in(grammar: str) -> str:
    from llguidance import LLMatcher

    source = source_of(grammar_from(grammar))
    return str(LLMatcher.validate_grammar(source, limits=limits()))


class Follower:
    """A ``Matcher`` that allows everything."""

    def num_allowed(self, tokens: Sequence[int]) -> int:
        return len(tokens)

    def advance(self, tokens: Sequence[int]) -> None:
        pass

    def fill(self, masks: Column, drafts: Sequence[int]) -> None:
        masks[:] = ALL

    def forced(self, recent: Sequence[int], most: int) -> Sequence[int]:
        return ()


def started(work: Callable[[], None]) -> Thread:
    """A thread that may look at grammars."""
    before = stack_size(STACK_BYTES)
    try:
        thread = Thread(target=work, name="grammar", daemon=True)
        thread.start()
    finally:
        stack_size(before)
    return thread


def special_of(tokenizer: LLTokenizer, text: str) -> int | None:
    """The token that this text is, if it is one that no text spells."""
    tokens = tokenizer.tokenize_str(text)
    is_one = len(tokens) == 1 and tokenizer.is_special_token(tokens[0])
    return tokens[0] if is_one else None


def elsewhere(work: Callable[[], str]) -> str:
    """What it returns or raises, in such a thread."""
    future: Future[str] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # the library may panic, which is no Exception
            future.set_exception(GrammarError(str(error)))

    started(run)
    return future.result()


def limits() -> LLParserLimits:
    """Of every grammar that is looked at."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_grammar_size=MAX_SYMBOLS, max_lexer_states=MAX_LEXER_STATES, verbose_errors=False
    )


def of_schema(schema: Any, grammar: Grammar, name: str) -> dict[str, Any]:
    """A schema as a grammar by name among others. Raises ``SchemaError``."""
    from llguidance import LLMatcher

    options: JsonCompileOptions = {"whitespace_pattern": grammar.whitespace or WHITESPACE}
    if grammar.is_dense:
        options = {"whitespace_flexible": False}
    text = json.dumps(prepared(schema, grammar.is_closed))
    (asked,) = json.loads(LLMatcher.grammar_from_json_schema(text, overrides=options))["grammars"]
    return {**asked, "name": name}


def source_of(grammar: Grammar, special_of: SpecialOf = none_special) -> str:
    """The grammar as the library reads it. special_of: the special token that a text is. Raises
    ``GrammarError``."""
    from llguidance import LLMatcher, grammar_from

    if grammar.kind in ("json", "json_object"):
        schema = {"type": "object"} if grammar.kind == "json_object" else json.loads(grammar.text)
        start = {"lark_grammar": f"start: @asked\n{UNFORCED}"}
        return json.dumps({"grammars": [start, of_schema(schema, grammar, "asked")]})
    if grammar.kind == "structural_tag":
        tags = json.loads(grammar.text)
        start = {"lark_grammar": f"{lark_of(tags, special_of)}\n{UNFORCED}"}
        schemas = [
            of_schema(structure["schema"], grammar, f"of_{number}")
            for number, structure in enumerate(tags["structures"])
        ]
        return json.dumps({"grammars": [start, *schemas]})
    if grammar.kind in ("regex", "choice"):
        expression = grammar.text
        if grammar.kind == "choice":
            expression = "|".join(map(_quoted, json.loads(grammar.text)))
        made = LLMatcher.grammar_from_regex(expression)
        (asked,) = json.loads(made)["grammars"]
        return f"{asked['lark_grammar']}\n{UNFORCED}"
    if (count := len(re.findall(r"^\s*[?!]?[\w-]+[^:\n]*:", grammar.text, re.M))) > MAX_RULES:
        raise GrammarError(f"the grammar has {count} rules, the limit is {MAX_RULES}")
    try:
        return f"{grammar_from('grammar', grammar.text)}\n{UNFORCED}"
    except ValueError as error:
        raise GrammarError(str(error)) from error


def guidance_of(read_tokenizer: Callable[[], str | None], vocab_size: int) -> GuidanceCompiler:
    """The compiler for a model. read_tokenizer: its tokenizer.json, called when the first grammar
    comes; ``None`` if it has none."""

    def make(eos: Eos) -> LLTokenizer:
        from llguidance import LLTokenizer

        source = read_tokenizer()
        if source is None:
            raise GrammarError(
                "this model's tokenizer is no fast one, of which grammars know the tokens; convert "
                "it to tokenizer.json"
            )
        return LLTokenizer(source, n_vocab=vocab_size, eos_token=list(eos))

    return GuidanceCompiler(make)


def _quoted(text: str) -> str:
    """Matches the text itself in a regular expression of Rust's."""
    return re.sub(r"([\\.+*?()|\[\]{}^$#&~/-])", r"\\\1", text)


def _words(error: str) -> str:
    """What the library says, without the trace behind it."""
    if error.startswith("NoExtension"):
        return "no text can go on from here: what is asked for cannot be met"
    return error.strip().split("\n<state>")[0][:2000]
