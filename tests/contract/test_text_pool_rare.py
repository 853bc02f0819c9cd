"""What befalls text processes seldom: no room to start one, ends in the wrong moment, forks."""

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import psutil
import pytest
from support.deadly_program import NO_TEXT
from support.fakes import FakeDecided, replay
from support.patience import SOON_SECONDS
from support.pooled import WAIT, LeapingClient, Pools, texts_of

from engine import SamplingParams
from engine.config.engine import EngineConfig
from engine.config.model import ModelConfig
from engine.errors import EngineDeadError, RefusedError, RequestError
from engine.frontend import text_workers
from engine.frontend.session import Session
from engine.frontend.text_workers import TextPool
from engine.text.tokenizer import Tokenizer

PROCESSES = ["tokenizer process 0", "detokenizer process 0"]


def no_room(*_: object) -> NoReturn:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.mark.parametrize("step", ["socket", "Program"])
@pytest.mark.usefixtures("place")
def test_want_of_descriptors_is_said_at_the_start_and_leaves_nothing(
    model: ModelConfig, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    TextPool(model, 1).close()  # what is made once stays
    num_fds = psutil.Process().num_fds()
    instead = {"socket": SimpleNamespace(socketpair=no_room), "Program": no_room}
    monkeypatch.setattr(text_workers, step, instead[step])
    pool = TextPool(model, 1)
    with pytest.raises(EngineDeadError, match=r"tokenizer process 0 could not be started: .*24"):
        pool.wait_until_ready()
    with pytest.raises(RefusedError, match="could not be started"):
        pool.encode("x").result(WAIT)
    pool.close()
    assert psutil.Process().num_fds() == num_fds


def test_want_of_descriptors_later_is_no_death(
    pools: Pools, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are refused for a while; then all is as before."""
    pool = pools.start(retry_seconds=0.2)
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(text_workers, "Program", no_room)
        os.kill(pool.pids[PROCESSES[0]], signal.SIGKILL)
        wait_until(lambda: pool.workers[0].is_down)
        with pytest.raises(RefusedError, match="Too many open files"):
            pool.encode("x").result(WAIT)
    time.sleep(0.2)
    assert pool.encode("fine").result(WAIT) == tokenizer.encode("fine")


def test_what_waits_for_one_that_does_not_start_goes_to_another(
    pools: Pools, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pools.start(size=2, hang_seconds=WAIT)
    pid = pool.pids[PROCESSES[0]]
    os.kill(pid, signal.SIGSTOP)
    futures = [pool.encode(f"text {i}") for i in range(60)]
    monkeypatch.setattr(text_workers, "PROGRAM", "no_such_module_anywhere")
    os.kill(pid, signal.SIGKILL)
    found = [future.result(WAIT) for future in futures]
    assert found == [tokenizer.encode(f"text {i}") for i in range(60)]


def test_long_texts_outlive_their_tokenizer(pools: Pools, tokenizer: Tokenizer) -> None:
    pool = pools.start()
    texts = [f"text {i} " * 2000 for i in range(40)]
    futures = [pool.encode(text) for text in texts]
    for number in (3, 10):
        futures[number].result(WAIT)
        os.kill(pool.pids[PROCESSES[0]], signal.SIGKILL)
    assert [each.result(WAIT) for each in futures] == [tokenizer.encode(text) for text in texts]


def test_a_rendering_that_is_no_text_costs_its_process_only(
    pools: Pools, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_workers, "PROGRAM", "support.deadly_program")
    pool = pools.start()
    bad = pool.render(NO_TEXT, {"messages": "those"})
    with pytest.raises(RequestError, match="those"):
        bad.result(WAIT)
    assert pool.encode("fine").result(WAIT) == tokenizer.encode("fine")


def test_who_waits_at_the_end_hears_of_it_behind_one_who_does_not(pools: Pools) -> None:
    pool = pools.start(hang_seconds=WAIT)
    os.kill(pool.pids[PROCESSES[0]], signal.SIGSTOP)
    futures = [pool.encode("x") for _ in range(50)]
    for each in futures[::2]:
        each.cancel()
    pool.close()
    assert all(isinstance(each.exception(WAIT), EngineDeadError) for each in futures[1::2])


def test_an_end_waits_for_no_process_that_is_stopped(pools: Pools) -> None:
    pool = pools.start(size=2, hang_seconds=WAIT)
    pids = list(pool.pids.values())
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    futures = [pool.encode("x") for _ in range(10)]
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < SOON_SECONDS
    assert all(isinstance(future.exception(WAIT), EngineDeadError) for future in futures)
    assert not any(map(psutil.pid_exists, pids))


def test_the_thread_itself_may_close_the_pool(
    pools: Pools, caplog: pytest.LogCaptureFixture
) -> None:
    """As it does when it is the one that collects it as garbage."""
    pool = pools.start()
    threads = [worker.thread for worker in pool.workers]
    with caplog.at_level(logging.WARNING):
        pool.encode("x").add_done_callback(lambda _: pool.close())
        for thread in threads:
            thread.join(WAIT)
    assert not any(thread.is_alive() for thread in threads) and not caplog.messages
    assert not pool.pids


def test_a_fork_is_told_and_disturbs_nobody(model: ModelConfig) -> None:
    code = (
        "import os\n"
        "from engine.config.model import ModelConfig\n"
        "from engine.errors import EngineDeadError\n"
        "from engine.frontend.text_workers import TextPool\n"
        f"pool = TextPool(ModelConfig(model={model.model!r}), 1)\n"
        "before = pool.encode('x').result(60)\n"
        "fork = os.fork()\n"
        "if not fork:\n"
        "    try:\n"
        "        pool.encode('x').result(60)\n"
        "    except EngineDeadError as error:\n"
        "        raise SystemExit(7 if 'forked' in str(error) else 1)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) == 7\n"
        "assert pool.encode('x').result(60) == before\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_short_texts_pass_a_long_one(pools: Pools, tokenizer: Tokenizer) -> None:
    pool = pools.start(size=2, hang_seconds=WAIT)
    long = pool.encode("long " * 400_000)
    short = [pool.encode(f"short {i}") for i in range(50)]
    assert [each.result(WAIT) for each in short] == [
        tokenizer.encode(f"short {i}") for i in range(50)
    ]
    assert not long.done()


@pytest.mark.parametrize("moment", [1, 4, 5, 7])
def test_tokens_that_come_several_at_a_time_outlive_a_death(
    pools: Pools, tokenizer: Tokenizer, moment: int
) -> None:
    """Half a character withholds the text of all that came with it."""
    ids = tokenizer.encode("日é本a語😀" * 4, add_special_tokens=False)
    pool = pools.start()
    steps = iter(range(1000))

    def pace() -> None:
        if next(steps) == moment:
            os.kill(pool.pids[PROCESSES[1]], signal.SIGKILL)

    def session(pool: TextPool | None, **options: Any) -> Session:
        client = LeapingClient(replay(ids), FakeDecided(256, tokenizer.vocab_size), **options)
        config = EngineConfig(model=ModelConfig(model="fake"), disable_log_stats=True)
        return Session(config, client, tokenizer, client.clock, pool)

    for stop in ([], ["never there"]):
        params = SamplingParams(max_tokens=60, output_kind="delta", stop=stop)
        steps = iter(range(1000))
        expected = texts_of(session(None), 3, params)
        assert texts_of(session(pool, pace=pace), 3, params) == expected


@pytest.mark.parametrize("times", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_pools_that_come_and_go_leave_descriptors_and_threads_as_they_were(
    pools: Pools, times: int
) -> None:
    me = psutil.Process()
    pools.start().close()
    before = me.num_fds(), threading.active_count(), me.num_threads()
    for _ in range(times):
        pool = pools.start(size=1)
        pool.encode("x " * 5000).result(WAIT)
        pool.close()
    wait_until(lambda: me.num_threads() <= before[2])
    assert (me.num_fds(), threading.active_count()) == before[:2]


def test_a_long_text_is_no_hang(pools: Pools, tokenizer: Tokenizer) -> None:
    """However little time a task is given, a text has what it takes."""
    pool = pools.start(hang_seconds=0.01, slowest=1 << 15)  # of a busy machine
    pids = pool.pids
    text = "long " * 200_000
    assert pool.encode(text).result(WAIT) == tokenizer.encode(text)
    assert pool.pids == pids


def test_a_process_is_started_again_from_another_working_directory(
    model: ModelConfig, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(model.model).parent)
    with Pools(ModelConfig(model=Path(model.model).name)) as pools:
        pool = pools.start()
        monkeypatch.chdir(tmp_path)
        os.kill(pool.pids[PROCESSES[0]], signal.SIGKILL)
        assert pool.encode("again").result(WAIT) == tokenizer.encode("again")


def wait_until(is_so: Any) -> None:
    deadline = time.monotonic() + WAIT
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)
