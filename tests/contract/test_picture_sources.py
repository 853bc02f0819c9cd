"""Where pictures are loaded from: allowed hosts, addresses and files, and nothing else."""

from __future__ import annotations

import os
import socket
import threading
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.listeners import (
    Answer,
    Listener,
    answered,
    drip,
    listening,
    redirect,
    silent,
    sized,
)

from engine.config.media import MediaConfig
from engine.errors import ConfigError, RequestError
from engine.frontend import async_pictures
from engine.frontend.async_pictures import AsyncPictures
from engine.pictures.addresses import AllowedHosts, is_public
from engine.pictures.fetching import fetch
from engine.pictures.sources import Given, MediaSources

MOST = 1000


def load(url: str, *allowed: str) -> bytes:
    return fetch(url, AllowedHosts(allowed or ["127.0.0.1"]), MOST)


CHUNKED = answered(b"2\r\nab\r\n1\r\nc\r\n0\r\n\r\n", "Transfer-Encoding: chunked")


@pytest.mark.parametrize("answer", [sized(b"abc"), answered(b"abc"), CHUNKED])
def test_the_content_is_loaded(answer: bytes) -> None:
    with listening(answer) as (server,):
        assert load(f"{server.url}/a%20b?c=d#e") == b"abc"
    (request,) = server.requests
    assert request.startswith(b"GET /a%20b?c=d HTTP/1.1\r\n")
    assert f"Host: 127.0.0.1:{server.port}\r\n".encode() in request


def test_a_redirect_is_followed_to_an_allowed_host() -> None:
    with (
        listening(sized(b"abc"), address="127.0.0.2") as (second,),
        listening(redirect(f"{second.url}/x")) as (first,),
    ):
        assert load(first.url, "127.0.0.1", "127.0.0.2") == b"abc"
        with pytest.raises(RequestError, match=r"host '127.0.0.2' .* is not allowed"):
            load(first.url, "127.0.0.1")
        with pytest.raises(RequestError, match="not allowed"):
            load(first.url, "127.0.0.1", f"127.0.0.2:{second.port + 1}")
    assert len(second.requests) == 1


BAD: dict[str, tuple[bytes, str]] = {
    "other status": (answered(b"", status="404 Not Found"), "answers with status 404"),
    "too long by its header": (answered(b"", "Content-Length: 1001"), "more than 1000 bytes"),
    "too long": (answered(b"x" * 1001), "more than 1000 bytes"),
    "cut off": (answered(b"abc", "Content-Length: 5"), "ends after 3 bytes, 2 are missing"),
    "no answer": (b"", "cannot be loaded"),
    "no HTTP": (b"220 mail.example ESMTP\r\n", "cannot be loaded"),
    "a wrong chunk": (answered(b"zz\r\nab", "Transfer-Encoding: chunked"), "cannot be loaded"),
    "too many headers": (answered(b"", *["X: y"] * 200), "cannot be loaded"),
    "an endless header": (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 99_999, "cannot be loaded"),
    "a redirect to itself": (redirect("/x"), "more than 3 redirects"),
    "a redirect to nothing": (answered(b"", status="302 Found"), "redirects a picture to ''"),
    "a redirect to a file": (redirect("file:///etc/passwd"), "not http or https"),
    "a redirect with a user": (redirect("http://a:b@127.0.0.1/"), "user name or password"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_answer_without_a_picture_is_refused(name: str) -> None:
    answer, message = BAD[name]
    with listening(answer) as (server,), pytest.raises(RequestError, match=message):
        load(server.url)


@pytest.mark.parametrize("answer", [drip, silent])
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_slow_answer_ends(answer: Answer, scheme: str) -> None:
    message = "takes longer than" if scheme == "http" else r"takes longer than|TLS|SSL"
    with listening(answer) as (server,), pytest.raises(RequestError, match=message):
        url = server.url.replace("http", scheme)
        fetch(url, AllowedHosts(["127.0.0.1"]), MOST, seconds=0.3)


NOT_ALLOWED = (
    "http://127.0.0.2:{port}/",
    "http://localhost:{port}/",
    "http://127.1:{port}/",
    "http://2130706434:{port}/",
    "http://0x7f000002:{port}/",
    "http://0177.0.0.2:{port}/",
    "http://[::1]:{port}/",
    "http://[::ffff:127.0.0.2]:{port}/",
    "http://127.0.0.1@127.0.0.2:{port}/",
    "http://127.0.0.1:80@127.0.0.2:{port}/",
    "http://127.0.0.1#@127.0.0.2:{port}/",
    "http://127.0.0.1\\@127.0.0.2:{port}/",
    "http://127.0.0.2:{port}\r\nHost: 127.0.0.1/",
    "http://127.0.0.1%2f@127.0.0.2:{port}/",
    "http://127.0.0.1.nip.io:{port}/",
    "http://⑫7.0.0.2:{port}/",
)


@pytest.mark.parametrize("url", NOT_ALLOWED)
def test_nothing_is_sent_to_an_address_that_is_not_in_the_list(url: str) -> None:
    with listening(sized(b"abc"), address="127.0.0.2") as (server,):
        with pytest.raises(RequestError):
            load(url.format(port=server.port), "127.0.0.1:1")
        assert not server.requests


def resolved(monkeypatch: pytest.MonkeyPatch, *answers: list[str]) -> list[str]:
    """Let names have these addresses, one list for each call. Returns the looked-up names."""
    names: list[str] = []
    found = iter(answers)

    def getaddrinfo(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        if host[0].isdigit():
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))]
        names.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in next(found)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return names


def test_a_name_must_have_a_public_address_or_one_in_the_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with listening(sized(b"abc")) as (server,):
        url = f"http://Pictures.example.:{server.port}/"
        private = ["127.0.0.1", "10.0.0.1", "::1", "169.254.169.254"]
        resolved(monkeypatch, private, private)
        with pytest.raises(RequestError, match="only addresses that are not public"):
            load(url, "pictures.example")
        assert not server.requests
        assert load(url, "pictures.example", "127.0.0.1") == b"abc"


def test_the_address_that_was_checked_is_the_one_connected_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name whose address changes after the check."""
    with listening(sized(b"abc")) as (server,):
        other = Listener(sized(b"secret"), "127.0.0.2", server.port)
        names = resolved(monkeypatch, ["127.0.0.1"], ["127.0.0.2"])
        url = f"http://pictures.example:{server.port}/"
        assert load(url, "pictures.example", "127.0.0.1") == b"abc"
        assert names == ["pictures.example"]
        other.close()
        assert not other.requests


PUBLIC = ("8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808")
PRIVATE = (
    *("0.0.0.0", "10.1.2.3", "100.64.0.1", "127.0.0.1", "169.254.169.254", "172.16.0.1"),
    *("192.0.0.1", "192.168.1.1", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255"),
    *("::", "::1", "fc00::1", "fe80::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1"),
    *("64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2002:a00:1::", "2001::80ff:fffe"),
)


@pytest.mark.parametrize("text", [*PUBLIC, *PRIVATE])
def test_which_addresses_are_public(text: str) -> None:
    assert is_public(ip_address(text)) == (text in PUBLIC)


@pytest.mark.parametrize(
    "entry", ["", "http://a.example", "a.example/x", "*.a.example", "a:b", "a:0", "a:99999", "u@a"]
)
def test_a_malformed_host_in_the_list_is_refused(entry: str) -> None:
    with pytest.raises(ConfigError, match="must have names of hosts or addresses"):
        MediaSources(MediaConfig(allowed_media_domains=(entry, "b.example")))


def test_nothing_is_loaded_without_a_list() -> None:
    sources = MediaSources(MediaConfig())
    for value, message in (
        ("http://127.0.0.1/", "loads nothing from the network.*--allowed-media-domains"),
        ("HTTPS://127.0.0.1/", "loads nothing from the network"),
        ("/etc/passwd", "no files are read"),
        ("file:///etc/passwd", "no files are read"),
        (Path("/etc/passwd"), "no files are read"),
        ("ftp://127.0.0.1/", "must be a data URL"),
        ("data:image/png,abc", "must be in base64"),
        ("data:image/png;base64,a", "not valid base64"),
        ("data:image/png;base64,", "has no content"),
    ):
        with pytest.raises(RequestError, match=message):
            sources.load(Given(value))
    assert sources.load(Given("data:image/png;base64,YW\nJj", "low")) == Given(b"abc", "low")
    assert sources.load(Given(b"abc")) == Given(b"abc")


def test_only_files_below_the_directory_are_read(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    for each in (root / "inner", outside):
        each.mkdir(parents=True)
        (each / "a b").write_bytes(b"abc")
    (root / "link").symlink_to(root / "inner" / "a b")
    (root / "escape").symlink_to(outside / "a b")
    (root / "folder").symlink_to(outside)
    os.mkfifo(root / "pipe")
    (tmp_path / "entry").symlink_to(root)
    sources = MediaSources(MediaConfig(allowed_local_media_path=tmp_path / "entry"))
    for path in (
        str(root / "inner" / "a b"),
        Path("inner/a b"),
        f"file://{root}/inner/a%20b",
        str(root / "link"),
        f"{root}/inner/../inner/a b",
    ):
        assert sources.load(Given(path)) == Given(b"abc")
    for path in (
        str(outside / "a b"),
        f"{root}/../outside/a b",
        f"file://{root}/..%2foutside/a%20b",
        str(root / "escape"),
        str(root / "folder" / "a b"),
        str(root / "pipe"),
        str(root / "inner"),
        str(root),
        str(root / "missing"),
        "/etc/passwd",
        f"{root}/inner/a b\0",
    ):
        with pytest.raises(RequestError, match="must be a file in the directory"):
            sources.load(Given(path))
    with pytest.raises(RequestError, match="names a host"):
        sources.load(Given("file://other/x"))
    with pytest.raises(ConfigError, match="must be a directory that exists"):
        MediaSources(MediaConfig(allowed_local_media_path=str(root / "missing")))


async def loaded(sources: Any, *urls: str) -> list[Any]:
    """The pictures of one request, loaded by tasks of a server."""
    inputs: Any = SimpleNamespace(
        pictures=SimpleNamespace(check_number=lambda number: None, sources=sources)
    )
    pictures = AsyncPictures(inputs)
    prompt: Any = {"prompt": "", "multi_modal_data": {"image": list(urls)}}
    try:
        found: Any = await pictures.loaded(prompt)
    finally:
        pictures.close()
    return [each.value for each in found["multi_modal_data"]["image"]]


async def test_pictures_of_a_request_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_pictures, "MOST_LOADED_BYTES", 5)
    sources, url = MediaSources(MediaConfig()), "data:;base64,YWJj"
    assert await loaded(sources, url, url) == [b"abc"] * 2
    with pytest.raises(RequestError, match="more than 5 bytes together"):
        await loaded(sources, *[url] * 8)


async def test_a_resolver_that_hangs_ends_only_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch has no limit of its own for the time in which a name is resolved."""
    is_over = threading.Event()
    monkeypatch.setattr(async_pictures, "SECONDS", 0.1)
    sources = SimpleNamespace(is_slow=lambda given: True, load=lambda given: is_over.wait())
    with pytest.raises(RequestError, match=r"cannot be loaded within 0\.1 s"):
        await loaded(sources, "http://pictures.example/")
    is_over.set()
