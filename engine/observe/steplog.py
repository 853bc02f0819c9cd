"""Step log: a file with all inputs and plans of a scheduler in order, for replay.

    magic | length checksum Header | length checksum record | length checksum record | ...

Lengths and checksums (CRC-32) are four bytes, little-endian; the data is msgpack. A record is one
call of the scheduler with the clock readings made in it. Plans and results are columns of int32; a
column that can be derived from the previous plan is left out."""

from __future__ import annotations

import atexit
import re
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from zlib import crc32

import msgspec
import numpy as np

from engine.errors import ConfigError, reason_of
from engine.messages.kv_orders import KVOrders, Loaded
from engine.messages.requests import AddRequest, Arrival, FinishReason
from engine.messages.step import EMPTY, Column, DraftPart, StepPlan, StepResult
from engine.messages.vectors import PooledPart

MAGIC = b"metronome step log\n"
FORMAT = 3
BUFFER_BYTES = 1 << 16
LENGTH_BYTES = CHECKSUM_BYTES = 4


class Header(msgspec.Struct, array_like=True):
    """The header of a step log: the scheduler's set-up. ``scheduler``, ``cache``: their options."""

    format: int
    version: str  # engine version
    scheduler: dict[str, Any]
    cache: dict[str, Any]
    num_blocks: int
    block_size: int
    seed: int
    kv_groups: list[tuple[int, ...]] = []
    """Window, maximum number of blocks, and 1 if the window is chunked, of each KV group; []: a
    single group without a window."""
    snapshot_blocks: int = 0
    """Blocks of a snapshot of a request's recurrent states; 0: none are taken."""
    max_loras: int = 0
    """LoRA adapters among running requests; 0: requests have none."""
    encoder_sizes: list[int] = []
    """Tokens of media encoded in a step, and kept, and 1 if media are never split; []: requests
    have no media."""
    num_stores: int = 0
    """Stores of KV blocks outside the pool."""


class AddCall(msgspec.Struct, array_like=True, tag="add"):
    """A call of ``add_request``. The next record is its ``AddResult``."""

    request: AddRequest


class AddResult(msgspec.Struct, array_like=True, tag="added"):
    """Result of ``add_request``. ``error``: why the request was refused; empty if accepted."""

    times: list[float]
    error: str = ""


class FinishCall(msgspec.Struct, array_like=True, tag="end"):
    """A call of ``finish_requests``. ``request_ids``: ``None`` for all requests."""

    times: list[float]
    request_ids: list[str] | None
    reason: FinishReason


class WakeCall(msgspec.Struct, array_like=True, tag="wake"):
    """A call of ``wake``, for a parked request."""

    times: list[float]
    request_id: str


class ArrivalCall(msgspec.Struct, array_like=True, tag="arrived"):
    """A call of ``arrived``, for the content of a media item."""

    times: list[float]
    arrival: Arrival


class LoadedCall(msgspec.Struct, array_like=True, tag="loaded"):
    """A call of ``transferred``, for the end of a load of KV blocks."""

    times: list[float]
    report: Loaded


class PauseCall(msgspec.Struct, array_like=True, tag="pause"):
    """A call of ``set_pause_state``. ``state``: value of the ``PauseState``."""

    times: list[float]
    state: str


class ResetCall(msgspec.Struct, array_like=True, tag="reset"):
    """A call of ``reset_prefix_cache``."""

    times: list[float]
    reset_running: bool


class EncoderResetCall(msgspec.Struct, array_like=True, tag="reset_encoder"):
    """A call of ``reset_encoder_cache``."""

    times: list[float]


class OutputsCall(msgspec.Struct, array_like=True, tag="take"):
    """A call of ``take_outputs``."""

    times: list[float]


class TimedDecision(msgspec.Struct, array_like=True, tag="judge"):
    """A decision that the scheduler based on measured times, in the call of the next record. A
    replay reads it from the log, because recomputed times may be rounded differently."""

    times: list[float]  # none
    step: int
    is_kept: bool


class LoadDecision(msgspec.Struct, array_like=True, tag="load"):
    """What the scheduler chose to load for a request in the call of the next plan; as
    ``LoadChoice``."""

    times: list[float]  # none
    step: int
    request_id: str
    stores: bytes


Decision = TimedDecision | LoadDecision
DECISIONS = (TimedDecision, LoadDecision)


class PlanRecord(msgspec.Struct, array_like=True, tag="plan"):
    """A call of ``schedule`` that returned a plan. A column that follows from the previous plan is
    ``None``: ``rows`` and ``counts`` if equal, ``starts`` if equal to its starts plus counts.
    ``digest``: hash of the plan's other fields."""

    times: list[float]
    step: int
    rows: bytes | None
    counts: bytes | None
    starts: bytes | None
    new: list[str]
    digest: bytes


class ResultRecord(msgspec.Struct, array_like=True, tag="result"):
    """A call of ``update_from_output`` with a step's result. ``counts``: ``None`` if each row that
    samples has one token."""

    times: list[float]
    step: int
    token_ids: bytes
    counts: bytes | None
    errors: dict[int, str]
    seconds: float
    drafts: DraftPart | None = None
    codes: dict[int, str] = {}
    lost_snapshots: bytes | None = None
    pooled: bytes | None = None  # rows with results, which are not recorded themselves


class RanksRecord(msgspec.Struct, array_like=True, tag="ranks"):
    """What the ranks of the core have spent their time with so far. A replay does not need it.

    ``ranks``: for each the seconds of its steps, and those in which it waited for other ranks and
    for other stages."""

    times: list[float]  # none
    ranks: list[tuple[float, float, float]]


Record = (
    AddCall
    | AddResult
    | FinishCall
    | WakeCall
    | ArrivalCall
    | LoadedCall
    | PauseCall
    | ResetCall
    | EncoderResetCall
    | OutputsCall
    | TimedDecision
    | LoadDecision
    | RanksRecord
    | PlanRecord
    | ResultRecord
)


class PlanColumns(NamedTuple):
    """Request rows, numbers of tokens and first positions of a plan."""

    rows: Column
    counts: Column
    starts: Column

    @classmethod
    def of(cls, plan: StepPlan) -> PlanColumns:
        return cls(plan.rows.astype(np.int32), plan.counts, plan.starts)


NO_PLAN = PlanColumns(EMPTY, EMPTY, EMPTY)


class PlanCoder:
    """Converts plans to records and back. It leaves out the columns that can be derived from the
    previous plan, and restores them."""

    def __init__(self) -> None:
        self._last = NO_PLAN

    def encode(self, plan: StepPlan, times: list[float]) -> PlanRecord:
        """Make the record of a plan. ``times``: clock readings in the call of ``schedule``."""
        last, self._last = self._last, PlanColumns.of(plan)
        return PlanRecord(
            times,
            plan.step,
            _unless(last.rows, self._last.rows),
            _unless(last.counts, plan.counts),
            _unless(last.starts + last.counts, plan.starts),
            [new.request_id for new in plan.new],
            digest_of(plan),
        )

    def decode(self, planned: PlanRecord) -> PlanColumns:
        """Restore the columns of a recorded plan. Plans must be decoded in order of encoding."""
        last = self._last
        self._last = PlanColumns(
            last.rows if planned.rows is None else _column(planned.rows),
            last.counts if planned.counts is None else _column(planned.counts),
            last.starts + last.counts if planned.starts is None else _column(planned.starts),
        )
        return self._last


def digest_of(plan: StepPlan) -> bytes:
    """A digest of eight bytes of all fields of a plan except rows, counts and starts."""
    digest = blake2b(digest_size=8)
    for column in (
        *(plan.slots, plan.generations, plan.samples),
        *(plan.block_slots, plan.block_indices, plan.block_ids),
    ):
        digest.update(column.tobytes())
    rest = (
        plan.freed_slots,
        [(new.slot, len(new.token_ids)) for new in plan.new],
        {name: _without_keys(getattr(plan, name)) for name in plan.parts if name != "masks"},
        # Which rows are sampled early depends on sampled tokens, which a replay does not have.
        None if plan.masks is None else plan.masks.rows,
    )
    digest.update(msgspec.msgpack.encode(rest, enc_hook=_plain))
    return digest.digest()


def _without_keys(part: object) -> object:
    return part.without_keys if isinstance(part, KVOrders) else part


def settled(plan: StepPlan, result: StepResult, times: list[float]) -> ResultRecord:
    """Make the record of a step's result. ``times``: clock readings in the call."""
    return ResultRecord(
        times,
        result.step,
        result.token_ids.tobytes(),
        _unless(plan.samples, result.counts),
        result.errors,
        result.seconds,
        result.drafts,
        result.codes,
        None if result.lost_snapshots is None else result.lost_snapshots.tobytes(),
        None if result.pooled is None else result.pooled.rows.tobytes(),
    )


def result_of(record: ResultRecord, plan: StepPlan) -> StepResult:
    """Restore the result of a plan from its record."""
    return StepResult(
        record.step,
        _column(record.token_ids),
        plan.samples if record.counts is None else _column(record.counts),
        record.errors,
        seconds=record.seconds,
        drafts=record.drafts,
        codes=record.codes,
        lost_snapshots=None if record.lost_snapshots is None else _column(record.lost_snapshots),
        pooled=None if record.pooled is None else PooledPart.without_values(_column(record.pooled)),
    )


def core_log(path: str | Path, rank: int) -> str:
    """The step log of one of several cores, given the path for all of them."""
    return f"{path}-core{rank}"


def logs_of(path: str | Path) -> list[Path]:
    """The step logs at this path: the file, or one for each of several cores and of its starts."""
    path = Path(path)
    if path.exists():
        return [path]
    found = re.compile(re.escape(path.name) + r"-core(\d+)(?:\.(\d+))?").fullmatch
    names = path.parent.iterdir() if path.parent.is_dir() else ()
    logs = {each: match for each in names if (match := found(each.name))}
    key = {each: (int(match[1]), int(match[2] or 0)) for each, match in logs.items()}
    return sorted(logs, key=key.__getitem__) or [path]


class StepLogWriter:
    """Writes records to a new file, replacing an old one. Raises ``ConfigError`` if it cannot be
    opened.

    The file only contains complete records. If the disk is full, ``write`` or ``close`` raises
    ``OSError`` once, and the log ends with the last complete record."""

    def __init__(self, path: str | Path, header: Header) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
        self._pending = [MAGIC + self._frame(header)]
        self._num_pending = 0  # bytes
        self._num_written = 0
        try:
            self._file: BinaryIO = open(path, "wb", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ConfigError(
                f"step_log {str(path)!r} cannot be written: {reason_of(error)}"
            ) from error
        atexit.register(self.close)  # most programs do not shut the engine down

    def write(self, record: Record) -> None:
        """Append a record. For values that msgpack cannot encode it raises ``TypeError``,
        ``ValueError``, ``OverflowError`` or ``RecursionError``."""
        frame = self._frame(record)
        self._pending.append(frame)
        self._num_pending += len(frame)
        if self._num_pending >= BUFFER_BYTES:
            self._flush()

    def close(self) -> None:
        """Write the remaining records and close the file. A second call does nothing."""
        atexit.unregister(self.close)
        if not self._file.closed:
            self._flush()
            self._file.close()

    def _flush(self) -> None:
        frames, self._pending, self._num_pending = self._pending, [], 0
        data, begun = memoryview(b"".join(frames)), self._num_written
        try:
            while data:
                num = self._file.write(data)
                self._num_written += num
                data = data[num:]
        except OSError:
            with suppress(OSError):  # a device cannot be truncated
                self._file.truncate(self._last_complete(frames, begun))
            self._file.close()
            raise

    def _last_complete(self, frames: list[bytes], begun: int) -> int:
        """The file position after the last of ``frames`` that was written completely. ``begun``:
        file position of the first of them."""
        ends = accumulate(map(len, frames), initial=begun)
        return max(end for end in ends if end <= self._num_written)

    def _frame(self, message: Header | Record) -> bytes:
        data = self._encoder.encode(message)
        checksum = crc32(data).to_bytes(CHECKSUM_BYTES, "little")
        return len(data).to_bytes(LENGTH_BYTES, "little") + checksum + data


class StepLog:
    """Reads a step log: its ``header``, and its records by iteration.

    Raises ``ConfigError`` for a file that is not a step log, is damaged, or ends within a record;
    with ``allow_truncated``, iteration stops there instead.
    """

    def __init__(self, path: str | Path, *, allow_truncated: bool = False) -> None:
        self._path = str(path)
        self._allow_truncated = allow_truncated
        with self._open() as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ConfigError(f"{self._path!r} is not a step log")
            self._first = file.tell()
            (self.header, self._first) = self._read_header(file)

    def __iter__(self) -> Iterator[Record]:
        decoder = msgspec.msgpack.Decoder(Record, dec_hook=_from_list)
        with self._open() as file:
            file.seek(self._first)
            number = 0
            while data := self._read_frame(file, number):
                number += 1
                yield decoder.decode(data)

    def _open(self) -> BinaryIO:
        try:
            return open(self._path, "rb")
        except OSError as error:
            raise ConfigError(
                f"step log {self._path!r} cannot be read: {reason_of(error)}"
            ) from error

    def _read_header(self, file: BinaryIO) -> tuple[Header, int]:
        data = self._read_frame(file, None)
        header = msgspec.msgpack.decode(data)
        if header[0] == FORMAT:
            return msgspec.msgpack.decode(data, type=Header), file.tell()
        raise ConfigError(
            f"step log {self._path!r} has format {header[0]} (of engine {header[1]}), this engine "
            f"reads format {FORMAT}; use the release that wrote it"
        )

    def _read_frame(self, file: BinaryIO, number: int | None) -> bytes:
        """Read the next frame of the file: the header if ``number`` is ``None``, else the record
        that follows ``number`` other records. Returns empty bytes at the end of the file."""
        length = file.read(LENGTH_BYTES)
        checksum = file.read(CHECKSUM_BYTES)
        data = file.read(int.from_bytes(length, "little"))
        has_all = len(checksum) == CHECKSUM_BYTES and len(data) == int.from_bytes(length, "little")
        if number is not None and (not length or (not has_all and self._allow_truncated)):
            return b""
        if not has_all:
            place = "within its header" if number is None else f"after record {number}"
            way_out = "use allow_truncated to read the complete records"
            raise ConfigError(
                f"step log {self._path!r} ends {place}, perhaps because its engine was killed; "
                f"{'it cannot be read' if number is None else way_out}"
            )
        if crc32(data) != int.from_bytes(checksum, "little"):
            place = "its header" if number is None else f"record {number + 1}"
            raise ConfigError(f"step log {self._path!r} is damaged in {place}")
        return data


def _unless(known: Column, column: Column) -> bytes | None:
    """The bytes of ``column``; ``None`` if it equals ``known``, so that it can be left out."""
    data = column.tobytes()
    return None if data == known.tobytes() else data


def _column(data: bytes) -> Column:
    return np.frombuffer(data, dtype=np.int32).copy()


def _from_list(kind: Any, value: Any) -> Column:
    """Convert a decoded list of numbers to a column of a plan part."""
    return np.array(value, dtype=np.int32)


def _plain(value: Any) -> Any:
    """Convert NumPy values, which plan parts and hints contain, to lists and plain numbers."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"a step log cannot hold {value!r:.80} ({type(value).__name__})")
