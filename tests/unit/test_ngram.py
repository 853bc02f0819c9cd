"""Drafts from a request's own text, and the options that ask for them."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace

import pytest

from engine import EngineArgs
from engine.config.speculative import SpeculativeConfig
from engine.core.build import features_of
from engine.errors import ConfigError
from engine.spec.ngram import NgramProposer

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


class Text(SimpleNamespace):
    """What a proposer sees of a request."""

    def __init__(self, tokens, arrival: int = 0) -> None:
        super().__init__(tokens=array("i", tokens), arrival=arrival)


def looked_up(tokens: list[int], min_size: int, max_size: int, num_tokens: int) -> list[int]:
    """The definition: the longest suffix found before, at its latest place, and what follows."""
    for size in range(min(max_size, len(tokens) - 1), min_size - 1, -1):
        suffix = tokens[-size:]
        for behind in range(len(tokens) - 1, size - 1, -1):
            if tokens[behind - size : behind] == suffix:
                said = list(tokens)
                for place in range(num_tokens):
                    said.append(said[behind + place])
                return said[len(tokens) :]
    return []


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 9, 1, 2, 3], [9, 1, 2, 3]),
        ([5, 1, 2, 7, 1, 2, 8, 1, 2], [8, 1, 2, 8]),  # the latest of two places
        ([4, 1, 2, 7, 1, 2, 8, 4, 1, 2], [7, 1, 2, 8]),  # the longest match before the latest
        ([6, 6, 6], [6, 6, 6, 6]),  # a loop of one goes on
        ([1, 2, 1, 2, 1], [2, 1, 2, 1]),
        ([1, 2, 3, 4], []),
        ([1], []),
    ],
)
def test_what_followed_the_last_tokens_is_guessed(tokens, expected):
    assert list(NgramProposer(1, 3).propose(Text(tokens), 4)) == expected


def test_a_match_shorter_than_the_least_is_none():
    assert not NgramProposer(2, 3).propose(Text([1, 5, 2, 5]), 4)
    assert NgramProposer(1, 3).propose(Text([1, 5, 2, 5]), 2) == [2, 5]


def test_guesses_are_what_the_definition_says_however_the_text_comes(seed):
    dice = random.Random(seed)
    for arrival in range(300):
        smallest = dice.randint(1, 4)
        largest = dice.randint(smallest, 7)
        proposer = NgramProposer(smallest, largest)
        vocab = dice.choice([2, 3, 10, 100_000])
        text = Text(dice.choices(range(vocab), k=dice.choice([1, 2, 5, 30, 200])), arrival)
        for _ in range(6):
            num = dice.randint(1, 6)
            found = list(proposer.propose(text, num))
            assert found == looked_up(text.tokens.tolist(), smallest, largest, num)
            more = dice.choice([found[: dice.randint(0, 6)], dice.choices(range(vocab), k=90), []])
            text.tokens.extend(more or [dice.randrange(vocab)])


def test_texts_do_not_mix_and_ended_ones_are_forgotten():
    proposer = NgramProposer(1, 2)
    one, other = Text([1, 2, 1], 0), Text([1, 3, 1], 1)
    assert proposer.propose(one, 1) == [2]
    assert proposer.propose(other, 1) == [3]
    proposer.release(one)
    proposer.release(one)  # never seen counts as forgotten
    assert proposer.propose(Text([7, 1], 0), 1) == []


def test_two_ngrams_of_one_code_are_told_apart():
    """With all codes equal every hit but a true one must be found out."""
    proposer = NgramProposer(2, 2, base=1 << 64)
    assert proposer.propose(Text([1, 5, 2, 5]), 2) == []
    assert proposer.propose(Text([1, 5, 2, 1, 5], 1), 2) == [2, 1]


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({}, (5, 5)),
        ({"prompt_lookup_max": 3}, (3, 3)),
        ({"prompt_lookup_min": 2}, (2, 2)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, (2, 4)),
        ({"prompt_lookup_min": None, "prompt_lookup_max": 4}, (4, 4)),
    ],
)
def test_a_size_that_was_not_given_is_as_the_other(given, sizes):
    asked = SpeculativeConfig.of({**NGRAM, **given})
    assert (asked.prompt_lookup_min, asked.prompt_lookup_max) == sizes


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, "speculative_config lacks 'method'; write one like"),
        ({"method": "ngram"}, "lacks 'num_speculative_tokens'"),
        ({**NGRAM, "method": "eagle"}, "method 'eagle' is not available; there are: ngram"),
        ({**NGRAM, "method": "[N-Gram]"}, "did you mean 'ngram'"),
        ({**NGRAM, "promt_lookup_max": 3}, "did you mean 'prompt_lookup_max'"),
        ({**NGRAM, "num_speculative_tokens": 0}, "num_speculative_tokens is 0"),
        ({**NGRAM, "num_speculative_tokens": "4"}, "num_speculative_tokens is '4'"),
        ({**NGRAM, "prompt_lookup_min": 0}, "prompt_lookup_min is 0"),
        ({**NGRAM, "prompt_lookup_max": 65}, "prompt_lookup_max is 65"),
        (
            {**NGRAM, "prompt_lookup_min": 6, "prompt_lookup_max": 5},
            r"prompt_lookup_min \(6\) is above prompt_lookup_max \(5\)",
        ),
    ],
)
def test_a_mistake_is_named_with_the_way_out(options, error):
    with pytest.raises(ConfigError, match=error):
        EngineArgs(speculative_config=options).create_config()


@pytest.mark.parametrize("wrong", ["ngram", ["ngram"], 4])
def test_what_is_no_table_of_options_is_refused(wrong):
    with pytest.raises(ConfigError, match="speculative_config"):
        EngineArgs(speculative_config=wrong).create_config()


def test_drafts_must_fit_into_a_step():
    wide = {"method": "ngram", "num_speculative_tokens": 16}
    with pytest.raises(ConfigError, match=r"num_speculative_tokens is 16.*needs 17 tokens"):
        EngineArgs(
            speculative_config=wide, max_num_batched_tokens=16, max_num_seqs=8
        ).create_config()
    args = EngineArgs(speculative_config=wide, max_num_batched_tokens=17, max_num_seqs=8)
    assert [member.name for member in features_of(args.create_config().scheduler)] == ["drafts"]


def test_nothing_asked_is_nothing_built():
    assert features_of(EngineArgs().create_config().scheduler) == []
