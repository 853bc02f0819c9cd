"""Ledger: records how many tokens were computed for each user, for policies of fair shares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from engine.sched.request import Request


class Account:
    """The service that one user has received, in tokens."""

    __slots__ = ("active", "cached_tokens", "input_tokens", "output_tokens", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight  # the user's share of the engine, relative to the other users
        self.input_tokens = 0  # prompt tokens computed for the first time
        self.cached_tokens = 0  # prompt tokens that were found in the prefix cache
        self.output_tokens = 0
        self.active = 0  # number of unfinished requests


class Ledger:
    """Counts the tokens computed for each user, if the policy has ``uses_ledger``.

    A prompt token counts once, even if a preempted request computes it again. ``weights``: each
    user's share of the service, above 0; by default 1."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._accounts: dict[str, Account] = {}
        self._entered: dict[Request, int] = {}  # prompt tokens counted so far

    def account(self, user: str) -> Account:
        """The user's account; an empty one for an unknown user."""
        return self._accounts.get(user) or Account(self._weights.get(user, 1.0))

    def service(self, user: str, input_price: float = 1.0, output_price: float = 2.0) -> float:
        """The user's input and output tokens times these prices, divided by the user's weight.
        Cached tokens cost nothing."""
        account = self.account(user)
        tokens = input_price * account.input_tokens + output_price * account.output_tokens
        return tokens / account.weight

    # -- called by the scheduler

    def on_add(self, req: Request) -> None:
        """Count an accepted request for its user. Called after the policy's ``on_add``."""
        account = self._accounts[req.user] = self.account(req.user)
        account.active += 1
        self._entered[req] = 0

    def on_grant(self, req: Request, num_tokens: int) -> None:
        """Count the prompt tokens among the ``num_tokens`` tokens that a step computes; they are
        already added to ``req.num_computed``. May be skipped for decodes."""
        entered, upto = self._entered[req], min(req.num_computed, req.num_prompt)
        if upto <= entered:
            return
        start = min(max(entered, req.num_computed - num_tokens), upto)
        account = self._accounts[req.user]
        account.cached_tokens += start - entered
        account.input_tokens += upto - start
        self._entered[req] = upto

    def on_tokens(self, counts: Iterable[tuple[str, int]]) -> None:
        """Count the output tokens of a step. ``counts``: pairs of a user and a number of tokens; a
        user may occur several times."""
        accounts = self._accounts
        for user, count in counts:
            accounts[user].output_tokens += count

    def on_finish(self, req: Request) -> None:
        """Remove an ended request from its user's account. If it has output, all of its prompt
        tokens count as computed."""
        account = self._accounts[req.user]
        account.active -= 1
        entered = self._entered.pop(req)
        if req.num_output:
            account.input_tokens += req.num_prompt - entered
