"""What goes wrong around grammars hurts one request, and says what it was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from e2e.test_structured import EXACT, answers, make, params
from llguidance import LLTokenizer
from support.forked_runs import run_forked
from support.patience import WAIT_SECONDS

from engine import RequestError, SamplingParams, StructuredOutputsParams
from engine.assets import BOX_MODEL
from engine.config.model import ModelConfig
from engine.core.replay import replay
from engine.messages.structured import grammar_of
from engine.sched.resource import Resource
from engine.structured import guidance
from engine.structured.guidance import GrammarError, GuidanceCompiler
from engine.text.tokenizer import load_tokenizer

TOO_LARGE = {"type": "object", "properties": {f"p{i}": {} for i in range(40_000)}}


def asked(**fields: Any) -> SamplingParams:
    form = StructuredOutputsParams(**fields)
    return SamplingParams(structured_outputs=form, max_tokens=12, temperature=0.0)


def test_a_grammar_that_is_too_large_is_replayed(tmp_path: Path) -> None:
    """In a process of its own: without limits the library overflows its stack."""
    log = tmp_path / "steps.log"
    with make(step_log=str(log), **EXACT) as engine:
        (one, _) = answers(engine, [asked(json=TOO_LARGE), params("choice")])
    assert one.finish_reason == "error"
    program = "import sys; from engine.core.replay import replay; print(replay(sys.argv[1]))"
    ran = subprocess.run([sys.executable, "-c", program, str(log)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-500:]
    assert "identical" in ran.stdout


LINKS = 15_000
CHAINS: dict[str, dict[str, Any]] = {
    "rules": {
        "grammar": "".join(f"r{i}: r{i + 1}\n" for i in range(LINKS))
        + f'r{LINKS}: "a"\nstart: r0\n'
    },
    "references": {
        "json": {
            "$defs": {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(LINKS)}
            | {f"d{LINKS}": {"type": "integer"}},
            "$ref": "#/$defs/d0",
        }
    },
}


def follow(log: Path, form: dict[str, Any]) -> None:
    """Print the answer to a choice next to a request with this form, and whether it replays."""
    request = params("choice")
    request.structured_outputs = StructuredOutputsParams(**form)
    with make(step_log=log, **EXACT) as engine:
        print(answers(engine, [request, params("choice")])[1].text)
    print(replay(log))


@pytest.mark.parametrize("name", ["rules", pytest.param("references", marks=pytest.mark.slow)])
def test_a_long_chain_does_not_end_the_engine(tmp_path: Path, name: str) -> None:
    """In a process of its own, which it may kill."""
    ran = run_forked(follow, tmp_path / "steps.log", CHAINS[name])
    assert ran.returncode == 0, ran.stderr[-500:]
    assert ran.stdout.startswith(("yes", "no", "may")) and "identical" in ran.stdout


def nested(depth: int) -> Any:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


UNREADABLE: dict[str, tuple[dict[str, Any], str]] = {
    "half a character in an expression": ({"regex": "a\ud800"}, "not a valid"),
    "half a character in a choice": ({"choice": ["a", "\udfff"]}, "not a valid"),
    "half a character in a grammar": ({"grammar": 'start: "\ud800"'}, "not a valid"),
    "half a character in a schema": ({"json": {"const": "\ud800"}}, "not a valid"),
    "half a character in the text of a schema": (
        {"json": '{"const":"\\ud800"}'},
        "not a valid character",
    ),
    "half a character for whitespace": (
        {"json": {}, "whitespace_pattern": "\ud800"},
        "not a valid",
    ),
    "no number": ({"json": {"const": float("nan")}}, "not JSON"),
    "nested too deeply": ({"json": nested(10_000)}, "not JSON"),
    "a schema that is true": ({"json": "true"}, "an object"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_no_core_could_read_is_refused_at_once(name: str) -> None:
    fields, says = UNREADABLE[name]
    with pytest.raises(RequestError, match=says):
        StructuredOutputsParams(**fields)


def test_a_form_that_was_changed_is_checked_again() -> None:
    wrong: dict[str, Any] = {"choice": None, "regex": "a", "json_object": 1}
    with make() as engine:
        for name, value in wrong.items():
            one = params("choice")
            assert one.structured_outputs is not None
            setattr(one.structured_outputs, name, value)
            with pytest.raises(RequestError, match="structured_outputs"):
                engine.add_request(name, "A small example:", one)
        assert not engine.has_unfinished_requests()


EOS = (2, 0)


def grammar(**fields: Any) -> str:
    return grammar_of(StructuredOutputsParams(**fields))


def tokenizer_of_the_box() -> Any:
    source = load_tokenizer(ModelConfig(model=str(BOX_MODEL))).backend.as_json()
    return LLTokenizer(source, n_vocab=4096, eos_token=list(EOS))


def test_a_tokenizer_that_could_not_be_read_is_read_again() -> None:
    reads = iter([OSError("the disk is away"), tokenizer_of_the_box()])

    def read(eos: tuple[int, ...]) -> Any:
        found = next(reads)
        if isinstance(found, OSError):
            raise found
        return found

    compiler, asked_for = GuidanceCompiler(read), grammar(choice=["yes"])
    with pytest.raises(GrammarError, match="the disk is away"):
        compiler.submit(asked_for, EOS).wait()
    assert compiler.submit(asked_for, EOS).wait().num_allowed([2]) == 0


def test_grammars_that_are_late_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What keeps the threads busy is not compiled again and again, and what all have given up
    waiting for is not compiled at all; the next who asks is served."""
    made, go_on = [], Event()
    real = guidance.sources_of

    def sources_of(form: Any, *rest: Any) -> list[str]:
        made.append(form.text)
        if form.kind == "regex":
            go_on.wait(WAIT_SECONDS)
        return real(form)

    monkeypatch.setattr(guidance, "sources_of", sources_of)
    tokenizer = tokenizer_of_the_box()
    compiler = GuidanceCompiler(lambda eos: tokenizer, max_seconds=0.05)
    slow = [grammar(regex=text) for text in ("a+", "b+")]
    quick = grammar(choice=["yes"])
    for _ in range(3):
        late = [compiler.submit(text, EOS) for text in (*slow, quick)]
        for one in late:
            with pytest.raises(GrammarError, match="compiling took longer"):
                while one.poll() is None:
                    pass
    go_on.set()
    compiler.max_seconds = 60.0
    late[-1].future.exception()  # its turn has come, and gone
    assert compiler.submit(quick, EOS).wait() is not None
    assert sorted(made[:2]) == ["a+", "b+"] and len(made) == 3


class OwnMasks(Resource):
    """A plug-in that says what may come next, of no grammar."""

    name = "own masks"
    needs = ("masks",)


def test_beside_masks_of_a_plug_in_a_grammar_is_refused(tmp_path: Path) -> None:
    """Or its text would follow no grammar, and its user would not know."""
    log = str(tmp_path / "steps.log")
    with make(resources=(OwnMasks,), step_log=log) as engine:
        engine.add_request("0", "A small example:", SamplingParams(max_tokens=5))
        with pytest.raises(RequestError, match="own masks"):
            engine.add_request("1", "A small example:", params("choice"))
        while engine.has_unfinished_requests():
            engine.step()
    assert replay(log).difference is None
