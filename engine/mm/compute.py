"""Encoder: the worker's half of media. Encodes pictures, keeps the outputs, and puts them into the
forward pass in place of the placeholders' embeddings."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from engine.config.model import ModelConfig, ModelInfo
from engine.errors import ConfigError, ModelError
from engine.ipc.device_pixels import DeviceMemory, DeviceReader
from engine.ipc.host_memory import free_host_bytes
from engine.layers.batch import Embeds, ForwardBatch, OpenItem
from engine.messages.media import Pixels
from engine.messages.requests import MediaItem
from engine.messages.step import StepPlan
from engine.mm.encoding import ItemEncoder
from engine.mm.store import DROP, KEEP, PixelStore
from engine.mm.tower import load_tower
from engine.models.decoder import NativeDecoder
from engine.pictures.cuda_memory import cuda_memory
from engine.pictures.families import VisionFamily
from engine.worker.batches import PlanRows
from engine.worker.feature import Feature, Machine
from engine.worker.platform import Platform
from engine.worker.slots import LiveSeqs

logger = logging.getLogger("engine.core")
GIB = 1 << 30


class Run(NamedTuple):
    """A run of embedded tokens in a prompt: its first position, its length, the hash of its media
    item, and the first row of the item's encoder output."""

    start: int
    length: int
    key: str
    row: int


class LargestRun(NamedTuple):
    """What the encoder does at most in a step."""

    num_tokens: int
    picture: Callable[[], tuple[Pixels, int]]
    """Makes the arrays of a large picture, and the number of its tokens."""


class Encoder(Feature):
    """Encodes the media of a plan before its step. Outputs are kept by hash until a plan frees
    them."""

    part = "media"
    waits_for_part = True

    def __init__(
        self,
        config: ModelConfig,
        info: ModelInfo,
        store: PixelStore,
        cache_tokens: int,
        family: VisionFamily,
        largest: LargestRun,
    ) -> None:
        """store: has the content of the media; cache_tokens: most tokens whose outputs are kept;
        largest: what is tried to measure memory."""
        self._both_ways, self._has_axes = family.whole, family.has_axes
        self._largest = largest
        self._config, self._info, self._store = config, info, store
        self._cache_tokens = cache_tokens
        self._encoder: ItemEncoder
        self._shape = (0, 0)  # of the output of a token, [1 + L, H]
        self._dtype = torch.float32
        self._platform: Platform
        self._open_memory: Callable[[torch.device], DeviceMemory] | None = None
        self._pool_bytes = 0  # of clients, on the device
        self._outputs: dict[str, torch.Tensor] = {}  # by hash, [1 + L, embedded tokens, H]
        self._media: dict[int, list[MediaItem]] = {}  # by slot
        self._runs: dict[int, list[Run]] = {}  # by slot, in order
        self._ends = np.zeros(0, dtype=np.int32)  # by slot, end of the last run; 0: none
        self._axes: dict[int, Axes] = {}  # by slot, if positions have axes
        # By slot, of positions after the last run, on the device; None: positions have no axes.
        self._shifts: torch.Tensor | None = None

    @property
    def own_bytes(self) -> int:
        num_bytes = self._shape[0] * self._shape[1] * self._dtype.itemsize
        return self._pool_bytes + self._cache_tokens * num_bytes

    def share_device(
        self, pool_bytes: int, open_memory: Callable[[torch.device], DeviceMemory] | None = None
    ) -> None:
        """Let clients copy pixels to the device, where they have a pool of ``pool_bytes``.
        open_memory: by default that of a CUDA device. To be called before ``attach``."""
        self._open_memory = open_memory or cuda_memory
        self._pool_bytes = pool_bytes

    def attach(self, machine: Machine) -> None:
        model = machine.model
        vision = self._info.hf.get("vision_config") or {}
        num_added = len(vision.get("deepstack_visual_indexes") or ())
        if not isinstance(model, NativeDecoder) and (self._both_ways or num_added):
            raise ModelError(
                f"the text half of {self._info.architecture} in {self._info.path} is computed by "
                "transformers, and then this model cannot read pictures: start with "
                'limit_mm_per_prompt={"image": 0} to use it for text'
            )
        encode = load_tower(self._config, self._info, model.dtype, machine.platform.device)
        are_batched = self._config.batch_invariant is not True
        self._encoder = ItemEncoder(encode, self._store, are_batched=are_batched)
        if self._open_memory is not None:
            self._open_reader(self._open_memory, machine.platform.device)
        self._ends = np.zeros(len(machine.live.num_sent), dtype=np.int32)
        if self._has_axes:
            self._shifts = machine.slots.keep_shifts(machine.platform)
        found = self._info.hf.get("hidden_size") or 4096
        hidden = model.spec.hidden_size if isinstance(model, NativeDecoder) else int(found)
        self._shape, self._dtype = (1 + num_added, hidden), model.dtype
        self._platform = machine.platform
        if machine.platform.shares_memory and self.own_bytes > (free := free_host_bytes()):
            raise ConfigError(
                f"outputs of {self._cache_tokens} tokens of pictures would need "
                f"{self.own_bytes / GIB:.4g} GiB, and {free / GIB:.4g} are free: lower "
                "encoder_cache_size or max_num_encoder_input_tokens"
            )

    def begin(self, plan: StepPlan, live: LiveSeqs) -> Mapping[int, str] | None:
        if plan.media is None and not self._runs:
            return None
        for slot in plan.freed_slots:
            self._media.pop(slot, None)
            self._runs.pop(slot, None)
            if self._axes.pop(slot, None) is not None and self._shifts is not None:
                self._shifts[slot] = 0
        self._ends[plan.freed_slots] = 0
        failed: dict[str, str] = {}  # by hash
        if (part := plan.media) is not None:
            for key in part.free:
                self._outputs.pop(key, None)
            for slot, items in part.media.items():
                self._media[slot] = items
                runs = self._runs[slot] = [run for item in items for run in runs_of(item)]
                self._ends[slot] = runs[-1].start + runs[-1].length
                if self._shifts is not None:
                    axes = self._axes[slot] = axes_of(items)
                    self._shifts[slot] = axes.shift
            encoded = self._encoder.run([self._media[slot][index] for slot, index in part.encode])
            self._outputs |= encoded.outputs
            failed = encoded.failed
        return self._reasons(plan, failed)

    def touches(self, rows: PlanRows) -> bool:
        """True if a row begins before the last embedded token of its prompt."""
        return bool(self._runs) and bool((rows.starts < self._ends[rows.slots]).any())

    def extend(self, batch: ForwardBatch, rows: PlanRows) -> None:
        if not self.touches(rows):
            return
        if self._axes:
            self._move(batch, rows)
        places: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        opened: list[OpenItem] = []
        first_tokens = np.cumsum(rows.counts) - rows.counts
        for index, slot, start, upto in self._reading(rows):
            first = int(first_tokens[index]) - start
            for run in read_by(self._runs[slot], start, upto):
                begin, end = max(run.start, start), min(run.start + run.length, upto)
                row = run.row + begin - run.start
                places.append(torch.arange(first + begin, first + end))
                opened.append(OpenItem(index, first + begin, end - begin, end))
                values.append(self._outputs[run.key][:, row : row + end - begin])
        if values:
            found = torch.cat(values, dim=1)
            batch.embeds = Embeds(torch.cat(places).to(found.device), found[0], found[1:])
            if self._both_ways:
                batch.open(opened)

    def profile(self, batch: ForwardBatch) -> None:
        """On a GPU: compute dummy rows as tokens of pictures, next to the outputs of others."""
        if self._platform.shares_memory:
            return
        outputs = self._full_cache()
        num_rows = min(len(batch.input_ids), self._cache_tokens)
        places = torch.arange(num_rows, device=outputs.device)
        batch.embeds = Embeds(places, outputs[0, :num_rows], outputs[1:, :num_rows])
        if self._has_axes:
            batch.move(batch.positions.expand(3, -1).clone())
        if self._both_ways:
            meta = batch.attention
            starts, ends = meta.query_start.tolist(), meta.seq_lens.tolist()
            rows = enumerate(zip(starts, starts[1:], ends, strict=False))
            batch.open([OpenItem(seq, row, to - row, end) for seq, (row, to, end) in rows])

    def profile_run(self, num_tokens: int, num_seqs: int) -> None:
        pixels, length = self._largest.picture()
        outputs = self._full_cache()
        self._encoder.try_run(pixels, max(1, self._largest.num_tokens // length))
        del outputs  # held until here

    # -- helpers

    def _full_cache(self) -> torch.Tensor:
        """Memory [1 + L, tokens, H] of the largest outputs together."""
        return self._platform.zeros(
            (self._shape[0], self._cache_tokens, self._shape[1]), self._dtype
        )

    def _open_reader(
        self, open_memory: Callable[[torch.device], DeviceMemory], device: torch.device
    ) -> None:
        try:
            self._store.reader = DeviceReader(open_memory(device))
        except OSError as error:  # clients count what they then send otherwise
            logger.warning("no pixels are copied to %s by clients: %s", device, error)
            self._pool_bytes = 0

    def _move(self, batch: ForwardBatch, rows: PlanRows) -> None:
        """Set the positions along three axes of the tokens up to the last embedded one of each
        prompt. Those of later tokens are equal along all axes."""
        firsts = np.cumsum(rows.counts) - rows.counts
        positions = batch.positions.expand(3, -1).clone()
        for index, slot, start, upto in self._reading(rows):
            part = torch.from_numpy(self._axes[slot].positions[:, start:upto])
            first = int(firsts[index])
            positions[:, first : first + part.shape[1]] = part.to(positions.device)
        batch.move(positions)

    def _reading(self, rows: PlanRows | StepPlan) -> Iterator[tuple[int, int, int, int]]:
        """Index, slot, first position and end of each row that begins before the last embedded
        token of its prompt."""
        for index in np.flatnonzero(rows.starts < self._ends[rows.slots]).tolist():
            start = int(rows.starts[index])
            yield index, int(rows.slots[index]), start, start + int(rows.counts[index])

    def _reasons(self, plan: StepPlan, failed: Mapping[str, str]) -> dict[int, str]:
        """Why rows of the plan cannot be computed, by slot: they read outputs that are missing.
        failed: why media items could not be encoded, by hash."""
        reasons: dict[int, str] = {}
        for _, slot, start, upto in self._reading(plan):
            for run in read_by(self._runs[slot], start, upto):
                if run.key not in self._outputs:
                    missing = f"the encoder output for token {run.start} is missing"
                    reasons[slot] = failed.get(run.key, missing)
                    break
        return reasons


class Axes(NamedTuple):
    """Positions of a prompt's tokens along time, height and width, up to its last media item, and
    the difference between positions and indices of later tokens."""

    positions: NDArray[np.int64]  # [3, tokens]
    shift: int


def axes_of(media: Sequence[MediaItem]) -> Axes:
    """The positions that media items with a grid give to the tokens of a prompt. The next text
    begins after the largest position in an item."""
    parts: list[NDArray[np.int64]] = []
    index = position = 0
    for item in media:
        length = item.offset - index
        parts.append(np.tile(np.arange(position, position + length), (3, 1)))
        position += length
        parts.append(np.indices(item.grid).reshape(3, -1) + position)
        position += max(item.grid)
        index = item.offset + item.length
    return Axes(np.concatenate(parts, axis=1), position - index)


def runs_of(item: MediaItem) -> list[Run]:
    """The runs of embedded tokens in a media item."""
    runs: list[Run] = []
    row = 0
    for start, length in item.spans or [(0, item.length)]:
        runs.append(Run(item.offset + start, length, item.hash, row))
        row += length
    return runs


def read_by(runs: Sequence[Run], start: int, upto: int) -> list[Run]:
    """The runs with tokens at positions [start, upto)."""
    return [run for run in runs if run.start < upto and start < run.start + run.length]


class KeptPixels(Feature):
    """In a further rank, keeps content in the store of the rank's encoder."""

    def __init__(self, store: PixelStore) -> None:
        self._store = store

    @property
    def methods(self) -> Mapping[str, Callable[..., Any]]:
        return {KEEP: self._keep, DROP: self._store.drop}

    def _keep(self, key: str, data: bytes) -> None:
        self._store.keep(key, msgspec.msgpack.decode(data, type=Pixels))
