"""Policies that experiments are tried with, by dotted path: other processes must find them."""

from __future__ import annotations

import os
import signal

from engine.sched import Defer, Limits, Policy, Refuse
from engine.sched.policies import POLICIES

LONG = 300  # tokens
FEW = 8  # seats


class Copy(POLICIES["fcfs"]):
    """fcfs under another name."""


class Dies(Policy):
    """Takes its process with it."""

    def rank(self, req, view):
        os.kill(os.getpid(), signal.SIGKILL)
        return (req.arrival,)


class Planted(Policy):
    """In order of arrival, but where seats are few the long prompts go first."""

    def rank(self, req, view):
        is_bad = view.config.max_num_seqs <= FEW and req.num_prompt >= LONG
        return (not is_bad, req.arrival)


class RefusesMost(Policy):
    """Takes one request in ten."""

    def rank(self, req, view):
        return (req.arrival,)

    def on_add(self, req, view):
        return None if req.request_id.endswith("0") else Refuse("not today")


class NeverEnds(Policy):
    """Lets no request into the queue, for ever."""

    def rank(self, req, view):
        return (req.arrival,)

    def on_add(self, req, view):
        return Defer(view.now + 1e9)


class Broken(Policy):
    """Asks the cost model for what it does not have, so it is switched off."""

    def rank(self, req, view):
        return (-req.arrival,)

    def limits(self, view):
        return view.cost.nonsense()


class WrongOnce(Policy):
    """Gives one wrong answer, to its fifth request."""

    def rank(self, req, view):
        return "first" if req.request_id == "r4" else (req.arrival,)


class RaisesAtTheEnd(Policy):
    """Raises once, as the last request ends."""

    def rank(self, req, view):
        return (req.arrival,)

    def on_finish(self, req, view):
        if req.request_id == "r29":
            raise KeyError("books")


class Idles(Policy):
    """Lets nothing run, so the default plans each step."""

    def rank(self, req, view):
        return (req.arrival,)

    def limits(self, view):
        return Limits(max_tokens=0)


class Corrupts(Policy):
    """Writes into what belongs to the mechanism."""

    def rank(self, req, view):
        return (req.arrival,)

    def on_grant(self, req, num_tokens, view):
        req.tokens = None


class Misspelt(POLICIES["fcfs"]):
    """Means to turn the order round."""

    def rnak(self, req, view):
        return (-req.arrival,)


class LongLast(Policy):
    """Prompts of 48 tokens and more go after all others."""

    def rank(self, req, view):
        return (req.num_prompt >= 48, req.arrival)


class Fails:
    """A predictor that raises for one request in ten."""

    name = "fails"

    def __init__(self, lengths):
        pass

    def predict(self, req):
        if req.request_id.endswith("7"):
            raise ValueError("no idea")
        return 4
