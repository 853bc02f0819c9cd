"""Shrink a failing case to a smaller one that fails in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from itertools import islice, pairwise
from typing import Any

import msgspec

from engine.config.sched import SchedulerConfig
from engine.errors import ConfigError
from engine.messages.params import SamplingParams
from engine.messages.requests import AddRequest
from policylab.verify.case import VOCAB_SIZE, Add, Case, Event, Setup

edit = msgspec.structs.replace
KEPT_FIELDS = ("request_id", "prompt_token_ids", "params", "seed", "arrival_time", "max_tokens")
TELL_SECONDS = 2.0  # between two reports of progress


GoesOn = Callable[[int, Case], bool]
"""Called with the number of tries and the smallest case so far; returns whether to continue."""


def to_its_end(num_tries: int, best: Case) -> bool:
    """The default limit of shrinking: always True, so that it continues while smaller cases are
    found."""
    return True


class Clocked:
    """Limits shrinking to ``limit`` seconds from its creation. A run that has begun is finished.

    From time to time ``tell(num_tries, best, seconds)`` gets the number of runs, the smallest case
    so far and the elapsed seconds."""

    def __init__(
        self,
        limit: float,
        tell: Callable[[int, Case, float], object] | None = None,
        *,
        every: float = TELL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.best: Case | None = None
        """The smallest case so far, for a caller that is interrupted."""
        self.is_over = False
        """True if the limit was reached."""
        self._limit = limit
        self._tell = tell
        self._every = every
        self._clock = clock
        self._begun = clock()
        self._tell_at = every

    def __call__(self, num_tries: int, best: Case) -> bool:
        self.best = best
        seconds = self._clock() - self._begun
        if self._tell is not None and seconds >= self._tell_at:
            self._tell_at = seconds + self._every
            self._tell(num_tries, best, seconds)
        self.is_over = seconds >= self._limit
        return not self.is_over


def shrink(
    case: Case,
    breaks: Callable[[Case], bool],
    max_tries: int = 2000,
    *,
    goes_on: GoesOn = to_its_end,
) -> Case:
    """Find a small case for which ``breaks`` is still true, in at most ``max_tries`` runs.

    ``goes_on`` is called before each run; if it returns False, the smallest case so far is
    returned."""
    tries = start = 0
    while True:
        for index, smaller in islice(enumerate(simpler(case)), start, None):
            tries += 1
            if tries > max_tries or not goes_on(tries, case):
                return case
            if breaks(smaller):
                case, start = (
                    smaller,
                    index,
                )  # simplifications before this one were just tried in vain
                break
        else:
            if start == 0:
                return case
            start = 0


def simpler(case: Case) -> Iterator[Case]:
    """Yield simpler variants of the case, roughly from much smaller to slightly smaller."""
    for events in fewer(case.events):
        yield edit(case, events=events)
    for setup in simpler_setups(case.setup):
        yield edit(case, setup=setup)
    for ticks in (lambda at: 0, lambda at: at // 2, lambda at: max(0, at - 1)):
        for start in range(len(case.events)):
            events = [
                edit(event, at=ticks(event.at)) if index >= start else event
                for index, event in enumerate(case.events)
            ]
            if events != case.events and is_ordered(events):
                yield edit(case, events=events)
    for index, event in enumerate(case.events):
        if isinstance(event, Add):
            for add in simpler_adds(event):
                yield edit(case, events=[*case.events[:index], add, *case.events[index + 1 :]])


def is_ordered(events: list[Event]) -> bool:
    """True if the events are in order of their ticks."""
    return all(one.at <= other.at for one, other in pairwise(events))


def fewer(events: list[Event]) -> Iterator[list[Event]]:
    """Yield shorter lists: without each half of the events, then without each quarter, and so on
    down to single events."""
    size = len(events)
    while size > 1:
        size = (size + 1) // 2
        for start in range(0, len(events), size):
            yield events[:start] + events[start + size :]
    if len(events) == 1:
        yield []


def simpler_setups(setup: Setup) -> Iterator[Setup]:
    """Yield setups that lack one feature or resource or have one smaller size."""
    for name in setup.needs:
        yield edit(setup, needs={key: size for key, size in setup.needs.items() if key != name})
    if setup.grammar_ticks > 0:
        yield edit(setup, grammar_ticks=0)
    plain = {"num_tokens_used": VOCAB_SIZE, "is_steady": True, "caching": False, "windows": (0,)}
    plain |= {"whole_media": False, "prefill_cores": 0}
    for name, value in plain.items():
        if getattr(setup, name) != value:
            yield edit(setup, **{name: value})
    least = {"num_blocks": 2, "block_size": 1, "prefill_cores": 1, "decode_cores": 1}
    for name, lowest in least.items():
        for size in smaller(getattr(setup, name), lowest):
            yield edit(setup, **{name: size})
    for config in simpler_configs(setup.config):
        yield edit(setup, config=config)


def simpler_configs(config: SchedulerConfig) -> Iterator[SchedulerConfig]:
    """Yield configs with one option at its default or, for sizes, at a smaller number."""
    sizes = ("num_steps_in_flight", "max_num_seqs", "max_num_batched_tokens", "max_model_len")
    changes: list[dict[str, Any]] = []
    for option in fields(SchedulerConfig):
        value = getattr(config, option.name)
        if option.name in sizes:
            changes += [{option.name: size} for size in smaller(value, 1)]
        elif option.name == "policy_options":
            changes += [{option.name: {}}] if value else []
        elif option.name != "scheduling_policy" and value != option.default:
            changes.append({option.name: option.default})
    for change in changes:
        try:
            yield replace(config, **change)
        except (ConfigError, TypeError):
            continue


def simpler_adds(add: Add) -> Iterator[Add]:
    """Yield the event without its worker fault, and with simpler requests."""
    if add.fails_at is not None:
        yield edit(add, fails_at=None)
    for request in simpler_requests(add.request):
        yield edit(add, request=request)


def simpler_requests(request: AddRequest) -> Iterator[AddRequest]:
    """Yield requests with one simplification each: a default field, a shorter prompt, a prompt of
    zeros, or fewer output tokens."""
    for field in msgspec.structs.fields(AddRequest):
        if field.name not in KEPT_FIELDS:
            value = field.default
            if field.default_factory is not msgspec.NODEFAULT:
                value = field.default_factory()
            if getattr(request, field.name) != value:
                yield edit(request, **{field.name: value})
    plain = SamplingParams(max_tokens=request.max_tokens)
    if request.params != plain:
        yield edit(request, params=plain)
    if request.arrival_time:
        yield edit(request, arrival_time=0.0)
    for size in smaller(request.max_tokens, 1):
        least = min(size, request.params.min_tokens)
        params = edit(request.params, max_tokens=size, min_tokens=least)
        yield edit(request, max_tokens=size, params=params)
    for size in smaller(len(request.prompt_token_ids), 1):
        media = [item for item in request.media if item.offset + item.length <= size]
        yield edit(request, prompt_token_ids=request.prompt_token_ids[:size], media=media)
    if any(request.prompt_token_ids):
        yield edit(request, prompt_token_ids=[0] * len(request.prompt_token_ids))


def smaller(value: int, least: int) -> Iterator[int]:
    """Yield two smaller values, not below ``least``: half of the value, and the value minus 1."""
    if value > least:
        half = max(least, value // 2)
        yield half
        if value - 1 > half:
            yield value - 1
