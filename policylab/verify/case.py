"""Cases: an engine and what happens to it, as data that can be drawn, shrunk, kept and printed."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any

import msgspec

from engine.config.sched import SchedulerConfig
from engine.messages.requests import AddRequest
from engine.sched.interface import PauseState

VOCAB_SIZE = 61


class Setup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the simulated engine is made of.

    ``windows``: one for each group of layers, 0 for full attention.
    ``needs``: resources by name (see ``needs.py`` and ``remote.py``) and the size of each. ``seed``
    throws the scheduler's dice and sets the pace: a steady engine launches and settles as the core
    does, any other in every order that is allowed. If it is odd the worker computes a step only
    when its result is collected. ``tick``: seconds between two plans, a binary fraction, so
    that times add up without rounding.

    ``config.speculative_config``: the engine's own drafts, and ``grammar_ticks``: its own grammars,
    ready after this many plans at most; -1: none (see ``halves.py``). ``num_tokens_used``: tokens
    that the model says, the first of the vocabulary: a text of few tokens repeats itself.
    """

    config: SchedulerConfig
    num_blocks: int
    block_size: int
    caching: bool = True
    windows: tuple[int, ...] = (0,)
    needs: dict[str, int] = {}
    seed: int = 0
    is_steady: bool = True
    tick: float = 2.0**-6
    grammar_ticks: int = -1
    num_tokens_used: int = VOCAB_SIZE

    @property
    def has_halves(self) -> bool:
        """Does it need the deciding halves of features?"""
        return self.config.speculative_config is not None or self.grammar_ticks >= 0


class Add(msgspec.Struct, frozen=True, omit_defaults=True, tag="add"):
    """A request comes. ``fails_at``: the first position that the worker cannot compute."""

    at: int
    request: AddRequest
    fails_at: int | None = None


class Abort(msgspec.Struct, frozen=True, omit_defaults=True, tag="abort"):
    """A client aborts these requests, known or not; ``None``: all."""

    at: int
    request_ids: list[str] | None


class Reset(msgspec.Struct, frozen=True, omit_defaults=True, tag="reset"):
    """The prefix cache is emptied."""

    at: int
    reset_running: bool = False


class Pause(msgspec.Struct, frozen=True, omit_defaults=True, tag="pause"):
    """The engine is paused, or goes on."""

    at: int
    state: PauseState


class Jump(msgspec.Struct, frozen=True, omit_defaults=True, tag="jump"):
    """The clock jumps by this many seconds, back too."""

    at: int
    seconds: float


class Wake(msgspec.Struct, frozen=True, omit_defaults=True, tag="wake"):
    """``wake`` is called for a request that may wait for nothing, or may not exist."""

    at: int
    request_id: str


Event = Add | Abort | Reset | Pause | Jump | Wake


class Case(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An engine and a script. ``at`` of each event is the tick before which it happens.

    After the script nothing new comes, the engine goes on and every request must finish.
    """

    setup: Setup
    events: list[Event] = []

    @property
    def num_ticks(self) -> int:
        """Length of the script."""
        return 1 + max((event.at for event in self.events), default=-1)


def to_json(case: Case) -> str:
    """One line. Raises ``TypeError`` for a policy that is not given by name."""
    return msgspec.json.encode(case).decode()


def from_json(line: str) -> Case:
    """What ``to_json`` made. Raises ``msgspec.ValidationError``."""
    return msgspec.json.decode(line, type=Case)


def to_python(value: Any) -> str:
    """Python that makes the value, without what has its default."""
    if isinstance(value, msgspec.Struct) or (is_dataclass(value) and not isinstance(value, type)):
        arguments = [
            f"{name}={to_python(getattr(value, name))}"
            for name, default in _defaults(value).items()
            if getattr(value, name) != default
        ]
        return f"{type(value).__name__}({', '.join(arguments)})"
    if isinstance(value, Enum):
        return str(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, list):
        return f"[{', '.join(map(to_python, value))}]"
    return repr(value)


def _defaults(value: Any) -> dict[str, Any]:
    """Defaults of the fields of a struct or dataclass, a mark of its own where there is none."""
    found = msgspec.structs.fields(value) if isinstance(value, msgspec.Struct) else fields(value)
    none = (MISSING, msgspec.NODEFAULT)
    return {
        field.name: field.default if field.default_factory in none else field.default_factory()
        for field in found
    }
