"""Compiles grammars with llguidance, in background threads.

llguidance finds the tokens allowed next with an Earley parser over lexemes whose automata are built
on demand (https://github.com/guidance-ai/llguidance). So compiling takes milliseconds and its cost
is bounded: a grammar that is too large is refused with a message that a user understands.

llguidance needs its own tokenizer object, which takes half a second or more to build and blocks all
Python threads meanwhile. It is built for the first grammar, so an engine without grammars never
pays for it.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from copy import copy
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread, stack_size
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from engine.messages.step import Column
from engine.messages.structured import OF_XGRAMMAR, WITH_SCHEMAS, Grammar, grammar_from
from engine.structured import xgrammar
from engine.structured.checked.checker import Checker
from engine.structured.checked.forms import checker_of
from engine.structured.checked.located import Layout
from engine.structured.checked.matcher import CheckedMatcher
from engine.structured.checked.vocabulary import Vocabulary, vocabulary_of
from engine.structured.decide import Compiled, GrammarError, Matcher
from engine.structured.schemas import as_given
from engine.structured.sources import sources_of
from engine.structured.tokens import Eos, before_end, special_of, tokenized

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    from engine.structured.xgrammar.compiler import GrammarSource, XGrammars

logger = logging.getLogger("engine.structured")

MAX_SECONDS = 10.0  # to compile one grammar, including the wait for others
NUM_THREADS = 2
_POLL_SECONDS = 0.05  # between two checks whether a compilation is late
# llguidance recurses once per rule or reference of a chain, and a stack overflow ends the process.
# This is enough for a chain of MAX_GRAMMAR_CHARS; unused stack takes no memory.
STACK_BYTES = 512 << 20
# Symbols of a grammar, where compiling time grows with the square, and of schemas, where as many as
# llguidance can count take a second or two. A lexer state takes 1 to 2 KB.
MAX_SYMBOLS = 20_000
MAX_SYMBOLS_OF_SCHEMAS = 65_000
MAX_LEXER_STATES = 50_000
# Earley items per position of the text, and per mask. Schemas with choices between large objects
# have many: this number takes 10 ms.
MAX_ITEMS = 2_000
MAX_ITEMS_OF_SCHEMAS = 20_000
MAX_MASK_ITEMS = 50_000
MAX_MASK_ITEMS_OF_SCHEMAS = 200_000
# Automaton states that may be built in one step. A position where any of many tools may be called
# needs more: 20 ms for 500 tools.
STEP_FUEL = 200_000
STEP_FUEL_OF_WAY = 10_000
# Character classes whose tokens llguidance precomputes; it searches for all others one by one. The
# shorter ones save a quarter of the time in JSON strings close to their maximum length.
_OF_STRINGS = r'[^"\\\x00-\x1F\x7F]'
SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_OF_STRINGS}{{1,{num}}}" for num in (2, 4, 6, 8, 10, 12, 30)),
    f"{_OF_STRINGS}+",
]
MAX_KEPT = 512  # compiled grammars
MAX_KEPT_BYTES = 8 << 20  # of their source texts
MAX_KEPT_COMPILED_BYTES = 256 << 20  # of grammars that xgrammar compiled

Library = tuple[str, Eos]  # a grammar library with the end-of-text ids that its tokenizer has
Make = Callable[[], Matcher]  # makes a new matcher


class GuidanceCompiler:
    """A ``GrammarCompiler`` that uses llguidance, and xgrammar if installed."""

    def __init__(
        self,
        make_tokenizer: Callable[[Eos], LLTokenizer],
        max_seconds: float = MAX_SECONDS,
        other: XGrammars | None = None,
    ) -> None:
        """make_tokenizer: called once for each set of end-of-text ids, when first needed.

        other: compiler for grammars that llguidance refuses or that name xgrammar, if installed."""
        self._make_tokenizer = make_tokenizer
        self._other = other
        self.max_seconds = max_seconds  # applies to later grammars
        self._tokenizers: dict[Eos, LLTokenizer] = {}
        self._vocabularies: dict[Eos, Vocabulary] = {}  # for grammars with a checker
        self._ready: dict[Library, float] = {}  # monotonic seconds
        self._making = Lock()
        # Daemon threads: unlike an executor's, they do not delay the end of the program.
        self._waiting: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[Thread] = []
        # xgrammar has its own thread, so that a slow compilation there delays no other grammar.
        self._other_waiting: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._other_thread: Thread | None = None
        self._kept: OrderedDict[tuple[str, Eos], GuidanceCompilation] = OrderedDict()

    def submit(self, grammar: str, eos_token_ids: Sequence[int]) -> GuidanceCompilation:
        """Start compiling and return immediately."""
        key = grammar, tuple(eos_token_ids)
        if (found := self._kept.get(key)) is not None and not found.is_void:
            self._kept.move_to_end(key)
            return found
        compilation = GuidanceCompilation(key[1], self._ready, self.max_seconds)
        self._waiting.put(partial(self._compile, compilation, *key))
        if len(self._threads) < NUM_THREADS:
            self._threads.append(started(partial(serve, self._waiting)))
        self._keep(key, compilation)
        return compilation

    def shutdown(self) -> None:
        """Stop the threads and drop tokenizers. A running compilation's result is dropped."""
        for _ in self._threads:
            self._waiting.put(None)
        self._threads = []
        with self._making:
            if self._other_thread is not None:
                self._other_waiting.put(None)
                self._other_thread = None
        self._kept.clear()
        self._tokenizers.clear()
        self._vocabularies.clear()
        if self._other is not None:
            self._other.clear()

    def _keep(self, key: tuple[str, Eos], compilation: GuidanceCompilation) -> None:
        self._kept.pop(key, None)
        self._kept[key] = compilation
        while len(self._kept) > 1 and self._is_too_much():
            self._kept.popitem(last=False)

    def _is_too_much(self) -> bool:
        if len(self._kept) > MAX_KEPT or sum(len(text) for text, _ in self._kept) > MAX_KEPT_BYTES:
            return True
        return sum(each.num_bytes for each in self._kept.values()) > MAX_KEPT_COMPILED_BYTES

    def _compile(self, compilation: GuidanceCompilation, text: str, eos: Eos) -> None:
        if self._is_given_up(compilation):
            return
        try:
            tokenizer = self._tokenizer(eos)
        except BaseException as error:  # not the grammar's fault: the next request tries again
            compilation.is_void = True
            compilation.future.set_exception(GrammarError(str(error)))
            return
        try:
            grammar = grammar_from(text)
            if grammar.backend == "xgrammar":
                self._hand_over(compilation, grammar, "", tokenizer)
                return
            matchers = matchers_of(grammar, tokenizer)
            checked = self._checked(checker_of(grammar), eos)
        except BaseException as error:  # llguidance may panic, which is not an Exception
            why = GrammarError(reason(error))
            if isinstance(error, msgspec.MsgspecError) or grammar.backend != "auto":
                compilation.future.set_exception(why)
            else:
                self._hand_over(compilation, grammar, str(why), tokenizer)
        else:
            compilation.future.set_result(
                lambda: checked(followed([each.deep_copy() for each in matchers], tokenizer, eos))
            )

    def _checked(self, checker: Checker | Layout | None, eos: Eos) -> Callable[[Matcher], Matcher]:
        """Return a function that wraps a matcher so that it also obeys ``checker``, if given."""
        if checker is None:
            return lambda matcher: matcher
        vocabulary = self._vocabulary(eos)
        return lambda matcher: CheckedMatcher(matcher, checker.begin(), vocabulary, eos)

    def _vocabulary(self, eos: Eos) -> Vocabulary:
        tokenizer = self._tokenizer(eos)
        with self._making:
            if eos not in self._vocabularies:
                self._vocabularies[eos] = vocabulary_of(
                    lambda token: tokenizer.decode_bytes([token]),
                    tokenizer.is_special_token,
                    tokenizer.vocab_size,
                )
            return self._vocabularies[eos]

    def _is_given_up(self, compilation: GuidanceCompilation) -> bool:
        """Return whether the time limit passed before the compilation began; if so, fail it."""
        if not compilation.is_late:
            return False
        compilation.is_void = True
        compilation.future.set_exception(compilation.lateness)
        return True

    def _hand_over(
        self,
        compilation: GuidanceCompilation,
        grammar: Grammar,
        refusal: str,
        tokenizer: LLTokenizer,
    ) -> None:
        """Queue the compilation for xgrammar's thread, or fail it if xgrammar cannot do it.

        refusal: llguidance's error; empty if the grammar asks for xgrammar."""
        if self._other is None or grammar.kind not in OF_XGRAMMAR:
            compilation.future.set_exception(GrammarError(refusal or xgrammar.NOT_INSTALLED))
            return
        try:
            source = self._other.source_of(grammar)
        except BaseException as error:
            compilation.future.set_exception(of_both(refusal, reason(error)))
            return
        compilation.library = ("xgrammar", compilation.library[1])
        with self._making:
            self._other_waiting.put(
                lambda: self._compile_there(compilation, grammar, source, tokenizer, refusal)
            )
            if self._other_thread is None:
                self._other_thread = started(partial(serve, self._other_waiting))

    def _compile_there(
        self,
        compilation: GuidanceCompilation,
        grammar: Grammar,
        source: GrammarSource,
        tokenizer: LLTokenizer,
        refusal: str,
    ) -> None:
        if self._is_given_up(compilation):
            return
        library, other = compilation.library, self._other
        assert other is not None, "only handed over if xgrammar is installed"
        try:
            other.prepare(tokenizer, library[1])
            self._ready.setdefault(library, time.monotonic())
        except BaseException as error:  # not the grammar's fault: the next request tries again
            compilation.is_void = True
            compilation.future.set_exception(GrammarError(f"xgrammar cannot be used: {error}"))
            return
        try:
            compiled = other.compiled(grammar, source, library[1])
            checked = self._checked(source.checker, library[1])
        except BaseException as error:  # whatever a library raises
            compilation.future.set_exception(of_both(refusal, reason(error)))
        else:
            compilation.num_bytes = compiled.num_bytes
            compilation.future.set_result(lambda: checked(compiled.matcher(tokenizer, library[1])))

    def _tokenizer(self, eos: Eos) -> LLTokenizer:
        with self._making:
            if eos not in self._tokenizers:
                began = time.perf_counter()
                made = self._make_tokenizer(eos)
                seconds = time.perf_counter() - began
                logger.info("the tokenizer was made ready for grammars in %.1f s", seconds)
                self._tokenizers[eos] = made
                self._ready["guidance", eos] = time.monotonic()
            return self._tokenizers[eos]


class GuidanceCompilation:
    """A ``Compilation`` by llguidance; each request gets its own matcher."""

    def __init__(self, eos: Eos, ready: Mapping[Library, float], max_seconds: float) -> None:
        """max_seconds: time limit, counted from now or, if later, from when the library's tokenizer
        is ready. ready: that time (``time.monotonic``) for each library."""
        self.future: Future[Make] = Future()
        self.is_void = False  # failed for another reason than the grammar: compile it again
        self.library: Library = ("guidance", eos)  # the one that compiles it now
        self.num_bytes = 0  # of the compiled grammar, if the library reports it
        self._ready = ready
        self._max_seconds = max_seconds
        self._since = time.monotonic()

    @property
    def is_late(self) -> bool:
        ready = self._ready.get(self.library)
        if self.future.done() or ready is None:
            return False
        return time.monotonic() - max(ready, self._since) > self._max_seconds

    @property
    def lateness(self) -> GrammarError:
        limit = f"{self._max_seconds:g}"
        return GrammarError(f"compiling took longer than {limit} seconds: make the grammar smaller")

    def poll(self) -> Matcher | None:
        if self.is_late:
            raise self.lateness
        if not self.future.done():
            return None
        if (error := self.future.exception()) is not None:
            # A raised error keeps alive all that the frames it went through hold, and this one
            # stays for later requests with the same grammar.
            raise copy(error) from None
        return self.future.result()()

    def wait(self) -> Matcher:
        while (matcher := self.poll()) is None:
            wait_for([self.future], timeout=_POLL_SECONDS)
        return matcher


class GuidanceMatcher:
    """A ``Matcher`` that uses llguidance."""

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, eos: Eos) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._eos = eos

    def num_allowed(self, tokens: Sequence[int]) -> int:
        text = before_end(tokens, self._eos)
        found: int = self._matcher.validate_tokens(text) if text else 0
        self._check()
        return found + (found == len(text) < len(tokens) and self._may_end_after(text))

    def advance(self, tokens: Sequence[int]) -> None:
        if text := before_end(tokens, self._eos):
            self._matcher.consume_tokens(text)
            self._check()

    def fill(self, masks: Column, drafts: Sequence[int]) -> None:
        _fill_one(self._matcher, masks[0])
        self._check()
        # An error stays with a matcher, and a draft may cause one that the output never has.
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
        return tokenized(self._tokenizer, text, recent, most)

    def _may_end_after(self, text: list[int]) -> bool:
        ahead = self._matcher.deep_copy() if text else self._matcher
        if text:
            ahead.consume_tokens(text)
            _check_one(ahead)
        may_end: bool = ahead.is_accepting()
        return may_end

    def _check(self) -> None:
        _check_one(self._matcher)


class JointMatcher:
    """A ``Matcher`` that allows a token only if each of several matchers allows it."""

    def __init__(self, first: Matcher, others: Sequence[Matcher]) -> None:
        self._first = first
        self._others = others

    def num_allowed(self, tokens: Sequence[int]) -> int:
        found = self._first.num_allowed(tokens)
        for each in self._others:
            found = min(found, each.num_allowed(tokens[:found]))
        return found

    def advance(self, tokens: Sequence[int]) -> None:
        for each in (self._first, *self._others):
            each.advance(tokens)

    def fill(self, masks: Column, drafts: Sequence[int]) -> None:
        self._first.fill(masks, drafts)
        for each in self._others:
            own: Column = np.zeros_like(masks)
            each.fill(own, drafts)
            masks &= own

    def forced(self, recent: Sequence[int], most: int) -> Sequence[int]:
        tokens = self._first.forced(recent, most)
        return tokens[: self.num_allowed(tokens)]


def _fill_one(matcher: LLMatcher, words: Column) -> None:
    matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)


def _check_one(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise GrammarError(_words(matcher.get_error()))


class CheckedOnly:
    """A ``GrammarCompiler`` for replaying recordings, without a tokenizer: it refuses invalid
    grammars, and its matchers accept all tokens."""

    def submit(self, grammar: str, eos_token_ids: Sequence[int]) -> Compiled:
        elsewhere(partial(_check, grammar_from(grammar)))
        return Compiled(Follower())

    def shutdown(self) -> None:
        """Do nothing: no state is kept."""


def _check(grammar: Grammar) -> str:
    """Raise ``GrammarError`` if the installed libraries refuse the grammar, else return ""."""
    refusal = ""
    if grammar.backend != "xgrammar":
        refusal = _refusal(grammar)
        if not refusal:
            return ""
        if grammar.backend == "guidance":
            raise GrammarError(refusal)
    if grammar.kind not in OF_XGRAMMAR or not xgrammar.is_installed():
        raise GrammarError(refusal or xgrammar.NOT_INSTALLED)
    from engine.structured.xgrammar.compiler import wrong_in

    if wrong := wrong_in(grammar):
        raise of_both(refusal, wrong)
    return ""


class Follower:
    """A ``Matcher`` that allows everything."""

    def num_allowed(self, tokens: Sequence[int]) -> int:
        return len(tokens)

    def advance(self, tokens: Sequence[int]) -> None:
        pass

    def fill(self, masks: Column, drafts: Sequence[int]) -> None:
        masks[:] = np.int32(-1)

    def forced(self, recent: Sequence[int], most: int) -> Sequence[int]:
        return ()


def serve(waiting: SimpleQueue[Callable[[], None] | None]) -> None:
    """Run the queued functions one after the other, until ``None`` is queued."""
    while (work := waiting.get()) is not None:
        work()


def matchers_of(grammar: Grammar, tokenizer: LLTokenizer) -> list[LLMatcher]:
    """Return new matchers of llguidance, all of which must accept the output. Raises if the grammar
    is invalid."""
    from llguidance import LLMatcher

    found = []
    for source in sources_of(grammar, partial(special_of, tokenizer)):
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits(grammar))
        _check_one(matcher)
        found.append(matcher)
    return found


def followed(matchers: Sequence[LLMatcher], tokenizer: LLTokenizer, eos: Eos) -> Matcher:
    """Make one matcher, which allows a token only if all of these matchers do."""
    first, *others = (GuidanceMatcher(each, tokenizer, eos) for each in matchers)
    return JointMatcher(first, others) if others else first


def of_both(refusal: str, other: str) -> GrammarError:
    """Combine the errors of llguidance and xgrammar into one error."""
    return GrammarError(f"{refusal}; xgrammar refuses it too: {other}" if refusal else other)


def reason(error: BaseException) -> str:
    """Return the message of an error that a compiler raised."""
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def started(work: Callable[[], None]) -> Thread:
    """Start a daemon thread whose stack is large enough to compile any grammar."""
    before = stack_size(STACK_BYTES)
    try:
        thread = Thread(target=work, name="grammar", daemon=True)
        thread.start()
    finally:
        stack_size(before)
    return thread


def fault_of(grammar: Grammar) -> str:
    """Return llguidance's error for a grammar, "" if the grammar is valid for any tokenizer."""
    try:
        return elsewhere(partial(_refusal, grammar), timeout=MAX_SECONDS)
    except TimeoutError:
        return f"compiling took longer than {MAX_SECONDS:g} seconds: make the grammar smaller"


def _refusal(grammar: Grammar) -> str:
    from llguidance import LLMatcher

    try:
        reports = [
            LLMatcher.validate_grammar(each, limits=limits(grammar)) for each in sources_of(grammar)
        ]
        checker_of(grammar)
    except BaseException as error:  # llguidance may panic, which is not an Exception
        return reason(error)
    return next(filter(None, map(_words, reports)), "")


def elsewhere(work: Callable[[], str], timeout: float | None = None) -> str:
    """Run a function in another thread and return its result. Raises its error, or ``TimeoutError``
    after ``timeout`` seconds, without stopping the function."""
    future: Future[str] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # llguidance may panic, which is not an Exception
            future.set_exception(GrammarError(str(error)))

    started(run)
    return future.result(timeout)


def limits(grammar: Grammar) -> LLParserLimits:
    """Return llguidance's limits for a grammar."""
    from llguidance import LLParserLimits

    has_schemas = grammar.kind in WITH_SCHEMAS or bool(grammar.parts)
    return LLParserLimits(
        max_grammar_size=MAX_SYMBOLS_OF_SCHEMAS if has_schemas else MAX_SYMBOLS,
        max_items_in_row=MAX_ITEMS_OF_SCHEMAS if has_schemas else MAX_ITEMS,
        step_max_items=MAX_MASK_ITEMS_OF_SCHEMAS if has_schemas else MAX_MASK_ITEMS,
        max_lexer_states=MAX_LEXER_STATES,
        step_lexer_fuel=STEP_FUEL + grammar.num_ways * STEP_FUEL_OF_WAY,
        verbose_errors=False,
    )


def guidance_of(read_tokenizer: Callable[[], str | None], vocab_size: int) -> GuidanceCompiler:
    """Make the compiler for a model. read_tokenizer: returns the text of tokenizer.json, ``None``
    if the model has none; called for the first grammar."""

    def make(eos: Eos) -> LLTokenizer:
        from llguidance import LLTokenizer

        source = read_tokenizer()
        if source is None:
            raise GrammarError(
                "this model has no fast tokenizer, which structured_outputs needs: convert its "
                "tokenizer to tokenizer.json"
            )
        return LLTokenizer(source, n_vocab=vocab_size, eos_token=list(eos), slices=SLICES)

    if not xgrammar.is_installed():
        return GuidanceCompiler(make)
    from engine.structured.xgrammar.compiler import XGrammars

    return GuidanceCompiler(make, other=XGrammars(vocab_size))


def _words(error: str) -> str:
    """Return llguidance's error message without the trace that follows it."""
    if error.startswith("NoExtension"):
        return "no text can follow here: the request cannot be satisfied"
    return as_given(error.strip().split("\n<state>")[0])[:2000]
