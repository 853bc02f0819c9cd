"""Plans and results travel: a worker behind a socket does what one in the process does."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterator
from itertools import count

import pytest
from support.data_plane import EvenTokens, make_feature_run
from support.plan_socket import Setup, SocketWorker, WorkerProcess, content_of, make_worker
from support.simulate import make_request

from engine.ipc import plans
from engine.lora.decide import AdapterSlots
from engine.messages.requests import MediaItem
from engine.messages.step import PARTS
from engine.mm.decide import EncoderBudget
from engine.spec.worker_drafts import WorkerDrafts


@pytest.fixture
def process() -> Iterator[WorkerProcess]:
    with WorkerProcess() as process:
        yield process


def draw_requests(rng: random.Random) -> list:
    shared, requests = [rng.randrange(1000) for _ in range(20)], []
    for index in range(12):
        length = rng.randint(2, 20)
        prompt = shared[: rng.randint(0, length)]
        prompt += [rng.randrange(1000) for _ in range(length - len(prompt))]
        offset = rng.randrange(length)
        item = MediaItem(offset, min(4, length - offset), f"m{rng.randrange(3)}")
        requests.append(
            make_request(
                str(index),
                prompt,
                rng.randint(1, 16),
                adapter=rng.choice([None, "A", "B", "C"]),
                media=[item] if rng.random() < 0.5 else [],
                grammar="even" if rng.random() < 0.4 else None,
            )
        )
    return requests


class Traced:
    """Keeps what a worker was told and answered."""

    def __init__(self, run) -> None:
        self.parts: Counter[str] = Counter()
        self.num_steps = 0
        self._digest = hashlib.blake2b(digest_size=16)
        self._launch, self._collect = run.worker.launch, run.worker.collect
        run.worker.launch, run.worker.collect = self.launch, self.collect

    def launch(self, plan):
        self.num_steps += 1
        self.parts.update(plan.parts)
        self._digest.update(plans.encode(plan))
        return self._launch(plan)

    def collect(self, ticket):
        result = self._collect(ticket)
        self._digest.update(plans.encode(result))
        return result

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()


def run_case(seed: int, process: WorkerProcess | None):
    """One random engine; its worker is in the process, or here. What came of it."""
    rng = random.Random(seed)
    setup = Setup(
        num_blocks=rng.randint(45, 90),
        block_size=rng.choice([2, 4]),
        windows=rng.choice([[0], [0, 5], [7]]),
        num_drafts=rng.choice([0, 3]),
        cache_size=rng.randint(8, 20),
        stores=rng.choice([[], ["plain"], ["slow", "lossy"]]),
        snapshot_blocks=rng.choice([0, 1, 3]),
    )
    resources = [AdapterSlots(2), EncoderBudget(8, setup.cache_size), EvenTokens()]
    resources += [WorkerDrafts(setup.num_drafts)] if setup.num_drafts else []
    here, stores = make_worker(setup)
    worker = here
    if process is not None:
        worker = stores = SocketWorker(process, setup)
    num_stages = rng.choice([1, 1, 2, 3])
    run = make_feature_run(
        depth=max(num_stages, rng.randint(1, 3)),
        pipeline_parallel_size=num_stages,
        resources=resources,
        stores=stores if setup.stores else None,
        num_drafts=setup.num_drafts,
        windows=setup.windows,
        snapshot_blocks=setup.snapshot_blocks,
        worker=worker,
        num_blocks=setup.num_blocks,
        block_size=setup.block_size,
        max_num_seqs=rng.randint(2, 8),
        max_num_batched_tokens=rng.randint(8, 40),
        max_model_len=41,
    )
    traced = Traced(run)
    for request in draw_requests(rng):
        run.add(request)
        if rng.random() < 0.6:
            run.step()
    run.wait()
    content = content_of(here) if process is None else worker.content()
    return traced, run.outputs, run.finished, content


def compare(seeds, process: WorkerProcess, num_steps: int) -> Counter[str]:
    """The same cases on both workers, until there were as many steps. Parts that were seen."""
    parts: Counter[str] = Counter()
    left = num_steps
    for seed in seeds:
        print(f"seed {seed}")
        here, there = run_case(seed, None), run_case(seed, process)
        assert there[0].digest == here[0].digest
        assert there[1:] == here[1:]
        assert all(end[0] == "length" for end in here[2].values()), here[2]
        parts += here[0].parts
        left -= here[0].num_steps
        if left <= 0:
            break
    return parts


def test_a_worker_behind_a_socket_gives_the_same_digests(process, seed):
    parts = compare(range(seed, seed + 1000), process, 1500)
    assert set(parts) == set(PARTS), parts


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_steps_on_both_sides_of_a_socket(process, seed):
    parts = compare(count(seed), process, 100_000)
    print(f"parts of plans: {dict(parts)}; {process.num_bytes / 1e6:.0f} MB travelled")
    assert set(parts) == set(PARTS), parts
