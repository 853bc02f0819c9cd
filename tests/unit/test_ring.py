"""Messages through a ring, to readers in threads."""

import mmap
import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from typing import TypeVar

import pytest
from support.patience import WAIT_SECONDS

from engine.ipc.ring import NAME, PAGE, STATE_BYTES, RingError, RingReader, RingWriter, Stopped
from engine.ipc.sealed_files import SealedFile, open_sealed

T = TypeVar("T")
SEED = int(os.environ.get("METRONOME_SEED", random.randrange(1 << 30)))


def in_thread(work: Callable[[], T]) -> Future[T]:
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done


def overwrite(handle: SealedFile, place: int, change: Callable[[int], int]) -> None:
    """Change a byte of a ring's memory, as an error elsewhere may do."""
    fd = open_sealed(handle, NAME, to_write=True)
    with mmap.mmap(fd, handle.size) as memory:
        memory[place] = change(memory[place]) & 0xFF
    os.close(fd)


def test_each_reader_gets_all_messages_in_order() -> None:
    rng = random.Random(SEED)
    print(f"METRONOME_SEED={SEED}")
    size = PAGE * rng.randint(1, 4)
    longest = rng.choice([64, size // 4, 3 * size])
    sent = [rng.randbytes(rng.randint(0, longest)) for _ in range(300)]
    with closing(RingWriter(rng.randint(1, 4), size)) as writer:

        def read(number: int, spin: float, naps: set[int]) -> list[bytes]:
            reader = RingReader(writer.handle, number, spin_seconds=spin)
            found = []
            for index in range(len(sent)):
                if index in naps:
                    time.sleep(0.002)
                found.append(reader.receive())
                reader.report(0, index)
            return found

        readers = []
        for number in range(writer.num_readers):
            spin, num_naps = rng.choice([0.0, 1e-4]), rng.choice([0, 20])
            naps = set(rng.sample(range(len(sent)), num_naps))
            readers.append(in_thread(partial(read, number, spin, naps)))
        for index, message in enumerate(sent):
            half = len(message) // 2
            writer.send(message[:half], message[half:])
            if index in (7, 150):
                time.sleep(0.002)  # so that readers sleep
        for number, reader in enumerate(readers):
            assert reader.result(WAIT_SECONDS) == sent
            assert writer.num_read(number) == writer.num_written
            assert writer.reported(number, 0) == len(sent) - 1


def test_a_message_that_is_lost_or_read_twice_is_found() -> None:
    for change in (1, -1):
        with closing(RingWriter(1, PAGE)) as writer:
            reader = RingReader(writer.handle, 0)
            writer.send(b"first")
            assert reader.receive() == b"first"
            place = STATE_BYTES + writer.num_written  # where the number of the next message will be
            writer.send(b"second")
            overwrite(writer.handle, place, change.__add__)
            with pytest.raises(RingError, match=f"message 1 of the core is number {1 + change}"):
                reader.receive()


def test_a_damaged_message_is_found() -> None:
    with closing(RingWriter(1, PAGE)) as writer:
        reader = RingReader(writer.handle, 0)
        writer.send(b"a plan")
        overwrite(writer.handle, STATE_BYTES + writer.num_written - 1, lambda byte: byte ^ 1)
        with pytest.raises(RingError, match="is damaged"):
            reader.receive()


def test_a_stop_ends_all_waits_now_and_later() -> None:
    with closing(RingWriter(1, PAGE)) as writer:
        reader = RingReader(writer.handle, 0, spin_seconds=0.0)
        waits = in_thread(reader.receive)
        time.sleep(0.01)
        writer.stop()
        with pytest.raises(Stopped):
            waits.result(WAIT_SECONDS)
        with pytest.raises(Stopped):
            reader.receive()
        with pytest.raises(Stopped):
            writer.send(b"more")
    with closing(RingWriter(1, PAGE)) as writer:
        reader = RingReader(writer.handle, 0)
        fills = in_thread(lambda: writer.send(bytes(3 * PAGE)))
        time.sleep(0.01)
        reader.stop()
        with pytest.raises(Stopped):
            fills.result(WAIT_SECONDS)


def test_who_waits_takes_no_processor_time() -> None:
    with closing(RingWriter(1, PAGE)) as writer:
        reader = RingReader(writer.handle, 0)

        def wait() -> float:
            began = time.thread_time()
            assert reader.receive() == b"at last"
            return time.thread_time() - began

        taken = in_thread(wait)
        time.sleep(0.5)
        writer.send(b"at last")
        assert taken.result(WAIT_SECONDS) < 0.05
