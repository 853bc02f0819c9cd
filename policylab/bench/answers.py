"""Reads the answer to a request as it arrives: HTTP/1.1 with a stream of server-sent events."""

from __future__ import annotations

from typing import Any

import msgspec

DATA, DONE = b"data:", b"[DONE]"
MAX_HEAD_BYTES = 1 << 16


class Delta(msgspec.Struct):
    """What a chunk of a chat adds to the answer."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None

    @property
    def text(self) -> str:
        return self.content or self.reasoning_content or self.reasoning or ""


class Choice(msgspec.Struct):
    """A choice of a chunk; ``text`` in completions, ``delta`` in chats."""

    text: str | None = None
    delta: Delta | None = None


class Cached(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: Cached | None = None


class Chunk(msgspec.Struct):
    """The data of one event."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: msgspec.Raw = msgspec.Raw()

    @property
    def added(self) -> str | None:
        """The text that it adds; ``None`` if it has no token, like the first chunk of a chat, which
        only names the role."""
        for choice in self.choices:
            if choice.text is not None:
                return choice.text
            if choice.delta is not None and (choice.delta.text or choice.delta.tool_calls):
                return choice.delta.text
        return None


read_chunk = msgspec.json.Decoder(Chunk).decode


class UnreadableAnswer(ValueError):
    """The answer does not follow the protocol."""


class Answer:
    """One answer, read in parts of any size."""

    __slots__ = (
        "_left", "_line", "_rest", "_until", "body", "closes", "is_complete", "is_done",
        "retry_after", "status",
    )  # fmt: skip

    def __init__(self) -> None:
        self.status = 0
        """The HTTP status; 0 before the head is complete."""
        self.retry_after = 0.0
        """Seconds after which a refused request may be sent again, as the server says; else 0."""
        self.closes = False
        """Whether the server closes the connection after this answer."""
        self.is_complete = False
        self.is_done = False
        """Whether ``[DONE]`` has come, which ends a stream of events."""
        self.body = b""
        """What came if the answer is not a stream of events, its head first."""
        self._rest = b""  # an incomplete line of HTTP
        self._line = b""  # an incomplete line of an event
        self._left = 0  # bytes of the body, or of the chunk, that are still to come
        self._until = self._read_head

    def feed(self, data: bytes) -> list[bytes]:
        """Read what has arrived and return the data of each complete event.

        Raises ``UnreadableAnswer``.
        """
        text = self._until(data)
        if not text:
            return []
        if self.body:
            self.body += text
            return []
        lines = (self._line + text).split(b"\n")
        self._line = lines.pop()
        events = [_data_of(line) for line in lines if line.startswith(DATA)]
        self.is_done = self.is_done or DONE in events
        return events

    def end(self) -> None:
        """Report that the connection is closed, which completes an answer without a length."""
        if self._until == self._all:
            self.is_complete = True
            self.is_done = self.is_done or _data_of(self._line) == DONE

    def _read_head(self, data: bytes) -> bytes:
        head, blank, rest = (self._rest + data).partition(b"\r\n\r\n")
        if not blank:
            self._rest = head
            if len(head) > MAX_HEAD_BYTES:
                raise UnreadableAnswer("the head of an answer has no end")
            return b""
        self._rest = b""
        first, *lines = head.split(b"\r\n")
        parts = first.split(b" ", 2)
        if not first.startswith(b"HTTP/1.") or len(parts) < 2 or not parts[1].isdigit():
            raise UnreadableAnswer(f"the answer begins with {first[:40]!r}, not with HTTP/1.1")
        if parts[1].startswith(b"1"):  # 100 Continue and the like; the answer follows
            return self._read_head(rest)
        self.status = int(parts[1])
        fields = {
            name.strip().lower(): value.strip().lower()
            for name, _, value in (line.partition(b":") for line in lines)
        }
        after = fields.get(b"retry-after", b"")
        self.retry_after = float(after) if after.isdigit() else 0.0  # no date
        self.closes = b"close" in fields.get(b"connection", b"") or first.startswith(b"HTTP/1.0")
        if self.status != 200 or b"event-stream" not in fields.get(b"content-type", b""):
            self.body = head + b"\r\n\r\n"
        if b"chunked" in fields.get(b"transfer-encoding", b""):
            self._until = self._chunks
        elif fields.get(b"content-length", b"").isdigit():
            self._until, self._left = self._counted, int(fields[b"content-length"])
            self.is_complete = not self._left
        else:
            self._until, self.closes = self._all, True
        return self._until(rest)

    def _all(self, data: bytes) -> bytes:
        return data

    def _counted(self, data: bytes) -> bytes:
        self._left -= len(data)
        self.is_complete = self._left <= 0
        return data

    def _chunks(self, data: bytes) -> bytes:
        """The contents of chunks. A size is a line; an empty line follows each chunk."""
        if self._rest:
            data, self._rest = self._rest + data, b""
        parts, at, end = [], 0, len(data)
        while at < end:
            if self._left:
                part = data[at : at + self._left]
                parts.append(part)
                at += len(part)
                self._left -= len(part)
                continue
            line_end = data.find(b"\r\n", at)
            if line_end < 0:
                self._rest = data[at:]
                break
            line, at = data[at:line_end], line_end + 2
            if line:
                self._begin(line)
                if not self._left:  # the last chunk, maybe with fields after it
                    self._until = self._trailer
                    self._trailer(data[at:])
                    break
        return b"".join(parts) if len(parts) != 1 else parts[0]

    def _begin(self, line: bytes) -> None:
        try:
            self._left = int(line.partition(b";")[0], 16)
            if self._left < 0:
                raise ValueError
        except ValueError:
            raise UnreadableAnswer(f"a chunk has the size {line[:40]!r}") from None

    def _trailer(self, data: bytes) -> bytes:
        self._rest += data
        self.is_complete = self._rest.startswith(b"\r\n") or b"\r\n\r\n" in self._rest
        return b""


def _data_of(line: bytes) -> bytes:
    return line.removeprefix(DATA).strip()
