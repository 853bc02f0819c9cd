"""Tokenises the texts of prompts, in this thread, other threads or text processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypedDict, TypeVar

from engine.errors import PromptTooLongError, RequestError, RequestTypeError, WireError
from engine.frontend.text_workers import TextPool
from engine.messages.params import SamplingParams
from engine.messages.pooling import PoolingParams
from engine.text.tokenizer import Tokenizer

T = TypeVar("T")
USUAL_CHARS = 16  # characters per token that texts hardly exceed
INLINE_CHARS = 500  # shorter texts are tokenised faster than a thread starts
INLINE_PROMPTS = 16  # likewise, for checking them
BATCH_CHARS = 1 << 20  # characters per tokeniser call, which cannot be interrupted
NUM_THREADS = 4  # tokenising threads
StartedIds = Future[list[int]] | None
"""Token ids of a prompt whose tokenising was started early; ``None`` if it was not."""


class TextPrompt(TypedDict, total=False):
    """A prompt with options, as text or token ids. If both are given, the token ids are used and
    the text is only shown in outputs."""

    prompt: str
    prompt_token_ids: list[int]
    cache_salt: str
    multi_modal_data: dict[str, Any]
    """``{"image": ...}``: a picture or several, for the prompt's image tokens in order. A picture
    is a PIL image, the bytes of a BMP, GIF, JPEG, PNG or WebP file, a data URL, or a URL or path
    that ``allowed_media_domains`` or ``allowed_local_media_path`` allows."""


Params = SamplingParams | PoolingParams
PROMPT_KEYS = frozenset(TextPrompt.__annotations__)


Prompt = str | list[int] | TextPrompt


class PromptEncoder:
    """Tokenises prompts, in this thread, other threads or text processes. A text that is certainly
    too long is refused without tokenising it."""

    def __init__(
        self, tokenizer: Tokenizer | None, pool: TextPool | None, max_model_len: int
    ) -> None:
        self._tokenizer = tokenizer
        self._pool = pool
        self._max_model_len = max_model_len
        self._threads = ThreadPoolExecutor(NUM_THREADS, "tokenizer")

    def prepare(self) -> None:
        """Start to scan the vocabulary in a thread: the first long prompt needs the result."""
        if self._tokenizer is not None:
            self._threads.submit(getattr, self._tokenizer, "max_chars_per_token")

    def start(self, prompt: Prompt, params: Params | None) -> StartedIds:
        """Start tokenising a prompt's text in a text process or a thread. Returns ``None`` if
        nothing was started: the prompt has token ids, or its text is short.

        Raises ``EngineDeadError`` if the text processes were shut down."""
        text = self._text_of(prompt, params)
        if text is None or self._tokenizer is None:
            return None
        if self._pool is None and len(text) > INLINE_CHARS:
            with suppress(RuntimeError):  # the engine was closed, which is reported elsewhere
                return self._threads.submit(self._tokenizer.encode, text)
        return self._begin(text)

    def start_all(self, prompts: Sequence[Prompt], params: Sequence[Params]) -> list[StartedIds]:
        """Start tokenising many prompts in text processes, or tokenise them here in batches.
        Returns one entry per prompt, to be passed to ``encode`` as ``started``."""
        requested = list(zip(prompts, params, strict=True))
        if self._pool is not None:
            return [self.start(*each) for each in requested]
        started: list[StartedIds] = [None] * len(requested)
        texts: dict[int, str] = {}
        num_chars = 0
        for place, each in enumerate(requested):
            if (text := self._text_of(*each)) is not None:
                texts[place] = text
                num_chars += len(text)
            if num_chars >= BATCH_CHARS:
                self._encode_together(texts, started)
                texts, num_chars = {}, 0
        self._encode_together(texts, started)
        return started

    def encode(self, text: str, most: int | None, started: StartedIds) -> list[int]:
        """Tokenise a text. Raises ``RequestError`` if that fails, or if the text certainly has over
        ``most`` tokens; ``None``: the request allows truncation, so a long text is no error.

        ``started``: what ``start`` returned for this text; unless ``None``, its result is
        returned."""
        if self._tokenizer is None:
            raise RequestError(
                "the engine has no tokenizer (skip_tokenizer_init): pass token ids as "
                '{"prompt_token_ids": [...]}',
                param="prompt",
            )
        if not isinstance(text, str):
            message = f"prompt must be a str, got {type(text).__name__}"
            raise RequestTypeError(message, param="prompt")
        fewest = self._fewest_tokens(text)
        if most is not None and fewest > most:
            limit, before = self._max_model_len, f"{len(text)} characters, "
            raise too_long(f"at least {fewest} tokens", limit, limit - most, before)
        ids = self._begin(text) if started is None else started
        if ids is not None:
            with suppress(WireError):  # too long for a message: it is tokenised here
                return ids.result()
        return self._tokenizer.encode(text)

    def takes_long(self, prompts: Sequence[Prompt]) -> bool:
        """Whether preparing these prompts should not block other tasks."""
        if len(prompts) > INLINE_PROMPTS or any(map(has_media, prompts)):
            return True
        texts = [each.get("prompt") if isinstance(each, dict) else each for each in prompts]
        num_chars = sum(len(each) for each in texts if isinstance(each, str))
        return num_chars > (INLINE_CHARS if self._pool is None else 0)  # the pool is waited for

    def elsewhere(self, function: Callable[..., T], *args: Any) -> Awaitable[T]:
        """Run a function in one of the tokenising threads."""
        return asyncio.get_running_loop().run_in_executor(self._threads, partial(function, *args))

    def close(self) -> None:
        """Shut the threads down. A second call does nothing."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _text_of(self, prompt: Prompt, params: Params | None) -> str | None:
        """The text to tokenise; ``None`` if the prompt has token ids or is certainly too long."""
        text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
        has_ids = isinstance(prompt, dict) and prompt.get("prompt_token_ids") is not None
        if has_ids or not isinstance(text, str):
            return None
        is_cut = getattr(params, "truncate_prompt_tokens", None) is not None
        return text if is_cut or self._fewest_tokens(text) < self._max_model_len else None

    def _encode_together(self, texts: dict[int, str], started: list[StartedIds]) -> None:
        """Tokenise texts in one call and put finished futures into ``started``, at the texts' keys.
        If a text is invalid, nothing is put there, and ``encode`` will raise the text's error."""
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
            started[place] = done

    def _begin(self, text: str) -> StartedIds:
        """Start tokenising in a text process. Returns ``None`` without such processes, or if the
        text is not valid Unicode."""
        try:
            return None if self._pool is None else self._pool.encode(text)
        except UnicodeError:
            return None

    def _fewest_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens in a text, from its length; 0 for a short text."""
        if self._tokenizer is None or len(text) < self._max_model_len * USUAL_CHARS:
            return 0
        most_chars = self._tokenizer.max_chars_per_token
        return 0 if most_chars is None else -(-len(text) // most_chars)


def has_media(prompt: Prompt) -> bool:
    """Whether a prompt has pictures or other media."""
    return isinstance(prompt, dict) and prompt.get("multi_modal_data") is not None


def too_long(
    length: str, limit: int, num_output: int, before: str = "", *, has_pictures: bool = False
) -> RequestError:
    """The error for a prompt with which ``num_output`` tokens of output do not fit. ``length``: the
    prompt's length as a text ("5000 tokens"); ``before``: words to show in front of ``length``."""
    cut = "send fewer or smaller pictures" if has_pictures else "set truncate_prompt_tokens=-1"
    together = ", prompt and at least one output token together" if num_output else ""
    return PromptTooLongError(
        f"the prompt is too long: it has {before}{length}, but max_model_len is {limit}{together}; "
        f"shorten the prompt, {cut}, or raise max_model_len",
        param="prompt",
        length=length,
        limit=limit,
        num_output=num_output,
    )
