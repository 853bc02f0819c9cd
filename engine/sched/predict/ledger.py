"""Ledger: the service of each user, for policies that share the engine among users."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from engine.sched.request import Request


class Account:
    """One user's service, in tokens."""

    __slots__ = ("active", "cached_tokens", "input_tokens", "output_tokens", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight  # share of the engine the user is owed, relative to the others
        self.input_tokens = 0  # prompt tokens computed for the first time
        self.cached_tokens = 0  # prompt tokens that were found in the cache instead
        self.output_tokens = 0
        self.active = 0  # unfinished requests


class Ledger:
    """Accounts by user. Kept by the scheduler while a policy with ``uses_ledger`` runs.

    Each prompt token counts once: recomputing it after a preemption is not service.
    ``weights`` gives users' shares, above 0; a user not named has 1.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._accounts: dict[str, Account] = {}
        self._entered: dict[Request, int] = {}  # prompt tokens entered so far

    def account(self, user: str) -> Account:
        """The user's account, an empty one if it was never seen."""
        return self._accounts.get(user) or Account(self._weights.get(user, 1.0))

    def service(self, user: str, input_price: float = 1.0, output_price: float = 2.0) -> float:
        """What the user was served per unit of weight; tokens from the cache cost nothing."""
        account = self.account(user)
        tokens = input_price * account.input_tokens + output_price * account.output_tokens
        return tokens / account.weight

    # -- entries, made by the scheduler

    def on_add(self, req: Request) -> None:
        """The request was accepted: called after the policy's ``on_add``, before its first rank."""
        account = self._accounts[req.user] = self.account(req.user)
        account.active += 1
        self._entered[req] = 0

    def on_grant(self, req: Request, num_tokens: int) -> None:
        """These tokens are being computed; ``req.num_computed`` includes them already.

        Grants of decodes may be left out, they change nothing.
        """
        entered, upto = self._entered[req], min(req.num_computed, req.num_prompt)
        if upto <= entered:
            return
        start = min(max(entered, req.num_computed - num_tokens), upto)
        account = self._accounts[req.user]
        account.cached_tokens += start - entered
        account.input_tokens += upto - start
        self._entered[req] = upto

    def on_tokens(self, counts: Iterable[tuple[str, int]]) -> None:
        """Output tokens of one step: pairs of a user and how many; a user may come repeatedly."""
        accounts = self._accounts
        for user, count in counts:
            accounts[user].output_tokens += count

    def on_finish(self, req: Request) -> None:
        """The request has ended. A last token of a prompt that was granted in bulk is entered."""
        account = self._accounts[req.user]
        account.active -= 1
        entered = self._entered.pop(req)
        if req.num_output:
            account.input_tokens += req.num_prompt - entered
