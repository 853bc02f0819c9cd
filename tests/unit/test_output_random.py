"""Random requests in random steps: what is shown is what a plain reading of the tokens says.

The plain reading knows no table of token texts, looks for stop strings in the whole text, and makes
every output anew.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from support import made_tokenizers as made
from support.fakes import FakeClient, counting, fake_session
from tokenizers import Tokenizer as RustTokenizer

from engine.frontend.session import Session
from engine.messages.params import SamplingParams
from engine.messages.requests import (
    CompletionOutput,
    CoreOutputs,
    Finished,
    RequestOutput,
    Started,
    TokenLogprobs,
)
from engine.text.detokenizer import Detokenizer
from engine.text.token_texts import TokenTexts
from engine.text.tokenizer import RustBackend, Tokenizer

STOPS = ["e", "the", "ab", " d", "ox", "\n", "quick brown", "é", "ー", "zzz"]
NUM_STEPS = 40


class StreamBackend(RustBackend):
    """One whose token texts nothing is known of."""

    def token_texts(self, skip_special_tokens: bool) -> TokenTexts | None:
        return None


@dataclass
class Plain:
    """One sequence."""

    params: SamplingParams
    stream: Detokenizer
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    end: tuple[str, int | str | None] | None = None
    num_read: int = 0
    shown: tuple[int, int] = (0, 0)  # tokens and characters

    def take(self, new: list[int], logprobs: list[float], end: Finished | None) -> None:
        params = self.params
        self.tokens += new
        self.logprobs += logprobs
        if not params.stop and params.output_kind == "final":  # read in one go at the end
            new = [] if end is None else self.tokens
        if end is not None and end.reason == "stop" and not params.include_stop_str_in_output:
            new = new[:-1]
        if params.detokenize:
            for part in [[token] for token in new] if params.stop else [new]:
                self.read(part)
                if self.end is not None:
                    return
        if end is not None:
            self.text += self.stream.flush() if params.detokenize else ""
            self.end = end.reason, end.stop_reason

    def read(self, part: list[int]) -> None:
        self.num_read += len(part)
        before = len(self.text)
        self.text += self.stream.feed(part)
        if len(self.text) == before or self.num_read <= self.params.min_tokens:
            return
        found = [
            (at, place)
            for place, stop in enumerate(self.params.stop)
            if (at := self.text.find(stop, max(0, before - len(stop) + 1))) >= 0
        ]
        if found:
            at, place = min(found)
            stop = self.params.stop[place]
            self.text = self.text[: at + len(stop) * self.params.include_stop_str_in_output]
            del self.tokens[self.num_read :], self.logprobs[self.num_read :]
            self.end = "stop", stop

    def show(self, only_new: bool) -> tuple[object, ...]:
        params = self.params
        upto = len(self.text)
        if self.end is None and params.stop and not params.include_stop_str_in_output:
            upto = max(0, upto - max(map(len, params.stop)) + 1)
        first_token, first_char = self.shown if only_new else (0, 0)
        self.shown = len(self.tokens), upto
        logprobs = None if params.logprobs is None else self.logprobs[first_token:]
        reason, stop_reason = self.end or (None, None)
        tokens = self.tokens[first_token:]
        return tokens, self.text[first_char:upto], logprobs, reason, stop_reason


def shown_of(output: CompletionOutput) -> tuple[object, ...]:
    logprobs = None
    if output.logprobs is not None:
        logprobs = [next(iter(position.values())).logprob for position in output.logprobs]
        assert output.cumulative_logprob is not None
    return output.token_ids, output.text, logprobs, output.finish_reason, output.stop_reason


class Requests:
    """Some requests of a session, their plain readings, and steps of a core that serves them."""

    def __init__(self, session: Session, plain: RustBackend, dice: random.Random) -> None:
        self.session = session
        self.plain = plain
        self.dice = dice
        self.plain_of: dict[str, list[Plain]] = {}  # by the user's id
        self.place_of: dict[str, tuple[str, int]] = {}  # of the core's ids that go on
        self.words = [i for i in range(plain.vocab_size) if plain.decode([i], True).isascii()]

    def add(self, name: str) -> None:
        dice = self.dice
        detokenize = dice.random() < 0.9
        params = SamplingParams(
            n=dice.choice((1, 1, 1, 2, 3)),
            max_tokens=200,
            output_kind=dice.choice(("delta", "cumulative", "final")),
            stop=dice.sample(STOPS, dice.choice((0, 0, 1, 3))) if detokenize else [],
            include_stop_str_in_output=dice.random() < 0.3,
            min_tokens=dice.choice((0, 0, 5)),
            skip_special_tokens=dice.random() < 0.7,
            logprobs=dice.choice((None, None, 0)),
            detokenize=detokenize,
        )
        prompt = self.tokens(dice.randint(1, 9))
        submission = self.session.inputs.process(name, {"prompt_token_ids": prompt}, params, {})
        self.session.submit(submission)
        self.plain_of[name] = [
            Plain(params, Detokenizer(self.plain, prompt, params.skip_special_tokens))
            for _ in range(params.n)
        ]
        for index, request in enumerate(submission.requests):
            self.place_of[request.request_id] = name, index

    def tokens(self, num: int) -> list[int]:
        dice, every = self.dice, range(self.plain.vocab_size)
        return [dice.choice(self.words if dice.random() < 0.8 else every) for _ in range(num)]

    def step(self, is_last: bool) -> tuple[list[RequestOutput], dict[str, list[int]]]:
        """What the session says of a step, and which sequences moved, by the user's id."""
        dice, moved = self.dice, dict[str, list[int]]()
        core_ids = [i for i in self.place_of if is_last or dice.random() < 0.8]
        dice.shuffle(core_ids)
        batch = CoreOutputs(core_ids, [], None, 1.0)
        if dice.random() < 0.4:
            batch.counts = [dice.choice((0, 1, 1, 2, 4)) for _ in core_ids]
        for row, core_id in enumerate(core_ids):
            name, index = self.place_of[core_id]
            sequence = self.plain_of[name][index]
            new = self.tokens(1 if batch.counts is None else batch.counts[row])
            if not sequence.tokens:
                batch.started.append(Started(row, 0, 0.5))
            logprobs = [-dice.random() for _ in new] if sequence.params.logprobs == 0 else []
            if logprobs:
                pairs = zip(new, logprobs, strict=True)
                batch.logprobs[row] = [TokenLogprobs([t], [lp], 1) for t, lp in pairs]
            end = None
            if new and (is_last or dice.random() < 0.04):
                end = Finished(row, dice.choice(("stop", "length")), dice.choice((None, new[-1])))
                batch.finished.append(end)
            batch.token_ids += new
            if new:
                sequence.take(new, logprobs, end)
                moved.setdefault(name, []).append(index)
            if sequence.end is not None:
                del self.place_of[core_id]
        return self.session.outputs.process(batch), moved

    def check(self, outputs: list[RequestOutput], moved: dict[str, list[int]]) -> None:
        expected = []
        for name, indices in moved.items():
            sequences = self.plain_of[name]
            finished = all(sequence.end is not None for sequence in sequences)
            kind = sequences[0].params.output_kind
            if kind == "final" and not finished:
                continue
            told = indices if kind == "delta" else range(len(sequences))
            shown = [(index, sequences[index].show(kind == "delta")) for index in told]
            expected.append((name, shown, finished))
        assert [
            (o.request_id, [(each.index, shown_of(each)) for each in o.outputs], o.finished)
            for o in outputs
        ] == expected


@pytest.mark.parametrize("maker", made.MAKERS.values(), ids=made.MAKERS.keys())
@pytest.mark.parametrize("turn", range(12))
def test_what_is_shown_is_what_the_tokens_say(
    maker: Callable[[], RustTokenizer], turn: int, seed: int
) -> None:
    dice = random.Random(seed + turn)
    tokenizer = Tokenizer(RustBackend(maker()), {}, {})
    plain = StreamBackend(maker())
    session = fake_session(FakeClient(counting), tokenizer)
    requests = Requests(session, plain, dice)
    for number in range(12):
        requests.add(f"request {number}")
    for number in range(NUM_STEPS):
        requests.check(*requests.step(is_last=False))
        if dice.random() < 0.3:
            requests.add(f"request {12 + number}")
    while requests.place_of:
        requests.check(*requests.step(is_last=True))
    assert not session.has_unfinished
    assert sorted(session.outputs.ended_here()) == sorted(set(session.outputs.ended_here()))
