"""Options of all workloads for users, tiers, deadlines, priorities, limits and adapters.

users="ann(share=3),bob(weight=2)"       num_users=100, user_skew=1.1
tiers="chat(share=0.7,ttft=1,tbt=0.1),batch(share=0.3,deadline=600,priority=1)"
deadlines=(1, 60)                        num_priorities=3
max_tokens="own"                         num_adapters=256, adapter_skew=1.0, base_share=0.2"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import repeat
from math import inf, isfinite, log
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigError
from policylab.sim.job import OWN
from policylab.sim.named import call, check_number, check_options, split
from policylab.sim.workloads.draws import CHUNK, RandomDraws

Rows = list[dict[str, Any]]
"""For each job the fields that are set."""

MAX_USERS = 1_000_000
MAX_ADAPTERS = 100_000
MAX_SHARE = 1e9
LONGEST, OWN_LENGTH = "longest", "own"  # values of the option max_tokens


class User(NamedTuple):
    """A user. ``share``: its number of requests relative to other users; ``weight``: its service
    relative to other users, under policies with weights."""

    share: float = 1.0
    weight: float = 1.0


class Tier(NamedTuple):
    """A class of requests. ``share``: its number of requests relative to other tiers. ``ttft``,
    ``tbt`` and ``deadline`` are latency limits in seconds. ``offline``: no user waits for the
    answers; ``pooled``: the results are vectors, in place of output tokens."""

    share: float = 1.0
    ttft: float | None = None
    tbt: float | None = None
    deadline: float | None = None
    priority: int = 0
    offline: bool = False
    pooled: bool = False
    hints: Mapping[str, Any] = {}

    def fields(self, name: str) -> dict[str, Any]:
        """The job fields that this tier, called ``name``, sets for each of its requests."""
        hints = {**({"offline": True} if self.offline else {}), **self.hints}
        set_ = {"ttft": self.ttft, "tbt": self.tbt, "deadline": self.deadline}
        found: dict[str, Any] = {k: float(value) for k, value in set_.items() if value is not None}
        found["tier"] = name
        if self.priority:
            found["priority"] = self.priority
        if self.pooled:
            found |= {"is_pooled": True, "num_output": 1}
        if hints:
            found["hints"] = hints
        return found


def read_users(text: str) -> dict[str, User]:
    """Parse a text such as ``ann(share=3),bob``; users by name. Raises ``ConfigError``."""
    found: dict[str, User] = {}
    for name, given in _named("users", text, User._fields, "ann(share=3,weight=2)"):
        user = User(**given)
        check_number(f"users: share of {name}", user.share, 0.0, MAX_SHARE)
        if not user.weight > 0:
            raise ConfigError(f"users: weight of {name} is {user.weight!r}, must be above 0")
        found[name] = user
    if found and not any(user.share for user in found.values()):
        raise ConfigError("users: all shares are 0; one must be above 0")
    return found


def read_tiers(text: str) -> dict[str, Tier]:
    """Parse a text such as ``chat(ttft=1),batch``; tiers by name. Raises ``ConfigError``."""
    found: dict[str, Tier] = {}
    for name, given in _named("tiers", text, Tier._fields, "chat(share=0.7,ttft=1,tbt=0.1)"):
        tier = Tier(**given)
        check_number(f"tiers: share of {name}", tier.share, 0.0, MAX_SHARE)
        for key in ("ttft", "tbt", "deadline"):
            value = getattr(tier, key)
            if value is not None and not (isinstance(value, int | float) and 0 < value < inf):
                raise ConfigError(f"tiers: {key} of {name} is {value!r}, must be seconds above 0")
        if not isinstance(tier.priority, int):
            raise ConfigError(f"tiers: priority of {name} is {tier.priority!r}, must be an integer")
        if not isinstance(tier.hints, dict):
            raise ConfigError(f"tiers: hints of {name} is {tier.hints!r}, must be as in {{'a': 1}}")
        found[name] = tier
    if found and not any(tier.share for tier in found.values()):
        raise ConfigError("tiers: all shares are 0; one must be above 0")
    return found


def _named(
    option: str, text: str, known: tuple[str, ...], example: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    names: set[str] = set()
    for part in split(text):
        name, given = call(part, option, example)
        check_options(f"{option}: {name}", given, known)
        if name in names:
            raise ConfigError(f"{option}: {name} is named twice; name it once")
        names.add(name)
        yield name, given


class Tags(NamedTuple):
    """The values of a workload's options that describe requests apart from arrival and lengths."""

    users: dict[str, User]
    tiers: dict[str, Tier]
    num_users: int = 0
    user_skew: float = 0.0
    deadlines: tuple[float, float] | None = None
    num_priorities: int = 0
    max_tokens: str = LONGEST
    num_adapters: int = 0
    adapter_skew: float = 1.0
    base_share: float = 0.0

    def check(self) -> None:
        """Raise ``ConfigError`` for invalid or contradictory options."""
        check_number("num_users", self.num_users, 0, MAX_USERS)
        check_number("user_skew", self.user_skew, 0, 10)
        check_number("num_priorities", self.num_priorities, 0, 1000)
        if self.max_tokens not in (LONGEST, OWN_LENGTH):
            raise ConfigError(
                f"max_tokens is {self.max_tokens!r}, must be {LONGEST!r} (longest output of the "
                f"workload) or {OWN_LENGTH!r} (the output length of each request)"
            )
        check_number("num_adapters", self.num_adapters, 0, MAX_ADAPTERS)
        check_number("adapter_skew", self.adapter_skew, 0, 10)
        check_number("base_share", self.base_share, 0, 1)
        if self.base_share and not self.num_adapters:
            raise ConfigError(
                f"base_share is {self.base_share!r}, and no request uses an adapter: set "
                "num_adapters"
            )
        if self.users and self.num_users:
            raise ConfigError("users and num_users both set the users; give only one of them")
        if self.deadlines is None:
            return
        try:
            least, most = self.deadlines
            is_right = 0 < least <= most and isfinite(most)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"deadlines is {self.deadlines!r}, must be two numbers of seconds as in (1, 60)"
            ) from error
        if not is_right:
            raise ConfigError(
                f"deadlines is {self.deadlines!r}, must be two rising numbers of seconds above 0"
            )

    def draw(self, dice: RandomDraws) -> Iterator[dict[str, Any]]:
        """An endless iterator of the job fields (user, tier, deadline, priority, ...) that these
        options set for each request."""
        columns = list(self._columns(dice))
        while columns:
            for parts in zip(*(next(column) for column in columns), strict=True):
                found: dict[str, Any] = {}
                for part in parts:
                    found.update(part)
                yield found
        while True:
            yield {}

    def _columns(self, dice: RandomDraws) -> Iterator[Iterator[Rows]]:
        """For each option that is set, yield an endless iterator of the fields that it gives to
        jobs, in lists of ``CHUNK`` jobs. Later options override earlier ones."""
        if self.num_priorities:
            levels: Rows = [{"priority": level} for level in range(self.num_priorities)]
            yield _pick(dice.stream("priorities"), levels, np.ones(len(levels)))
        if self.max_tokens == OWN_LENGTH:
            yield repeat([{"max_tokens": OWN}] * CHUNK)
        if self.deadlines is not None:
            yield _deadlines(dice.stream("deadlines"), *self.deadlines)
        if self.users:
            rows: Rows = [{"user": name} for name in self.users]
            shares = np.array([user.share for user in self.users.values()], dtype=np.float64)
            yield _pick(dice.stream("users"), rows, shares)
        if self.num_users:
            rows = [{"user": f"user{number}"} for number in range(self.num_users)]
            yield _pick(dice.stream("users"), rows, _zipf(self.num_users, self.user_skew))
        if self.tiers:
            rows = [tier.fields(name) for name, tier in self.tiers.items()]
            shares = np.array([tier.share for tier in self.tiers.values()], dtype=np.float64)
            yield _pick(dice.stream("tiers"), rows, shares)
        if self.num_adapters:
            rows = [{"adapter": f"adapter{number}"} for number in range(self.num_adapters)]
            shares = (1.0 - self.base_share) * _zipf(self.num_adapters, self.adapter_skew)
            rows, shares = [{"adapter": ""}, *rows], np.append(self.base_share, shares)
            yield _pick(dice.stream("adapters"), rows, shares)


def _zipf(number: int, skew: float) -> NDArray[np.float64]:
    """Shares [number] proportional to ``1 / n**skew`` for the n-th, with the sum 1."""
    shares: NDArray[np.float64] = np.arange(1, number + 1, dtype=np.float64) ** -skew
    shares /= shares.sum()
    return shares


def _pick(rng: np.random.Generator, rows: Rows, shares: np.ndarray[Any, Any]) -> Iterator[Rows]:
    upto = np.cumsum(shares / shares.sum())
    while True:
        places = np.searchsorted(upto, rng.random(CHUNK), side="right")
        yield [rows[place] for place in np.minimum(places, len(rows) - 1).tolist()]


def _deadlines(rng: np.random.Generator, least: float, most: float) -> Iterator[Rows]:
    while True:
        seconds = np.exp(rng.uniform(log(least), log(most), CHUNK))
        yield [{"deadline": value} for value in seconds.tolist()]
