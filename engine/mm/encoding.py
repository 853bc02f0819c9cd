"""Encodes the media items of a step: those whose arrays have equal shapes in one run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch

from engine.messages.media import PixelArray, Pixels
from engine.messages.requests import MediaItem
from engine.mm.store import PixelStore
from engine.mm.tower import Encode
from kernels.cpu.threads import num_threads


class Encoded(NamedTuple):
    """Outputs [1 + L, embedded tokens, H] of media items by hash, and why others have none."""

    outputs: dict[str, torch.Tensor]
    failed: dict[str, str]


class ItemEncoder:
    """Encodes media items by their content."""

    def __init__(self, encode: Encode, store: PixelStore, *, are_batched: bool) -> None:
        """store: has the content; are_batched: items of equal shapes are encoded in one run, which
        is faster; the last bits of an output may then depend on the other items."""
        self._encode, self._store = encode, store
        self._are_batched = are_batched

    def run(self, items: Sequence[MediaItem]) -> Encoded:
        """Encode items. One that cannot be encoded does not change the others."""
        encoded = Encoded({}, {})
        batches: dict[object, list[MediaItem]] = {}
        for item in {item.hash: item for item in items}.values():
            pixels = self._store.get(item.hash)
            if pixels is None:
                why = f"the content of the media item at token {item.offset} has not arrived"
                encoded.failed[item.hash] = why
            else:
                key = _shapes(pixels) if self._are_batched else item.hash
                batches.setdefault(key, []).append(item)
        for batch in batches.values():
            with all_threads():
                self._batch(batch, encoded)
            for item in batch:
                self._store.has_read(item.hash)
        return encoded

    def try_run(self, pixels: Pixels, count: int) -> None:
        """Encode a picture ``count`` times in one run, to measure the memory that this takes."""
        arrays = {name: tensor_of(array) for name, array in pixels.items()}
        with all_threads():
            self._encode({name: torch.cat([each] * count) for name, each in arrays.items()})

    def _batch(self, batch: Sequence[MediaItem], encoded: Encoded) -> None:
        """Encode items of equal shapes together, or each alone if that fails."""
        numbers = [num_embedded(item) for item in batch]
        try:
            output = self._encode(self._arrays(batch))
            if output.shape[1] != sum(numbers):
                raise ValueError(
                    f"it has {sum(numbers)} placeholder tokens, and the encoder made "
                    f"{output.shape[1]} vectors"
                )
        except torch.AcceleratorError:  # the device is lost, and with it every request
            raise
        except Exception as error:
            for item in batch if len(batch) > 1 else ():
                self._batch([item], encoded)
            if len(batch) == 1:
                encoded.failed[batch[0].hash] = (
                    f"the media item at token {batch[0].offset} cannot be encoded: "
                    f"{type(error).__name__}: {error}"
                )
            return
        parts = torch.split(output, numbers, dim=1)
        for item, part in zip(batch, parts, strict=True):
            # A copy, since a view would keep the outputs of the whole batch.
            encoded.outputs[item.hash] = part if len(batch) == 1 else part.clone()

    def _arrays(self, batch: Sequence[MediaItem]) -> dict[str, torch.Tensor]:
        """The arrays of items, joined along the first dimension, on the device if one is there."""
        contents = [self._tensors(item.hash) for item in batch]
        if len(contents) == 1:
            return dict(contents[0])
        devices = [tensor.device for each in contents for tensor in each.values()]
        place = next((each for each in devices if each.type != "cpu"), torch.device("cpu"))
        return {
            name: torch.cat([each[name].to(place) for each in contents]) for name in contents[0]
        }

    def _tensors(self, key: str) -> Mapping[str, torch.Tensor]:
        if (tensors := self._store.on_device(key)) is not None:
            return tensors
        return {name: tensor_of(array) for name, array in (self._store.get(key) or {}).items()}


def num_embedded(item: MediaItem) -> int:
    """Number of embedded tokens of a media item."""
    return sum(length for _, length in item.spans) if item.spans else item.length


def _shapes(pixels: Pixels) -> object:
    """Equal for items that can be encoded in one run: their arrays differ only in length."""
    return tuple((name, array.dtype, *array.shape[1:]) for name, array in sorted(pixels.items()))


@contextmanager
def all_threads() -> Iterator[None]:
    """Let torch use all threads, most of which are otherwise left to compiled kernels."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(before, num_threads()))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def tensor_of(array: PixelArray) -> torch.Tensor:
    """The tensor of an array of pixels, on the CPU."""
    values = np.frombuffer(bytearray(array.data), dtype=array.dtype).reshape(array.shape)
    return torch.from_numpy(values)
