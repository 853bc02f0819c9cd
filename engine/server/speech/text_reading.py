"""Parser of answers where thinking and tool calls are between markers, and the rest is text."""

from __future__ import annotations

from engine.server.speech.calls import CallReader
from engine.server.speech.events import Text, Thinking
from engine.server.speech.source import Literals, Steps, TextSource, Waits

MAX_READ_AGAIN = 1 << 16  # characters of one answer that may be rewound
BARE = ("{", "[", "```")  # beginnings of calls without a marker


class TextParser:
    """Parses one answer of any model family except gpt-oss."""

    def __init__(
        self,
        source: TextSource,
        calls: CallReader | None,
        thinking: tuple[str, str] | None,
        *,
        is_thinking: bool,
        thinks_first: bool,
    ) -> None:
        """thinking: the markers that open and close thinking, each as a single character if it is a
        token; ``None`` if the model does not think. is_thinking: the prompt ends inside thinking.
        thinks_first: thinking can begin only at the start of the answer."""
        self._source = source
        self._calls = calls
        self._open, close = thinking or ("", "")
        self._thinks_first = thinks_first
        self.is_thinking = is_thinking
        openers = calls.openers if calls is not None else ()
        bare = BARE if calls is not None and calls.bare != "never" else ()
        self._starts = Literals((self._open, *openers, *bare))
        self._close = Literals((close,))
        self._num_read_again = 0
        self._num_hopeless = 0  # next characters in which no call is searched for any more
        self._is_blank = True  # whether the answer so far is white space
        self._is_line_blank = True  # whether the current line so far is white space

    def run(self) -> Steps[None]:
        while True:
            if self.is_thinking:
                yield from self._think()
            found = yield from self._plain_text()
            if not found:
                return
            if found == self._open:
                yield from self._begin_thinking()
            elif self._calls is not None:
                yield from self._try(self._calls, found)

    def _think(self) -> Steps[None]:
        source = self._source
        while True:
            match = self._close.search(source)
            end = self._close.safe_end(source) if match is None else match.start()
            if end > source.at:
                yield Thinking(source.take(end))
            if match is not None:
                source.at = match.end()
                self.is_thinking = False
                return
            if source.is_ended:
                return
            yield None

    def _plain_text(self) -> Steps[str]:
        """Yield text up to the next marker. Returns the marker, "" at the end of the answer."""
        source = self._source
        while True:
            match = self._starts.search(source)
            end = self._starts.safe_end(source) if match is None else match.start()
            if end > source.at:
                yield self._text(end)
            if match is not None:
                return match[0]
            if source.is_ended:
                return ""
            yield None

    def _begin_thinking(self) -> Steps[None]:
        source = self._source
        if self._thinks_first and not self._is_blank:
            yield self._text(source.at + len(self._open))
            return
        source.at += len(self._open)
        self.is_thinking = True

    def _try(self, calls: CallReader, found: str) -> Steps[None]:
        source = self._source
        if self._num_hopeless or (found in BARE and not self._may_be_bare(calls)):
            yield self._text(source.at + len(found))
            return
        source.hold()
        if not (yield from calls.attempt()):
            self._give_back()
            yield self._text(source.at + 1)
            return
        source.mark = None
        self._is_blank, self._is_line_blank = False, True
        yield from self._after_calls(calls)

    def _give_back(self) -> None:
        """Rewind to the start of a call that could not be parsed. To limit the time, the text is no
        longer searched for calls once ``MAX_READ_AGAIN`` characters have been rewound."""
        num = self._source.give_back()
        self._num_read_again += num
        if self._num_read_again > MAX_READ_AGAIN:
            self._num_hopeless = num

    def _may_be_bare(self, calls: CallReader) -> bool:
        return self._is_line_blank if calls.bare == "line" else self._is_blank

    def _after_calls(self, calls: CallReader) -> Steps[None]:
        """After a call, drop closing markers and parse calls that lack an opening marker."""
        source = self._source
        while True:
            source.hold()
            yield from source.skip_space()
            found = yield from source.accept(*calls.closers, *calls.trailing)
            if found or (yield from self._is_last(calls.openers)):
                source.mark = None
                continue
            source.give_back()
            source.hold()
            if not (yield from calls.following()):
                source.give_back()
                return
            source.mark = None

    def _is_last(self, openers: tuple[str, ...]) -> Waits[bool]:
        """Skip an opening marker that ends the answer, as models write it by mistake for a closing
        one. Returns False if there is none, or if the answer is incomplete."""
        source = self._source
        opener = yield from source.standing(0, openers)
        if not opener or (yield from source.look(len(opener)))[0] or not source.is_ended:
            return False
        source.at = len(source.text)
        return not source.is_cut

    def _text(self, end: int) -> Text:
        text = self._source.take(end)
        if self._num_hopeless:
            self._num_hopeless = max(0, self._num_hopeless - len(text))
        line = text.rpartition("\n")[2]
        blank = not line.strip()
        self._is_line_blank = blank and (self._is_line_blank or len(line) < len(text))
        self._is_blank = self._is_blank and blank and not text.strip()
        return Text(text)
