"""Tool calls over HTTP: a model that writes what the corpus has, read by all APIs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from speech.apis import APIS, asked_of
from speech.cases import CASES
from speech.corpus import EDIT, Case
from speech.families import TOOLS, markers_of, signs_of
from speech.playing import Read, events_in
from support.served import Served, forked
from tokenizers import Tokenizer

import engine
from engine.server.speech.json_text import object_in

BOX = Path(engine.__file__).parent / "assets" / "metronome-3m"
TESTS = Path(__file__).resolve().parents[1]
NUM_TOKENS = 4096  # of the vocabulary of the box
COMMON = (
    "--served-model-name", "m", "--load-format", "dummy", "--num-threads", "1",
    "--num-kv-blocks", "600", "--max-num-seqs", "8",
    "--logits-processors", "support.scripted.script",
)  # fmt: skip
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages",
         "ollama": "/api/chat"}  # fmt: skip
TITLES = ("two calls", "an unknown tool", "words before", "words after", "words around",
          "arguments: real control characters", "arguments: markers inside a string",
          "no end of a value", "tags in a text", "no opening tag",
          "the recipient first")  # fmt: skip


class Scripted(NamedTuple):
    """A server whose model writes what it is given."""

    family: str
    server: Served
    tokenizer: Tokenizer
    file: Path

    def write(self, text: str) -> int:
        """The answer to all requests from now on; returns its tokens."""
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        self.file.write_text(json.dumps(ids))
        return len(ids)

    def ask(self, name: str, **more: Any) -> bytes:
        return self.server.ask(PATHS[name], {**asked_of(name, stream=False), **more}).body


def make_model(root: Path, family: str) -> None:
    """The model in the box, its weights random, with the markers of this family."""
    tokenizer = json.loads((BOX / "tokenizer.json").read_text())
    known = {token["content"] for token in tokenizer["added_tokens"]}
    for marker in markers_of(family):
        if marker not in known:
            token = {
                "id": NUM_TOKENS + len(known),
                "content": marker,
                "special": family == "gpt-oss",
            }
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            tokenizer["added_tokens"].append({**token, **flags})
            known.add(marker)
    (root / "tokenizer.json").write_text(json.dumps(tokenizer))
    told = json.loads((BOX / "tokenizer_config.json").read_text())
    told["chat_template"] = (
        "{% for m in messages %}{{ m.content }}\n{% endfor %}{# " + signs_of(family) + " tools #}"
    )
    (root / "tokenizer_config.json").write_text(json.dumps(told))
    config = json.loads((BOX / "config.json").read_text())
    tiny = {"vocab_size": NUM_TOKENS + 64, "num_hidden_layers": 1, "torch_dtype": "float32"}
    (root / "config.json").write_text(json.dumps({**config, **tiny}))


@pytest.fixture(scope="module", params=["qwen-coder", "gpt-oss"])
def scripted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scripted]:
    family = request.param
    root = tmp_path_factory.mktemp("model")
    make_model(root, family)
    file = tmp_path_factory.mktemp("script") / "ids.json"
    variables = {"METRONOME_SCRIPT": str(file), "PYTHONPATH": str(TESTS)}
    with forked("--model", str(root), *COMMON, **variables) as server:
        yield Scripted(family, server, Tokenizer.from_file(str(root / "tokenizer.json")), file)


def check(read: Read, case: Case) -> None:
    meant = [(tool, given) for tool, given in case.calls]
    assert [(tool, object_in(given) if isinstance(given, str) else given)
            for tool, given in read.calls] == meant  # fmt: skip
    assert (read.content, read.thinking) == (case.content, case.thinking)


@pytest.mark.parametrize("name", sorted(APIS))
def test_answers_are_read_as_they_are_meant(scripted: Scripted, name: str) -> None:
    api = APIS[name]
    cases = [case for case in CASES[scripted.family] if case.title in TITLES]
    assert len(cases) > 3
    for case in cases:
        scripted.write(case.text)
        answer = json.loads(scripted.ask(name))
        check(api.whole(answer), case)
        events = events_in(scripted.ask(name, stream=True))
        check(api.streamed(events), case)
        if case.calls:
            assert api.end(answer) == api.end(events[api.last]) == api.ends["stop"]


@pytest.mark.parametrize("name", sorted(APIS))
def test_a_call_that_is_cut_has_the_arguments_so_far(scripted: Scripted, name: str) -> None:
    api = APIS[name]
    (case,) = (case for case in CASES[scripted.family] if case.title == "two calls")
    begun = case.text[: case.text.index("a.go") + 3]
    num = scripted.write(begun)
    limits = {"responses": {"max_output_tokens": num}, "ollama": {"options": {"num_predict": num}}}
    limit: dict[str, Any] = limits.get(name, {"max_tokens": num})
    events = events_in(scripted.ask(name, stream=True, **limit))
    ((tool, arguments),) = api.streamed(events).calls
    assert tool == "edit" and arguments == ("{}" if name == "ollama" else '{"path": "a.g')
    answer = json.loads(scripted.ask(name, **limit))
    ((_, given),) = api.whole(answer).calls
    assert given == ({} if name == "messages" else arguments)
    assert api.end(answer) == api.end(events[api.last]) == api.ends["length"]


def test_several_answers_with_their_tokens(scripted: Scripted) -> None:
    (case,) = (case for case in CASES[scripted.family] if case.title == "two calls")
    num = scripted.write(case.text)
    more = {"n": 2, "logprobs": True, "return_token_ids": True, "parallel_tool_calls": False}
    answer = json.loads(scripted.ask("chat", **more))
    chunks = events_in(scripted.ask("chat", stream=True, **more))
    for index in range(2):
        choice = answer["choices"][index]
        ((tool, arguments),) = APIS["chat"].whole({"choices": [choice]}).calls
        assert (tool, json.loads(arguments)) == ("edit", EDIT)
        own = [each["choices"][0] for each in chunks if each["choices"][0]["index"] == index]
        assert APIS["chat"].streamed([{"choices": [each]} for each in own]).calls == [
            (tool, arguments)
        ]
        ids = [token for each in own for token in each.get("token_ids") or []]
        entries = [
            entry for each in own if each["logprobs"] for entry in each["logprobs"]["content"]
        ]
        assert ids == choice["token_ids"] and len(ids) >= num
        assert len(entries) == len(choice["logprobs"]["content"]) == len(ids)


def test_special_tokens_are_left_out_or_not(scripted: Scripted) -> None:
    """Special tokens that are no markers of the family."""
    scripted.write("a<|im_start|>b")
    for skips, content in ((True, "ab"), (False, "a<|im_start|>b")):
        answer = json.loads(scripted.ask("chat", skip_special_tokens=skips))
        assert answer["choices"][0]["message"]["content"] == content


def test_tools_that_may_not_be_called_are_not(scripted: Scripted) -> None:
    (case,) = (case for case in CASES[scripted.family] if case.title == "two calls")
    scripted.write(case.text)
    answer = json.loads(scripted.ask("chat", tool_choice="none", tools=TOOLS))
    assert not APIS["chat"].whole(answer).calls
