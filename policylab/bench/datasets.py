"""What is sent: jobs as the lab's workloads make them, from made-up prompts, files or workloads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from engine.errors import ConfigError
from policylab.bench.words import Words
from policylab.sim.job import Job, Span
from policylab.sim.workloads.arrivals import Gamma
from policylab.sim.workloads.draws import RandomDraws
from policylab.sim.workloads.source import JobSource

Text = str | list[Any]
"""The prompt of a request as text, or as messages of a chat."""
MAX_LENGTH = 10_000_000
SHAREGPT_EXAMPLE = '[{"conversations": [{"value": "question"}, {"value": "answer"}]}]'
CUSTOM_EXAMPLE = '{"prompt": "...", "output_tokens": 64} or {"messages": [...]}'


class Dataset(Protocol):
    """An endless or finite sequence of requests, without arrival times."""

    def bodies(self, seed: int) -> Iterator[tuple[tuple[Span, ...], int, Text | None]]:
        """Yields prompt, output tokens and, if the prompt is real, its text. Equal seeds give equal
        requests; different ones share no prompt."""


@dataclass(frozen=True, kw_only=True)
class Random:
    """Random tokens. Lengths are uniform within ``range_ratio`` of their means, to either side;
    the first ``prefix_len`` tokens of all prompts are equal, and are not part of ``input_len``."""

    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0

    def __post_init__(self) -> None:
        _check_lengths("--random-", self.input_len, self.output_len, prefix=self.prefix_len)
        if not 0.0 <= self.range_ratio < 1.0:
            raise ConfigError(
                f"--random-range-ratio is {self.range_ratio:g}, must be at least 0 and below 1: "
                "lengths differ from their means by at most this share"
            )

    def bodies(self, seed: int) -> Iterator[tuple[tuple[Span, ...], int, None]]:
        rng = RandomDraws(seed).stream("lengths")
        for number in count():
            suffix = Span(f"{seed}: prompt {number}", self._length(rng, self.input_len))
            prefix = (Span(f"{seed}: prefix", self.prefix_len),) if self.prefix_len else ()
            yield (*prefix, suffix), self._length(rng, self.output_len), None

    def _length(self, rng: np.random.Generator, mean: int) -> int:
        reach = int(mean * self.range_ratio)
        return int(rng.integers(max(1, mean - reach), mean + reach + 1))


@dataclass(frozen=True, kw_only=True)
class PrefixRepetition:
    """A few prefixes in random order, each before a suffix of its own."""

    prefix_len: int = 256
    suffix_len: int = 256
    num_prefixes: int = 10
    output_len: int = 128

    def __post_init__(self) -> None:
        flag = "--prefix-repetition-"
        _check_lengths(flag, self.suffix_len, self.output_len, prefix=self.prefix_len)
        if self.num_prefixes < 1:
            raise ConfigError(f"{flag}num-prefixes is {self.num_prefixes}, must be 1 or more")

    def bodies(self, seed: int) -> Iterator[tuple[tuple[Span, ...], int, None]]:
        rng = RandomDraws(seed).stream("prefixes")
        for number in count():
            if number % self.num_prefixes == 0:
                order = rng.permutation(self.num_prefixes)
            prefix = Span(f"{seed}: prefix {order[number % self.num_prefixes]}", self.prefix_len)
            suffix = Span(f"{seed}: suffix {number}", self.suffix_len)
            yield (prefix, suffix), self.output_len, None


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Prompts of a file in random order, again from the start if there are too few."""

    rows: tuple[tuple[Text, int, int], ...]
    """Prompt, its tokens and output tokens."""

    def bodies(self, seed: int) -> Iterator[tuple[tuple[Span, ...], int, Text]]:
        rng = RandomDraws(seed).stream("order")
        while True:
            for place in rng.permutation(len(self.rows)).tolist():
                text, num_prompt, num_output = self.rows[place]
                yield (Span(f"text {place}", num_prompt),), num_output, text


def _check_lengths(flag: str, prompt: int, output: int, prefix: int) -> None:
    for name, value, least in (
        ("input-len or suffix-len", prompt, 1),
        ("output-len", output, 1),
        ("prefix-len", prefix, 0),
    ):
        if not least <= value <= MAX_LENGTH:
            raise ConfigError(f"{flag}{name} is {value}, must be {least} to {MAX_LENGTH} tokens")


def read_sharegpt(path: Path, words: Words, output_len: int | None) -> Texts:
    """The first question of each conversation of a ShareGPT file; its answer gives the number of
    output tokens unless ``output_len`` does. Raises ``ConfigError``."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        talks = [each.get("conversations") or each.get("conversation") or [] for each in found]
        pairs = [(str(talk[0]["value"]), str(talk[1]["value"])) for talk in talks if len(talk) > 1]
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise _unreadable(path, error, SHAREGPT_EXAMPLE) from error
    rows = [
        (ask, words.count(ask), output_len or words.count(answer))
        for ask, answer in pairs
        if ask.strip() and answer.strip()  # others would have no token
    ]
    return _texts(path, rows, SHAREGPT_EXAMPLE)


def read_custom(path: Path, words: Words, output_len: int | None) -> Texts:
    """The requests of a file with a JSON object in each line. Raises ``ConfigError``."""
    rows: list[tuple[Text, int, int]] = []
    try:
        for line in filter(str.strip, path.read_text(encoding="utf-8").splitlines()):
            each = json.loads(line)
            prompt: Text = each.get("messages") or each["prompt"]
            text = prompt if isinstance(prompt, str) else json.dumps(prompt)
            num_output = output_len or int(each.get("output_tokens") or Random.output_len)
            rows.append((prompt, words.count(text), num_output))
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise _unreadable(path, error, CUSTOM_EXAMPLE) from error
    return _texts(path, rows, CUSTOM_EXAMPLE)


def _texts(path: Path, rows: Sequence[tuple[Text, int, int]], example: str) -> Texts:
    if not rows:
        raise ConfigError(f"--dataset-path {str(path)!r} has no prompt, must be as {example}")
    return Texts(rows=tuple(rows))


def _unreadable(path: Path, error: Exception, example: str) -> ConfigError:
    return ConfigError(
        f"--dataset-path {str(path)!r} cannot be read: {type(error).__name__}: {error}; must be as "
        f"{example}"
    )


@dataclass
class Requests:
    """Jobs in order of arrival, and the texts of those with real prompts."""

    source: JobSource
    texts: dict[str, Text] = field(default_factory=dict)
    """By request id; removed by ``take``."""

    def take_text(self, job: Job) -> Text | None:
        """Return the text of a job, once."""
        return self.texts.pop(job.request_id, None)


def arrive(
    dataset: Dataset,
    *,
    number: int | None,
    rate: float = inf,
    burstiness: float = 1.0,
    seed: int = 0,
    seconds: float = inf,
) -> Requests:
    """Give the requests of a dataset arrival times.

    number: of requests; ``None`` for as many as arrive within ``seconds``. rate: requests per
    second; at infinity all arrive at time 0. burstiness: shape of the Gamma distribution of the
    gaps; 1 is a Poisson process, less comes in bursts, infinity is evenly spaced. As in vLLM, the
    gaps of a run with a given ``number`` are scaled so that its last request arrives at ``number /
    rate``.
    """
    texts: dict[str, Text] = {}

    def jobs() -> Iterator[Job]:
        times = due_times(number, rate, burstiness, seed)
        for place, (time, body) in enumerate(zip(times, dataset.bodies(seed), strict=False)):
            if time >= seconds and rate < inf:
                return
            prompt, num_output, text = body
            request_id = f"r{place}"
            if text is not None:
                texts[request_id] = text
            yield Job(request_id=request_id, arrival=time, prompt=prompt, num_output=num_output)

    return Requests(JobSource(jobs()), texts)


def due_times(number: int | None, rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Arrival times in seconds, as ``arrive`` describes them."""
    cv = 0.0 if burstiness == inf else burstiness**-0.5
    times = Gamma(cv=cv).times(RandomDraws(seed), rate, number or 1)
    if number is None:
        yield from times
        return
    drawn = [next(times) for _ in range(number)]
    scale = number / rate / drawn[-1] if drawn[-1] else 1.0
    yield from (scale * time for time in drawn)
