"""Real drafters and grammars for the checks of policies and schedulers."""

from __future__ import annotations

from engine.core.build import features_of, following_grammars, make_compiler
from engine.messages.requests import AddRequest
from policylab.verify.case import VOCAB_SIZE, Setup
from policylab.verify.halves import WRONG, DelayedMatcher, Guide, Halves, NoGuide, small_tokenizer


class SimulatedHalves:
    """Makes the real drafters and grammars of a case for the scheduler. All runs share the compiled
    grammars."""

    def __init__(self) -> None:
        self._compiler = make_compiler(small_tokenizer, VOCAB_SIZE)

    def __call__(self, setup: Setup) -> Halves:
        resources = tuple(features_of(setup.config))
        if setup.grammar_ticks >= 0:
            delayed = DelayedMatcher(self._compiler, setup.grammar_ticks)
            resources = following_grammars(resources, delayed, VOCAB_SIZE, may_cut=True)
        return Halves(resources, self._guide)

    def _guide(self, add: AddRequest) -> Guide:
        """Make a matcher of the request's grammar for the checker; the scheduler has its own."""
        if add.grammar is None or add.grammar == WRONG:
            return NoGuide()
        return self._compiler.submit(add.grammar, add.eos_token_ids).wait()
