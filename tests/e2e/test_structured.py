"""Texts that follow a schema, an expression, a choice or a grammar, from the API to the tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from engine import (
    LLM,
    EngineArgs,
    LLMEngine,
    RequestError,
    RequestTypeError,
    SamplingParams,
    StructuredOutputsParams,
)
from engine.assets import BOX_MODEL
from engine.core.replay import replay
from engine.messages.requests import CompletionOutput

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "chess"]}, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "number", "exclusiveMinimum": -5, "maximum": 5},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
WHEN = {
    "type": "object",
    "properties": {
        "day": {"type": "string", "format": "date"},
        "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
        "at": {"const": "noon"},
    },
    "required": ["day", "code", "at"],
    "additionalProperties": False,
}
TAG = {"begin": "<f=a>", "schema": {"type": "object"}, "end": "</f>"}
EXPRESSION = r"[a-z]{3}-\d{2,4}(!|\?)?"
SUM = 'start: term ("+" term)*\nterm: /[0-9]{1,3}/ | "(" start ")"\n'
ASKED: dict[str, dict[str, Any]] = {
    "person": {"json": PERSON},
    "person, dense": {"json": json.dumps(PERSON), "disable_any_whitespace": True},
    "person, spaces": {"json": PERSON, "whitespace_pattern": "[ ]?"},
    "tree": {"json": TREE},
    "when": {"json": WHEN},
    "expression": {"regex": EXPRESSION},
    "choice": {"choice": ["yes", "no", "may (be) [a+b]?"]},
    "grammar": {"grammar": SUM},
    "object": {"json_object": True},
}


def is_right(name: str, text: str) -> bool:
    """By other judges than the one that made the masks."""
    asked = ASKED[name]
    if "json" in asked:
        schema = asked["json"]
        value = json.loads(text)
        schema = json.loads(schema) if isinstance(schema, str) else schema
        jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker())
        if asked.get("disable_any_whitespace"):
            assert text == json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    elif "regex" in asked:
        return re.fullmatch(asked["regex"], text) is not None
    elif "choice" in asked:
        return text in asked["choice"]
    elif "grammar" in asked:
        return re.fullmatch(r"[0-9+()]+", text) is not None and eval(numbers(text)) >= 0
    else:
        return isinstance(json.loads(text), dict)
    return True


def numbers(text: str) -> str:
    """Python reads no number with zeros before it."""
    return re.sub(r"\d+", lambda found: str(int(found[0])), text)


def params(name: str, seed: int | None = None, **options: Any) -> SamplingParams:
    options = {"max_tokens": 300, "temperature": 0.0 if seed is None else 1.0, **options}
    return SamplingParams(
        seed=seed, structured_outputs=StructuredOutputsParams(**ASKED[name]), **options
    )


def make(**options: Any) -> LLMEngine:
    defaults = {
        "num_threads": 1,
        "max_model_len": 400,
        "max_num_seqs": 16,
        "num_kv_blocks": 500,
        "log_level": "error",
    }
    return LLMEngine.from_engine_args(EngineArgs(model=str(BOX_MODEL), **{**defaults, **options}))


def answers(
    engine: LLMEngine, asked: list[SamplingParams], prompt: str = "A small example:"
) -> list[CompletionOutput]:
    for index, one in enumerate(asked):
        engine.add_request(str(index), prompt, one)
    last: dict[str, list[CompletionOutput]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            last[output.request_id] = output.outputs
    return [one for index in range(len(asked)) for one in last[str(index)]]


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    with make() as made:
        yield made


@pytest.mark.parametrize("name", ASKED)
def test_every_text_that_ends_is_right(engine: LLMEngine, name: str) -> None:
    found = answers(engine, [params(name), *(params(name, seed) for seed in range(15))])
    ended = [one for one in found if one.finish_reason == "stop"]
    assert {one.finish_reason for one in found} <= {"stop", "length"}
    assert len(ended) >= (6 if name == "tree" else 12), [one.text for one in found]
    for one in ended:
        assert is_right(name, one.text), one.text


@pytest.mark.parametrize("name", ["person", "expression", "grammar"])
def test_tokens_drawn_ahead_of_masks_are_those_of_masks(engine: LLMEngine, name: str) -> None:
    """With a top_k of the whole vocabulary a token is drawn among fewer, so that nothing is drawn
    ahead, and the law is the same."""
    ahead = answers(engine, [params(name, seed) for seed in range(12)])
    masked = answers(engine, [params(name, seed, top_k=32_000) for seed in range(12)])
    assert [one.token_ids for one in ahead] == [one.token_ids for one in masked]


def test_a_text_that_is_too_long_says_so(engine: LLMEngine) -> None:
    (one,) = answers(engine, [params("person", max_tokens=5)])
    assert (one.finish_reason, len(one.token_ids)) == ("length", 5)


def everything() -> list[SamplingParams]:
    mixed = [params(name, seed, max_tokens=150) for seed, name in enumerate(ASKED)]
    plain = [SamplingParams(temperature=1.0, seed=seed, max_tokens=30) for seed in range(3)]
    return [
        *mixed,
        *plain,
        params("person", 7, max_tokens=150, repetition_penalty=1.2, top_k=30, logprobs=1),
    ]


MODES: dict[str, dict[str, Any]] = {
    "one step at a time": {"async_scheduling": False},
    "two steps in flight": {"async_scheduling": True},
    "chunks": {"max_num_batched_tokens": 16, "max_num_seqs": 5},
    "preempted": {"num_kv_blocks": 26, "block_size": 8, "enable_prefix_caching": False},
    "one by one": {"max_num_seqs": 1},
    "drafts": {
        "speculative_config": {
            "adaptive": False,  # what a step takes is no matter here
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 3,
        }
    },
    "suffix drafts": {"speculative_config": {"method": "suffix", "adaptive": False}},
}
EXACT = {"dtype": "float32", "max_model_len": 180}


@pytest.fixture(scope="module")
def told() -> list[tuple[str, list[int]]]:
    with make(**EXACT) as engine:
        return [(one.text, one.token_ids) for one in answers(engine, everything())]


@pytest.mark.parametrize("mode", MODES)
def test_the_same_in_every_way(mode: str, told: list[tuple[str, list[int]]]) -> None:
    with make(**EXACT, **MODES[mode]) as engine:
        found = answers(engine, everything())
        assert [(one.text, one.token_ids) for one in found] == told
        if mode == "preempted":
            assert engine.stats().num_preemptions > 0
        if "drafts" in mode:
            assert engine.stats().counters["drafts.num_accepted_tokens"] > 0


def test_what_a_trigger_opens_follows_its_schema(engine: LLMEngine) -> None:
    """A small model calls functions of one number all the time, once it may not do otherwise."""
    tag = {"begin": "(", "schema": {"type": "integer"}, "end": ")"}
    form = StructuredOutputsParams(structural_tag={"structures": [tag], "triggers": ["("]})
    asked = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=60, structured_outputs=form)
        for seed in range(16)
    ]
    opened = 0
    for out in answers(engine, asked, "def f(x):\n    return g"):
        whole, *rest = re.split(r"\(-?(?:0|[1-9][0-9]*)\)", out.text)
        opened += len(rest)
        for piece in (whole, *rest[:-1]):
            assert "(" not in piece, out.text
        last = rest[-1] if rest else whole
        assert re.fullmatch(r"[^(]*(\(-?[0-9]*)?", last), out.text
    assert opened > 5


def test_several_answers_of_one_request(engine: LLMEngine) -> None:
    found = answers(engine, [params("expression", 5, n=4)])
    assert len({one.text for one in found}) > 1
    assert all(is_right("expression", one.text) for one in found)


def test_a_core_in_a_process_of_its_own() -> None:
    with make(**EXACT) as here:
        own = [one.text for one in answers(here, everything()[:4])]
    llm = LLM(
        str(BOX_MODEL),
        **EXACT,
        num_threads=1,
        num_kv_blocks=500,
        log_level="error",
        multiprocess=True,
    )
    with llm:
        found = llm.generate(["A small example:"] * 4, everything()[:4])
        assert [one.outputs[0].text for one in found] == own


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a keyword that nobody enforces": (
        {"json": {"type": "integer", "divisibleBy": 3}},
        "divisibleBy",
    ),
    "a type that is none": ({"json": {"type": "strin"}}, "strin"),
    "no end": ({"regex": "(ab"}, "unclosed group"),
    "look-around": ({"regex": "(?=a)b"}, "look-around"),
    "no rule": ({"grammar": "start: missing"}, "missing"),
    "no grammar at all": ({"grammar": "&&&"}, "grammar"),
    "too large": (
        {"json": {"type": "object", "properties": {f"p{i}": {} for i in range(40_000)}}},
        "",
    ),
    "cannot be met": ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, ""),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_grammar_fails_its_request_alone(engine: LLMEngine, name: str) -> None:
    fields, says = WRONG[name]
    plain = SamplingParams(temperature=0, max_tokens=12)
    (alone,) = answers(engine, [plain])
    wrong = SamplingParams(structured_outputs=StructuredOutputsParams(**fields), max_tokens=12)
    bad, good, right = answers(engine, [wrong, plain, params("choice", 1)])
    assert bad.finish_reason == "error" and bad.error is not None
    assert "grammar" in bad.error and says in bad.error
    assert good.token_ids == alone.token_ids
    assert is_right("choice", right.text)


def test_a_step_log_is_replayed(tmp_path: Path) -> None:
    log = tmp_path / "steps.log"
    wrong = StructuredOutputsParams(**WRONG["no end"][0])
    with make(step_log=str(log), **EXACT, **MODES["preempted"]) as engine:
        answers(engine, [*everything(), SamplingParams(structured_outputs=wrong)])
    assert replay(log).difference is None


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "none of them"),
    "two": ({"regex": "a", "choice": ["a"]}, "regex and choice"),
    "no schema": ({"json": "[1]"}, "JSON schema"),
    "no JSON": ({"json": "{'type': 1}"}, "not JSON"),
    "no value of JSON": ({"json": {"enum": {1, 2}}}, "not JSON"),
    "no choice": ({"choice": []}, "at least one"),
    "an empty choice": ({"choice": ["a", ""]}, "empty text"),
    "an empty expression": ({"regex": ""}, "regex"),
    "a long expression": ({"regex": "[a-z]?" * 2000}, "12000 characters, the limit is 8192"),
    "a long text": ({"choice": ["a" * 5000]}, "5000 characters, the limit is 4096"),
    "a tag of nothing": ({"structural_tag": "{}"}, "must have structures and triggers, e.g. {"),
    "a newer tag": ({"structural_tag": {"format": {}}}, "use structures and triggers"),
    "a tag without a trigger": (
        {"structural_tag": {"structures": [TAG], "triggers": ["[f"]}},
        "is '<f=a>', must start with one of the triggers: '[f'",
    ),
    "half a tag": (
        {"structural_tag": {"structures": [{"begin": "<f"}], "triggers": ["<f"]}},
        "has begin, must have begin, schema and end",
    ),
    "an option of JSON": ({"regex": "a", "disable_any_whitespace": True}, "disable_any_whitespace"),
    "two of whitespace": (
        {"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "},
        "leave one",
    ),
    "a wrong type": ({"choice": "yes"}, "choice"),
    "a wrong entry": ({"choice": [1]}, "choice"),
    "a wrong option": ({"json": {}, "disable_additional_properties": 1}, "must be a bool"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_asked_is_refused_at_once(name: str) -> None:
    fields, says = REFUSED[name]
    with pytest.raises(RequestError, match=re.escape(says)):
        StructuredOutputsParams(**fields)


def test_options_that_do_not_go_together() -> None:
    form = StructuredOutputsParams(regex="a")
    with pytest.raises(RequestError, match="ignore_eos"):
        SamplingParams(structured_outputs=form, ignore_eos=True)
    with pytest.raises(RequestTypeError, match="structured_outputs"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    with make(skip_tokenizer_init=True) as engine, pytest.raises(RequestError, match="tokenizer"):
        engine.add_request("0", {"prompt_token_ids": [5, 6]}, params("choice"))


def test_a_schema_without_an_end_is_refused_before_anything_runs(engine: LLMEngine) -> None:
    kind: dict[str, Any] = {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}
    form = StructuredOutputsParams(json=kind)
    with pytest.raises(RequestError, match="json of structured_outputs has no finite value"):
        engine.add_request("0", "A small example:", SamplingParams(structured_outputs=form))
    assert not engine.has_unfinished_requests()
    optional = {
        "type": "object",
        "properties": {"kind": {"$ref": "#/$defs/kind"}, "n": {"enum": [1, 2]}},
        "additionalProperties": False,
        "$defs": {"kind": {**kind, "properties": {"x": {"$ref": "#/$defs/kind"}}}},
    }
    form = StructuredOutputsParams(json=optional)
    for seed in range(4):
        asked = SamplingParams(seed=seed, max_tokens=60, structured_outputs=form)
        (found,) = answers(engine, [asked])
        assert found.finish_reason == "stop" and "kind" not in json.loads(found.text)


def test_whitespace_is_what_its_pattern_says(engine: LLMEngine) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "maximum": 9, "minimum": -9}, "on": {"enum": [1]}},
        "required": ["n", "on"],
        "additionalProperties": False,
    }
    for pattern in ("[ ]{1,2}", "\n", ""):
        form = StructuredOutputsParams(json=schema, whitespace_pattern=pattern)
        between = f"(?:{pattern})"
        tokens = ["{", '"n"', ":", "-?[0-9]", ",", '"on"', ":", "1", "}"]
        whole = re.compile(between.join(tokens))
        for seed in range(3):
            asked = SamplingParams(seed=seed, max_tokens=60, structured_outputs=form)
            (found,) = answers(engine, [asked])
            assert found.finish_reason == "stop" and whole.fullmatch(found.text), found.text
