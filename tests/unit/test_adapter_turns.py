"""Threads that read adapters give way to steps."""

from threading import Event

from engine.lora.turns import PAUSE, give_way, taking_turns


def test_a_thread_pauses_unless_its_result_is_urgent() -> None:
    pauses: list[float] = []
    urgent = Event()
    with taking_turns(urgent):
        give_way(burst=0, sleep=pauses.append)
        give_way(burst=1e9, sleep=pauses.append)
        assert pauses == [PAUSE]
        urgent.set()
        give_way(burst=0, sleep=pauses.append)
    give_way(burst=0, sleep=pauses.append)
    assert pauses == [PAUSE]
