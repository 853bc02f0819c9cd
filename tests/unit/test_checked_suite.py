"""The part of the JSON-Schema-Test-Suite that we keep, by the checker alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.structured.checked.checker import Checker
from engine.structured.schemas import SchemaError

SUITE = Path(__file__).parents[1] / "structured" / "suite"
DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
}


@pytest.mark.parametrize("draft", DRAFTS)
def test_instances_pass_where_the_suite_says_that_they_are_valid(draft: str) -> None:
    lines = (SUITE / f"{draft}.jsonl").read_text(encoding="utf-8").splitlines()
    num_refused = 0
    for group in map(json.loads, lines):
        schema = group["schema"]
        if isinstance(schema, dict):
            schema = {"$schema": DRAFTS[draft], **schema}
        try:
            checker = Checker(schema)
        except SchemaError as error:
            assert "another file" in str(error), group["description"]
            num_refused += 1
            continue
        for test in group["tests"]:
            state, text = checker.begin(), json.dumps(test["data"]).encode()
            pieces = (text[at : at + 2] for at in range(0, len(text), 2))
            found = all(map(state.feed, pieces)) and state.may_end
            if group["keyword"] in ("format", "vocabulary"):
                assert not found or test["valid"]  # formats hold, and so do all keywords
                continue
            note = f"{group['keyword']}, {group['description']}, {test['description']}"
            assert found == test["valid"], note
    assert num_refused < len(lines) / 4
