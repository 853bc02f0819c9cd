"""Loads pictures: from data URLs, and from hosts and files that the operator allows."""

from __future__ import annotations

import os
import re
import stat
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from engine.config.media import KIND, MediaConfig
from engine.errors import ConfigError, RequestError
from engine.pictures.addresses import PORTS, AllowedHosts
from engine.pictures.errors import refused
from engine.pictures.fetching import fetch

MAX_BYTES = 64 << 20  # of a file
DATA_URL = re.compile(r"data:[\w.+/-]*(;[\w.+=-]*)*?;base64,", re.ASCII | re.IGNORECASE)
LONGEST_SCHEME = 200  # characters before the content of a data URL
PIECE = 4 << 18  # characters of base64
DETAILS = ("auto", "low", "high", "original")


class Given(NamedTuple):
    """A picture as a request has it: the bytes of a file, a PIL image, a URL or a path; with the
    ``detail`` of OpenAI's API, one of ``DETAILS``."""

    value: object
    detail: str = DETAILS[0]


class PictureLimits(NamedTuple):
    """Which pictures a server takes: formats, bytes of a file, pixels, and pictures of a prompt;
    ``None``: any number."""

    formats: tuple[str, ...]
    most_bytes: int
    most_pixels: int
    most_pictures: int | None


class MediaSources:
    """Loads the files of pictures. Thread-safe."""

    def __init__(self, options: MediaConfig) -> None:
        """Raises ``ConfigError`` for a malformed host, or a path that is no directory."""
        self._hosts: AllowedHosts | None = None
        if options.allowed_media_domains:
            self._hosts = AllowedHosts(options.allowed_media_domains)
        self._root: Path | None = None
        if options.allowed_local_media_path:
            self._root = _directory(options.allowed_local_media_path)

    def load(self, given: Given) -> Given:
        """The picture with its content in place of a URL or path. Blocks while it loads. Raises
        ``RequestError`` if the source is not allowed, or does not give it within the limits."""
        value = os.fspath(given.value) if isinstance(given.value, Path) else given.value
        if not isinstance(value, str):
            return given
        scheme = value[:LONGEST_SCHEME].partition(":")[0].lower()
        if scheme == "data":
            return given._replace(value=_from_data_url(value))
        if scheme in PORTS:
            return given._replace(value=self._from_host(value))
        if scheme == "file":
            return given._replace(value=self._from_file(_path_in(value)))
        if isinstance(given.value, Path) or value.startswith("/"):
            return given._replace(value=self._from_file(value))
        raise refused(
            f"a picture's URL is {value[:80]!r}, must be a data URL in base64 "
            '("data:image/png;base64,..."), or begin with http://, https:// or / (a path)'
        )

    def is_slow(self, given: Given) -> bool:
        """Whether loading the picture may wait for another machine."""
        value = given.value
        return isinstance(value, str) and value[:6].partition(":")[0].lower() in PORTS

    def _from_host(self, url: str) -> bytes:
        if self._hosts is None:
            raise refused(
                f"a picture's URL is {url[:80]!r}, and this server loads nothing from the network: "
                "send the picture as a data URL, or start the server with --allowed-media-domains"
            )
        return fetch(url, self._hosts, MAX_BYTES)

    def _from_file(self, path: str) -> bytes:
        if self._root is None:
            raise refused(
                f"a picture is at the path {path[:80]!r}, and no files are read: send its "
                "content, or set allowed_local_media_path to a directory"
            )
        try:
            return _read_within(self._root, path)
        except (OSError, ValueError) as error:
            if isinstance(error, RequestError):
                raise
            # The same for files outside and missing ones, so that nobody learns which exist.
            raise refused(
                f"a picture at {path[:80]!r} cannot be read: it must be a file in the directory "
                "of allowed_local_media_path"
            ) from error


def pictures_in(data: object) -> list[Given]:
    """The pictures in ``multi_modal_data``. Raises ``RequestError`` if it has others."""
    if not isinstance(data, Mapping) or set(data) - {KIND}:
        shown = sorted(map(str, data)) if isinstance(data, Mapping) else type(data).__name__
        raise refused(
            f'multi_modal_data has {shown}, must be {{"image": ...}}: a picture or a list of '
            "pictures; this model reads no other media"
        )
    value = data.get(KIND, [])
    is_one = isinstance(value, Given) or not isinstance(value, list | tuple)
    values: list[Any] = [value] if is_one else list(value)
    return [each if isinstance(each, Given) else Given(each) for each in values]


def _from_data_url(url: str) -> bytes:
    head = DATA_URL.match(url[:LONGEST_SCHEME])
    if head is None:
        raise refused(
            f"a picture's data URL begins with {url[:40]!r}, must be in base64: "
            '"data:image/png;base64,..."'
        )
    content = url[head.end() :]
    if any(char in content for char in " \n\r\t"):  # encoders break lines
        content = "".join(content.split())
    if len(content) > MAX_BYTES // 3 * 4:
        raise refused(
            f"a picture's data URL has {len(content)} characters, the limit is "
            f"{MAX_BYTES // 3 * 4}: shrink the picture"
        )
    if not content:
        raise refused("a picture's data URL has no content: add the bytes of a file in base64")
    try:
        # In pieces, between which other threads run.
        return b"".join(
            b64decode(content[begin : begin + PIECE], validate=True)
            for begin in range(0, len(content), PIECE)
        )
    except (Base64Error, ValueError) as error:
        raise refused(
            f"a picture's data URL is not valid base64 ({error}): encode the bytes of a file"
        ) from error


def _path_in(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise refused(f"a picture's URL {url[:80]!r} is malformed ({error}): correct it") from error
    if parts.netloc not in ("", "localhost"):
        raise refused(
            f"a picture's URL {url[:80]!r} names a host, must be file:///PATH: correct it"
        )
    return unquote(parts.path)


def _directory(text: str | Path) -> Path:
    with suppress(OSError):
        path = Path(text).resolve(strict=True)
        if path.is_dir():
            return path
    raise ConfigError(
        f"allowed_local_media_path is {str(text)!r:.200}, must be a directory that exists: "
        "create it, or leave the option out"
    )


def _read_within(root: Path, path: str) -> bytes:
    """The content of a file below ``root``. Raises ``OSError`` or ``ValueError`` for others.

    Links are followed while the path is checked and not while it is opened, so that a link that is
    changed meanwhile leads nowhere."""
    *folders, name = Path(root, path).resolve(strict=True).relative_to(root).parts
    at = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for folder in folders:
            inner = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = inner
        # Without O_NONBLOCK a pipe would be waited for.
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at)
    finally:
        os.close(at)
    with os.fdopen(file, "rb") as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise ValueError("not a file")
        content = opened.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise refused(
            f"a picture at {path[:80]!r} has more than {MAX_BYTES} bytes, the limit: shrink it"
        )
    return content
