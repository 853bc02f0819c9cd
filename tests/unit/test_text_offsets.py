"""``text_offset`` counts what is in the text, whatever the tokenizer, the prompt and the end."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from support import made_tokenizers as made

from engine.config.model import ModelConfig
from engine.frontend.output import OutputSequence
from engine.messages.params import SamplingParams
from engine.messages.requests import Finished, Logprob, TokenLogprobs
from engine.server.logprobs import TextLogprobs, TokenNames
from engine.server.offsets import TextOffsets, prompt_offsets
from engine.text.detokenizer import TextReader, wish_of
from engine.text.tokenizer import Tokenizer, load_tokenizer

BOS, EOS = 1, 2
WORDS = [
    "Hello world.",
    "日本 books",
    "a  b",
    " é\u0301x",
    "\U0001f468\u200d\U0001f469!",
    "<s>x</s>",
    "x",
]


@pytest.fixture(scope="module", params=made.MAKERS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Tokenizer:
    root = made.save(tmp_path_factory.mktemp("tokenizer"), made.MAKERS[request.param]())
    return load_tokenizer(ModelConfig(model=str(root)))


class Told:
    """The text and the columns of an answer, whole or in chunks."""

    def __init__(self) -> None:
        self.text = ""
        self.offsets: list[int] = []
        self.tokens: list[str] = []
        self.num_early = 0  # tokens that were told before the last chunk

    def add(self, text: str, columns: dict[str, list[Any]]) -> None:
        self.text += text
        self.num_early = len(self.offsets)
        self.offsets += columns["text_offset"]
        self.tokens += columns["tokens"]


def answer(
    tokenizer: Tokenizer,
    prompt: list[int],
    echoed: str | None,
    parts: list[list[int]],
    end: Finished,
    **params: Any,
) -> Told:
    """The answer to a prompt; ``parts``: tokens of each chunk, the last with the end."""
    sampling = SamplingParams(output_kind="delta", logprobs=0, **params)
    reader = TextReader(tokenizer.backend, prompt, wish_of(sampling))
    sequence = OutputSequence(0, sampling, tokenizer, reader)
    begin = 0 if echoed is None else len(echoed)
    offsets = TextOffsets(tokenizer, skips_special=sampling.skip_special_tokens, begin=begin)
    offsets.follow(prompt)
    logprobs, told = TextLogprobs(1, TokenNames(tokenizer), offsets), Told()
    if echoed is not None:
        at = [{token: Logprob(-1.0, 1)} for token in prompt]
        logprobs.echo(echoed, prompt, [None, *at[1:]])
    for place, part in enumerate(parts):
        sequence.token_ids += part
        sequence.take_logprobs([TokenLogprobs([token], [-1.0], 1) for token in part])
        sequence.read(part, end if place == len(parts) - 1 else None)
        completion = sequence.delta()
        before = echoed or "" if place == 0 else ""
        told.add(before + completion.text, logprobs.of(completion))
        if sequence.end is not None:
            break
    return told


def in_parts(token_ids: list[int], dice: random.Random) -> list[list[int]]:
    parts, rest = [], token_ids
    while rest:
        num = dice.choice((1, 1, 1, 2, 5))
        parts.append(rest[:num])
        rest = rest[num:]
    return parts


def check(told: Told, token_ids: list[int], tokenizer: Tokenizer, *, skips: bool, out: int) -> None:
    """``out``: of the tokens, the first that was generated."""
    text, offsets = told.text, told.offsets
    assert len(offsets) == len(told.tokens) <= len(token_ids)
    assert offsets == sorted(offsets) and (
        not offsets or 0 <= offsets[0] <= offsets[-1] <= len(text)
    )
    special = {added.token_id for added in tokenizer.added_tokens.values() if added.special}
    pairs = zip(token_ids, offsets, [*offsets[1:], len(text)], strict=False)
    for place, (token, begin, after) in enumerate(pairs):
        if token in special and (skips or place < out) and begin == after:
            continue
        piece = (tokenizer.token_bytes(token) or b"").decode(errors="replace")
        if "\ufffd" in piece:
            continue
        is_there = any(
            text[begin:].startswith(each) or each.startswith(text[begin:])  # cut by a stop string
            for each in (piece, piece.lstrip(" "))
        )
        assert is_there, (piece, begin, text, told.tokens, offsets)


@pytest.mark.parametrize("has_echo", [False, True])
@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("stop", [[], ["or"], ["xyz", "w"], ["本"]], ids=str)
def test_tokens_begin_where_their_text_does(
    tokenizer: Tokenizer, has_echo: bool, skips: bool, stop: list[str]
) -> None:
    dice = random.Random(7)
    for prompt_text, by_ids, own in itertools.product(WORDS, (False, True), range(3)):
        prompt = [BOS, *tokenizer.encode(prompt_text, add_special_tokens=False)]
        echoed = tokenizer.decode(prompt, skip_special_tokens=False) if by_ids else prompt_text
        output = [
            *tokenizer.encode(dice.choice(WORDS), add_special_tokens=False),
            *([EOS] * (own == 1)),
            *tokenizer.encode(dice.choice(WORDS), add_special_tokens=False),
            EOS,
        ]
        params = {"stop": stop, "skip_special_tokens": skips}
        shown = echoed if has_echo else None
        parts = in_parts(output, dice)
        streamed = answer(tokenizer, prompt, shown, parts, Finished(0, "stop"), **params)
        whole = answer(tokenizer, prompt, shown, [output], Finished(0, "stop"), **params)
        assert (streamed.text, streamed.offsets) == (whole.text, whole.offsets)
        assert streamed.tokens == whole.tokens
        token_ids = [*prompt, *output] if has_echo else output
        check(whole, token_ids, tokenizer, skips=skips, out=len(prompt) if has_echo else 0)


def test_a_special_token_that_is_not_shown_takes_no_room(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello world.", add_special_tokens=False)
    assert prompt_offsets(tokenizer, "Hello world.", [BOS, *ids])[:2] == [0, 0]
    told = answer(tokenizer, [BOS], None, [[EOS, *ids]], Finished(0, "length"), max_tokens=90)
    assert told.offsets[:2] == [0, 0]
    shown = {"skip_special_tokens": False, "max_tokens": 90}
    told = answer(tokenizer, [BOS], None, [[EOS, *ids]], Finished(0, "length"), **shown)
    assert told.offsets[:2] == [0, 4] and told.text.startswith("</s>")


def test_parts_of_a_character_begin_where_it_does(tokenizer: Tokenizer) -> None:
    by_bytes = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)}
    parts = [by_bytes[bytes([byte])] for byte in "x日y".encode()]
    told = answer(tokenizer, [BOS], None, [[part] for part in parts], Finished(0, "length"))
    assert told.text.strip() == "x日y"
    first = len(told.text) - 3
    assert told.offsets == [first, *[first + 1] * 3, first + 2]


def test_tokens_after_half_a_character_begin_after_its_substitute(tokenizer: Tokenizer) -> None:
    by_bytes = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)}
    parts = [by_bytes[byte] for byte in (b"x", b"\xe6", b"\x97", b"y")]
    told = answer(tokenizer, [BOS], None, [[part] for part in parts], Finished(0, "length"))
    assert told.text[told.offsets[-1] :] == "y" and "\ufffd" in told.text


def test_what_a_stop_string_may_cut_off_waits(tokenizer: Tokenizer) -> None:
    """A client that has been given an offset finds it in the text that it is given."""
    ids = tokenizer.encode("Hello worlds of books", add_special_tokens=False)
    for stop in ("of", "books", "worldsX", " of b"):
        told = answer(
            tokenizer, [BOS], None, [[each] for each in ids], Finished(0, "length"), stop=[stop]
        )
        assert told.text.strip() == "Hello worlds of books".partition(stop)[0].strip()
        assert max(told.offsets) <= len(told.text)


def test_a_prompt_that_was_cut_is_the_end_of_its_text(tokenizer: Tokenizer) -> None:
    text = "a b c Hello world."
    ids = tokenizer.encode(text, add_special_tokens=False)[-3:]
    offsets = prompt_offsets(tokenizer, text, ids, may_be_cut=True)
    for begin, token in zip(offsets, ids, strict=True):
        piece = (tokenizer.token_bytes(token) or b"").decode(errors="replace")
        assert "\ufffd" in piece or text[begin:].startswith(piece)


def test_without_a_tokenizer_there_is_no_text() -> None:
    offsets = TextOffsets(None)
    for token in (3, 4):
        offsets.add_token(token)
    assert offsets.take(is_last=True) == [0, 0]


@pytest.mark.parametrize("rest", ["complete", "broken off"])
@pytest.mark.parametrize("stop", [[], ["zzzz"]], ids=str)
def test_a_character_that_the_prompt_has_begun(
    tokenizer: Tokenizer, rest: str, stop: list[str]
) -> None:
    by_bytes = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)}
    first, second, third = (by_bytes[bytes([byte])] for byte in "日".encode())
    prompt = [BOS, first, second]
    output = [*([third] * (rest == "complete")), *(by_bytes[b] for b in (b"x", b"y"))]
    end, params = Finished(0, "length"), {"stop": stop}
    for echoed in (None, "\ufffd"):
        whole = answer(tokenizer, prompt, echoed, [output], end, **params)
        streamed = answer(tokenizer, prompt, echoed, [[each] for each in output], end, **params)
        assert (streamed.text, streamed.offsets) == (whole.text, whole.offsets)
        assert [whole.text[begin] for begin in whole.offsets[-2:]] == ["x", "y"]
        num_before = len(echoed or "")
        assert ("日" in whole.text[num_before:]) is (rest == "complete")
