"""What Python launches in a step of a GPU, by layers: next to nothing where a step was recorded.

Counted without a device: what a graph would replay does not count, a kernel and a product of
torch's otherwise each count one.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.compile_keys import Keys, engine_of, grouped, model, recorded
from torch.utils._python_dispatch import TorchDispatchMode

from engine import LLMEngine, SamplingParams
from engine.config.decide import TOKEN_BUDGET
from engine.worker.platform import Work
from engine.worker.platform.host import HostPlatform, RerunGraph

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are counted, not computed"
    ),
]

MOST = 3  # launches a layer
FEW, MANY = 2, 6  # layers
SEATS, OTHERS = 64, 8  # of which decode
COMMON = {"ignore_eos": True, "detokenize": False, "temperature": 0.0}


class Counter(TorchDispatchMode):
    """Launches and products outside recorded work."""

    def __init__(self, keys: Keys) -> None:
        super().__init__()
        self._keys = keys
        self._products = 0
        self._replayed = 0
        self._is_replaying = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self._products += not self._is_replaying and name in ("mm", "addmm", "bmm", "linear")
        return func(*args, **(kwargs or {}))

    def replay(self, graph: RerunGraph, replay: Callable[[RerunGraph], None]) -> None:
        before = self._keys.num_launches
        self._is_replaying = True
        replay(graph)
        self._is_replaying = False
        self._replayed += self._keys.num_launches - before

    @property
    def total(self) -> int:
        return self._products + self._keys.num_launches - self._replayed


def but_once(work: Work) -> Work:
    """The same work, of which the first run does nothing."""
    skipped = iter((True,))
    return lambda: None if next(skipped, False) else work()


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    with recorded(monkeypatch) as keys:
        found, replay = Counter(keys), RerunGraph.replay
        monkeypatch.setattr(RerunGraph, "replay", lambda graph: found.replay(graph, replay))
        # A start has nothing to count: nothing is run then.
        capture = RerunGraph.capture
        monkeypatch.setattr(
            RerunGraph, "capture", lambda graph, work: capture(graph, but_once(work))
        )
        monkeypatch.setattr(HostPlatform, "compiles", False)
        yield found


class Requests:
    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self._ids = map(str, itertools.count())

    def add(self, length: int, **params: Any) -> None:
        options = {**COMMON, "max_tokens": 40, **params}
        ids = {"prompt_token_ids": [5] * length}
        self.engine.add_request(next(self._ids), ids, SamplingParams(**options))

    def step(self) -> None:
        for output in self.engine.step():
            assert all(one.finish_reason != "error" for one in output.outputs), output


def beside_a_chunk(requests: Requests) -> None:
    requests.add(200)


def beside_many_chunks(requests: Requests) -> None:
    for length in range(9, 41):
        requests.add(length % 16 + 9)


def beside_as_many_chunks_as_there_are_seats(requests: Requests) -> None:
    for length in range(SEATS - OTHERS):
        requests.add(length % 8 + 9)


def beside_a_long_chunk(requests: Requests) -> None:
    requests.add(1500)


def beside_all_that_fits(requests: Requests) -> None:
    for _ in range(3):
        requests.add(3000)


def beside_long_prompt_logprobs(requests: Requests) -> None:
    requests.add(1500, prompt_logprobs=1)


def beside_prompt_logprobs(requests: Requests) -> None:
    requests.add(200, prompt_logprobs=2)


def beside_many_prompt_logprobs(requests: Requests) -> None:
    for length in range(20, 36):
        requests.add(length, prompt_logprobs=1)


STEPS = [
    beside_a_chunk,
    beside_many_chunks,
    beside_as_many_chunks_as_there_are_seats,
    beside_a_long_chunk,
    beside_all_that_fits,
    beside_prompt_logprobs,
    beside_many_prompt_logprobs,
    beside_long_prompt_logprobs,
]


def launched(
    root: Path,
    counter: Counter,
    num_layers: int,
    grow: Callable[[Requests], None],
    others: int = OTHERS,
    **options: Any,
) -> int:
    """Launches of the step that computes what joins the others' decodes, and of the next."""
    directory = model(root / str(num_layers), **grouped(4), num_hidden_layers=num_layers)
    options = {"max_num_batched_tokens": TOKEN_BUDGET, "async_scheduling": False, **options}
    with engine_of(directory, max_num_seqs=SEATS, **options) as engine:
        requests = Requests(engine)
        for _ in range(others):
            requests.add(3)
        requests.step()
        requests.step()
        grow(requests)
        before = counter.total
        with counter:
            requests.step()
            requests.step()
        return counter.total - before


@pytest.mark.parametrize("grow", STEPS, ids=lambda grow: grow.__name__)
def test_a_mixed_step_is_launched_by_few_calls(
    grow: Callable[[Requests], None], counter: Counter, tmp_path: Path
) -> None:
    few, many = (launched(tmp_path, counter, layers, grow) for layers in (FEW, MANY))
    assert many - few <= 2 * MOST * (MANY - FEW)


def test_a_step_of_prompts_alone_is_too(counter: Counter, tmp_path: Path) -> None:
    few, many = (
        launched(tmp_path, counter, layers, beside_all_that_fits, others=0)
        for layers in (FEW, MANY)
    )
    assert many - few <= 2 * MOST * (MANY - FEW)


def test_call_by_call_they_are_counted(counter: Counter, tmp_path: Path) -> None:
    few, many = (
        launched(tmp_path, counter, layers, beside_a_chunk, enforce_eager=True)
        for layers in (FEW, MANY)
    )
    assert many - few > 2 * MOST * (MANY - FEW)
