"""Pictures of requests for asyncio tasks: loaded and opened in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, cast

from engine.config.media import KIND
from engine.frontend.encoding import Prompt, TextPrompt, has_media
from engine.frontend.prompt import InputProcessor
from engine.pictures.errors import refused
from engine.pictures.sources import Given, MediaSources, PictureLimits, pictures_in

P = TypeVar("P", bound=Prompt)
NUM_THREADS = 8  # that wait for other machines
NUM_AT_ONCE = 4  # pictures of one request that are loaded at the same time
MOST_LOADED_BYTES = 128 << 20  # of one request; the pictures being loaded may exceed it
SECONDS = 30.0  # for one picture, the resolver's time included


class AsyncPictures:
    """Loads and opens the pictures of requests without blocking other tasks."""

    def __init__(self, inputs: InputProcessor) -> None:
        self._inputs = inputs
        self._threads = ThreadPoolExecutor(NUM_THREADS, "pictures")

    @property
    def are_read(self) -> bool:
        """Whether the model reads pictures."""
        return self._inputs.pictures is not None

    @property
    def limits(self) -> PictureLimits | None:
        """Which pictures the model reads; ``None``: none."""
        return None if self._inputs.pictures is None else self._inputs.pictures.limits

    def has_placeholders(self, token_ids: Sequence[int]) -> bool:
        """Whether token ids have places of pictures, whose content they do not contain."""
        pictures = self._inputs.pictures
        return pictures is not None and pictures.image_token_id in token_ids

    async def loaded(self, prompt: P) -> P:
        """The prompt with the content of its pictures in place of URLs and paths. Raises
        ``RequestError`` for those that are not allowed, or cannot be loaded within the limits."""
        pictures = self._inputs.pictures
        if pictures is None or not has_media(prompt):
            return prompt
        parts = cast(TextPrompt, prompt)
        given = pictures_in(parts["multi_modal_data"])
        if not any(isinstance(each.value, str) for each in given):
            return prompt
        pictures.check_number(len(given))
        found = await self._load_all(pictures.sources, given)
        return cast(P, {**parts, "multi_modal_data": {KIND: found}})

    async def token_ids(self, prompt: TextPrompt) -> list[int]:
        """The token ids of a prompt of token ids, with those of its pictures, whose headers are
        read. Raises ``RequestError``."""
        if not has_media(prompt):
            return prompt["prompt_token_ids"]
        return await self._inputs.texts.elsewhere(self._inputs.token_ids, prompt)

    def close(self) -> None:
        """Let the threads end. A second call does nothing."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _load_all(self, sources: MediaSources, given: Sequence[Given]) -> list[Given]:
        loop, gate = asyncio.get_running_loop(), asyncio.Semaphore(NUM_AT_ONCE)
        size = 0

        async def load(each: Given) -> Given:
            nonlocal size
            async with gate:
                if size > MOST_LOADED_BYTES:
                    raise refused(
                        f"the pictures have more than {MOST_LOADED_BYTES} bytes together, the "
                        "limit: send fewer, or smaller ones"
                    )
                # Others that load from data URLs need not wait for slow hosts.
                threads = self._threads if sources.is_slow(each) else None
                try:
                    async with asyncio.timeout(SECONDS):
                        found = await loop.run_in_executor(threads, sources.load, each)
                except TimeoutError:
                    raise refused(
                        f"a picture cannot be loaded within {SECONDS:g} s: send it as a data URL"
                    ) from None
            if isinstance(found.value, bytes):
                size += len(found.value)
            return found

        tasks = [asyncio.ensure_future(load(each)) for each in given]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
