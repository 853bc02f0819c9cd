"""Threads that read adapters give way to steps."""

from threading import Event

from engine.lora.turns import PAUSE, give_way, taking_turns


def test_only_a_thread_whose_result_is_not_awaited_pauses() -> None:
    pauses: list[float] = []
    awaited = Event()
    with taking_turns(awaited):
        give_way(burst=0, sleep=pauses.append)
        give_way(burst=1e9, sleep=pauses.append)
        assert pauses == [PAUSE]
        awaited.set()
        give_way(burst=0, sleep=pauses.append)
    give_way(burst=0, sleep=pauses.append)
    assert pauses == [PAUSE]
