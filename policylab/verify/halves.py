"""Simulates the worker's part of real drafters and grammars in test cases.

The caller makes the scheduler's part (``Halves``). This module has a small vocabulary, a stand-in
for the draft model, and checks of drafts and counters."""

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

END = VOCAB_SIZE - 1  # the end-of-text token
WRONG = "}{"  # an invalid grammar
WORDS = -(-VOCAB_SIZE // 32)  # int32 words per mask
CHARACTERS = 'abcdefghijklmnopqrstuvwxyz0123456789{}[]":,.-+'
MERGES = ("a b", "ab ab", "c d", "t r", "u e", "tr ue", "f a", "l s", "fa ls", "fals e", "cd ,")
PUNCTUATION = ('{ "', '" :', "1 0")


class Guide(Protocol):
    """The state of a grammar during one answer. Its methods may raise any exception if no token can
    continue the answer."""

    def advance(self, tokens: Sequence[int]) -> None:
        """Advance the grammar's state by these generated tokens."""

    def fill(self, masks: Column, drafts: Sequence[int]) -> None:
        """Set the bits of allowed tokens in ``masks`` [1 + drafts, words] (int32, initially 0): row
        0 is for the next token, row i for the token after i drafts."""


class NoGuide:
    """A guide for an invalid grammar, which allows no token."""

    def advance(self, tokens: Sequence[int]) -> None:
        """Never called, since no token is allowed."""

    def fill(self, masks: Column, drafts: Sequence[int]) -> None:
        """Leave all bits unset."""


class Halves(NamedTuple):
    """What a case with real drafters and grammars needs: the scheduler's resources, and a function
    that makes a grammar matcher for the checker."""

    resources: tuple[Resource, ...]
    guide: Callable[[AddRequest], Guide]


MakeHalves = Callable[[Setup], Halves]


def small_tokenizer() -> str:
    """The JSON text of a small tokenizer: single characters and some longer texts. The last token
    is the end-of-text token."""
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
    """Sample a token under a grammar: ``token`` if it is allowed, else another one; ``NONE_LEFT``
    if the grammar allows none. Advances ``guide`` by the sampled token."""
    masks: Column = np.zeros((1, WORDS), dtype=np.int32)
    try:
        guide.fill(masks, ())
    except Exception:  # a library may raise anything
        return NONE_LEFT
    token_drawn = allowed(token, masks[0])
    if token_drawn != NONE_LEFT:
        guide.advance([token_drawn])
    return token_drawn


# -- grammars


class DelayedMatcher:
    """A grammar compiler whose results are ready after a deterministic number of polls, at most
    ``most``. ``compiler``: the real compiler."""

    def __init__(self, compiler: Any, most: int) -> None:
        self._compiler = compiler
        self._most = most
        self._num = count()

    def submit(self, grammar: str, eos_token_ids: Sequence[int]) -> DelayedCompilation:
        looks = mix(next(self._num), len(grammar)) % (self._most + 1)
        return DelayedCompilation(self._compiler.submit(grammar, eos_token_ids), looks)

    def shutdown(self) -> None:
        """Do nothing, because the real compiler is shared with other runs."""


class DelayedCompilation:
    """A compilation that is reported as unfinished for the first ``looks`` polls."""

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
    """The largest number of draft tokens of a request in one step, from real drafters."""
    speculative = setup.config.speculative_config
    return 0 if speculative is None else SpeculativeConfig.of(speculative).num_speculative_tokens


def worker_proposes(setup: Setup) -> bool:
    """True if the worker proposes the draft tokens, not the scheduler."""
    speculative = setup.config.speculative_config
    return speculative is not None and speculative["method"] == "draft_model"


def is_adaptive(setup: Setup) -> bool:
    """True if the engine adapts the number of drafts to measured step times."""
    speculative = setup.config.speculative_config
    return speculative is not None and SpeculativeConfig.of(speculative).adaptive


class WorkersDrafts:
    """Proposes draft tokens in place of a draft model: mostly right ones, sometimes wrong ones,
    none, or another number than requested."""

    def __init__(self, answers: Callable[[str], Sequence[int] | None]) -> None:
        """``answers`` returns the expected answer to a request by id; ``None`` if it has ended."""
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
    """Check the numbers of draft tokens that a plan requests from the worker: only for rows that
    sample, at most ``most`` each, and no more than a later step can verify (rule [22])."""
    if plan.proposals is None:
        return
    wishes = plan.proposals
    assert len(wishes) == len(plan.rows), "proposals must have one entry per row"
    assert (wishes >= 0).all() and (wishes <= most).all(), (
        f"{wishes} drafts are requested, at most {most}"
    )
    assert not wishes[plan.samples == 0].any(), "drafts are requested without a sample"
    num_drafts = 0 if plan.drafts is None else plan.drafts.counts
    known = plan.starts + plan.counts - num_drafts + 1  # known tokens after this step, at least
    room = scheduler.roster.table.limit.all[plan.rows] - known - 1
    assert (wishes <= room.clip(min=0)).all(), f"{wishes} drafts are requested, {room} are usable"


class DraftCounts:
    """Counts proposed and accepted draft tokens, to check the engine's counters."""

    def __init__(self) -> None:
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0

    def add(self, plan: StepPlan, result: StepResult) -> None:
        """Count the draft tokens of a finished step."""
        if plan.drafts is None:
            return
        counts = result.counts.tolist()
        for drafts, num in zip(plan.drafts.by_row(), counts, strict=True):
            num_real = sum(draft != PADDING for draft in drafts)
            if num_real and num:
                assert num - 1 <= num_real, f"{num - 1} of the drafts {drafts} were accepted"
                self.num_drafts += 1
                self.num_draft_tokens += num_real
                self.num_accepted_tokens += num - 1

    def check(self, resources: Sequence[Resource]) -> None:
        """Assert that resources count drafts as this object does and keep no data of requests."""
        for resource in resources:
            assert not (kept := kept_by(resource)), f"{resource.name} keeps {kept}"
            if "num_draft_tokens" in (counters := resource.counters()):
                seen = vars(self)
                same = {name: counters[name] for name in seen} == seen
                assert same, f"the engine counted {counters}, the check counted {seen}"


def kept_by(resource: Resource) -> dict[str, object]:
    """The attributes of a resource that are non-empty containers, by name."""
    return dict(_not_empty(vars(resource)))


def _not_empty(attributes: dict[str, Any]) -> Iterator[tuple[str, object]]:
    for name, value in attributes.items():
        if isinstance(value, dict | set | list) and value:
            yield name, value
