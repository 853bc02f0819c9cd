"""Texts that are written for a schema, by a model or at random, and what becomes of them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from random import Random
from typing import Any

import jsonschema_rs
import numpy as np

from engine import LLMEngine, RequestError, SamplingParams, StructuredOutputsParams
from engine.messages.step import Column
from engine.structured.decide import WORD, GrammarError
from structured.checks import PROMPT, Bench, byte_tokens
from structured.judges import json_judge

MAX_WAITING = 36  # requests of the engine
MOST = sys.float_info.max
Judge = Callable[[str], bool]
Options = dict[str, Any]  # of ``StructuredOutputsParams``, besides the schema


@dataclass(frozen=True)
class SchemaCase:
    """A schema, and what else a text of it must be accepted by."""

    name: str
    schema: dict[str, Any]
    is_accepted: Judge | None = None

    @cached_property
    def judge(self) -> Judge:
        """By ``jsonschema_rs``, which reads patterns as ECMAScript has them, formats included; and
        by the schema's own judge. By ``jsonschema`` where the other refuses the schema, as for a
        pattern of Python's."""
        try:
            validator = jsonschema_rs.validator_for(self.schema, validate_formats=True)
        except jsonschema_rs.ValidationError:
            return json_judge(self.schema)

        def is_right(text: str) -> bool:
            try:
                value = json.loads(text, parse_float=_read)
            except ValueError:
                return False
            if not validator.is_valid(value):
                return False
            return self.is_accepted is None or self.is_accepted(text)

        return is_right


@dataclass
class Outcome:
    """What became of one schema."""

    case: SchemaCase
    refusal: str = ""
    seconds: float = 0.0  # for compiling
    num_texts: int = 0
    num_complete: int = 0
    num_cut: int = 0  # not complete after the most tokens
    invalid: list[str] = field(default_factory=list)  # complete texts
    dead_ends: list[str] = field(default_factory=list)  # errors

    def note(self, reason: str, text: str, error: str | None) -> None:
        """reason: why the text has ended, as ``finish_reason`` has it."""
        self.num_texts += 1
        if reason == "stop":
            self.num_complete += 1
            if not self.case.judge(text):
                self.invalid.append(text)
        elif reason == "length":
            self.num_cut += 1
        else:
            self.dead_ends.append(f"{error} after {text[-300:]!r}")


def _read(number: str) -> float:
    """Python reads what is too large for it as infinity, which is no number for the judge."""
    return min(max(float(number), -MOST), MOST)


def compiled(bench: Bench, case: SchemaCase, options: Options) -> Outcome:
    found = Outcome(case)
    began = time.monotonic()
    try:
        bench.compiled({"json": case.schema, **options})
    except (RequestError, GrammarError) as error:
        found.refusal = str(error)
    found.seconds = time.monotonic() - began
    return found


def write(
    engine: LLMEngine, outcomes: Sequence[Outcome], num: int, max_tokens: int, options: Options
) -> int:
    """An engine writes texts for each schema that is not refused, at temperature 1.

    num: texts of each. Returns the number of tokens.
    """
    # All texts of a schema one after the other: few grammars are compiled at a time.
    waiting = [(one, seed) for one in outcomes if not one.refusal for seed in range(num)]
    waiting.reverse()
    running: dict[str, Outcome] = {}
    num_tokens = 0
    while waiting or running:
        # Compiling has a time limit, in which a grammar waits for those before it.
        while waiting and len(running) < MAX_WAITING:
            one, seed = waiting.pop()
            request_id = f"{one.case.name} {seed}"
            form = StructuredOutputsParams(json=one.case.schema, **options)
            params = SamplingParams(
                temperature=1.0, seed=seed, max_tokens=max_tokens, structured_outputs=form
            )
            engine.add_request(request_id, PROMPT, params)
            running[request_id] = one
        for output in engine.step():
            if output.finished:
                (found,) = output.outputs
                num_tokens += len(found.token_ids)
                one = running.pop(output.request_id)
                one.note(found.finish_reason, found.text, found.error)
    return num_tokens


def walk(bench: Bench, one: Outcome, num: int, max_tokens: int, options: Options) -> None:
    """Draws bytes at random, without a model, among those that the masks allow; texts that no
    model would write are among them."""
    compilation = bench.compiled({"json": one.case.schema, **options})
    letters = byte_tokens(bench.tokenizer)
    for seed in range(num):
        rng = Random(f"{one.case.name} {seed}")
        text, matcher = bytearray(), compilation.wait()
        reason, error = "length", None
        try:
            for _ in range(max_tokens):
                masks: Column = np.zeros((1, bench.num_words), dtype=np.int32)
                matcher.fill(masks, [])
                drawn = _drawn(masks[0], letters, bench.eos[0], rng)
                if drawn is None:
                    reason = "stop"
                    break
                matcher.advance([letters[drawn]])
                text.append(drawn)
        except Exception as problem:  # whatever a backend raises
            reason, error = "error", str(problem)
        one.note(reason, text.decode("utf-8", "replace"), error)


def _drawn(mask: Column, letters: dict[int, int], eos: int, rng: Random) -> int | None:
    """A byte, or ``None`` for the end. Raises ``ValueError`` where nothing is allowed."""

    def is_allowed(token: int) -> bool:
        return bool(mask[token // WORD] >> (token % WORD) & 1)

    found = [byte for byte, token in letters.items() if is_allowed(token)]
    if is_allowed(eos) and (not found or rng.random() < 0.5):
        return None
    if not found:
        raise ValueError("nothing is allowed")
    return rng.choices(found, [_weight(byte) for byte in found])[0]


def _weight(byte: int) -> float:
    """Texts come to an end, and are mostly letters."""
    if chr(byte) == '"':
        return 12.0
    if chr(byte) in "}]":
        return 4.0
    if chr(byte) in "\n\r\t \\" or byte >= 0x7F:
        return 0.05
    return 1.0 if chr(byte).isalnum() or chr(byte) in ",:{[" else 0.2
