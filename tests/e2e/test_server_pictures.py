"""Pictures through the APIs: tokens equal to those of transformers."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from e2e.picture_cases import as_file, picture
from e2e.picture_requests import (
    COMMON,
    FILE,
    GREEDY,
    NAME,
    SHOWN,
    chat,
    data_url,
    fill_folder,
    ids_of,
    shown,
    text,
    user,
)
from e2e.seeing_models import make_seeing_model
from e2e.test_pictures import expected
from PIL import Image
from support.listeners import Listener, sized
from support.served import Served, forked

from engine import LLM, AsyncLLMEngine, EngineArgs, SamplingParams
from engine.config.media import MediaConfig
from engine.config.model import ModelConfig, read_model_info
from engine.errors import RequestError
from engine.frontend.async_pictures import NUM_THREADS
from engine.pictures.prompts import Pictures
from engine.pictures.sources import MediaSources
from engine.text.tokenizer import load_tokenizer

ALLOWED = "127.0.0.1"
CLOSED = "127.0.0.2"
"""The address of a listener that the server may not connect to."""
JPEG = as_file(SHOWN, "JPEG")


class Hosts(NamedTuple):
    """Servers of pictures: one that the list allows, and one that it does not."""

    good: Listener
    closed: Listener


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with ExitStack() as stack:

        def listener(answer: bytes, address: str = ALLOWED) -> Listener:
            made = Listener(answer, address)
            stack.callback(made.close)
            return made

        yield Hosts(listener(sized(FILE)), listener(sized(FILE), CLOSED))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing_model(tmp_path_factory.mktemp("seeing"), "smolvlm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill_folder(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def server(path: Path, folder: Path) -> Iterator[Served]:
    options = ("--model", str(path), "--served-model-name", NAME, *COMMON)
    allowed = ("--allowed-media-domains", ALLOWED, "--allowed-local-media-path", str(folder))
    with forked(*options, *allowed) as made:
        yield made


def test_tokens_equal_those_of_transformers(server: Served, path: Path, hosts: Hosts) -> None:
    """URLs of each kind give the same tokens, as many as usage and /tokenize count."""
    wanted = expected(path, "smolvlm", "user: <image>what?a:", [SHOWN])
    for url in (data_url(FILE), f"{hosts.good.url}/a.png"):
        messages = user(shown(url), text("what?"))
        answer = chat(server, messages)
        assert ids_of(answer) == wanted
        num = len(wanted) - 8
        assert answer["usage"]["prompt_tokens"] == num
        tokenized = server.ask("/tokenize", {"messages": messages}).json
        assert (tokenized["count"], tokenized["tokens"]) == (num, wanted[:num])
    assert hosts.good.requests and not hosts.closed.requests


def test_several_pictures_in_several_turns(server: Served, path: Path, folder: Path) -> None:
    other, third = picture(90, 40), picture(20, 20, "L")
    messages = [
        *user(text("one "), shown(data_url(FILE)), text(" two "), shown(data_url(as_file(other)))),
        {"role": "assistant", "content": "yes <image>"},
        *user(shown(data_url(as_file(third), "image/x")), text("and?")),
        *user(shown(f"file://{folder}/shown.png")),
    ]
    answer = server.ask("/tokenize", {"messages": messages}).json
    # The assistant's words are words, and no picture.
    prompt = "user: one <image> two <image>assistant: yes ...user: <image>and?\n<image>a:"
    head, tail = prompt.split("...")
    ids = expected(path, "smolvlm", head, [SHOWN, other])[:-8]
    after = expected(path, "smolvlm", tail, [third, SHOWN])[:-8]
    assert answer["tokens"][: len(ids)] == ids
    assert answer["tokens"][-len(after) :] == after
    assert answer["count"] == len(ids) + len("<image>") + len(after)


def test_a_stream_has_the_same_text(server: Served) -> None:
    messages = user(shown(data_url(FILE)), text("what?"))
    whole = chat(server, messages)["choices"][0]["message"]["content"]
    about = {"stream": True, "stream_options": {"include_usage": True}}
    body = {"model": NAME, "messages": messages, **GREEDY, **about}
    lines = server.ask("/v1/chat/completions", body).body.decode().splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    pieces = [each["choices"][0]["delta"].get("content") for each in events if each["choices"]]
    assert "".join(filter(None, pieces)) == whole
    assert events[-1]["usage"]["prompt_tokens"] > 10


def test_a_picture_that_cannot_be_decoded_is_a_400_of_streams_too(server: Served) -> None:
    """The damage is found when the request has been queued."""
    cut = data_url(JPEG[: len(JPEG) // 2], "image/jpeg")
    messages = user(shown(cut), text("what?"))
    given = [
        ("/v1/chat/completions", {"messages": messages}, "messages"),
        ("/v1/responses", {"input": [{**messages[0], "content": seen_by_responses(cut)}]}, "input"),
        ("/v1/messages", {"messages": for_messages(cut), "max_tokens": 4}, "messages"),
    ]
    for path, fields, param in given:
        for stream in (False, True):
            answer = server.ask(path, {"model": NAME, "stream": stream, **fields})
            assert answer.status == 400, (path, stream, answer.body)
            assert "a picture is damaged" in answer.json["error"]["message"]
            assert answer.json["error"].get("param", param) == param


def seen_by_responses(url: str) -> list[dict[str, Any]]:
    return [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "what?"}]


def for_messages(url: str) -> list[dict[str, Any]]:
    data = url.partition(",")[2]
    source = {"type": "base64", "media_type": "image/jpeg", "data": data}
    return [{"role": "user", "content": [{"type": "image", "source": source}]}]


def test_low_detail_is_a_smaller_picture(server: Served, path: Path) -> None:
    large = picture(1200, 900)
    url = data_url(as_file(large))
    ids = {
        detail: ids_of(chat(server, user(shown(url, detail=detail))))
        for detail in ("low", "high", "auto")
    }
    assert ids["high"] == ids["auto"] == expected(path, "smolvlm", "user: <image>a:", [large])
    small = large.resize((512, 384), Image.Resampling.BICUBIC)
    assert ids["low"] == expected(path, "smolvlm", "user: <image>a:", [small])


@pytest.fixture(scope="module")
def description(server: Served) -> str:
    """The text of the answer about the picture."""
    answer = chat(server, user(shown(data_url(FILE)), text("what?")))
    return str(answer["choices"][0]["message"]["content"])


def test_a_model_of_text_says_so(hosts: Hosts) -> None:
    """It loads nothing either."""
    before = len(hosts.good.requests)
    options = ("--served-model-name", "box", "--allowed-media-domains", ALLOWED)
    with forked(*COMMON, *options) as server:
        for way, body in bodies_of(hosts.good.url).items():
            answer = server.ask(way, {"model": "box", **body})
            assert answer.status == 400, answer.body
            assert b"this model reads only text" in answer.body
        assert server.ask("/page/model").json["pictures"] is None
    assert len(hosts.good.requests) == before


def test_the_tokens_of_pictures_are_bounded(path: Path) -> None:
    """They are even where a prompt may exceed the model's limit, as for /tokenize."""
    options = MediaConfig()
    tokenizer = load_tokenizer(ModelConfig(model=str(path)))
    about = (read_model_info(str(path)), tokenizer, options, MediaSources(options))
    (image,) = tokenizer.encode("<image>", add_special_tokens=False)
    one = len(Pictures(*about).into([image], {"image": FILE}).token_ids)
    pictures = Pictures(*about, most_tokens=3 * one)
    assert len(pictures.into([image] * 3, {"image": [FILE] * 3}).token_ids) == 3 * one
    with pytest.raises(RequestError, match=f"more than {3 * one} tokens together"):
        pictures.into([image] * 4, {"image": [FILE] * 4})


def test_loading_counts_against_the_timeout(server: Served) -> None:
    is_over = threading.Event()

    def hold(connection: socket.socket, request: bytes) -> None:
        is_over.wait()

    with closing(Listener(hold, ALLOWED)) as slow:
        body = {"model": NAME, "messages": user(shown(slow.url)), "timeout": 0.2}
        answer = server.ask("/v1/chat/completions", body)
        is_over.set()
    assert (answer.status, answer.json["error"]["code"]) == (408, "deadline_exceeded")
    body = {**body, "messages": user(shown(data_url(FILE))), "timeout": 60}
    assert server.ask("/v1/chat/completions", body).status == 200


def bodies_of(url: str) -> dict[str, dict[str, Any]]:
    """The same picture in each API."""
    source = {"type": "url", "url": url}
    part = {"type": "input_image", "image_url": url}
    return {
        "/v1/chat/completions": {"messages": user(shown(url))},
        "/v1/responses": {"input": [{"role": "user", "content": [part]}]},
        "/v1/messages": {
            "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}],
            "max_tokens": 1,
        },
        "/api/chat": {"messages": [{"role": "user", "content": "", "images": ["aGk="]}]},
        "/api/generate": {"prompt": "a", "images": ["aGk="]},
        "/tokenize": {"messages": user(shown(url))},
    }


def test_the_page_learns_which_pictures_the_model_reads(server: Served) -> None:
    assert server.ask("/page/model").json["pictures"] == {
        "formats": ["BMP", "GIF", "JPEG", "PNG", "WEBP"],
        "most_bytes": 64 << 20,
        "most_pixels": 64 << 20,
        "most_pictures": None,
        "most_chars": 32 << 20,
    }


def test_a_slow_host_delays_no_other_request(server: Served, description: str) -> None:
    """More requests wait for its pictures than there are threads that load pictures."""
    is_over, number = threading.Event(), NUM_THREADS + 4

    def hold(connection: socket.socket, request: bytes) -> None:
        is_over.wait()
        connection.sendall(sized(FILE))

    slow = Listener(hold, ALLOWED)
    with closing(slow), ThreadPoolExecutor(number) as threads:
        messages = user(shown(slow.url), text("what?"))
        waiting = [threads.submit(chat, server, messages) for _ in range(number)]
        for url in (data_url(FILE), data_url(JPEG)):
            chat(server, user(shown(url), text("and?")))
        is_over.set()
        answers = [each.result()["choices"][0]["message"]["content"] for each in waiting]
    assert answers == [description] * number


def test_nothing_is_loaded_or_decoded_on_the_event_loop(
    path: Path, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int]] = []

    def noting(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def noted(*args: Any, **options: Any) -> Any:
            seen.append((name, threading.get_ident()))
            return function(*args, **options)

        monkeypatch.setattr(owner, name, noted)

    noting(socket, "create_connection")
    noting(Image, "open")
    noting(Image.Image, "convert")
    args = EngineArgs(
        model=str(path),
        allowed_media_domains=[ALLOWED],
        num_threads=1,
        max_num_seqs=8,
        num_kv_blocks=200,
    )

    async def answer() -> list[int]:
        engine = AsyncLLMEngine.from_engine_args(args)
        seen.clear()  # its start processes a picture of its own
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, output_kind="final")
        messages = user(shown(hosts.good.url), text("what?"))
        async for output in engine.chat(messages, params, "a"):
            found = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        engine.shutdown()
        return found

    found = asyncio.run(answer())
    assert {name for name, _ in seen} == {"create_connection", "open", "convert"}
    assert threading.get_ident() not in {thread for _, thread in seen}
    assert found == expected(path, "smolvlm", "user: <image>what?a:", [SHOWN])


def test_pictures_of_a_directory_in_python(path: Path, folder: Path) -> None:
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    wanted = expected(path, "smolvlm", "user: <image>what?a:", [SHOWN])
    sizes = {"num_threads": 1, "max_num_seqs": 8, "num_kv_blocks": 200}
    with LLM(path, allowed_local_media_path=folder, **sizes) as llm:
        file = folder / "shown.png"
        for value in (file, str(file), f"file://{file}"):
            prompt = {"prompt": "user: <image>what?a:", "multi_modal_data": {"image": value}}
            (output,) = llm.generate(prompt, params, use_tqdm=False)
            assert [*output.prompt_token_ids, *output.outputs[0].token_ids] == wanted
        (output,) = llm.chat(user(shown(str(file)), text("what?")), params, use_tqdm=False)
        assert [*output.prompt_token_ids, *output.outputs[0].token_ids] == wanted
        with pytest.raises(RequestError, match="must be a file in the directory"):
            llm.chat(user(shown(str(folder / "out"))), params, use_tqdm=False)


def test_pictures_belong_to_users_and_tools(server: Served) -> None:
    for role in ("system", "assistant"):
        messages = [{"role": role, "content": [shown(data_url(FILE))]}, *user(text("hi"))]
        answer = server.ask("/v1/chat/completions", {"model": NAME, "messages": messages})
        assert answer.status == 400
        assert "send pictures in messages of users" in answer.json["error"]["message"]
    many = user(*[shown("data:;base64,aGk=")] * 1025)
    answer = server.ask("/v1/chat/completions", {"model": NAME, "messages": many})
    assert answer.status == 400
    assert "more than 1024 pictures" in answer.json["error"]["message"]


def test_errors_name_the_field_of_each_api(server: Served, hosts: Hosts) -> None:
    params = {"/v1/responses": "input", "/v1/chat/completions": "messages"}
    for way, body in bodies_of(hosts.closed.url).items():
        answer = server.ask(way, {"model": NAME, **body})
        assert answer.status == 400, answer.body
        assert b"multi_modal_data" not in answer.body
        if way in params:
            assert answer.json["error"]["param"] == params[way]
    source = {"type": "file", "file_id": "file_1"}
    blocks = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    answer = server.ask("/v1/messages", {"model": NAME, "messages": blocks, "max_tokens": 1})
    assert (answer.status, b"file_id 'file_1'" in answer.body) == (400, True)
    assert not hosts.closed.requests
