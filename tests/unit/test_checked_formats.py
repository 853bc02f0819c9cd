"""Formats as the checker reads them: never looser than the judge of other programs."""

from __future__ import annotations

import os
import random

import jsonschema_rs
import pytest

from engine.structured.checked.checker import Checker
from engine.structured.checked.formats import FORMATS
from engine.structured.schemas import SchemaError

SEED = int(os.environ.get("METRONOME_SEED", "36"))
MORE = "09aZz-.:/@#?T+ ~{}[]%^$*(,é_"
SLOW = "^(a|aa)+$"
RIGHT = {
    "date": ["2020-02-29", "2021-12-31"],
    "time": ["12:34:56Z", "23:59:60Z", "01:02:03.5+05:30"],
    "date-time": ["2020-02-29T12:34:56Z", "1998-12-31T23:59:60Z"],
    "duration": ["P1Y2M3DT4H5M6S", "P3W", "PT1H"],
    "email": ["a.b@c.d", '"x y"@e.f', "a@[127.0.0.1]"],
    "idn-email": ["실례@실례.테스트"],
    "hostname": ["a-b.c", "xn--4gbwdl.xn--wgbh1c"],
    "idn-hostname": ["실례.테스트"],
    "ipv4": ["127.0.0.1"],
    "ipv6": ["::1", "fe80::a:b", "::ffff:1.2.3.4"],
    "uri": ["http://a.b/c?d#e", "urn:x:y", "mailto:a@b", "ftp://u:p@h:21/x", "http://[::1]/"],
    "uri-reference": ["/a/b", "a?b", "#f", "//h/x"],
    "iri": ["http://ä.b/c"],
    "iri-reference": ["/ä"],
    "uri-template": ["http://a/{b}", "{+x,y*}"],
    "uuid": ["2eb8aa08-aa98-11ea-b4aa-73b441d16380"],
    "regex": ["^a$", "[a-z]+", "(?<n>a){2,3}", r"\d|\]"],
    "json-pointer": ["/a/b~0~1", ""],
    "relative-json-pointer": ["0#", "1/a"],
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_passes_is_right_for_others(name: str) -> None:
    judge = jsonschema_rs.validator_for({"format": name}, validate_formats=True)
    assert all(map(FORMATS[name], RIGHT[name]))
    dice = random.Random(SEED)
    for _ in range(1500):
        text = changed(dice, dice.choice(RIGHT[name]))
        assert not FORMATS[name](text) or judge.is_valid(text), f"METRONOME_SEED: {SEED}, {text!r}"


def changed(dice: random.Random, text: str) -> str:
    """The text with a few characters more, less or others."""
    chars = [*text]
    for _ in range(dice.randrange(3)):
        at = dice.randrange(len(chars) + 1)
        chars[at : at + dice.randrange(2)] = [dice.choice(MORE)] * dice.randrange(2)
    return "".join(chars)


def test_a_pattern_that_takes_too_long_is_an_error_that_names_it() -> None:
    state = Checker({"type": "string", "pattern": SLOW}).begin()
    with pytest.raises(SchemaError, match="takes too long"):
        state.feed(b'"' + b"a" * 60 + b'!"')
