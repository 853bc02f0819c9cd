"""Suffix drafts: tokens that followed the same context before, in this or in ended requests.

Source: SuffixDecoding (Oliaro et al. 2024). The context is the longest suffix of the text, drafts
included, that occurred before; a draft is the token that most often followed it. Each running
request has a tree (``context_tree``) over its prompt and output, and another tree has the outputs
of ended requests. Of the two trees, the one whose drafts are more likely to be right is used.
Drafts are deterministic."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.config.speculative import MAX_DRAFTS
from engine.sched.request import Request
from engine.spec import context_tree

SHARED_TOKENS = 1 << 20  # most tokens of ended requests
SMALLEST = 256  # initial capacity of a request's tree, in tokens
NO_ROOT = 0

# Most tokens added per call, so that a long text delays no step much (1.3 us each): of the
# request itself, and of ended requests (in addition to twice the number of new tokens).
OWN_PIECE, SHARED_PIECE = 2048, 64
STRIDE = 64  # tokens that are written into the ring or removed at a time


class SuffixProposer:
    """Proposes tokens that often followed the same context of up to ``max_depth`` tokens.

    The number of drafts is at most ``max_factor`` times the length of the context found, but at
    least one; drafts stop where the product of their relative frequencies falls below
    ``min_probability``. Contexts are looked up in the request itself and in the outputs of the last
    ``max_requests`` ended requests with the same cache salt, up to ``num_shared`` tokens (a power
    of two).

    The cost of a step depends on its new tokens, not on the length of the texts. A tree takes 164
    bytes per token of its capacity. A request's tree has a capacity of at least 256 tokens, which
    is doubled when it is full (5 ms for 32,768 tokens); so it usually takes at most 328 bytes per
    token of the text, 410 for random bits. The tree of ended requests has a capacity of
    ``num_shared`` tokens."""

    def __init__(
        self,
        max_depth: int,
        max_requests: int,
        max_factor: float,
        min_probability: float,
        *,
        num_shared: int = SHARED_TOKENS,
    ) -> None:
        self._max_depth = max_depth
        self._limits = np.array([max_factor, min_probability], dtype=np.float64)
        self._texts: dict[int, OwnText] = {}  # by arrival number of the request
        self._ended = EndedTexts(max_depth, max_requests, num_shared) if max_requests else None
        self._query = np.empty(0, dtype=np.int32)

    def propose(self, req: Request, num_tokens: int) -> Sequence[int]:
        """Return the tokens that most often followed the longest suffix of the request's tokens
        that occurred before; [] without such a suffix."""
        tokens, ended, depth = req.tokens, self._ended, self._max_depth
        own = self._texts.get(req.arrival)
        if own is None:
            own = self._texts[req.arrival] = OwnText(len(tokens), depth)
        num_new = own.follow(tokens)
        roots, other = (own.root, NO_ROOT), own.tree
        if ended is not None:
            ended.work(SHARED_PIECE + 2 * min(num_new, MAX_DRAFTS + 1))
            roots, other = (own.root, ended.root_of(req.cache_salt)), ended.tree
        if len(self._query) < depth + num_tokens:
            self._query = np.empty(depth + num_tokens, dtype=np.int32)
        query, known = self._query, min(depth, len(tokens))
        query[:known] = tokens[len(tokens) - known :]
        num = context_tree.draft(own.tree, other, roots, query, known, num_tokens, self._limits)
        drafts: list[int] = query[known : known + num].tolist()
        return drafts

    def release(self, req: Request) -> None:
        """Drop the tree of an ended request, and add its output to the tree of ended requests."""
        self._texts.pop(req.arrival, None)
        if self._ended is not None and len(req.tokens) > req.num_prompt:
            self._ended.add(req)
            self._ended.work(SHARED_PIECE)


class OwnText:
    """The tree over the prompt and output of one running request."""

    def __init__(self, num_tokens: int, depth: int) -> None:
        self.tree = context_tree.make(room_for(max(num_tokens, SMALLEST)), depth)
        self.root = context_tree.change_roots(self.tree, NO_ROOT)
        self._num_entered = 0

    def follow(self, tokens: array[int]) -> int:
        """Add new tokens to the tree, at most ``OWN_PIECE`` per call. Returns the number added."""
        first = self._num_entered
        end = min(len(tokens), first + OWN_PIECE)
        while end > self.tree[context_tree.LENGTH]:
            self.tree = context_tree.grown(self.tree)
        context_tree.text_of(self.tree)[first:end] = tokens[first:end]
        at = first
        while (at := context_tree.enter(self.tree, (self.root, 0, at, end), True)) < end:
            self.tree = context_tree.grown(self.tree)
        self._num_entered = end
        return end - first


@dataclass(slots=True)
class EndedText:
    """The output of an ended request, after the end of its prompt, with the numbers of tokens
    already written to the ring buffer (``num_placed``) and to the tree (``num_entered``)."""

    salt: str | None
    tokens: array[int]  # end of the prompt, and the output, until all of it is in the ring
    num_tokens: int
    num_prompt: int
    begin: int = -1
    num_placed: int = 0
    num_entered: int = 0


class EndedTexts:
    """A tree over the outputs of ended requests, which drops the oldest outputs when it is full.

    ``work`` adds and drops outputs, a few tokens at a time, in the order in which the requests
    ended. Each cache salt has a separate root."""

    def __init__(self, depth: int, max_requests: int, num_tokens: int) -> None:
        self._depth = depth
        self._max_requests = max_requests
        self._num_tokens = max(num_tokens, room_for(4 * (depth + STRIDE)))
        self.tree = context_tree.make(self._num_tokens, depth)
        self._roots: dict[str | None, tuple[int, int]] = {}  # root and number of texts
        self._held: deque[EndedText] = deque()  # texts in the tree, the last one perhaps in part
        self._waiting: deque[EndedText] = deque()  # texts to add; the first may be in _held, too
        self._oldest = self._next = 0  # range of indices in the ring

    def root_of(self, salt: str | None) -> int:
        """The root in the tree for texts with this cache salt; 0 if there is none."""
        return self._roots.get(salt, (NO_ROOT, 0))[0]

    def add(self, req: Request) -> None:
        """Queue the output of an ended request; if too many wait, the oldest is dropped."""
        begin = max(0, req.num_prompt - self._depth)
        tokens = req.tokens[begin:]
        self._waiting.append(EndedText(req.cache_salt, tokens, len(tokens), req.num_prompt - begin))
        if len(self._waiting) > self._max_requests + 1:
            del self._waiting[1]  # the first may be partly in the tree

    def work(self, num_tokens: int) -> None:
        """Add queued outputs to the tree, and drop the oldest outputs if they take the space. About
        ``num_tokens`` tokens are added or dropped in all."""
        while self._waiting and num_tokens > 0:
            text = self._waiting[0]
            if text.begin < 0 and not self._begin(text):
                num_tokens -= self._forget()
                continue
            if text.num_placed < text.num_tokens and not self._place(text):
                num_tokens -= self._forget()
                continue
            first = text.begin + max(text.num_entered, text.num_prompt)
            end = text.begin + text.num_placed
            reached = self._enter(text, first, end, True) if end > first else end
            text.num_entered = reached - text.begin
            num_tokens -= max(reached - first, 1)
            if reached < end:
                num_tokens -= self._forget()
            elif end == text.begin + text.num_tokens:
                text.tokens = array("i")
                self._waiting.popleft()

    def _begin(self, text: EndedText) -> bool:
        """Prepare to add the text of an ended request: assign it a root of the tree. Returns False
        if there is no room for another text."""
        if len(self._held) >= self._max_requests:
            return False
        root, num_texts = self._roots.get(text.salt, (NO_ROOT, 0))
        root = root or context_tree.change_roots(self.tree, NO_ROOT)
        if not root:
            return False
        self._roots[text.salt] = root, num_texts + 1
        text.begin = self._next
        self._held.append(text)
        return True

    def _place(self, text: EndedText) -> bool:
        """Write the text's next tokens into the ring buffer. Returns False if it is full."""
        tokens = text.tokens[text.num_placed : text.num_placed + STRIDE]
        if self._next + len(tokens) - self._oldest > self._num_tokens - self._depth:
            return False
        at = self._next % self._num_tokens
        ring, num_before_end = context_tree.text_of(self.tree), self._num_tokens - at
        ring[at : at + len(tokens)] = tokens[:num_before_end]
        ring[: max(0, len(tokens) - num_before_end)] = tokens[num_before_end:]
        text.num_placed += len(tokens)
        self._next += len(tokens)
        return True

    def _forget(self) -> int:
        """Drop some tokens of the oldest text from the tree; returns how many (1 for none)."""
        text, first = self._held[0], self._oldest
        self._oldest = end = max(first, min(first + STRIDE, text.begin + text.num_entered))
        first = max(first, text.begin + text.num_prompt)
        size = max(end - first, 1)
        if first < end:
            self._enter(text, first, end, False)
        if end == text.begin + text.num_tokens:
            self._held.popleft()
            root, num_texts = self._roots.pop(text.salt)
            if num_texts > 1:
                self._roots[text.salt] = root, num_texts - 1
            else:
                context_tree.change_roots(self.tree, root)
        return size

    def _enter(self, text: EndedText, first: int, end: int, is_new: bool) -> int:
        root = self._roots[text.salt][0]
        reached: int = context_tree.enter(self.tree, (root, text.begin, first, end), is_new)
        return reached


def room_for(num_tokens: int) -> int:
    """The smallest power of two that is at least ``num_tokens``."""
    return 1 << (num_tokens - 1).bit_length()
