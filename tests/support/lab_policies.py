"""Policies that experiments are tried with, by dotted path: other processes must find them."""

from __future__ import annotations

import os
import signal

from engine.sched import Defer, Policy, Refuse
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
