"""Random texts through processes that are killed, stopped and restarted all the time: object for
object what the front end itself makes of them."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import made_tokenizers as made
from support.fakes import FakeDecided, asked_id
from support.patience import SOON_SECONDS
from support.pooled import TEXT, WAIT, LeapingClient, joined

from engine import LLMEngine, RequestOutput, SamplingParams
from engine.config.engine import EngineConfig
from engine.config.model import ModelConfig
from engine.frontend.prompt import Prompt
from engine.frontend.session import Session
from engine.frontend.text_workers import TextPool
from engine.messages.requests import AddRequest
from engine.text.tokenizer import Tokenizer, load_tokenizer

SIGNALS = [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT, signal.SIGSTOP]
RANGES = [(0x20, 0x7F), (0x1, 0x20), (0x80, 0x800), (0x800, 0xD800), (0xE000, 0x10000)]
RANGES += [(0x10000, 0x20000), (0x20000, 0x30000), (0xE0000, 0x110000)]
MARKS = ["\u200d", "\ufe0f", "\u0301", "\u202e", "\ufffd", "\ufeff", "\x00", "<s>", "</s>", "  "]


class Request:
    """What is asked, and what its core says."""

    def __init__(self, tokenizer: Tokenizer, dice: random.Random) -> None:
        self.prompt: Prompt = random_text(dice, dice.randint(1, 60))
        if dice.random() < 0.3:  # which may end in the middle of a character
            self.prompt = random_ids(tokenizer, dice)[: dice.randint(1, 60)]
        self.ids = random_ids(tokenizer, dice)
        self.stride = [dice.choice([1, 1, 1, 2, 5]) for _ in range(7)]
        self.abort_at = dice.randint(0, 40) if dice.random() < 0.1 else None
        self.params = random_params(tokenizer.decode(self.ids), dice)


def random_text(dice: random.Random, length: int) -> str:
    pieces = []
    while len(pieces) < length:
        if dice.random() < 0.3:
            pieces.append(dice.choice([*MARKS, *TEXT.split()]))
        else:
            pieces.append(chr(dice.randrange(*dice.choice(RANGES))))
    return "".join(pieces)


def random_ids(tokenizer: Tokenizer, dice: random.Random) -> list[int]:
    """Of a text, with ids in between that cut its characters, or mean nothing at all."""
    ids = tokenizer.encode(random_text(dice, 40), add_special_tokens=False)[:150]
    for _ in range(dice.choice([0, 0, 3, 30])):
        ids.insert(dice.randrange(len(ids)), dice.randrange(tokenizer.vocab_size))
    return ids


def random_params(text: str, dice: random.Random) -> SamplingParams:
    options: dict[str, Any] = {"max_tokens": dice.randint(1, 120)}
    options["output_kind"] = dice.choice(["delta", "delta", "cumulative", "final"])
    options["skip_special_tokens"] = dice.random() < 0.8
    if text and dice.random() < 0.5:
        starts = [dice.randrange(len(text)) for _ in range(dice.randint(1, 3))]
        options["stop"] = [text[at : at + dice.randint(1, 9)] for at in starts]
        options["include_stop_str_in_output"] = dice.random() < 0.5
        options["min_tokens"] = dice.choice([0, options["max_tokens"] // 3])
    return SamplingParams(**options)


class RandomClient(LeapingClient):
    """Says what each request is to be told, in its strides."""

    def __init__(
        self, requests: list[Request], vocab_size: int, pace: Callable[[], object]
    ) -> None:
        def script(request: AddRequest, position: int) -> int:
            ids = requests[int(asked_id(request.request_id))].ids
            return ids[position % len(ids)]

        super().__init__(script, FakeDecided(4096, vocab_size), pace=pace)
        self._requests = requests

    def stride(self, request: AddRequest, position: int) -> int:
        strides = self._requests[int(asked_id(request.request_id))].stride
        return strides[position % len(strides)]


def outputs_of(
    requests: list[Request],
    tokenizer: Tokenizer,
    pool: TextPool | None,
    pace: Callable[[], object] = lambda: None,
) -> list[list[RequestOutput]]:
    client = RandomClient(requests, tokenizer.vocab_size, pace)
    config = EngineConfig(model=ModelConfig(model="fake"), disable_log_stats=True)
    session = Session(config, client, tokenizer, client.clock, pool)
    llm_engine = LLMEngine(session)
    outputs: list[list[RequestOutput]] = [[] for _ in requests]
    for number, request in enumerate(requests):
        llm_engine.add_request(str(number), request.prompt, request.params)
    deadline = time.monotonic() + WAIT
    while llm_engine.has_unfinished_requests():
        assert time.monotonic() < deadline
        for output in llm_engine.step():
            outputs[int(output.request_id)].append(output)
        due = [str(i) for i, each in enumerate(requests) if each.abort_at == client.num_steps]
        llm_engine.abort_request(due)
    assert not client.live
    return outputs


@contextmanager
def killer(pool: TextPool, dice: random.Random) -> Iterator[list[signal.Signals]]:
    """Sends signals to the pool's processes, those that are starting too; lists what it sent.

    None dies more than twice in a row over the same task: then that one would be given up.
    """
    sent: list[signal.Signals] = []
    is_over = threading.Event()

    def kill() -> None:
        while not is_over.wait(dice.random() ** 3 * 0.4):
            worker = dice.choice(pool.workers)
            process = worker.process
            if process is None or worker.num_idle_deaths > 1 or worker.num_failed_starts > 1:
                continue
            number = dice.choice(SIGNALS if process.is_ready else SIGNALS[:-1])
            with suppress(ProcessLookupError):
                os.kill(process.program.pid, number)
                sent.append(number)
                if number == signal.SIGSTOP and dice.random() < 0.7:  # slow, and no more than that
                    is_over.wait(dice.random() * 0.3)
                    os.kill(process.program.pid, signal.SIGCONT)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield sent
    finally:
        is_over.set()
        thread.join()


@pytest.mark.parametrize("name", made.MAKERS)
@pytest.mark.parametrize("seconds", [1.5, pytest.param(100, marks=pytest.mark.slow)])
def test_random_texts_outlive_random_deaths(
    tmp_path: Path, seed: int, name: str, seconds: float
) -> None:
    dice = random.Random(seed)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    model = ModelConfig(
        model=str(made.save(tmp_path, made.MAKERS[name](), {"chat_template.jinja": template}))
    )
    tokenizer = load_tokenizer(model)
    pool = TextPool(model, 2, hang_seconds=0.5)
    pool.wait_until_ready()
    began, num_rounds = time.monotonic(), 0
    with killer(pool, random.Random(seed)) as sent:
        while time.monotonic() - began < seconds:
            requests = [Request(tokenizer, dice) for _ in range(dice.randint(1, 24))]
            wait = dice.choice([0, 0, 0.002])
            expected = outputs_of(requests, tokenizer, None)
            found = outputs_of(requests, tokenizer, pool, lambda wait=wait: time.sleep(wait))
            for number, request in enumerate(requests):
                where = f"seed {seed}, round {num_rounds}, request {number}: {request.params}"
                kind = request.params.output_kind
                assert joined(found[number], kind) == joined(expected[number], kind), where
            num_rounds += 1
    pool.close()
    print(f"{num_rounds} rounds, {len(sent)} signals")
    assert num_rounds and sent


def test_a_pool_may_be_closed_at_any_moment(model: ModelConfig, seed: int) -> None:
    """Whatever its processes do just then, everybody who waits is told, and none is left."""
    dice = random.Random(seed)
    for number in range(6):
        pool = TextPool(model, 2, hang_seconds=0.5)
        pids, futures = list(pool.pids.values()), []
        with killer(pool, random.Random(seed + number)):
            deadline = time.monotonic() + dice.random() * 0.6
            while time.monotonic() < deadline:
                futures.append(pool.encode(random_text(dice, 300)))
                futures.append(pool.render("{{ a }}", {"a": random_text(dice, 300)}))
                futures[-dice.randint(1, 2)].cancel()
                pids += pool.pids.values()
                time.sleep(0.001)
            began = time.monotonic()
            pool.close()
            assert time.monotonic() - began < SOON_SECONDS, f"seed {seed}, round {number}"
        assert all(future.done() for future in futures)
        assert not any(psutil.pid_exists(pid) for pid in pids)
