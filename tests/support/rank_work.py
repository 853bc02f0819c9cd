"""What ranks compute together in tests, and what must come out."""

from __future__ import annotations

import hashlib
import os
import random
import signal
from multiprocessing.connection import Connection

import torch

from engine.errors import RankError
from engine.ipc.sealed_files import SealedFile
from engine.parallel import distributed
from engine.parallel.collectives import Collectives
from engine.parallel.shared import SharedCollectives

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 2, 3, 15, 16, 17, 100, 511, 513, 1024, 5000)
LARGE = (17_000, 70_001, 140_000)  # elements that take several meetings, or shares


def random_operations(ranks: Collectives, seed: int, num: int) -> str:
    """Do random operations and check each result. Returns a digest of all bits of the results."""
    rng = random.Random(seed)
    digest = hashlib.sha256()
    for _ in range(num):
        name = rng.choice(("all_reduce", "all_reduce", "all_gather", "barrier"))
        dtype = rng.choice(DTYPES)
        size = rng.choice(LARGE if rng.random() < 0.02 else SIZES)
        parts = [_part(rng.randrange(2**31), size, dtype) for _ in range(ranks.size)]
        if name == "barrier":
            ranks.barrier()
        elif name == "all_gather":
            gathered = ranks.all_gather(parts[ranks.rank])
            assert torch.equal(gathered, torch.stack(parts))
            digest.update(gathered.view(torch.uint8).numpy().tobytes())
        else:
            total = torch.zeros(size)
            for part in parts:
                total += part
            x = parts[ranks.rank].clone()
            assert ranks.all_reduce(x) is x
            assert torch.equal(x, total.to(dtype)), (dtype, size)
            digest.update(x.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _part(seed: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator).mul_(8).to(dtype)


def a_rank(
    line: Connection, handles: list[SealedFile], rank: int, size: int, seed: int, num: int
) -> None:
    """Main function of a rank's process: the same random operations in each of the groups, then the
    last rank kills itself while the others wait for it. Sends the digests, then the error."""
    torch.set_num_threads(1)
    groups = [SharedCollectives(one, rank, size, num_threads=size) for one in handles]
    line.send([random_operations(one, seed, num) for one in groups])
    if rank == size - 1:
        line.recv()
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            groups[0].all_reduce(torch.ones(1000))
    except RankError as error:
        line.send(str(error))


def a_torch_rank(
    line: Connection, host: str, port: int, rank: int, size: int, seed: int, num: int
) -> None:
    """The same over torch.distributed. Rank 0 sends the port of its store first."""
    torch.set_num_threads(1)
    if rank == 0:
        store = distributed.serve(host, size)
        line.send(store.port)
    else:
        store = distributed.connect(host, port, size)
    ranks = distributed.TorchCollectives(store, rank, size, host=host)
    line.send([random_operations(ranks, seed, num)])
    if rank == size - 1:
        line.recv()
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            ranks.all_reduce(torch.ones(1000))
    except RankError as error:
        line.send(str(error))
