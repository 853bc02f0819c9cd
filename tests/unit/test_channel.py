"""Messages from one process to another in shared memory, here between threads."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from support.patience import WAIT_SECONDS

from engine.errors import RankError
from engine.parallel.channel import ChannelMemory, Ends, Outbox, Receiver, Sender, Shape

SEED = int(os.environ.get("METRONOME_SEED", random.randrange(1 << 30)))
ENDS = Ends(3, 7, spins=False)


def a_channel(shape: Shape) -> tuple[Sender, Receiver]:
    memory = np.zeros(shape.num_bytes, np.uint8)
    return Sender(memory, ENDS, shape), Receiver(memory, ENDS, shape)


def message_of(rng: random.Random, most: int) -> np.ndarray:
    return np.frombuffer(rng.randbytes(rng.choice((0, 1, rng.randrange(most), most))), np.uint8)


@pytest.mark.parametrize("shape", [Shape(1, 64), Shape(3, 64), Shape.of(300, 4)])
def test_messages_arrive_in_order_and_as_they_were_sent(shape: Shape) -> None:
    print(f"METRONOME_SEED={SEED}")
    rng = random.Random(SEED)
    messages = [message_of(rng, 300) for _ in range(300)]
    sender, receiver = a_channel(shape)

    def send() -> None:
        for step, message in enumerate(messages):
            sender.send(step, message)

    thread = started(send)
    for step, message in enumerate(messages):
        if rng.random() < 0.5:
            assert receiver.receive(step).tobytes() == message.tobytes()
        else:
            target = np.empty(rng.randint(0, len(message)), np.uint8)
            rest = receiver.receive_into(step, target)
            assert target.tobytes() + rest.tobytes() == message.tobytes()
        if rng.random() < 0.05:
            time.sleep(0.001)
    thread.join(WAIT_SECONDS)


def test_a_sender_is_ahead_by_as_many_messages_as_there_is_room_for() -> None:
    sender, receiver = a_channel(Shape.of(1000, 3))
    sent: list[int] = []

    def send() -> None:
        for step in range(5):
            sender.send(step, np.full(1000, step, np.uint8))
            sent.append(step)

    thread = started(send)
    wait_for(lambda: len(sent) == 3)
    time.sleep(0.05)
    assert sent == [0, 1, 2]
    assert receiver.receive(0)[0] == 0
    wait_for(lambda: len(sent) == 4)
    for step in range(1, 5):
        receiver.receive(step)
    thread.join(WAIT_SECONDS)


def test_an_outbox_waits_only_for_a_message_that_is_wanted() -> None:
    """Large messages that nobody reads yet do not hold up who sends them."""
    print(f"METRONOME_SEED={SEED}")
    rng = random.Random(SEED)
    sender, receiver = a_channel(Shape(3, 64))
    outbox, messages = Outbox(sender), [message_of(rng, 1000) for _ in range(100)]
    for step in range(0, 100, 4):
        for later in range(step, step + 4):
            outbox.add(later, messages[later])
        for wanted in range(step, step + 4):
            thread = started(lambda wanted=wanted: outbox.send(wanted))
            assert receiver.receive(wanted).tobytes() == messages[wanted].tobytes()
            thread.join(WAIT_SECONDS)


@pytest.mark.parametrize("is_full", [True, False])
def test_all_waits_end_when_the_group_stops(is_full: bool) -> None:
    memory = ChannelMemory(Shape(1, 64))
    sender, receiver = Sender(memory.opened, ENDS), Receiver(memory.opened, ENDS)
    caught: list[RankError] = []

    def wait() -> None:
        try:
            while True:
                if is_full:
                    sender.send(4, np.zeros(8, np.uint8))
                else:
                    receiver.receive(4)
        except RankError as error:
            caught.append(error)

    thread = started(wait)
    time.sleep(0.05)
    memory.stop()
    thread.join(WAIT_SECONDS)
    wanted = "rank 3 waited until rank 7 reads" if is_full else "rank 7 waited for rank 3 in step 4"
    assert wanted in str(caught[0])
    for end in (sender, receiver):
        end.close()
    memory.close()
    memory.close()
    memory.stop()
    with pytest.raises(RankError, match="the group has stopped"):
        receiver.receive(5)
    with pytest.raises(RankError, match="the group has stopped"):
        sender.send(5, np.zeros(8, np.uint8))


def test_a_message_of_another_step_or_size_is_an_error() -> None:
    for step, num in ((5, 8), (4, 9)):
        sender, receiver = a_channel(Shape(4, 64))
        sender.send(4, np.zeros(8, np.uint8))
        message = f"rank 7 computes step {step} from {num} bytes, but rank 3 has sent 8 .* step 4"
        with pytest.raises(RankError, match=message):
            receiver.receive_into(step, np.zeros(num, np.uint8))


def test_the_owner_knows_who_waits_for_a_message_that_was_not_sent() -> None:
    memory = ChannelMemory(Shape(2, 64))
    sender, receiver = Sender(memory.opened, ENDS), Receiver(memory.opened, ENDS)
    assert not memory.is_awaited
    thread = started(lambda: receiver.receive(1))
    wait_for(lambda: memory.is_awaited)
    sender.send(1, np.zeros(4, np.uint8))
    thread.join(WAIT_SECONDS)
    assert not memory.is_awaited
    memory.close()
    assert not memory.is_awaited


def test_a_wait_takes_no_processor_time() -> None:
    sender, receiver = a_channel(Shape(1, 64))
    thread = started(lambda: receiver.receive(1))
    time.sleep(0.1)
    began = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - began < 0.1
    sender.send(1, np.zeros(1, np.uint8))
    thread.join(WAIT_SECONDS)
    assert receiver.waited_seconds > 0.2


def started(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def wait_for(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.001)
