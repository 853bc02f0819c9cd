"""Test cases: an engine and its events, as data that can be drawn, shrunk, stored and printed."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any

import msgspec

from engine.config.sched import SchedulerConfig
from engine.messages.params import SamplingParams
from engine.messages.requests import AddRequest
from engine.sched.interface import PauseState

VOCAB_SIZE = 61
WILD = "policylab.verify.wild.Wild"  # the policy that answers at random


class RankFault(msgspec.Struct, frozen=True, array_like=True):
    """What goes wrong in one of the further ranks, at which of its plans."""

    kind: str
    rank: int
    plan: int


class Setup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The simulated engine of a case.

    ``windows``: sliding window of each group of layers; 0: full attention; negative: attention
    within chunks of that many tokens. ``needs``: sizes of
    simulated resources by name. ``seed``: seed of the scheduler, of the worker and of the order of
    calls; with an odd seed the worker computes a step only when its result is collected.
    ``is_steady``: steps are launched and settled as by the engine core, otherwise in random order.
    ``tick``: seconds between two plans, a binary fraction, so that sums of times are exact.

    With ``config.speculative_config``, the engine's real drafter is used. ``grammar_ticks``: real
    grammars are used, each compiled within this many plans; -1: no real grammars.
    ``num_tokens_used``: the number of different tokens that the model generates.

    ``snapshot_blocks``: blocks of a snapshot of the model's recurrent states; 0: it has none.
    ``snapshot_interval``: tokens between snapshots that stay, in blocks; 0: none.
    ``snapshot_policy``: as the option ``state_snapshot_policy``.

    ``encoder_cache_size`` and ``whole_media``: of the resource "pictures". ``stores``: those of KV
    blocks of the resource "tiers", see ``policylab.verify.tiers``. ``ranks``: workers that compute
    each step together, one of which fails as ``rank_fault`` says."""

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
    snapshot_blocks: int = 0
    snapshot_interval: int = 0
    snapshot_policy: str = "cost"
    encoder_cache_size: int = 0
    whole_media: bool = False
    stores: tuple[str, ...] = ()
    ranks: int = 1
    rank_fault: RankFault | None = None
    prefill_cores: int = 0
    decode_cores: int = 0
    prefill_threshold: int = 1

    @property
    def has_halves(self) -> bool:
        """True if the case uses the engine's real drafter or grammars."""
        return self.config.speculative_config is not None or self.grammar_ticks >= 0


class Add(msgspec.Struct, frozen=True, omit_defaults=True, tag="add"):
    """Event: a request arrives. ``fails_at``: the first position at which the worker reports an
    error; ``None``: none."""

    at: int
    request: AddRequest
    fails_at: int | None = None


class Abort(msgspec.Struct, frozen=True, omit_defaults=True, tag="abort"):
    """Event: requests are aborted by id; ``None``: all of them. Unknown ids are allowed."""

    at: int
    request_ids: list[str] | None


class Reset(msgspec.Struct, frozen=True, omit_defaults=True, tag="reset"):
    """The prefix cache is reset."""

    at: int
    reset_running: bool = False


class Pause(msgspec.Struct, frozen=True, omit_defaults=True, tag="pause"):
    """Event: the engine is paused or resumed."""

    at: int
    state: PauseState


class Jump(msgspec.Struct, frozen=True, omit_defaults=True, tag="jump"):
    """Event: the clock jumps by this many seconds, forward or back."""

    at: int
    seconds: float


class Wake(msgspec.Struct, frozen=True, omit_defaults=True, tag="wake"):
    """Event: ``scheduler.wake`` is called with this id, whether or not the request is parked."""

    at: int
    request_id: str


class Write(msgspec.Struct, frozen=True, omit_defaults=True, tag="write"):
    """Event: the files of an adapter are replaced. ``content``: what they have then, a text that
    begins with the path; see ``policylab.verify.adapters``."""

    at: int
    path: str
    content: str


class Load(msgspec.Struct, frozen=True, omit_defaults=True, tag="load"):
    """Event: a client loads an adapter. ``replaces``: in place of one with the same name."""

    at: int
    name: str
    path: str
    replaces: bool = False


class Unload(msgspec.Struct, frozen=True, omit_defaults=True, tag="unload"):
    """Event: a client unloads an adapter."""

    at: int
    name: str


class Bring(msgspec.Struct, frozen=True, omit_defaults=True, tag="bring"):
    """Event: the content of media items with the hash ``key`` arrives for requests, which may have
    ended or be unknown. ``error``: why there is no content; see ``policylab.verify.pictures``."""

    at: int
    key: str
    request_ids: list[str]
    error: str = ""


class ResetEncoder(msgspec.Struct, frozen=True, omit_defaults=True, tag="reset_encoder"):
    """Event: the encoder cache is reset."""

    at: int


class Kill(msgspec.Struct, frozen=True, omit_defaults=True, tag="kill"):
    """Event: a core of several dies, which is noticed when it is sent something, or after this many
    ticks. The last one does not die."""

    at: int
    core: int
    ticks: int = 0


Event = (
    Add | Abort | Reset | Pause | Jump | Wake | Write | Load | Unload | Bring | ResetEncoder | Kill
)


class Case(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A test case: a simulated engine and a list of events. An event happens before the engine's
    round of work (tick) with the number ``at``. After the last event the run continues until all
    requests have ended."""

    setup: Setup
    events: list[Event] = []

    @property
    def num_ticks(self) -> int:
        """The number of ticks up to and including that of the last event."""
        return 1 + max((event.at for event in self.events), default=-1)


def plain_request(
    name: str, prompt: list[int], num_output: int, now: float, user: str, **fields: Any
) -> AddRequest:
    """A request that arrives at ``now`` (seconds) and generates up to ``num_output`` tokens.
    Requests of the same user belong to the same program."""
    fields.setdefault("hints", {"output_tokens": num_output, "program": f"program of {user}"})
    return AddRequest(
        name,
        prompt,
        SamplingParams(max_tokens=num_output),
        seed=0,
        arrival_time=now,
        max_tokens=num_output,
        user=user,
        **fields,
    )


def to_json(case: Case) -> str:
    """The case as one line of JSON. Raises ``TypeError`` if its policy is not given by name."""
    return msgspec.json.encode(case).decode()


def from_json(line: str) -> Case:
    """The case in a line that ``to_json`` made. Raises ``msgspec.ValidationError``."""
    return msgspec.json.decode(line, type=Case)


def to_python(value: Any) -> str:
    """A Python expression that creates this value, without fields that have their default."""
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
    """The default of each field of a struct or dataclass, by name; for a required field, a marker
    that equals no value."""
    found = msgspec.structs.fields(value) if isinstance(value, msgspec.Struct) else fields(value)
    none = (MISSING, msgspec.NODEFAULT)
    return {
        field.name: field.default if field.default_factory in none else field.default_factory()
        for field in found
    }
