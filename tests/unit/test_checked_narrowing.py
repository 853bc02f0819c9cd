"""Which tokens a checker takes out of a mask."""

from __future__ import annotations

import numpy as np
import pytest

from engine.structured.checked.checker import Checker
from engine.structured.checked.narrowing import Narrowing
from engine.structured.checked.vocabulary import Vocabulary

TOKENS = [
    b'"',
    b"1",
    b"99",
    b"1e99999",
    b'", "a": ',
    b'ud800"',
    b'\\udc00"',
    b'"\\ud800": 1',
    b'"a"',
]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        (b'{"a": 1e9999', [b"1", b"99", b"1e99999"]),
        (b'{"a": 1E-999', [b"99", b"1e99999"]),
        (b'{"a": ', [b"1e99999"]),
        (b'{"a": "\\ud800', [b'"', b'", "a": ']),
        (b'{"a": "\\', [b'ud800"']),
        (b'{"a": "b', [b'", "a": ', b'\\udc00"']),
        (b'{"a": 1, ', [b'"a"', b'"\\ud800": 1']),
    ],
)
def test_names_and_what_no_program_reads_are_looked_at(text: bytes, tokens: list[bytes]) -> None:
    """Where any JSON may stand, few tokens are looked at: all that the checker refuses and a
    grammar may let pass are among them."""
    state = Checker(True).begin()
    assert state.feed(text)
    mask = np.array([(1 << len(TOKENS)) - 1], np.int32)
    forbidden = Narrowing(Vocabulary(TOKENS)).forbidden(mask, [], state)
    found = {TOKENS[token] for token in forbidden}
    assert found >= set(tokens)
    assert not [each for each in found if state.copy().feed(each)]
