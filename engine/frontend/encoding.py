"""Texts of prompts to token ids: at once, many together, or ahead, in a thread or a text process.

An invalid text raises when its ids are asked for, even if it was begun ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from engine.errors import RequestError, RequestTypeError, WireError
from engine.frontend.rendering import Prompt
from engine.frontend.text_workers import TextPool
from engine.messages.params import SamplingParams
from engine.text.tokenizer import Tokenizer

USUAL_CHARS = 16  # characters of a token, hardly more in any text
INLINE_CHARS = 500  # below it, tokenising takes less time than starting it in another thread
TOGETHER_CHARS = 1 << 20  # of texts that are tokenised in one go, which no interrupt ends
NUM_THREADS = 4  # texts that are tokenised at once

Ahead = Future[list[int]] | None
"""Ids of a text that was begun; ``None`` if it was not."""


class PromptEncoder:
    """Tokenises prompts; refuses those without a tokenizer, and those that are surely too long."""

    def __init__(
        self, tokenizer: Tokenizer | None, pool: TextPool | None, max_model_len: int
    ) -> None:
        self._tokenizer = tokenizer
        self._pool = pool
        self._max_model_len = max_model_len
        self._threads = ThreadPoolExecutor(NUM_THREADS, "tokenizer")

    def ahead(self, prompt: Prompt, params: SamplingParams | None) -> Ahead:
        """Begin a prompt in a process or a thread, if it is a text that takes a while.

        Raises ``EngineDeadError``.
        """
        text = self._text_of(prompt, params)
        if text is None or self._tokenizer is None:
            return None
        if self._pool is None and len(text) > INLINE_CHARS:
            with suppress(RuntimeError):  # closed meanwhile, which is said elsewhere
                return self._threads.submit(self._tokenizer.encode, text)
        return self._begin(text)

    def all_ahead(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[Ahead]:
        """Many prompts: tokenised together, or all begun in text processes."""
        asked = list(zip(prompts, params, strict=True))
        if self._pool is not None:
            return [self.ahead(*each) for each in asked]
        ahead: list[Ahead] = [None] * len(asked)
        texts: dict[int, str] = {}
        num_chars = 0
        for place, each in enumerate(asked):
            if (text := self._text_of(*each)) is not None:
                texts[place] = text
                num_chars += len(text)
            if num_chars >= TOGETHER_CHARS:
                self._encode_together(texts, ahead)
                texts, num_chars = {}, 0
        self._encode_together(texts, ahead)
        return ahead

    def encode(self, text: str, is_cut: bool, ahead: Ahead) -> list[int]:
        """Ids of a text. Raises ``RequestError`` for one that has none, or too many unless it
        ``is_cut`` to length."""
        if self._tokenizer is None:
            raise RequestError(
                "the engine has no tokenizer (skip_tokenizer_init): pass token ids, as "
                '{"prompt_token_ids": [...]}'
            )
        if not isinstance(text, str):
            raise RequestTypeError(f"prompt must be a str, got {type(text).__name__}")
        fewest, limit = self._fewest_tokens(text), self._max_model_len
        if fewest >= limit and not is_cut:
            raise too_long(f"{len(text)} characters, at least {fewest}", limit)
        begun = self._begin(text) if ahead is None else ahead
        if begun is not None:
            with suppress(WireError):  # too long to travel: it is refused here soon enough
                return begun.result()
        return self._tokenizer.encode(text)

    def close(self) -> None:
        """Begin nothing more in threads; harmless when repeated."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _text_of(self, prompt: Prompt, params: SamplingParams | None) -> str | None:
        """The text of a prompt, unless it has its ids or is too long to be tokenised at all."""
        text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
        has_ids = isinstance(prompt, dict) and prompt.get("prompt_token_ids") is not None
        if has_ids or not isinstance(text, str):
            return None
        is_cut = getattr(params, "truncate_prompt_tokens", None) is not None
        return text if is_cut or self._fewest_tokens(text) < self._max_model_len else None

    def _encode_together(self, texts: dict[int, str], ahead: list[Ahead]) -> None:
        """Tokenise all into ``ahead``; none if one is invalid, which ``encode`` then names."""
        if self._tokenizer is None or not texts:
            return
        try:
            encoded = self._tokenizer.encode_all(list(texts.values()))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # the library raises plain Exception, or worse
            return
        for place, token_ids in zip(texts, encoded, strict=True):
            done: Future[list[int]] = Future()
            done.set_result(token_ids)
            ahead[place] = done

    def _begin(self, text: str) -> Ahead:
        """In a text process, if there are any."""
        try:
            return None if self._pool is None else self._pool.encode(text)
        except UnicodeError:
            return None

    def _fewest_tokens(self, text: str) -> int:
        """A lower bound of a text's tokens, without tokenising it; 0 for a text of usual length."""
        if self._tokenizer is None or len(text) < self._max_model_len * USUAL_CHARS:
            return 0
        most_chars = self._tokenizer.max_chars_per_token
        return 0 if most_chars is None else -(-len(text) // most_chars)


def too_long(num_tokens: str, limit: int) -> RequestError:
    """The error for a prompt that leaves no room for output."""
    return RequestError(
        f"the prompt has {num_tokens} tokens, but max_model_len is {limit}, prompt and at least "
        "one output token together; shorten the prompt, have it shortened by "
        "truncate_prompt_tokens=-1, or raise max_model_len"
    )
