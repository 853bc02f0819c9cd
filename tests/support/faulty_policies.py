"""Policies with one fault each, which `metronome verify` has to find: the first ten were planted in
a trial of the lab, the others are of further kinds."""

import datetime
import functools
import os
import random
import time
from collections import OrderedDict, defaultdict

from engine.sched import Admission, Limits, Refuse
from engine.sched.policies import FCFS

SEEN = {}
COUNTED = {"requests": 0}


class WallClock(FCFS):
    """Ranks by the clock of the wall."""

    def rank(self, req, view):
        return (int(time.time() * 1e6) % 7, req.arrival)


class Dice(FCFS):
    """Ranks by dice of its own."""

    def rank(self, req, view):
        return (random.random(),)


class WritesPriority(FCFS):
    """Changes what a request is."""

    def rank(self, req, view):
        req.priority = 0
        return (req.arrival,)


class BooksOfTheClass(FCFS):
    """Keeps its books in the class, so that two engines share them."""

    served = defaultdict(int)  # noqa: RUF012

    def rank(self, req, view):
        return (self.served[req.user], req.arrival)

    def on_finish(self, req, view):
        self.served[req.user] += req.num_output


class NaNLater(FCFS):
    """Ranks who was preempted twice by no number."""

    dynamic = True

    def rank(self, req, view):
        return (float("nan") if req.num_preempted > 1 else 0.0, req.arrival)


class VictimOfItsOwn(FCFS):
    """Names the request itself as the victim."""

    def victim(self, candidates, req, view):
        return req


class DoorShut(FCFS):
    """Never lets a long prompt in."""

    def admit(self, req, view):
        return Admission.SKIP if req.num_prompt > 100 else super().admit(req, view)


class PausesLongest(FCFS):
    """The longest request that decodes stands still for as long as another runs."""

    def order(self, view):
        decodes = [req for req in view.running if req.num_output]
        longest = max(decodes, key=lambda req: (req.max_total, req.arrival), default=None)
        for req in list(view.running):
            if req is not longest or len(view.running) == 1:
                yield req
        while (req := self.next_waiting(view)) is not None:
            yield req


class KeepsAll(FCFS):
    """Keeps every request for ever."""

    def __init__(self):
        self.known = []

    def on_add(self, req, view):
        self.known.append(req)


class HashOfString(FCFS):
    """Ranks by the hash of a string."""

    def rank(self, req, view):
        return (hash(req.user) % 5, hash(req.request_id) % 3)


# -- further kinds


class Address(FCFS):
    """Ranks by where the request lies in memory."""

    def rank(self, req, view):
        return (id(req) // 64 % 11, req.arrival)


class OrderOfSet(FCFS):
    """Offers tokens in the order of a set."""

    def order(self, view):
        yield from set(view.running)
        while (req := self.next_waiting(view)) is not None:
            yield req


class TimeOfDay(FCFS):
    """Shorter prompts first in the afternoon."""

    def rank(self, req, view):
        return (req.num_prompt * (datetime.datetime.now().hour // 6), req.arrival)


class Environment(FCFS):
    """Goes by a variable of the environment."""

    def rank(self, req, view):
        return (req.num_prompt if os.environ.get("SHORTEST") == "yes" else 0, req.arrival)


class EnvironmentOnce(FCFS):
    """Reads a variable of the environment as it is made."""

    def __init__(self):
        self.share = float(os.getenv("CHUNK_SHARE", "1.0"))
        self.is_short = "SHORTEST_FIRST" in os.environ and bool(os.environ["SHORTEST_FIRST"])
        self.weight = int(os.environ.get("WEIGHT", "0"))

    def rank(self, req, view):
        return (self.weight * req.num_prompt, req.arrival)


class ProcessNumber(FCFS):
    """Ranks by the number of the process."""

    def rank(self, req, view):
        return ((req.arrival * os.getpid()) % 5, req.arrival)


class MutableDefault(FCFS):
    """Engines share a default argument."""

    def __init__(self, order=[]):  # noqa: B006
        self.numbers = order

    def rank(self, req, view):
        self.numbers.append(1)
        return (len(self.numbers) // 3 % 4, req.arrival)


class StateOfModule(FCFS):
    """Counts in a global, which no run resets."""

    def rank(self, req, view):
        COUNTED["requests"] += 1
        return (COUNTED["requests"] % 7, req.arrival)


class StarvesUser(FCFS):
    """The victim is always of one user, who never comes in again."""

    waiting_may_preempt = True

    def rank(self, req, view):
        return (req.user == "bob", req.arrival)

    def outranks(self, req, other):
        return other.user == "bob" and req.user != "bob"

    def victim(self, candidates, req, view):
        return next((each for each in candidates if each.user == "bob"), candidates[-1])


class StarvesLastUser(FCFS):
    """The waiting user whose name is the greatest never goes first."""

    dynamic = True

    def rank(self, req, view):
        return (req.user, req.arrival)


class Idles(FCFS):
    """Computes nothing in every second step."""

    def limits(self, view):
        return Limits(max_tokens=0 if view.step.index % 2 else None)


class HalfSteps(FCFS):
    """Fills half of each step."""

    def limits(self, view):
        return Limits(max_tokens=max(1, view.config.max_num_batched_tokens // 2))


class OneSeat(FCFS):
    """Serves one request at a time, however many seats there are."""

    def limits(self, view):
        return Limits(max_seqs=1)


class NestedBooks(FCFS):
    """Keeps a line for each request, far down."""

    class Books:
        def __init__(self):
            self.by_user = {}

    def __init__(self):
        self.books = self.Books()

    def on_finish(self, req, view):
        of_user = self.books.by_user.setdefault(req.user, {"ended": OrderedDict()})
        of_user["ended"][req.request_id] = view.now


class BooksOfModule(FCFS):
    """Keeps a line for each request in a global."""

    def on_finish(self, req, view):
        SEEN[req.arrival_time, req.request_id] = req.num_output


def _closure():
    ended = []

    class InClosure(FCFS):
        """Keeps a number for each request in a closure."""

        def on_finish(self, req, view):
            ended.append(req.num_prompt)

    return InClosure


InClosure = _closure()
InClosure.__qualname__ = "InClosure"


class Cached(FCFS):
    """Keeps each request in a cache without a bound."""

    @functools.cache  # noqa: B019
    def cost(self, req):
        return req.num_prompt

    def rank(self, req, view):
        return (self.cost(req) // 1000, req.arrival)


class Log(FCFS):
    """Writes a text that grows with each step."""

    def __init__(self):
        self.text = ""

    def on_step(self, shape, view):
        self.text += f"{shape.num_tokens} tokens\n"


class SampledBooks(FCFS):
    """Keeps one request of twelve."""

    def __init__(self):
        self.sample = set()

    def on_finish(self, req, view):
        if req.arrival % 12 == 0:
            self.sample.add(req.request_id)


class RaisesRarely(FCFS):
    """Raises at one request in some hundreds."""

    def on_finish(self, req, view):
        if req.arrival % 499 == 498:
            raise RuntimeError("a rare one")


class Flips(FCFS):
    """Turns its order round in each step, and who waits may evict who runs."""

    dynamic = True
    waiting_may_preempt = True

    def rank(self, req, view):
        return (req.arrival if view.step.index % 2 else -req.arrival,)


class WritesHints(FCFS):
    """Leaves a note in another's request."""

    def on_add(self, req, view):
        req.hints["seen"] = len(view.waiting)


class ReadsOthers(FCFS):
    """Ranks by what another request has got so far, from a book that outlives the engine."""

    latest = [0]  # noqa: RUF012

    def rank(self, req, view):
        return (self.latest[0], req.arrival)

    def on_tokens(self, reqs, view):
        self.latest[0] = sum(req.num_computed for req in reqs) % 13


class Forgets(FCFS):
    """Defers each fifth request to a time that does not come."""

    def admit(self, req, view):
        return Admission.SKIP if req.arrival % 5 == 4 else super().admit(req, view)


class RefusesMost(FCFS):
    """Takes one request of ten."""

    def on_add(self, req, view):
        return Refuse("full") if req.arrival % 10 else None


LAB = (
    *(WallClock, Dice, WritesPriority, BooksOfTheClass, NaNLater, VictimOfItsOwn, DoorShut),
    *(PausesLongest, KeepsAll, HashOfString),
)
FURTHER = (
    *(Address, OrderOfSet, TimeOfDay, Environment, EnvironmentOnce, ProcessNumber),
    *(MutableDefault, StateOfModule, StarvesUser, StarvesLastUser, Idles, HalfSteps, OneSeat),
    *(NestedBooks, BooksOfModule, InClosure, Cached, Log, SampledBooks, RaisesRarely, Flips),
    *(WritesHints, ReadsOthers, Forgets, RefusesMost),
)
