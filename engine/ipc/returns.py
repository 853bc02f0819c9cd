"""Readers of shared memory report to its owner that they no longer read it.

The owner shares a file of slots, one for each loan. The reader writes the loan's ticket, a number
that is never used again, to its slot. So nobody waits for anybody, no message is needed, and what a
reader writes late cannot end a later loan.
"""

from __future__ import annotations

import mmap
import os
from itertools import count
from struct import Struct
from typing import NamedTuple

from engine.errors import WireError
from engine.ipc.sealed_files import SealedFile, create, is_there, open_sealed, seal
from engine.messages.media import SharedPixels

NAME = "metronome-returns"
TICKET = Struct("<Q")
MAX_SLOTS = 1 << 16


class Loan(NamedTuple):
    """A reader may read until it has returned ``ticket`` in ``slot``."""

    slot: int
    ticket: int


class Returns:
    """The owner's side: a file of ``num_slots`` slots."""

    def __init__(self, num_slots: int) -> None:
        """Raises ``OSError`` if the system has no anonymous files, or too many are open."""
        self._fd = create(NAME, num_slots * TICKET.size)
        try:
            self.handle = SharedPixels(*seal(self._fd, can_be_written=True), {})
            self._memory = mmap.mmap(self._fd, self.handle.size, access=mmap.ACCESS_READ)
        except BaseException:
            os.close(self._fd)
            raise
        self._free = list(range(num_slots))
        self._tickets = count(1)

    def lend(self) -> Loan | None:
        """Begin a loan; ``None`` if each slot has one."""
        return Loan(self._free.pop(), next(self._tickets)) if self._free else None

    def is_returned(self, loan: Loan) -> bool:
        (ticket,) = TICKET.unpack_from(self._memory, loan.slot * TICKET.size)
        return bool(ticket == loan.ticket)

    def end(self, loan: Loan) -> None:
        """End a loan, returned or not."""
        self._free.append(loan.slot)

    def close(self) -> None:
        self._memory.close()
        os.close(self._fd)


class ReturnsOfOwner:
    """The reader's side of another process's ``Returns``."""

    def __init__(self, handle: SharedPixels) -> None:
        """Raises ``WireError`` for an invalid handle."""
        self._file = SealedFile(handle.namespace, handle.pid, handle.fd, handle.inode, handle.size)
        if not 0 < handle.size <= MAX_SLOTS * TICKET.size:
            raise WireError(f"{handle.size} bytes of returns, must be 1 to {MAX_SLOTS} slots")
        fd = open_sealed(self._file, NAME, to_write=True)
        try:
            self._memory = mmap.mmap(fd, handle.size, access=mmap.ACCESS_WRITE)
        except OSError as error:
            raise WireError(f"returns cannot be written: {error}") from error
        finally:
            os.close(fd)

    @property
    def has_owner(self) -> bool:
        """False if the owner has closed the file, or has died."""
        return is_there(self._file)

    def give_back(self, loan: Loan) -> None:
        """Return what was lent. Raises ``WireError`` for a slot or ticket that cannot exist."""
        num_slots = len(self._memory) // TICKET.size
        if not (0 <= loan.slot < num_slots and 0 < loan.ticket < 1 << 64):
            raise WireError(f"{loan} cannot be returned in {num_slots} slots")
        TICKET.pack_into(self._memory, loan.slot * TICKET.size, loan.ticket)

    def close(self) -> None:
        self._memory.close()
