"""What the compiler makes of an entry, token by token; and what an engine writes for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from engine import LLMEngine, RequestError, SamplingParams, StructuredOutputsParams
from engine.assets import BOX_MODEL
from engine.config.model import ModelConfig, read_model_info
from engine.messages.finite import check_finite
from engine.messages.structured import grammar_of
from engine.structured.decide import WORD, Matcher
from engine.structured.guidance import MAX_SECONDS, GrammarError, GuidanceCompilation, guidance_of
from engine.text.tokenizer import load_tokenizer
from structured.corpus import NUM, Entry

PROMPT = "An example of what was asked for:\n"
MAX_BOMB_SECONDS = MAX_SECONDS + 60  # a busy machine notices late


class Bench:
    """A compiler and the tokenizer of one model."""

    def __init__(self, model: Path = BOX_MODEL, max_seconds: float = MAX_SECONDS) -> None:
        info = read_model_info(model)
        self.eos = info.eos_token_ids
        self.tokenizer = load_tokenizer(ModelConfig(model=str(model)))
        self.num_words = -(-info.vocab_size // WORD)
        self._compiler = guidance_of(self.tokenizer.backend.as_json, info.vocab_size)
        self._compiler.max_seconds = max_seconds
        self._bytes = byte_tokens(self.tokenizer)

    def compiled(self, fields: dict[str, Any]) -> GuidanceCompilation:
        """Raises ``RequestError`` and ``GrammarError``, as a request would end with it.

        By llguidance, unless the fields say otherwise.
        """
        return self.compiled_form(StructuredOutputsParams(**{"backend": "guidance", **fields}))

    def compiled_form(self, params: StructuredOutputsParams) -> GuidanceCompilation:
        """Raises what ``compiled`` does."""
        grammar = grammar_of(params)
        check_finite(grammar)
        compilation = self._compiler.submit(grammar, self.eos)
        compilation.wait()
        return compilation

    def tokenisations(self, text: str) -> Iterable[list[int]]:
        """The text as the tokenizer cuts it, and byte by byte where each byte is a token."""
        yield self.tokenizer.encode(text, add_special_tokens=False)
        data = text.encode()
        if all(byte in self._bytes for byte in data):
            yield [self._bytes[byte] for byte in data]

    def takes(self, params: StructuredOutputsParams, text: str) -> bool:
        """Whether this is a whole text of the form."""
        compilation = self.compiled_form(params)
        found = {
            self.num_accepted(compilation.wait(), tokens) == len(tokens) + 1
            for tokens in self.tokenisations(text)
        }
        assert len(found) == 1, "it depends on how the text is cut into tokens"
        return found.pop()

    def num_accepted(self, matcher: Matcher, tokens: Sequence[int]) -> int:
        """How many of the tokens and of the end after them the masks let pass, one by one."""
        found = 0
        for token in [*tokens, self.eos[0]]:
            masks = np.zeros((1, self.num_words), dtype=np.int32)
            try:
                matcher.fill(masks, [])
            except GrammarError:  # a dead end: nothing may follow
                break
            if not masks[0, token // WORD] >> (token % WORD) & 1:
                break
            matcher.advance([token])
            found += 1
        return found


@cache
def bench() -> Bench:
    """The one of the model in the box."""
    return Bench()


def byte_tokens(tokenizer: Any) -> dict[int, int]:
    """The token of each byte, of a tokenizer whose tokens are bytes in GPT-2's letters."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    found = {}
    for byte, letter in bytes_to_unicode().items():
        if (token := tokenizer.backend.token_id(letter)) is not None:
            found[byte] = token
    return found


@dataclass
class Checked:
    """What became of an entry."""

    entry: Entry
    refusal: str = ""
    num_right: int = 0
    num_right_accepted: int = 0
    num_wrong: int = 0
    num_wrong_refused: int = 0
    num_texts: int = 0
    num_complete: int = 0
    num_true: int = 0
    faults: list[str] = field(default_factory=list)


def check_texts(bench: Bench, entry: Entry, num: int = NUM) -> Checked:
    """Right texts pass the masks to their end and wrong ones do not."""
    checked = Checked(entry)
    try:
        compilation = bench.compiled(entry.fields)
    except (RequestError, GrammarError) as error:
        checked.refusal = str(error)
        if not entry.refused:
            checked.faults.append(f"refused: {error}")
        elif entry.refused not in str(error):
            checked.faults.append(f"refused without {entry.refused!r}: {error}")
        return checked
    if entry.refused:
        checked.faults.append("not refused")
        return checked
    right = entry.right(num)
    wrong = entry.wrong(right, num)
    checked.num_right, checked.num_wrong = len(right), len(wrong)
    if not right or not wrong:
        checked.faults.append("the corpus has no right or no wrong text for it")
    for text in right:
        if fault := _fault_of(bench, compilation.wait, text, is_right=True):
            checked.faults.append(fault)
        else:
            checked.num_right_accepted += 1
    for text in wrong:
        if fault := _fault_of(bench, compilation.wait, text, is_right=False):
            checked.faults.append(fault)
        else:
            checked.num_wrong_refused += 1
    return checked


def _fault_of(
    bench: Bench, matcher: Callable[[], Matcher], text: str, *, is_right: bool
) -> str | None:
    for tokens in bench.tokenisations(text):
        whole = [*tokens, bench.eos[0]]
        passed = bench.num_accepted(matcher(), tokens)
        if passed != matcher().num_allowed(whole):
            return f"masks let {passed} tokens pass, num_allowed another number: {text!r}"
        if (passed == len(whole)) != is_right:
            before = bench.tokenizer.decode(list(tokens[:passed]))
            kind = "right text refused" if is_right else "wrong text accepted"
            return f"{kind}: {text!r}" + (f" behind {before!r}" if is_right else "")
    return None


def check_generation(
    engine: LLMEngine, checked: Sequence[Checked], seeds: Sequence[int], max_tokens: int = 512
) -> int:
    """Every complete text is right. All entries go through the engine together.

    Returns the number of tokens that were written.
    """
    asked: dict[str, Checked] = {}
    for one in checked:
        if one.refusal:
            continue
        for seed in seeds:
            request_id = f"{one.entry.name} {seed}"
            params = SamplingParams(
                temperature=1.0,
                seed=seed,
                max_tokens=max_tokens,
                structured_outputs=StructuredOutputsParams(**one.entry.fields),
            )
            engine.add_request(request_id, PROMPT, params)
            asked[request_id] = one
    num_tokens = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                (found,) = output.outputs
                num_tokens += len(found.token_ids)
                _judge(asked[output.request_id], output.request_id, found)
    return num_tokens


def _judge(one: Checked, request_id: str, found: Any) -> None:
    one.num_texts += 1
    if found.finish_reason == "stop":
        one.num_complete += 1
        if one.entry.judge(found.text):
            one.num_true += 1
        else:
            one.faults.append(f"{request_id}: complete and wrong: {found.text!r}")
    elif found.finish_reason != "length":
        one.faults.append(f"{request_id}: ended with {found.finish_reason}: {found.error}")


# -- bombs

NEIGHBOURS = (
    SamplingParams(temperature=0, max_tokens=24),
    SamplingParams(temperature=1.0, seed=7, max_tokens=24),
    SamplingParams(
        temperature=1.0,
        seed=8,
        max_tokens=24,
        structured_outputs=StructuredOutputsParams(regex="[a-z ]{20,60}"),
    ),
)


def check_bomb(engine: LLMEngine, fields: dict[str, Any], alone: list[list[int]]) -> str:
    """What became of it. Raises ``AssertionError`` if anything else was hurt.

    alone: the neighbours' tokens without it.
    """
    began = time.monotonic()
    try:
        form = StructuredOutputsParams(**fields)
        bomb = [SamplingParams(temperature=1.0, seed=1, max_tokens=24, structured_outputs=form)]
        *neighbours, found = finished(engine, [*NEIGHBOURS, *bomb])
    except RequestError as error:
        return f"refused at once: {str(error)[-60:]}"
    seconds = time.monotonic() - began
    assert [one.token_ids for one in neighbours] == alone, "a neighbour wrote something else"
    assert seconds < MAX_BOMB_SECONDS, f"it took {seconds:.1f} s"
    if found.finish_reason == "error":
        assert found.error and "grammar" in found.error, found.error
        return f"failed in {seconds:.1f} s: {found.error[:110]!r}"
    assert found.finish_reason in ("stop", "length"), found.finish_reason
    return f"worked in {seconds:.1f} s: {found.text[:40]!r}"


def finished(engine: LLMEngine, asked: Sequence[SamplingParams]) -> list[Any]:
    """The answers, in the order of the requests; or the error of a request that is refused."""
    for index, params in reversed(list(enumerate(asked))):  # the last is refused before others run
        engine.add_request(str(index), PROMPT, params)
    found: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                (found[output.request_id],) = output.outputs
    return [found[str(index)] for index in range(len(asked))]
