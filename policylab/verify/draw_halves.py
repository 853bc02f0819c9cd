"""Puts the engine's real drafters and grammars into a case, in place of simulated ones.

A separate random generator leaves the rest of the case unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import msgspec

from engine.config.sched import SchedulerConfig
from engine.messages.requests import AddRequest
from engine.messages.structured import StructuredOutputsParams, grammar_of
from policylab.verify.case import Add, Case, Event
from policylab.verify.halves import END, WRONG

edit = msgspec.structs.replace
SHARE = 0.6  # share of requests with a grammar, in cases with grammars
FORM = {
    "type": "object",
    "properties": {"ab": {"type": "boolean"}, "cd": {"enum": ["ab", "false", 10]}},
    "required": ["ab", "cd"],
    "additionalProperties": False,
}
FORMS: tuple[dict[str, Any], ...] = (
    {"regex": "(ab|ba){2,9}"},
    {"regex": "[a-f0-9 ]{0,30}"},
    {"regex": "(abab|cd,){1,40}true"},
    {"choice": ["true", "false", "ab", "abab10"]},
    {"choice": ["abcdefghijklmnopqrstuvwxyz"]},
    {"choice": ["ab!", "abab!"]},  # needs a character that no token contains
    {"choice": ["!"]},
    {"json": FORM, "disable_any_whitespace": True},
    {"json": {"type": "array", "items": {"enum": ["ab", 1]}, "maxItems": 6}},
    {"grammar": 'start: "{" start "}" | "ab" | "cd"\n'},
)


def with_halves(case: Case, seed: int) -> Case:
    """Return the case with a real drafter, real grammars, or both, chosen by ``seed``."""
    rng = Random(f"halves of {seed}")
    has_drafts = rng.random() < 0.8
    has_grammars = not has_drafts or rng.random() < 0.6
    stands_for = {"drafts": has_drafts, "grammars": True}
    needs = {name: size for name, size in case.setup.needs.items() if not stands_for.get(name)}
    setup = edit(
        case.setup,
        needs=needs,
        grammar_ticks=rng.choice((0, 3)) if has_grammars else -1,
        num_tokens_used=rng.choice((61, 2, 2, 3)),
    )
    if has_drafts:
        setup = edit(setup, config=with_drafts(rng, setup.config))
    events = [changed for event in case.events for changed in rewritten(rng, event, has_grammars)]
    return edit(case, setup=setup, events=events)


def with_drafts(rng: Random, config: SchedulerConfig) -> SchedulerConfig:
    """The config with a random draft method and number of drafts."""
    most = config.max_num_batched_tokens - 1
    if most < 1:  # a step needs room for one token besides drafts
        config, most = replace(config, max_num_batched_tokens=2), 1
    method = rng.choice(("ngram", "suffix", "draft_model", "draft_model", "grammar"))
    options: dict[str, Any] = {
        "method": method,
        "num_speculative_tokens": min(most, rng.choice((1, 2, 3, 5, 9))),
        "adaptive": rng.random() < 0.5,
    }
    if method == "ngram":
        sizes = sorted((rng.randint(1, 3), rng.randint(1, 3)))
        options |= {"prompt_lookup_min": sizes[0], "prompt_lookup_max": sizes[1]}
    if method == "suffix":
        options["suffix_decoding_max_cached_requests"] = rng.choice((0, 2, 100))
        options["suffix_decoding_max_spec_factor"] = rng.choice((1.0, 3.0))
    if method == "draft_model":
        options["model"] = "of the worker"
    return replace(config, speculative_config=options)


def rewritten(rng: Random, event: Event, has_grammars: bool) -> Iterator[Event]:
    """The event and, if it adds a request, sometimes copies with the same prompt. ``has_grammars``:
    the request may get a random grammar."""
    if not isinstance(event, Add):
        yield event
        return
    request = edit(event.request, grammar=None)
    if has_grammars and rng.random() < SHARE:
        request = with_grammar(rng, request)
    num_more = rng.choice((0, 0, 0, 0, 1, 3))
    yield edit(event, request=request)
    for place in range(num_more):
        name = f"{request.request_id}/{place}"
        yield edit(event, request=edit(request, request_id=name))


def with_grammar(rng: Random, request: AddRequest) -> AddRequest:
    """The request with a random grammar, sometimes an invalid one."""
    grammar = (
        WRONG if rng.random() < 0.05 else grammar_of(StructuredOutputsParams(**rng.choice(FORMS)))
    )
    return edit(
        request,
        grammar=grammar,
        eos_token_ids=[END],
        params=edit(request.params, min_tokens=0),
    )
