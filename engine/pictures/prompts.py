"""Puts pictures into prompts: placeholder tokens, media items and pixels."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from hashlib import blake2b
from threading import Lock
from typing import NamedTuple

from engine.config.media import MediaConfig
from engine.config.model import ModelInfo
from engine.messages.media import Pixels
from engine.messages.requests import MediaItem
from engine.pictures.errors import refused
from engine.pictures.families import Layout, family_of
from engine.pictures.opening import FORMATS, MAX_PIXELS, Picture, open_picture
from engine.pictures.processing import ImageProcessor
from engine.pictures.sources import MAX_BYTES, MediaSources, PictureLimits, pictures_in
from engine.text.tokenizer import Tokenizer

MOST_TOKENS = 1 << 20  # of a prompt with pictures, before the model's own limit is checked


class SeeingPrompt(NamedTuple):
    """Token ids with placeholders, the pictures among them, and the opened pictures by hash."""

    token_ids: list[int]
    media: list[MediaItem]
    opened: dict[str, Picture]


class Pictures:
    """Puts pictures into the prompts of one model. Thread-safe."""

    def __init__(
        self,
        info: ModelInfo,
        tokenizer: Tokenizer | None,
        options: MediaConfig,
        sources: MediaSources,
        most_tokens: int = MOST_TOKENS,
    ) -> None:
        """Load the image processor. Raises ``ConfigError``."""
        self.sources = sources
        self._for_large = Lock()
        self._most = options.most_pictures
        self._most_tokens = most_tokens
        self._processor = ImageProcessor(info, options.mm_processor_kwargs)
        self._family = family_of(info, self._processor.settings)
        self._tokenizer = tokenizer
        self._ids_of = lru_cache(maxsize=1024)(self._encode)

    @property
    def limits(self) -> PictureLimits:
        """Which pictures are taken."""
        return PictureLimits(FORMATS, MAX_BYTES, MAX_PIXELS, self._most)

    @property
    def image_token_id(self) -> int:
        """The id of the tokens in whose places features of pictures are."""
        return self._family.image_token_id

    def into(self, token_ids: Sequence[int], data: object) -> SeeingPrompt:
        """Replace the image tokens of a prompt by the placeholders of pictures, in order. Loads
        them if they are URLs or paths, and reads only their headers. data:
        ``{"image": picture or list of pictures}``. Raises ``RequestError``."""
        values = pictures_in(data)
        self.check_number(len(values))
        image = self._family.prompt_token_id
        if (count := token_ids.count(image)) != len(values):
            raise refused(
                f"the prompt has {count} image tokens ({self._text([image])!r}, id {image}) and "
                f"multi_modal_data {len(values)} pictures: the numbers must be equal, so put one "
                "image token where each picture belongs; in a chat the template does so"
            )
        waiting = iter([open_picture(self.sources.load(each)) for each in values])
        ids: list[int] = []
        media: list[MediaItem] = []
        found: dict[str, Picture] = {}
        after_lines = False  # the last tokens are line ends that a picture brought
        lines: list[int] = []  # tokens of the prompt that are line ends next to these
        for token in token_ids:
            if after_lines and self._is_lines(token):
                lines.append(token)
                continue
            if lines:
                ids += self._joined(ids, lines)
                lines = []
            after_lines = False
            if token != image:
                ids.append(token)
                continue
            picture = next(waiting)
            layout = self._family.layout(picture.width, picture.height)
            before = self._pop_lines(ids) if str(layout[0]).startswith("\n") else ""
            item, own = self._place(picture, (before, *layout), len(ids))
            ids += own
            if len(ids) > self._most_tokens:
                raise refused(
                    f"the pictures have more than {self._most_tokens} tokens together, the limit: "
                    "send fewer, or smaller ones"
                )
            media.append(item)
            found.setdefault(item.hash, picture)
            after_lines = str(layout[-1]).endswith("\n")
        if lines:
            ids += self._joined(ids, lines)
        return SeeingPrompt(ids, media, found)

    def check_number(self, number: int) -> None:
        """Raise ``RequestError`` for more pictures than a prompt may have."""
        if self._most is not None and number > self._most:
            raise refused(
                f"multi_modal_data has {number} pictures, and limit_mm_per_prompt allows "
                f"{self._most}: send fewer, or raise the limit"
            )

    def pixels(self, picture: Picture) -> Pixels:
        """Decode and process a picture. Raises ``RequestError`` for a damaged file."""
        # Large ones one after the other, since each takes up to a gigabyte.
        guard: AbstractContextManager[object] = nullcontext()
        if picture.is_large:
            guard = self._for_large
        with guard:
            return self._processor.pixels(picture.decode())

    def _joined(self, ids: list[int], lines: Sequence[int]) -> tuple[int, ...]:
        """The tokens of the line ends at the end of ``ids``, which are removed, and of ``lines``: a
        tokenizer may have tokens for several line ends."""
        return self._encode(self._pop_lines(ids) + self._text(lines))

    def _pop_lines(self, ids: list[int]) -> str:
        """Remove the last tokens as long as they are line ends. Returns their text."""
        count = 0
        while count < len(ids) and self._is_lines(ids[-1 - count]):
            count += 1
        first = len(ids) - count
        text = self._text(ids[first:])
        del ids[first:]
        return text

    def _text(self, tokens: Sequence[int]) -> str:
        assert self._tokenizer is not None or not tokens
        return "".join(self._tokenizer.token_text(token) for token in tokens if self._tokenizer)

    def _is_lines(self, token: int) -> bool:
        """True if the text of a token is only line ends."""
        text = "" if self._tokenizer is None else self._tokenizer.token_text(token)
        return bool(text) and not text.strip("\n")

    def _place(self, picture: Picture, layout: Layout, offset: int) -> tuple[MediaItem, list[int]]:
        """The media item and the tokens of a picture whose first token is at ``offset``."""
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        text = ""
        for part in (*layout, 0):
            if isinstance(part, str):
                text += part
                continue
            ids += self._ids_of(text)
            if part:
                spans.append((len(ids), part))
            ids += [self._family.image_token_id] * part
            text = ""
        first, (last, length) = spans[0][0], spans[-1]
        key = blake2b(picture.digest.encode() + self._processor.key, digest_size=16).hexdigest()
        runs = tuple((start - first, count) for start, count in spans) if len(spans) > 1 else ()
        grid = self._family.grid(picture.width, picture.height)
        return MediaItem(offset + first, last + length - first, key, runs, grid), ids

    def _encode(self, text: str) -> tuple[int, ...]:
        if not text:
            return ()
        if self._tokenizer is None:
            raise refused(
                "pictures of this model need a tokenizer, and the engine has none "
                "(skip_tokenizer_init): start it without skip_tokenizer_init"
            )
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))
