"""What plug-ins and clients may do that nobody thought of, each in its smallest form."""

from __future__ import annotations

from simulate import expected, make_request, make_run

from engine.sched.policies import FCFS

PROMPT = list(range(100, 140))


class LooksBack(FCFS):
    """Asks the cache about requests that have ended."""

    def __init__(self):
        self.ended = []

    def rank(self, req, view):
        self.ask(view)
        return (req.arrival,)

    def on_finish(self, req, view):
        self.ended.append(req)
        self.ask(view)

    def ask(self, view):
        for old in self.ended:
            view.kv.cached_prefix(old)
            view.kv.missing(old, 8)
            assert not view.kv.held(old)


def test_who_asks_about_an_ended_request_changes_nothing_for_the_next_in_its_row():
    """The next one found the ended one's hashes in its row and read its KV."""
    run = make_run(policy=LooksBack())
    prompts = {name: [ord(name)] * 40 for name in "abcd"}
    for name, prompt in prompts.items():
        run.add(make_request(name, prompt, 5))
        run.drain()
    assert run.outputs == {name: expected(prompt, 5) for name, prompt in prompts.items()}
    assert not run.scheduler.guard.faults.messages
