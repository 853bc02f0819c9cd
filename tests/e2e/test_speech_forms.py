"""Tools that must be called, in the forms of all families: what the grammar lets a model write is
read as a call that follows its schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from engine import LLM, SamplingParams
from engine.assets import BOX_MODEL
from engine.server.speech.families import FAMILIES, TOOL_FAMILIES
from engine.server.speech.forms import form_of_answer
from engine.server.speech.tools import tools_of
from engine.server.speech.turns import ChatFormat

PARAMETERS = {
    "type": "object",
    "properties": {
        "unit": {"$ref": "#/$defs/unit"},
        "days": {"type": "integer", "minimum": 1, "maximum": 99},
        "place": {"$ref": "#/$defs/place"},
        "mode": {"const": "fast"},
        "level": {"enum": [1, 2]},
        "same": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    "$defs": {
        "unit": {"enum": ["C", "F"]},
        "place": {
            "type": "object",
            "properties": {"x": {"enum": [1, 2]}, "u": {"$ref": "#/$defs/unit"}},
            "required": ["x", "u"],
            "additionalProperties": False,
        },
    },
    "required": ["unit", "days", "place", "mode", "level", "same"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    made = LLM(BOX_MODEL, max_model_len=1024, num_kv_blocks=200, num_threads=1)
    yield made
    made.shutdown()


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize("name", TOOL_FAMILIES)
def test_a_forced_call_follows_its_schema(llm: LLM, name: str, is_strict: bool) -> None:
    family = next(each for each in FAMILIES if each.name == name)
    speech = ChatFormat(llm.get_tokenizer(), "".join(family.signs))
    assert speech.family is not None and speech.family.name == name
    function = {"name": "weather", "parameters": PARAMETERS, "strict": is_strict}
    tools = tools_of([{"type": "function", "function": function}], "required", False)
    assert tools is not None
    form = form_of_answer(speech, tools, None, "")
    params = SamplingParams(
        max_tokens=400, seed=1, skip_special_tokens=False, structured_outputs=form
    )
    (output,) = llm.generate(["def weather"], params)
    completion = output.outputs[0]
    assert completion.finish_reason == "stop", completion
    prompt: Any = {"prompt": "", "prompt_token_ids": output.prompt_token_ids}
    turn = speech.begin(prompt, tools=tools.read_as, skip_special=True)
    turn.read(completion)
    (call,) = turn.calls
    assert call.name == "weather" and not turn.content
    jsonschema.validate(json.loads(call.arguments), PARAMETERS)
