"""Pictures through the APIs: tokens equal to those of transformers, and hostile ones refused."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import struct
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from e2e.seeing_models import make_seeing_model
from e2e.test_pictures import as_file, expected, picture
from PIL import Image
from support.listeners import Listener, answered, redirect, sized
from support.served import Served, forked

from engine import LLM, AsyncLLMEngine, EngineArgs, SamplingParams
from engine.errors import RequestError

NAME = "seeing"
COMMON = ("--num-threads", "1", "--max-num-seqs", "8", "--num-kv-blocks", "400")
ALLOWED = "127.0.0.1"
CLOSED = "127.0.0.2"
"""An address on which somebody listens, and which the server may not connect to."""
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
SHOWN = picture(50, 30)
FILE = as_file(SHOWN)


def data_url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def shown(url: Any, **about: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **about}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


class Hosts(NamedTuple):
    """Servers of pictures: those that the list allows, and one that it does not."""

    good: Listener
    inward: Listener
    large: Listener
    missing: Listener
    page: Listener
    silent: Listener
    closed: Listener


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with ExitStack() as stack:

        def listener(answer: bytes, address: str = ALLOWED) -> Listener:
            made = Listener(answer, address)
            stack.callback(made.close)
            return made

        closed = listener(sized(FILE), CLOSED)
        yield Hosts(
            listener(sized(FILE)),
            listener(redirect(f"{closed.url}/secret")),
            listener(answered(b"", f"Content-Length: {1 << 30}")),
            listener(answered(b"", status="404 Not Found")),
            listener(sized(b"<html>sign in</html>")),
            listener(b""),
            closed,
        )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing_model(tmp_path_factory.mktemp("seeing"), "smolvlm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pictures")
    (root / "shown.png").write_bytes(FILE)
    (root / "out").symlink_to("/etc/passwd")
    return root


@pytest.fixture(scope="module")
def server(path: Path, folder: Path) -> Iterator[Served]:
    options = ("--model", str(path), "--served-model-name", NAME, *COMMON)
    allowed = ("--allowed-media-domains", ALLOWED, "--allowed-local-media-path", str(folder))
    with forked(*options, *allowed) as made:
        yield made


def ids_of(answer: Any) -> list[int]:
    """Token ids of prompt and answer."""
    return [*answer["prompt_token_ids"], *answer["choices"][0]["token_ids"]]


def chat(server: Served, messages: list[Any], **about: Any) -> Any:
    body = {"model": NAME, "messages": messages, **GREEDY, "return_token_ids": True, **about}
    answer = server.ask("/v1/chat/completions", body)
    assert answer.status == 200, answer.body
    return answer.json


def test_tokens_equal_those_of_transformers(server: Served, path: Path, hosts: Hosts) -> None:
    """By each kind of URL, with the number of tokens in usage and of /tokenize."""
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
def told(server: Served) -> str:
    """The answer about the picture."""
    answer = chat(server, user(shown(data_url(FILE)), text("what?")))
    return str(answer["choices"][0]["message"]["content"])


def test_the_clients_of_openai(server: Served, hosts: Hosts, told: str) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    messages = user(shown(data_url(FILE), detail="auto"), text("what?"))
    about = {"temperature": 0, "extra_body": {"ignore_eos": True}}
    answer = client.chat.completions.create(model=NAME, messages=messages, max_tokens=8, **about)
    assert answer.choices[0].message.content == told
    for url in (data_url(FILE), hosts.good.url):
        parts = [
            {"type": "input_image", "image_url": url, "detail": "auto"},
            {"type": "input_text", "text": "what?"},
        ]
        given = [{"role": "user", "content": parts}]
        first = client.responses.create(model=NAME, input=given, max_output_tokens=8, **about)
        assert first.output_text == told
    again = client.responses.create(
        model=NAME,
        input="and?",
        previous_response_id=first.id,
        max_output_tokens=8,
        **about,
    )
    assert again.usage.input_tokens > first.usage.input_tokens
    output = [{"type": "input_text", "text": "seen"}, parts[0]]
    given = [
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": output},
    ]
    with_one = client.responses.create(model=NAME, input=given, max_output_tokens=8, **about)
    given[1]["output"] = "seen"
    without = client.responses.create(model=NAME, input=given, max_output_tokens=8, **about)
    assert with_one.usage.input_tokens > without.usage.input_tokens + 4


def test_the_client_of_anthropic(server: Served, hosts: Hosts, told: str) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    content = base64.b64encode(FILE).decode()
    inline = {"type": "base64", "media_type": "image/png", "data": content}
    about = {"max_tokens": 8, "extra_body": {"temperature": 0, "ignore_eos": True}}
    for source in (inline, {"type": "url", "url": hosts.good.url}):
        blocks = [{"type": "image", "source": source}, text("what?")]
        messages = [{"role": "user", "content": blocks}]
        # Blocks are joined by a line end where both are texts.
        answer = client.messages.create(model=NAME, messages=messages, **about)
        assert answer.content[0].text == told
        counted = client.messages.count_tokens(model=NAME, messages=messages)
        usage = answer.usage
        assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    messages = [
        {"role": "user", "content": "look"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t", "name": "shot", "input": {}}],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t",
                    "content": [text("the screen"), {"type": "image", "source": inline}],
                }
            ],
        },
    ]
    with_one = client.messages.count_tokens(model=NAME, messages=messages)
    messages[-1]["content"][0]["content"].pop()  # type: ignore[index]
    without = client.messages.count_tokens(model=NAME, messages=messages)
    assert with_one.input_tokens > without.input_tokens + 4


def test_the_client_of_ollama(server: Served, told: str) -> None:
    ollama = pytest.importorskip("ollama")
    with ollama.Client(server.url) as client:
        message = {"role": "user", "content": "what?", "images": [FILE]}
        options = {"temperature": 0, "num_predict": 8}
        answer = client.chat(NAME, [message], options=options)
        assert told.startswith(answer.message.content)
        other = client.generate(NAME, "what?", images=[FILE], options=options)
        assert other.response == answer.message.content
        assert other.prompt_eval_count == answer.prompt_eval_count
        assert "vision" in client.show(NAME).capabilities


def test_the_client_of_langchain(server: Served, told: str) -> None:
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        model=NAME,
        temperature=0,
        max_retries=0,
        max_tokens=8,
        extra_body={"ignore_eos": True},
    )
    parts = [shown(data_url(FILE)), text("what?")]
    assert model.invoke([("user", parts)]).content == told


def test_a_model_of_text_says_so(hosts: Hosts) -> None:
    """And loads nothing."""
    before = len(hosts.good.requests)
    options = ("--served-model-name", "box", "--allowed-media-domains", ALLOWED)
    with forked(*COMMON, *options) as server:
        for way, body in bodies_of(hosts.good.url).items():
            answer = server.ask(way, {"model": "box", **body})
            assert answer.status == 400, answer.body
            assert b"this model reads only text" in answer.body
        names = server.ask("/v1/models").json["data"]
    assert names
    assert len(hosts.good.requests) == before


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


def test_a_slow_host_delays_no_other_request(server: Served, told: str) -> None:
    """With more requests for its pictures than threads that load any."""
    is_over = threading.Event()

    def hold(connection: socket.socket, request: bytes) -> None:
        is_over.wait()
        connection.sendall(sized(FILE))

    slow = Listener(hold, ALLOWED)
    with closing(slow), ThreadPoolExecutor(12) as threads:
        messages = user(shown(slow.url), text("what?"))
        waiting = [threads.submit(chat, server, messages) for _ in range(12)]
        for url in (data_url(FILE), data_url(JPEG)):
            chat(server, user(shown(url), text("and?")))
        is_over.set()
        answers = [each.result()["choices"][0]["message"]["content"] for each in waiting]
    assert answers == [told] * 12


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


# -- hostile pictures and URLs


def chunk(name: bytes, content: bytes) -> bytes:
    check = zlib.crc32(name + content)
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", check)


def png(width: int, height: int, pixels: bytes, *more: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [chunk(b"IHDR", header), *more, chunk(b"IDAT", pixels), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def other_format(kind: str) -> bytes:
    file = BytesIO()
    SHOWN.save(file, kind)
    return file.getvalue()


JPEG = as_file(SHOWN, "JPEG")
FAR = as_file(Image.new("1", (20_000, 20_000)))
NO_PICTURE = "cannot be read as BMP, GIF, JPEG, PNG, WEBP"
FILES: dict[str, tuple[bytes, str]] = {
    "a text": (b"not a picture", NO_PICTURE),
    "a byte": (b"\x00", NO_PICTURE),
    "SVG": (b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///x"/></svg>', NO_PICTURE),
    "PostScript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", NO_PICTURE),
    "PDF": (b"%PDF-1.7\n", NO_PICTURE),
    "TIFF": (other_format("TIFF"), NO_PICTURE),
    "an icon": (other_format("ICO"), NO_PICTURE),
    "a Targa file": (other_format("TGA"), NO_PICTURE),
    "half a PNG": (FILE[: len(FILE) // 2], "damaged"),
    "half a JPEG": (JPEG[: len(JPEG) // 2], "damaged"),
    "the head of a PNG": (FILE[:20], NO_PICTURE),
    "a PNG without pixels": (png(9, 9, b""), "damaged"),
    "a PNG with too few pixels": (png(900, 900, zlib.compress(b"\0" * 9)), "damaged"),
    "a PNG of wrong pixels": (png(9, 9, b"no zlib"), "damaged"),
    "a PNG of no width": (png(0, 9, zlib.compress(b"")), "must have at least one|cannot be read"),
    "a bomb": (FAR, "20000 x 20000|too large"),
    "a PNG of 2**31 pixels a side": (png(1 << 30, 1 << 30, b""), "too large|the limit is"),
    "a large text in a small PNG": (
        png(9, 9, b"", chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(8 << 20)))),
        "damaged|cannot be read",
    ),
    "a WebP of 16,384 pixels a side": (
        b"RIFF\x16\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0\xff\x3f\0\xff\x3f\0",
        "16384 x 16384 pixels, the limit",
    ),
    "a GIF of 65,535 pixels a side": (
        b"GIF89a" + struct.pack("<HHBBB", 65_535, 65_535, 0, 0, 0) + b";",
        "too large|cannot be read|the limit is",
    ),
    "a BMP of 60,000 pixels a side": (
        b"BM" + struct.pack("<IHHI", 54, 0, 0, 54)
        + struct.pack("<IiiHHIIiiII", 40, 60_000, 60_000, 1, 24, 0, 0, 0, 0, 0, 0),
        "too large|the limit is",
    ),
}  # fmt: skip
URLS: dict[str, tuple[str, str]] = {
    "another host": ("http://{closed}/", "is not allowed"),
    "a name for this machine": ("http://localhost:{closed_port}/", "is not allowed"),
    "metadata": ("http://169.254.169.254/latest/meta-data/", "is not allowed"),
    "a number": ("http://2130706434:{closed_port}/", "is not allowed"),
    "octal": ("http://0177.0.0.2:{closed_port}/", "is not allowed"),
    "hexadecimal": ("http://0x7f.0.0.2:{closed_port}/", "is not allowed"),
    "IPv6": ("http://[::1]:{closed_port}/", "is not allowed"),
    "IPv4 in IPv6": ("http://[::ffff:127.0.0.2]:{closed_port}/", "is not allowed"),
    "a user": ("http://127.0.0.1@{closed}/", "user name or password"),
    "a backslash": ("http://127.0.0.1\\@{closed}/", "percent-encoded"),
    "a line end": ("http://127.0.0.1/\r\nHost: x", "percent-encoded"),
    "no host": ("http:///a.png", "has no host"),
    "half a bracket": ("http://[::1/a.png", "is malformed"),
    "a large port": ("http://127.0.0.1:70000/", "is malformed"),
    "a long one": ("http://127.0.0.1/" + "a" * 9000, "the limit is 8192"),
    "a redirect inwards": ("{inward}", "is not allowed"),
    "a gigabyte": ("{large}", "more than 67108864 bytes"),
    "a missing file": ("{missing}", "status 404"),
    "a page": ("{page}", NO_PICTURE),
    "no answer": ("{silent}", "cannot be loaded"),
    "TLS to a server without it": ("{tls}", "SSL"),
    "a closed port": ("http://127.0.0.1:{unused}/", "refused"),
    "a file": ("file:///etc/passwd", "must be a file in the directory"),
    "a path": ("/etc/passwd", "must be a file in the directory"),
    "a path out of the directory": ("{folder}/../../../etc/passwd", "must be a file in the dir"),
    "a link out of the directory": ("file://{folder}/out", "must be a file in the directory"),
    "a folder": ("{folder}", "must be a file in the directory"),
    "FTP": ("ftp://127.0.0.1/a.png", "must be a data URL"),
    "gopher": ("gopher://127.0.0.1/a", "must be a data URL"),
    "a script": ("javascript:alert(1)", "must be a data URL"),
    "a name": ("picture.png", "must be a data URL"),
    "nothing in base64": ("data:image/png;base64,", "has no content"),
    "wrong base64": ("data:image/png;base64,&&&&", "not valid base64"),
    "data that is not base64": ("data:image/png,%89PNG", "must be in base64"),
}
PARTS: dict[str, tuple[Any, str]] = {
    "a stored file": ({"type": "input_image", "file_id": "file-1"}, "file_id 'file-1'"),
    "a detail": (shown(data_url(FILE), detail="huge"), "detail 'huge', must be one of"),
    "no URL": ({"type": "image_url", "image_url": {}}, "without a picture"),
    "a number": (shown(5), "must be a URL"),
    "a list": (shown([data_url(FILE)]), "must be a URL"),
    "a video": ({"type": "video_url", "video_url": {"url": "data:"}}, "'video_url', which is not"),
}


@pytest.fixture(scope="module")
def refusing(server: Served, hosts: Hosts, folder: Path) -> Any:
    """Whether the server refuses a part of a message with 400, and says why."""
    with socket.create_server((ALLOWED, 0)) as probe:
        unused = probe.getsockname()[1]
    places = {
        "closed": hosts.closed.url.removeprefix("http://"),
        "closed_port": hosts.closed.port,
        "inward": hosts.inward.url,
        "large": hosts.large.url,
        "missing": hosts.missing.url,
        "page": hosts.page.url,
        "silent": hosts.silent.url,
        "tls": hosts.page.url.replace("http", "https"),
        "unused": unused,
        "folder": folder,
    }
    return partial(refuse, server, places)


def refuse(server: Served, places: dict[str, Any], part: Any) -> str:
    """The message of the 400 that a part gets."""
    if part.get("type") == "image_url" and isinstance(part["image_url"].get("url"), str):
        url = part["image_url"]["url"]
        if not url.startswith("data:"):
            part = shown(url.format(**places))
    body = {"model": NAME, "messages": user(part, text("what?")), **GREEDY}
    answer = server.ask("/v1/chat/completions", body)
    assert answer.status == 400, answer.body
    error = answer.json["error"]
    assert error["param"] == "messages"
    assert "multi_modal_data" not in error["message"]
    return str(error["message"])


def peak_of(server: Served) -> int:
    """The largest memory of a process, in bytes."""
    for line in Path(f"/proc/{server.process.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) << 10
    raise AssertionError("no VmHWM")


def test_hostile_pictures_and_urls_get_a_400_that_says_why(
    server: Served, hosts: Hosts, refusing: Any
) -> None:
    """In bounded memory, without a connection to an address that is not allowed."""
    cases = {
        **{name: (shown(data_url(file)), message) for name, (file, message) in FILES.items()},
        **{name: (shown(url), message) for name, (url, message) in URLS.items()},
        **PARTS,
    }
    assert len(cases) >= 40
    chat(server, user(shown(data_url(FILE))))
    before = peak_of(server)
    wrong = []
    for name, (part, message) in cases.items():
        found = refusing(part)
        if not any(each in found for each in message.split("|")):
            wrong.append(f"{name}: {found}")
    assert not wrong, "\n".join(wrong)
    assert not hosts.closed.requests
    assert peak_of(server) - before < 400 << 20
    chat(server, user(shown(data_url(FILE))))


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
