"""Text of a growing sequence, a few microseconds a token; stop strings in it."""

from __future__ import annotations

from typing import NamedTuple

from engine.text.backends import REPLACEMENT, Backend

CONTEXT_LENGTHS = (8, 64)  # ids of the prompt that give the first output ids their context
MAX_DANGLING = 4  # a character has at most four bytes


class Detokenizer:
    """Incremental text of one sequence behind its prompt.

    The pieces joined are the decoded output in the context of the prompt: a word behind the prompt
    keeps its space, a character begun in the prompt appears whole. Half a character is withheld
    until it is resolved or ``flush`` says that nothing follows.
    """

    def __init__(
        self, backend: Backend, prompt_token_ids: list[int], skip_special_tokens: bool
    ) -> None:
        self._backend = backend
        self._skip = skip_special_tokens
        context = split_context(backend, prompt_token_ids, skip_special_tokens)
        self._context, self._pending = context
        self._step = backend.stream(self._context, skip_special_tokens)
        if self._pending:
            self._step(list(self._pending))

    def feed(self, token_ids: list[int]) -> str:
        """The text these next ids complete, often none."""
        if not token_ids:
            return ""
        try:
            text = self._step(token_ids)
        except Exception:  # the library names no type for "text given out has changed"
            return self._restart(token_ids)
        if text is None:
            self._pending += token_ids
            return ""
        self._context = [*self._pending, *token_ids] if self._pending else token_ids
        self._pending = []
        return text

    def flush(self) -> str:
        """What is withheld, with U+FFFD for incomplete bytes. Nothing may be fed after it."""
        if not self._pending:
            return ""
        before = self._decode(self._context)
        text = self._decode(self._context + self._pending)
        return text[len(before) :] if text.startswith(before) else self._decode(self._pending)

    def _restart(self, token_ids: list[int]) -> str:
        """Text that is out would change (its bytes turned out to be no text): go on behind it."""
        self._pending += token_ids
        text = self.flush()
        context = self._pending
        if self._decode(context).endswith(REPLACEMENT):
            context = []
        self._context, self._pending = context, []
        self._step = self._backend.stream(context, self._skip)
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, self._skip)


class Context(NamedTuple):
    """The end of a prompt: ids whose text is complete, and ids that begin a character."""

    complete: list[int]
    dangling: list[int]


def split_context(
    backend: Backend, prompt_token_ids: list[int], skip_special_tokens: bool
) -> Context:
    length = len(prompt_token_ids)
    for size in (*CONTEXT_LENGTHS, length):
        tail = prompt_token_ids[max(0, length - size) :]
        text = backend.decode(tail, skip_special_tokens)
        if text:
            break  # special tokens alone give no context
    if not text.endswith(REPLACEMENT):
        return Context(tail, [])
    for cut in range(1, min(MAX_DANGLING, len(tail)) + 1):
        if not backend.decode(tail[:-cut], skip_special_tokens).endswith(REPLACEMENT):
            return Context(tail[:-cut], tail[-cut:])
    return Context([], [])


class StopMatch(NamedTuple):
    """A stop string in the text, and the length the text keeps."""

    string: str
    keep: int


class StopStrings:
    """Looks for stop strings in text that grows."""

    def __init__(self, strings: list[str], include_in_output: bool) -> None:
        self._strings = strings
        self._include = include_in_output
        # What may turn out to be the beginning of a stop string is not shown yet.
        self.num_held_back = 0 if include_in_output else max(map(len, strings)) - 1

    def find(self, text: str, num_new: int) -> StopMatch | None:
        """The first match that ends in the last ``num_new`` characters of ``text``."""
        best: tuple[int, str] | None = None
        for string in self._strings:
            at = text.find(string, max(0, len(text) - num_new - len(string) + 1))
            if at >= 0 and (best is None or at < best[0]):
                best = at, string
        if best is None:
            return None
        at, string = best
        return StopMatch(string, at + len(string) if self._include else at)
