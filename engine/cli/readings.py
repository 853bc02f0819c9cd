"""Reads the statistics of a running engine: from its core, or from its server's metrics page."""

from __future__ import annotations

import http.client
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from engine.errors import ConfigError, EngineDeadError
from engine.ipc.address import address_of
from engine.messages.stats import AdapterUse, GroupUse, RankUse, SchedulerStats, StoreUse
from engine.rpc.zmq_client import EngineCoreClient

HANG_SECONDS = 60.0  # in one step or without an answer, after which the core counts as dead
HTTP_SECONDS = 10.0  # for an answer; the server itself waits a second for its core
MAX_PAGE_BYTES = 16 << 20
OURS = "metronome_"


@dataclass(frozen=True)
class EngineReading:
    """An engine's statistics at one moment."""

    time: float
    """When the reading arrived, in seconds of this process's monotonic clock."""
    stats: SchedulerStats
    generated: int | None = None
    """Tokens delivered to requests since the start; only a server counts them."""
    prompts: int | None = None
    """Prompt tokens of requests that have got a first token; only a server counts them."""
    cores: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Living cores, and all, by what they do ("": all the same); only a server counts them."""
    is_fresh: bool = True
    """False if the core does not answer its server, which then repeats older statistics."""


class ReadingSource(Protocol):
    """A source of readings."""

    @property
    def name(self) -> str:
        """The engine's name, for the headline."""

    def read(self) -> EngineReading:
        """Request one reading and wait for it. Raises ``EngineDeadError`` if the engine has
        ended."""

    def close(self) -> None:
        """Disconnect; the engine keeps running."""


class CoreSource:
    """Reads from a core in another process, as a client without requests.

    Raises ``ConfigError`` for an invalid address, ``EngineDeadError`` if no core answers."""

    def __init__(self, address: str, secret: str | None) -> None:
        self._address = address
        self._client = EngineCoreClient(
            address_of(address, secret), name="metronome top", hang_timeout=HANG_SECONDS
        )

    @property
    def name(self) -> str:
        model = self._client.decided.model
        return f"core at {self._address}" + (f", model {model}" if model else "")

    def read(self) -> EngineReading:
        stats = self._client.stats()
        if stats is None:
            raise ConfigError(f"the scheduler of the core at {self._address} has no statistics")
        return EngineReading(time.monotonic(), stats)

    def close(self) -> None:
        self._client.shutdown()


class ServerSource:
    """Reads from the Prometheus metrics page of ``metronome serve``.

    Raises ``ConfigError`` for an invalid URL."""

    def __init__(self, url: str, key: str | None) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(f"--url is {url!r}, must look like http://127.0.0.1:8000")
        path = parts.path.rstrip("/")
        for end in ("/metrics", "/v1"):  # users may copy these addresses
            path = path.removesuffix(end)
        self._server = f"{parts.scheme}://{parts.netloc}{path}"
        self._key = key

    @property
    def name(self) -> str:
        return f"server at {self._server}"

    def read(self) -> EngineReading:
        page = Page(self._fetch())
        if "engine_up" not in page:
            raise ConfigError(
                f"{self._server}/metrics has no metrics of Metronome: check --url, another server "
                "may run there"
            )
        return EngineReading(
            time.monotonic(),
            stats_of(page),
            int(page.sum("generation_tokens_total")),
            int(page.sum("prompt_tokens_total")),
            _cores(page),
            is_fresh=bool(page.sum("engine_up")),
        )

    def close(self) -> None: ...

    def _fetch(self) -> str:
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        request = urllib.request.Request(f"{self._server}/metrics", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=HTTP_SECONDS) as answer:
                page: bytes = answer.read(MAX_PAGE_BYTES)
        except urllib.error.HTTPError as error:
            with error:
                raise self._refused(error.code) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            why = getattr(error, "reason", None) or error
            raise EngineDeadError(f"the server at {self._server} does not answer: {why}") from error
        return page.decode(errors="replace")

    def _refused(self, status: int) -> Exception:
        if status in (401, 403):
            return ConfigError(
                f"the server at {self._server} requires a key: give --api-key, or set "
                "METRONOME_API_KEY"
            )
        if status == 404:
            return ConfigError(
                f"{self._server} has no /metrics: check --url, another server may run there"
            )
        return EngineDeadError(f"the server at {self._server} answers with status {status}")


# A line is "name{label="value",...} number", optionally followed by a time.
LINE = re.compile(OURS + r"(\w+)(?:\{(.*)\})? (\S+)(?: \d+)?")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
ESCAPED = re.compile(r"\\(.)")


class Value(NamedTuple):
    """A value of a metric, with its labels."""

    labels: dict[str, str]
    number: float


class Page:
    """The engine's metrics from a Prometheus page, by name without the prefix ``metronome_``."""

    def __init__(self, text: str) -> None:
        self._by_name: dict[str, list[Value]] = {}
        for name, value in _values(text.splitlines()):
            self._by_name.setdefault(name, []).append(value)

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def sum(self, name: str) -> float:
        """Sum a metric over all labels; 0 if it does not exist."""
        return sum(value.number for value in self._by_name.get(name, ()))

    def values(self, name: str) -> list[Value]:
        """All values of a metric, in the order of the page."""
        return self._by_name.get(name, [])

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sum a metric separately for each value of ``label``; the result is keyed by that
        value."""
        found: dict[str, float] = {}
        for value in self._by_name.get(name, ()):
            key = value.labels.get(label, "")
            found[key] = found.get(key, 0.0) + value.number
        return found


def _values(lines: Iterable[str]) -> Iterator[tuple[str, Value]]:
    for line in lines:
        if (found := LINE.fullmatch(line)) is None:
            continue
        name, labels, number = found.groups()
        try:
            yield name, Value(dict(_labels(labels or "")), float(number))
        except ValueError:  # not a number: perhaps a proxy's page
            continue


def _labels(text: str) -> Iterator[tuple[str, str]]:
    for name, value in LABEL.findall(text):
        yield name, ESCAPED.sub(lambda each: {"n": "\n"}.get(each[1], each[1]), value)


def stats_of(page: Page) -> SchedulerStats:
    """Convert a metrics page to statistics. Fields that the page lacks keep their defaults.

    The field ``blocked`` only says that the queue makes no progress, not why.
    """
    waiting = page.by("requests_waiting_by_reason", "reason")
    return SchedulerStats(
        num_running=int(page.sum("requests_running")),
        num_waiting=int(waiting.get("capacity", 0)),
        num_parked=int(waiting.get("deferred", 0)),
        kv_usage=page.sum("kv_usage_ratio"),
        prefix_queries=int(page.sum("prefix_cache_query_tokens_total")),
        prefix_hits=int(page.sum("prefix_cache_hit_tokens_total")),
        num_preemptions=int(page.sum("preemptions_total")),
        num_failed=int(page.sum("requests_failed_total")),
        num_steps=int(page.sum("steps_total")),
        num_scheduled_tokens=int(page.sum("scheduled_tokens_total")),
        num_refused=int(page.sum("requests_refused_total")),
        num_expired=int(page.sum("requests_expired_total")),
        num_rescued_steps=int(page.sum("rescued_steps_total")),
        num_policy_faults=int(page.sum("policy_faults_total")),
        wait_seconds=page.by("wait_seconds_total", "cause"),
        hook_seconds=page.by("hook_seconds_total", "hook"),
        blocked="no request in the queue can start" if page.sum("queue_blocked") else "",
        num_cache_resets=int(page.sum("prefix_cache_resets_total")),
        counters={name: int(num) for name, num in page.by("feature_events_total", "event").items()},
        step_seconds=page.sum("step_seconds_total"),
        floor_seconds=page.sum("step_floor_seconds_total"),
        prefix_missed={
            reason: int(num)
            for reason, num in page.by("prefix_cache_missed_tokens_total", "reason").items()
        },
        kv_groups=[
            GroupUse(
                int(value.labels.get("window", 0)),
                int(value.number),
                value.labels.get("attention") == "chunked",
            )
            for value in page.values("kv_blocks_in_use")
        ],
        num_snapshots=int(page.sum("state_snapshots")),
        snapshot_usage=page.sum("state_snapshot_usage_ratio"),
        adapters=_adapters(page) if "adapter_slots" in page else None,
        waiting_by_cause={
            cause: int(num) for cause, num in page.by("requests_waiting_by_cause", "cause").items()
        },
        stores=_stores(page),
        ranks=_ranks(page),
    )


def _cores(page: Page) -> dict[str, tuple[int, int]]:
    alive, total = page.by("cores_alive_by_role", "role"), page.by("cores_by_role", "role")
    if not total:
        alive, total = {"": page.sum("cores_alive")}, {"": page.sum("cores")}
    return {role: (int(alive.get(role, 0)), int(num)) for role, num in total.items()}


def _stores(page: Page) -> dict[str, StoreUse]:
    sizes, cores = page.by("kv_store_bytes", "store"), page.by("kv_store_cores", "store")
    return {
        name: StoreUse(int(num), int(sizes.get(name, 0)), int(cores.get(name, 0)))
        for name, num in page.by("kv_store_blocks", "store").items()
    }


def _ranks(page: Page) -> list[RankUse]:
    found: dict[tuple[int, int], list[float]] = {}
    for place, name in enumerate(("step", "wait", "stage_wait")):
        for value in page.values(f"rank_{name}_seconds_total"):
            key = int(value.labels.get("core", 0)), int(value.labels.get("rank", 0))
            found.setdefault(key, [0.0] * 3)[place] = value.number
    return [RankUse(*key, *seconds) for key, seconds in found.items()]


def _adapters(page: Page) -> AdapterUse:
    requests: dict[str, dict[str, int]] = {"running": {}, "waiting": {}}
    for value in page.values("adapter_requests"):
        of_state = requests.setdefault(value.labels.get("state", ""), {})
        of_state[value.labels.get("adapter", "")] = int(value.number)
    return AdapterUse(
        int(page.sum("adapter_slots")),
        int(page.sum("adapter_slots_used")),
        int(page.sum("adapter_host_copies")),
        int(page.sum("adapter_host_bytes")),
        requests["running"],
        requests["waiting"],
    )
