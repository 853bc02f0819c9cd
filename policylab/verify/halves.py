"""Features as they serve, in a simulated engine: drafts by every method, grammars by a library.

No feature is known here. Who assembles an engine makes the deciding halves that a case asks for
(``Setup.config.speculative_config``, ``Setup.grammar_ticks``) and gives them to the simulation.
The rest is here: a vocabulary of which a library can make masks, what the worker proposes, what
plans may ask of it, and what the counters must say.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple, Protocol

import numpy as np

from engine.config.speculative import SpeculativeConfig
from engine.messages.requests import AddRequest
from engine.messages.step import PADDING, Column, DraftPart, StepPlan, StepResult
from engine.sched.resource import Resource
from engine.sched.scheduler import Scheduler
from policylab.verify.case import VOCAB_SIZE, Setup
from policylab.verify.fake import NONE_LEFT, Computed, allowed, mix

END = VOCAB_SIZE - 1  # the token that ends a text
WRONG = "}{"  # a grammar that nobody can read
WORDS = -(-VOCAB_SIZE // 32)  # of a mask
CHARACTERS = 'abcdefghijklmnopqrstuvwxyz0123456789{}[]":,.-+'
MERGES = ("a b", "ab ab", "c d", "t r", "u e", "tr ue", "f a", "l s", "fa ls", "fals e", "cd ,")
PUNCTUATION = ('{ "', '" :', "1 0")


class Guide(Protocol):
    """Follows one answer through its grammar. Either call may raise if it cannot go on."""

    def advance(self, tokens: Sequence[int]) -> None:
        """These tokens were generated."""

    def fill(self, masks: Column, drafts: Sequence[int]) -> None:
        """Set the bits of what may follow: [1 + drafts, words] int32, all zero."""


class NoGuide:
    """The guide of a grammar that cannot be used: nothing may be generated."""

    def advance(self, tokens: Sequence[int]) -> None:
        """It never comes to that."""

    def fill(self, masks: Column, drafts: Sequence[int]) -> None:
        """No bit is set."""


class Halves(NamedTuple):
    """The deciding halves for one run, and what judges its answers."""

    resources: tuple[Resource, ...]
    guide: Callable[[AddRequest], Guide]


MakeHalves = Callable[[Setup], Halves]


def small_tokenizer() -> str:
    """A tokenizer.json: a token for each of some characters, longer ones for some texts. The last
    token ends texts; a text may hold any other character, which no token spells."""
    merges = [*MERGES, *PUNCTUATION]
    names = [*CHARACTERS, *(merge.replace(" ", "") for merge in merges)]
    vocab = {name: token for token, name in enumerate(names)} | {"<end>": END}
    assert sorted(vocab.values()) == list(range(VOCAB_SIZE)), "ids without a token"
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    level["use_regex"] = False
    end = {"id": END, "content": "<end>", "special": True}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [end],
            "pre_tokenizer": level,
            "decoder": level,
            "model": {"type": "BPE", "vocab": vocab, "merges": merges},
        }
    )


def guided(guide: Guide, token: int) -> int:
    """What a model says that would say this token; NONE_LEFT: no token is allowed."""
    masks: Column = np.zeros((1, WORDS), dtype=np.int32)
    try:
        guide.fill(masks, ())
    except Exception:  # whatever a library raises
        return NONE_LEFT
    token_drawn = allowed(token, masks[0])
    if token_drawn != NONE_LEFT:
        guide.advance([token_drawn])
    return token_drawn


# -- grammars


class DelayedMatcher:
    """A compiler whose grammars are ready a few looks later, each time the same.

    ``compiler``: what compiles. ``most``: looks, at most.
    """

    def __init__(self, compiler: Any, most: int) -> None:
        self._compiler = compiler
        self._most = most
        self._num = count()

    def submit(self, grammar: str, eos_token_ids: Sequence[int]) -> DelayedCompilation:
        looks = mix(next(self._num), len(grammar)) % (self._most + 1)
        return DelayedCompilation(self._compiler.submit(grammar, eos_token_ids), looks)

    def shutdown(self) -> None:
        """The compiler serves others, too."""


class DelayedCompilation:
    """Under way until it has been looked at this many times."""

    def __init__(self, compilation: Any, looks: int) -> None:
        self._compilation = compilation
        self._looks = looks

    def poll(self) -> Any:
        self._looks -= 1
        return None if self._looks >= 0 else self._compilation.wait()

    def wait(self) -> Any:
        return self._compilation.wait()


# -- drafts


def max_drafts(setup: Setup) -> int:
    """Drafts of a row in a step, in an engine that drafts as the case's options say."""
    speculative = setup.config.speculative_config
    return 0 if speculative is None else SpeculativeConfig.of(speculative).num_speculative_tokens


def worker_proposes(setup: Setup) -> bool:
    """Do these options leave it to the worker to make drafts?"""
    speculative = setup.config.speculative_config
    return speculative is not None and speculative["method"] == "draft_model"


def is_adaptive(setup: Setup) -> bool:
    """Do drafts depend on what steps have taken?"""
    speculative = setup.config.speculative_config
    return speculative is not None and SpeculativeConfig.of(speculative).adaptive


class WorkersDrafts:
    """What a worker proposes: the right tokens, but sometimes a wrong one among them, sometimes
    none or too few, sometimes more than was wanted, and for a row that wants none."""

    def __init__(self, answers: Callable[[str], Sequence[int] | None]) -> None:
        """answers: what a request will hear in all; ``None``: it has ended."""
        self._answers = answers

    def __call__(self, plan: StepPlan, rows: Sequence[Computed]) -> DraftPart | None:
        if plan.proposals is None or mix(plan.step, 0) % 8 == 0:
            return None
        wishes = zip(rows, plan.proposals.tolist(), strict=True)
        drafts = [self._for(row, wish, mix(plan.step, row.work.new.slot)) for row, wish in wishes]
        return DraftPart(
            np.array([len(row) for row in drafts], dtype=np.int32),
            np.array([token for row in drafts for token in row], dtype=np.int32),
        )

    def _for(self, row: Computed, wish: int, dice: int) -> list[int]:
        num = (wish, wish, wish, wish, wish // 2, 0, wish + 2, wish + 1)[dice % 8]
        right = self._answers(row.work.new.request_id) or ()
        first = len(row.work.seq.tokens) - row.work.new.num_prompt
        drafts = [*right[first : first + num], *range(num)][:num]
        spoiled = (dice >> 8) % (2 * num + 1)
        return [(token + (place == spoiled)) % VOCAB_SIZE for place, token in enumerate(drafts)]


def check_wishes_for_drafts(scheduler: Scheduler, plan: StepPlan, most: int) -> None:
    """The worker is requested drafts of rows that sample, at most this many, and for none that no
    step will verify: after the last token but one of a request there is no place for any [22]."""
    if plan.proposals is None:
        return
    wishes = plan.proposals
    assert len(wishes) == len(plan.rows), "a wish for each row"
    assert (wishes >= 0).all() and (wishes <= most).all(), f"{wishes} drafts are wanted"
    assert not wishes[plan.samples == 0].any(), "drafts are wanted after what is not drawn"
    num_drafts = 0 if plan.drafts is None else plan.drafts.counts
    known = plan.starts + plan.counts - num_drafts + 1  # after this step, at least
    room = scheduler.roster.table.limit.all[plan.rows] - known - 1
    assert (wishes <= room.clip(min=0)).all(), f"{wishes} drafts are wanted, {room} have a use"


class DraftCounts:
    """Counts what was verified and what of it was right, next to the engine's own counters."""

    def __init__(self) -> None:
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0

    def add(self, plan: StepPlan, result: StepResult) -> None:
        """A step has ended."""
        if plan.drafts is None:
            return
        counts = result.counts.tolist()
        for drafts, num in zip(plan.drafts.by_row(), counts, strict=True):
            num_real = sum(draft != PADDING for draft in drafts)
            if num_real and num:
                assert num - 1 <= num_real, f"{num - 1} of {drafts} were right"
                self.num_drafts += 1
                self.num_draft_tokens += num_real
                self.num_accepted_tokens += num - 1

    def check(self, resources: Sequence[Resource]) -> None:
        """Do the counters say the same? Nothing may be kept of requests that have ended."""
        for resource in resources:
            assert not (kept := kept_by(resource)), f"{resource.name} keeps {kept}"
            if "num_draft_tokens" in (counters := resource.counters()):
                seen = vars(self)
                same = {name: counters[name] for name in seen} == seen
                assert same, f"{counters} are counted, {seen} were seen"


def kept_by(resource: Resource) -> dict[str, object]:
    """What is in its own containers, by attribute."""
    return dict(_not_empty(vars(resource)))


def _not_empty(attributes: dict[str, Any]) -> Iterator[tuple[str, object]]:
    for name, value in attributes.items():
        if isinstance(value, dict | set | list) and value:
            yield name, value
