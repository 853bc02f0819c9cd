"""Drafts from what followed the longest end of a text, in it and in those that have ended."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace

import numpy as np
import pytest

from engine import EngineArgs
from engine.config.speculative import SpeculativeConfig
from engine.core.build import features_of
from engine.errors import ConfigError
from engine.spec import context_tree
from engine.spec.suffix import SuffixProposer

SUFFIX = {"method": "suffix", "num_speculative_tokens": 4}


class Text(SimpleNamespace):
    """What a proposer sees of a request."""

    def __init__(self, prompt, output=(), arrival: int = 0, salt: str | None = None) -> None:
        super().__init__(
            tokens=array("i", [*prompt, *output]),
            arrival=arrival,
            num_prompt=len(prompt),
            cache_salt=salt,
        )


def make(depth=4, requests=10, factor=1.0, least=0.0, **options) -> SuffixProposer:
    return SuffixProposer(depth, requests, factor, least, **options)


def drafts_by_counting(texts, end, num_tokens, depth, factor, least) -> tuple[list[int], float]:
    """The definition. ``texts``: tokens, and which of them may follow, as a range."""
    known, drafts, chance, expected = list(end), [], 1.0, 0.0
    while len(drafts) < num_tokens:
        found: dict[int, list[int]] = {}
        for size in range(min(depth, len(known)), 0, -1):
            place = 0
            for tokens, may_follow in texts:
                for behind in may_follow:
                    place += 1
                    if behind >= size and tokens[behind - size : behind] == known[-size:]:
                        found.setdefault(tokens[behind], []).append(place)
            if found:
                break
        else:
            break
        if not drafts:
            num_tokens = min(num_tokens, max(1, int(factor * size + 1e-6)))
        token = max(found, key=lambda each: (len(found[each]), found[each][-1]))
        chance *= len(found[token]) / sum(map(len, found.values()))
        if chance < least:
            break
        expected += chance
        drafts.append(token)
        known.append(token)
    return drafts, expected


def repeating(dice: random.Random, num_tokens: int, vocab: int) -> list[int]:
    """Chance, loops and copies of what was said."""
    said = [dice.randrange(vocab)]
    while len(said) < num_tokens:
        start = dice.randrange(len(said))
        said += dice.choice([[dice.randrange(vocab)], said[start : start + 20], [said[-1]] * 5])
    return said[:num_tokens]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 9, 1, 2, 3], [9, 1, 2]),  # as many as were the same
        ([5, 1, 2, 7, 1, 2, 7, 1, 2, 8, 1, 2], [7, 1]),  # the most frequent
        ([5, 1, 2, 7, 1, 2, 8, 1, 2], [8, 1]),  # of those as frequent the latest
        ([4, 1, 2, 7, 1, 2, 8, 1, 2, 8, 4, 1, 2], [7, 1, 2]),  # the longest before the frequent
        ([6, 6, 6, 6, 6], [6, 6, 6, 6]),  # a loop goes on behind the end of the text
        ([1, 2, 1, 2, 1], [2, 1, 2]),
        ([1, 2, 3, 4], []),
        ([1], []),
    ],
)
def test_what_mostly_followed_the_last_tokens_is_guessed(tokens, expected):
    assert make().propose(Text(tokens), 6) == expected


@pytest.mark.parametrize(
    ("factor", "expected"), [(0.0, [9]), (0.5, [9]), (0.7, [9, 1]), (2.0, [9, 1, 2, 3, 9, 1])]
)
def test_a_longer_match_is_followed_further(factor, expected):
    assert make(factor=factor).propose(Text([1, 2, 3, 9, 1, 2, 3]), 6) == expected
    assert make(factor=factor).propose(Text([1, 2, 3, 9, 1, 2, 3]), 1) == [9]


@pytest.mark.parametrize(
    ("least", "expected"), [(0.0, [3, 4, 5]), (0.3, [3, 4, 5]), (0.5, [3, 4]), (0.7, []), (1.0, [])]
)
def test_an_improbable_draft_is_none(least, expected):
    """3 followed in two of three places, 4 then always, 5 in one of two."""
    tokens = [1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 5, 1, 2]
    assert make(2, factor=1.5, least=least).propose(Text(tokens), 3) == expected


def test_guesses_are_what_counting_finds_however_the_text_comes(seed):
    dice = random.Random(seed)
    for arrival in range(120):
        depth, factor = dice.choice([1, 2, 5, 24]), dice.choice([0.0, 0.29, 1.0, 1.5, 4.0])
        least = dice.choice([0.0, 0.1, 0.5, 1.0])
        proposer = make(depth, dice.choice([0, 5]), factor, least)
        vocab = dice.choice([1, 2, 3, 10, 100_000])
        text = Text(repeating(dice, dice.choice([1, 2, 5, 30, 300]), vocab), arrival=arrival)
        for _ in range(5):
            num = dice.randint(1, 6)
            found = list(proposer.propose(text, num))
            said = text.tokens.tolist()
            known = [(said, range(1, len(said)))]
            assert found == drafts_by_counting(known, said, num, depth, factor, least)[0]
            more = dice.choice([found[: dice.randint(0, 6)], repeating(dice, 40, vocab), []])
            text.tokens.extend(more or [dice.randrange(vocab)])


def test_outputs_that_ended_are_counted_until_they_are_forgotten(seed):
    """Several salts, each with the last outputs of all that it gave; the better tree drafts."""
    dice = random.Random(seed)
    for _ in range(12):
        depth, factor, least = dice.choice([1, 4, 24]), dice.choice([0.5, 2.0]), 0.1
        most, vocab = dice.choice([1, 2, 5]), dice.choice([2, 4, 30])
        proposer = make(depth, most, factor, least, num_shared=512)
        ended: list[tuple[str | None, list[int], range]] = []
        for arrival in range(25):
            salt = dice.choice([None, "", "a"])
            prompt, output = (
                repeating(dice, dice.randint(low, 60), vocab) for low in (1, 0 if arrival else 1)
            )
            text = Text(prompt, output, arrival, salt)
            for _ in range(8):  # what waits is entered meanwhile
                found = list(proposer.propose(text, 5))
            said = text.tokens.tolist()
            own = [(said, range(1, len(said)))]
            shared = [(tokens, may) for other, tokens, may in ended[-most:] if other == salt]
            guesses = [
                drafts_by_counting(known, said, 5, depth, factor, least) for known in (own, shared)
            ]
            best = guesses[1] if guesses[1][1] > guesses[0][1] else guesses[0]
            assert found == best[0]
            proposer.release(text)
            if output:
                cut = max(0, len(prompt) - depth)
                ended.append((salt, said[cut:], range(max(1, len(prompt) - cut), len(said) - cut)))


def test_a_window_over_a_ring_is_all_that_is_known(seed):
    """Entered and forgotten in pieces of any size, round and round."""
    dice = random.Random(seed)
    for _ in range(4):
        depth, length, vocab = dice.choice([1, 3, 24]), 256, dice.choice([2, 5, 50])
        tree, said = context_tree.make(length, depth), repeating(dice, 1500, vocab)
        root, oldest, newest = context_tree.change_roots(tree, 0), 0, 0
        free, limits = int(tree[context_tree.LEFT]), np.array([2.0, 0.0])
        while newest < len(said):
            end = min(len(said), newest + dice.randint(1, 60))
            while True:
                is_kept = end - oldest <= length - depth  # what stands in the ring
                if is_kept:
                    for index in range(newest, end):
                        context_tree.text_of(tree)[index % length] = said[index]
                    newest = context_tree.enter(tree, (root, 0, newest, end), True)
                if newest == end:
                    break
                first, oldest = oldest, min(newest, oldest + dice.randint(1, 100))
                context_tree.enter(tree, (root, 0, first, oldest), False)
            query = np.array([*said[max(0, newest - depth) : newest], *[0] * 6], dtype=np.int32)
            known = len(query) - 6
            num = context_tree.draft(tree, tree, (root, 0), query, known, 6, limits)
            texts = [(said[:newest], range(max(1, oldest), newest))]
            wanted = drafts_by_counting(texts, said[:newest], 6, depth, 2.0, 0.0)[0]
            assert query[known : known + num].tolist() == wanted
        context_tree.enter(tree, (root, 0, oldest, newest), False)
        assert tree[context_tree.LEFT] == free, "all that was taken is free again"


def said_after(proposer: SuffixProposer, text: Text, num_calls: int = 9) -> list[int]:
    """Drafts, when what waits has been entered."""
    for _ in range(num_calls):
        drafts = list(proposer.propose(text, 4))
    return drafts


def test_an_output_is_remembered_with_the_end_of_its_prompt():
    proposer = make()
    proposer.release(Text([1, 2, 3, 4, 5, 6], [7, 8, 9], arrival=1))
    assert said_after(proposer, Text([5, 6])) == [7, 8]
    assert said_after(proposer, Text([7, 8], arrival=2)) == [9]
    assert said_after(proposer, Text([1, 2], arrival=3)) == [], "a prompt is not what was said"


def test_a_request_that_said_nothing_leaves_nothing():
    proposer = make(requests=1)
    proposer.release(Text([1, 2], [3], arrival=1))
    proposer.release(Text([1, 2, 5, 1, 2], [], arrival=2))
    assert said_after(proposer, Text([1, 2], arrival=3)) == [3]


def test_the_text_of_a_running_request_is_its_own():
    proposer = make()
    one, other = Text([1, 2, 1], arrival=1), Text([1, 3, 1], arrival=2)
    assert proposer.propose(one, 1) == [2]
    assert proposer.propose(other, 1) == [3]
    proposer.release(one)
    proposer.release(one)  # never seen counts as forgotten
    assert proposer.propose(Text([7, 1], arrival=1), 1) == []


def test_the_oldest_of_too_many_are_forgotten():
    proposer = make(requests=2)
    for arrival in range(1, 5):
        proposer.release(Text([10 * arrival], [arrival], arrival))
        assert said_after(proposer, Text([10 * arrival], arrival=9)) == [arrival]
    found = [said_after(proposer, Text([10 * each], arrival=10 + each)) for each in range(1, 5)]
    assert found == [[], [], [3], [4]]
    proposer = make(requests=0)
    proposer.release(Text([1], [2], 1))
    assert said_after(proposer, Text([1], arrival=2)) == []


def test_more_than_there_is_room_for_makes_the_oldest_forgotten():
    proposer = make(requests=10_000, num_shared=512)
    for arrival in range(40):
        proposer.release(Text([5000 + arrival], range(100 * arrival, 100 * arrival + 100), arrival))
    assert said_after(proposer, Text([3970, 3971], arrival=99), 150) == [3972, 3973]
    assert said_after(proposer, Text([70, 71], arrival=100)) == []
    proposer.release(Text([1], range(100_000, 103_000), 101))  # longer than the whole
    assert said_after(proposer, Text([102_990, 102_991], arrival=300), 150) == [102_992, 102_993]
    assert said_after(proposer, Text([100_010, 100_011], arrival=301)) == []


def test_what_was_said_with_a_salt_stays_there():
    proposer = make()
    for arrival, salt in enumerate([None, "a", "b"]):
        proposer.release(Text([1, 2], [10 + arrival, 20 + arrival], arrival, salt))
    for arrival, salt in enumerate([None, "a", "b"]):
        found = said_after(proposer, Text([1, 2], arrival=5 + arrival, salt=salt))
        assert found == [10 + arrival, 20 + arrival]
    for salt in ("c", ""):
        assert said_after(proposer, Text([1, 2], arrival=9, salt=salt)) == []
        proposer.release(Text([1, 2], arrival=9, salt=salt))


def test_salts_come_and_go():
    """Each has a root, which is free again when its last text is forgotten."""
    proposer = make(requests=3, num_shared=512)
    for arrival in range(3000):
        salt = f"salt {arrival}"
        proposer.release(Text([1, 2], [arrival], arrival, salt))
        if arrival % 100 == 0:
            assert said_after(proposer, Text([1, 2], arrival=9999, salt=salt)) == [arrival]
            assert (
                said_after(proposer, Text([1, 2], arrival=9999, salt=f"salt {arrival - 5}")) == []
            )


def test_the_same_calls_give_the_same_drafts(seed):
    def told() -> list[list[int]]:
        dice, proposer, found = random.Random(seed), make(requests=4, num_shared=512), []
        for arrival in range(30):
            text = Text(repeating(dice, 20, 4), arrival=arrival, salt=dice.choice([None, "a"]))
            for _ in range(6):
                found.append(list(proposer.propose(text, 5)))
                text.tokens.extend(repeating(dice, 7, 4))
            proposer.release(text)
        return found

    assert told() == told()


def asked(**options) -> SpeculativeConfig:
    return SpeculativeConfig.of({"method": "suffix", **options})


def test_the_number_of_drafts_is_the_depth_if_not_given():
    assert asked().num_speculative_tokens == asked().suffix_decoding_max_tree_depth == 24
    assert asked(suffix_decoding_max_tree_depth=7).num_speculative_tokens == 7
    assert asked(num_speculative_tokens=None).num_speculative_tokens == 24
    given = asked(num_speculative_tokens=30, suffix_decoding_max_tree_depth=7)
    assert given.num_speculative_tokens == 30
    assert asked(suffix_decoding_max_spec_factor=2).suffix_decoding_max_spec_factor == 2


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"suffix_decoding_max_tree_depth": 0}, r"max_tree_depth is 0, must be in 1\.\.256"),
        ({"suffix_decoding_max_cached_requests": -1}, "max_cached_requests is -1, must be in 0"),
        ({"suffix_decoding_max_spec_factor": -0.5}, "max_spec_factor is -0.5, must be in 0"),
        ({"suffix_decoding_min_token_prob": 1.1}, "min_token_prob is 1.1, must be in 0.0..1.0"),
        ({"suffix_decoding_tree_depth": 3}, "did you mean 'suffix_decoding_max_tree_depth'"),
        (
            {"prompt_lookup_max": 3},
            "prompt_lookup_max is 3, which is for method 'ngram' and not 'suffix'; leave it out",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 3, "suffix_decoding_min_token_prob": 0.2},
            "suffix_decoding_min_token_prob is 0.2, which is for method 'suffix' and not 'ngram'",
        ),
        *(
            ({"method": method}, f"method '{method}' is not available; there are: ngram, suffix")
            for method in ("eagle", "eagle3", "medusa", "mlp_speculator", "mtp")
        ),
    ],
)
def test_a_mistake_is_named_with_the_way_out(options, error):
    with pytest.raises(ConfigError, match=error):
        EngineArgs(speculative_config={"method": "suffix", **options}).create_config()


def test_what_was_asked_for_is_built():
    config = EngineArgs(speculative_config=SUFFIX).create_config().scheduler
    (drafts,) = features_of(config)
    assert (drafts.name, drafts.num_speculative_tokens) == ("drafts", 4)
    none_other = {**SUFFIX, "prompt_lookup_max": None}
    assert features_of(EngineArgs(speculative_config=none_other).create_config().scheduler)
