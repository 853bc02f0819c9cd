"""Draws random test cases; each seed combines features in a different way."""

from __future__ import annotations

import inspect
from dataclasses import replace
from random import Random
from typing import Any

import msgspec

from engine.config.sched import SchedulerConfig
from engine.messages.params import SamplingParams
from engine.messages.requests import AddRequest, MediaItem
from engine.sched.interface import PauseState
from engine.sched.plugins.find import find_cache_policy, find_policy
from engine.sched.policies import POLICIES
from engine.sched.policy import Policy
from policylab.verify.case import (
    VOCAB_SIZE,
    WILD,
    Abort,
    Add,
    Case,
    Event,
    Jump,
    Pause,
    RankFault,
    Reset,
    Setup,
    Wake,
)
from policylab.verify.draw_adapters import with_adapters
from policylab.verify.draw_apart import with_apart
from policylab.verify.draw_halves import with_halves
from policylab.verify.draw_pictures import with_pictures
from policylab.verify.draw_pooled import with_pooled
from policylab.verify.draw_tiers import with_tiers
from policylab.verify.ranks import FAULTS

WILD_SNAPSHOTS = "policylab.verify.wild.WildSnapshots"
WILD_CACHE = "policylab.verify.wild.WildCache"
SNAPSHOT_POLICIES = ("cost", "cost", "interval", "marconi")
CROWDED = 0.15  # share of engines with many running requests
SHARES = {"adapters": 0.4}  # share of engines with a resource; 0.25 for any other
STATEFUL = 0.3  # share of models with recurrent states
RETENTIVE = 0.3  # share of engines with a cache policy
STAGED = 0.25  # share of engines with several stages
PARALLEL = 0.25  # share of engines with several ranks, of those that may have them
YEARS = 2.0**28  # seconds; a binary fraction like all times here
FEATURES = (
    *("aborts", "resets", "pauses", "jumps", "wakes", "faults", "deadlines", "stops", "salts"),
    *("media", "hints", "logprobs", "clients", "twins", "giants", "users", "storms"),
)


def draw_case(
    seed: int,
    policy: Any = None,
    options: dict[str, Any] | None = None,
    *,
    has_halves: bool = False,
) -> Case:
    """The random case of a seed. ``policy``: used in place of a random shipped policy.
    ``has_halves``: odd seeds use the engine's real drafters or grammars."""
    case = with_tiers(draw_plain(seed, policy, options), seed)
    case = with_adapters(with_states(case, seed), seed)
    case = with_cache_policy(with_pictures(case, seed), seed)
    case = with_pooled(with_halves(case, seed) if has_halves and seed % 2 else case, seed)
    return with_apart(with_stages(with_ranks(case, seed), seed), seed)


def draw_plain(seed: int, policy: Any, options: dict[str, Any] | None) -> Case:
    """The random case of a seed, with simulated drafts and grammars only."""
    rng = Random(seed)
    features = {name for name in FEATURES if rng.random() < 0.4}
    setup = draw_setup(rng, policy, options)
    num_requests = rng.choice((3, 8, 20, 40))
    if rng.random() < CROWDED:
        setup, features, num_requests = crowded(rng, setup), {*features, "storms", "short"}, 50
    pace = rng.choice((0.2, 0.7, 2.0))  # requests per tick
    maker = RequestMaker(rng, setup, features)
    events: list[Event] = [
        maker.add(str(index), int(index / pace)) for index in range(num_requests)
    ]
    num_ticks = max(event.at for event in events) + rng.choice((1, 10, 40))
    events += draw_troubles(rng, features, num_ticks, num_requests)
    return Case(setup=setup, events=sorted(events, key=lambda event: event.at))


def with_states(case: Case, seed: int) -> Case:
    """The case, with recurrent states in some of the model's layers for a part of the seeds. A
    separate random generator leaves the rest of the case unchanged."""
    rng = Random(f"states of {seed}")
    share = 0.5 if "tiers" in case.setup.needs else STATEFUL
    if rng.random() >= share:
        return case
    setup, size = case.setup, rng.choice((1, 2, 3, case.setup.block_size))
    size = min(size, setup.block_size)  # small blocks have many hits
    setup = msgspec.structs.replace(
        setup,
        block_size=size,
        num_blocks=setup.num_blocks * setup.block_size // size + rng.choice((0, 0, 10, 60)),
        snapshot_blocks=rng.choice((1, 1, 1, 2, 4, 9)),
        snapshot_interval=rng.choice((0, 0, 0, 1, 2, 5)),
        snapshot_policy=rng.choice((*SNAPSHOT_POLICIES, WILD_SNAPSHOTS)),
    )
    return msgspec.structs.replace(case, setup=setup)


def with_ranks(case: Case, seed: int) -> Case:
    """The case, with several ranks for a part of the seeds, one of which may fail. Not with
    simulated adapters and pictures, which are of one worker."""
    rng = Random(f"ranks of {seed}")
    is_simple = not {"adapters", "pictures"} & case.setup.needs.keys()
    if rng.random() >= PARALLEL or not is_simple:
        return case
    ranks, fault = rng.choice((2, 2, 3)), None
    if rng.random() < 0.3:
        fault = RankFault(rng.choice(FAULTS), rng.randrange(1, ranks), rng.randint(1, 40))
    setup = msgspec.structs.replace(case.setup, ranks=ranks, rank_fault=fault)
    return msgspec.structs.replace(case, setup=setup)


def with_stages(case: Case, seed: int) -> Case:
    """The case, with a model that is split into stages for a part of the seeds."""
    rng = Random(f"stages of {seed}")
    if rng.random() >= STAGED:
        return case
    size = rng.choice((2, 2, 3, 4))
    config = replace(case.setup.config, pipeline_parallel_size=size, num_steps_in_flight=size)
    if config.enable_chunked_prefill:
        config = replace(config, min_stage_chunk=rng.choice((0, 0, 3, 8)))
    return msgspec.structs.replace(case, setup=msgspec.structs.replace(case.setup, config=config))


def with_cache_policy(case: Case, seed: int) -> Case:
    """The case, with a cache policy for a part of the seeds."""
    rng = Random(f"cache policy of {seed}")
    if rng.random() >= RETENTIVE:
        return case
    name = rng.choice(("programs", "shares", WILD_CACHE, WILD_CACHE))
    config = replace(case.setup.config, cache_policy=name)
    return msgspec.structs.replace(case, setup=msgspec.structs.replace(case.setup, config=config))


# -- the engine


def draw_setup(rng: Random, policy: Any, options: dict[str, Any] | None) -> Setup:
    """A random engine with few KV blocks, few seats and small budgets."""
    block_size = rng.choice((1, 2, 3, 4, 8, 16))
    needs = {"adapters": rng.randint(1, 2), "grammars": 1, "encoder": rng.randint(4, 9)}
    needs |= {"moods": rng.choice((5, 30)), "drafts": rng.randint(1, 4)}
    windows = rng.choice(((0, 5), (7,), (0, -6, 5), (0, 0, 9, -4), (0, 2), *((0,),) * 8))
    return Setup(
        config=draw_config(rng, policy, options),
        num_blocks=2 + int(62 * rng.random() ** 1.5),
        block_size=block_size,
        caching=rng.random() < 0.8,
        windows=windows,
        needs={name: size for name, size in needs.items() if rng.random() < SHARES.get(name, 0.25)},
        seed=rng.randrange(2**31),
        is_steady=rng.random() < 0.6,
    )


def crowded(rng: Random, setup: Setup) -> Setup:
    """The setup with room for many running requests, and sometimes with long prompts split into
    small chunks."""
    threshold = setup.config.long_prefill_token_threshold or rng.choice((0, 3))
    config = replace(
        setup.config,
        long_prefill_token_threshold=threshold,
        max_num_seqs=rng.randint(20, 40),
        max_num_batched_tokens=max(64, setup.config.max_model_len),
        max_waiting_requests=None,
        max_waiting_tokens=None,
    )
    sizes = {"num_blocks": rng.randint(60, 120), "block_size": rng.choice((2, 3, 4))}
    return msgspec.structs.replace(
        setup, config=config, needs=dict(list(setup.needs.items())[:1]), **sizes
    )


def draw_config(rng: Random, policy: Any, options: dict[str, Any] | None) -> SchedulerConfig:
    """Random options of the scheduler, and of the policy if ``options`` is ``None``."""
    name = policy if policy is not None else rng.choice((*sorted(POLICIES), WILD, WILD, WILD))
    if options is None:
        options = draw_options(rng, name)
    if name == WILD:
        options = {"rate": rng.choice((0.05, 0.2, 0.5))}
    max_model_len = rng.choice((16, 40, 64))
    seats = rng.randint(1, 16) if rng.random() < 0.8 else rng.randint(17, 32)
    chunked = rng.random() < 0.75
    budget = max(seats, rng.randint(1, 64))
    threshold = rng.choice((0, 0, 3, 8))
    return SchedulerConfig(
        max_num_batched_tokens=budget if chunked else max(budget, max_model_len),
        max_num_seqs=seats,
        max_model_len=max_model_len,
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=threshold,
        long_prefill_token_threshold_adaptive=threshold > 0 and rng.random() < 0.3,
        max_mixed_prefill_tokens=rng.choice((0, 0, 1, 4)) * chunked,
        watermark=rng.choice((None, None, None, None, 0.0, 0.2)),
        scheduling_policy=name,
        policy_options=options,
        num_steps_in_flight=rng.randint(1, 3),
        length_predictor=rng.choice(("none", "history", "oracle")),
        user_weights={"u0": 2.0} if rng.random() < 0.2 else {},
        max_waiting_requests=rng.choice((None, None, None, 1, 5)),
        max_waiting_tokens=rng.choice((None, None, None, 30)),
    )


def draw_options(rng: Random, policy: Any) -> dict[str, Any]:
    """Random arguments for the policy's constructor, near their defaults; empty if there are none
    or the constructor rejects them."""
    cls = POLICIES.get(policy, policy) if isinstance(policy, str) else policy
    if not (isinstance(cls, type) and issubclass(cls, Policy)) or rng.random() < 0.5:
        return {}
    options = {}
    for name, parameter in inspect.signature(cls).parameters.items():
        options[name] = _near(rng, parameter.default)
    options = {name: value for name, value in options.items() if value is not None}
    try:
        find_cache_policy(None, find_policy(cls, options))  # it may also be one
    except ValueError:
        return {}
    return options


def _near(rng: Random, default: Any) -> Any:
    """A random value near the default, of the same type; ``None`` if it is no number or bool."""
    if isinstance(default, bool):
        return rng.random() < 0.5
    if not isinstance(default, int | float):
        return None
    value = default * rng.choice((0.1, 0.5, 1, 2, 10))
    return max(1, round(value)) if isinstance(default, int) else value


# -- requests


class RequestMaker:
    """Draws random requests with shared prefixes; ``features`` names what they may use."""

    def __init__(self, rng: Random, setup: Setup, features: set[str]) -> None:
        self.rng = rng
        self.setup = setup
        self.features = features
        room = (setup.num_blocks - 1) * setup.block_size
        self.longest = self.most = max(1, min(setup.config.max_model_len - 1, room))
        if "short" in features:
            self.longest = min(self.longest, 12)
        self.shared = [rng.randrange(VOCAB_SIZE) for _ in range(self.longest)]

    def add(self, name: str, at: int) -> Add:
        """An event: a random request arrives before tick ``at``. With the feature "storms", half of
        the requests arrive at the start."""
        rng = self.rng
        if "twins" in self.features and rng.random() < 0.1:
            name = str(max(0, int(name) - rng.randint(1, 5)))
        fails_at = None
        if "faults" in self.features and rng.random() < 0.15:
            fails_at = rng.randrange(self.longest)
        at = 0 if "storms" in self.features and rng.random() < 0.5 else at
        return Add(at=at, request=self.request(name, at), fails_at=fails_at)

    def request(self, name: str, at: int) -> AddRequest:
        rng = self.rng
        longest = self.longest
        if "short" in self.features and rng.random() < 0.1:
            longest = self.most  # one long request among short ones
        if "giants" in self.features and rng.random() < 0.05:
            longest *= 3
        total = rng.randint(2, max(2, longest + 1))
        num_prompt = rng.randint(1, total - 1)
        max_tokens = total - num_prompt
        return AddRequest(
            request_id=name,
            prompt_token_ids=self.prompt(num_prompt),
            params=self.params(max_tokens),
            seed=0,
            arrival_time=at / 64,
            max_tokens=max_tokens,
            eos_token_ids=[rng.randrange(VOCAB_SIZE)] if "stops" in self.features else [],
            priority=rng.randint(-1, 2),
            user=f"u{rng.randrange(3)}" if "users" in self.features else "",
            client_index=rng.randrange(3) if "clients" in self.features else 0,
            cache_salt=rng.choice((None, "a", "b")) if "salts" in self.features else None,
            hints=self.hints(max_tokens),
            **self.feature_fields(num_prompt),
            **self.deadlines(at),
        )

    def prompt(self, num_tokens: int) -> list[int]:
        """A prompt of ``num_tokens`` tokens: a prefix shared by all requests, then random ones."""
        rng = self.rng
        common = rng.randint(0, num_tokens) if rng.random() < 0.7 else num_tokens
        rest = [rng.randrange(VOCAB_SIZE) for _ in range(num_tokens - min(common, self.longest))]
        return self.shared[:common] + rest

    def params(self, max_tokens: int) -> SamplingParams:
        """Random sampling parameters: stop tokens, and sometimes prompt logprobs."""
        rng = self.rng
        stops = []
        if "stops" in self.features:
            stops = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(0, 2))]
        scores = "logprobs" in self.features and rng.random() < 0.2
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=rng.randint(0, max_tokens) if stops else 0,
            stop_token_ids=stops,
            prompt_logprobs=1 if scores else None,
        )

    def hints(self, max_tokens: int) -> dict[str, Any]:
        """Random hints for a policy, always with ``output_tokens`` for the oracle predictor."""
        rng = self.rng
        hints: dict[str, Any] = {"output_tokens": rng.randint(1, max_tokens)}
        if "hints" in self.features:
            hints["program"] = f"p{rng.randrange(3)}"
            hints["ttft"] = rng.choice((0.01, 0.5))
            hints["tbt"] = rng.choice((0.01, 0.5))
        return hints

    def feature_fields(self, num_prompt: int) -> dict[str, Any]:
        """Random values of the request fields that the engine's resources use: adapter, grammar
        and media."""
        rng, needs = self.rng, self.setup.needs
        fields: dict[str, Any] = {}
        if "adapters" in needs or "salts" in self.features:
            fields["adapter"] = rng.choice((None, "x", "y", "z"))
        if "grammars" in needs and rng.random() < 0.4:
            ticks = rng.randint(0, 20)
            fields["grammar"] = str(-ticks if rng.random() < 0.2 else ticks)
        if ("encoder" in needs or "media" in self.features) and rng.random() < 0.6:
            fields["media"] = self.media(num_prompt)
        return fields

    def media(self, num_prompt: int) -> list[MediaItem]:
        """Up to three media items that do not overlap; contents are often equal between
        requests."""
        items: list[MediaItem] = []
        offset = self.rng.randrange(4)
        while offset < num_prompt and len(items) < 3:
            length = self.rng.randint(1, min(5, num_prompt - offset))
            items.append(MediaItem(offset, length, f"m{self.rng.randrange(2)}"))
            offset += length + self.rng.randrange(6)
        return items

    def deadlines(self, at: int) -> dict[str, Any]:
        """Random deadlines of several kinds, in seconds on the clock."""
        rng = self.rng
        if "deadlines" not in self.features:
            return {}
        chosen = {}
        for name in ("deadline", "queue_deadline", "end_deadline"):
            if rng.random() < 0.3:
                chosen[name] = (at + rng.randint(0, 60)) / 64
        if len(chosen) == 1:
            chosen["tbt"] = 1 / 32
        return chosen


# -- troubles


def draw_troubles(
    rng: Random, features: set[str], num_ticks: int, num_requests: int
) -> list[Event]:
    """Random aborts, wakes, cache resets, pauses and clock jumps within these ticks."""
    events: list[Event] = []
    for tick in range(num_ticks):
        if "aborts" in features and rng.random() < 0.1:
            events.append(Abort(at=tick, request_ids=_some_ids(rng, num_requests)))
        if "wakes" in features and rng.random() < 0.1:
            events.append(Wake(at=tick, request_id=str(rng.randrange(num_requests + 1))))
        if "resets" in features and rng.random() < 0.05:
            events.append(Reset(at=tick, reset_running=rng.random() < 0.5))
        if "pauses" in features and rng.random() < 0.1:
            events.append(Pause(at=tick, state=rng.choice(list(PauseState))))
        if "jumps" in features and rng.random() < 0.05:
            events.append(Jump(at=tick, seconds=rng.choice((YEARS, -YEARS, 1.0, -0.5))))
    return events


def _some_ids(rng: Random, num_requests: int) -> list[str] | None:
    """One or three random request ids, possibly finished, unknown or repeated; ``None``: all
    requests."""
    if rng.random() < 0.03:
        return None
    return [str(rng.randrange(num_requests + 2)) for _ in range(rng.choice((1, 1, 1, 3)))]
