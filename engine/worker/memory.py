"""Free memory, and the KV cache allocated from it."""

from __future__ import annotations

import ctypes
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from engine.config.gpu_memory import shortage
from engine.errors import ConfigError
from engine.kv.layout import KVSpec
from engine.layers.linear import is_cpu
from engine.models.decoder import Decoder
from engine.models.model import Model
from engine.models.weights import own_pages
from engine.worker.platform import Platform
from kernels.bodies import triton_for
from kernels.reference.quant import FP8

CGROUP = Path("/sys/fs/cgroup")
LARGE = 1 << 20  # bytes of a tensor with pages of its own
PAGES_AHEAD = 256 << 20
PAGES_AT_ONCE = 2 << 20
MADV_POPULATE_WRITE = 23  # of Linux, from 5.14 on; mmap does not name it

# Of glibc's mallopt: freed memory at the end of the heap that is kept, and what gets a mapping of
# its own, which is given back when it is freed.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT, MAPPED = 64 << 20, 32 << 20

FP8_NAMES = ("fp8", "fp8_e4m3")  # of ``kv_cache_dtype``: vLLM's
logger = logging.getLogger("engine.worker")

Zeros = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


def free_host_bytes() -> int:
    """Memory this process may still take: the machine's, or its control group's if that is less."""
    available = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return available
    return available if limit == "max" else min(available, max(0, int(limit) - used))


def choose_kv_dtype(
    requested: str, computed_in: torch.dtype, device: torch.device | str
) -> torch.dtype:
    """Type of keys and values. requested: ``kv_cache_dtype``.

    Raises ``ConfigError`` where no kernel reads what was requested next to such activations.
    """
    if requested == "auto":
        return computed_in
    device = torch.device(device)
    if requested in FP8_NAMES:
        _check_fp8(requested, computed_in, device)
        return FP8
    is_read = computed_in is torch.bfloat16 or (computed_in is torch.float32 and is_cpu(device))
    if not is_read:
        raise ConfigError(
            f"kv_cache_dtype is {requested!r}, but the model is computed in {_name(computed_in)} "
            f'on {device.type!r}, which needs a cache of its own type: use "auto", or '
            'dtype="bfloat16"'
        )
    return torch.bfloat16


def _check_fp8(requested: str, computed_in: torch.dtype, device: torch.device) -> None:
    what = f"kv_cache_dtype is {requested!r}"
    if is_cpu(device):
        raise ConfigError(
            f"{what}, which needs device='cuda', got device='cpu': no kernel there reads 8-bit "
            'floats; use "auto", or "bfloat16", which halves float32\'s bytes'
        )
    if computed_in not in (torch.bfloat16, torch.float16):
        raise ConfigError(
            f"{what}, but the model is computed in {_name(computed_in)}, with which no kernel "
            'reads 8-bit floats: use dtype="bfloat16", or leave it "auto"'
        )
    tensor = torch.empty(0, device=device)
    body = triton_for(tensor)
    if body is None or not body.reads_fp8(tensor):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        raise ConfigError(
            f"{what}, and attention has no kernels for 8-bit floats on {name}: they are for "
            'NVIDIA\'s compute capabilities 9.0 and 10.0; use "auto"'
        )


def settle_kv_dtype(model: Model, requested: str, device: torch.device) -> torch.dtype:
    """Type of the keys and values of a loaded model, which scales them from now on where they are
    of 8 bits. Raises ``ConfigError`` as ``choose_kv_dtype`` does."""
    dtype = choose_kv_dtype(requested, model.dtype, device)
    if dtype is FP8:
        num_layers = model.kv_spec.num_layers
        num_scaled = model.scale_cache(device) if isinstance(model, Decoder) else 0
        logger.info(
            "keys and values are kept as float8_e4m3fn: %d of %d layers have scales in the "
            "checkpoint, others take 1.0, and what is above 448 becomes 448",
            *(num_scaled, num_layers),
        )
    return dtype


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def make_kv_cache(
    spec: KVSpec, num_blocks: int, block_size: int, *, dtype: torch.dtype, zeros: Zeros
) -> list[torch.Tensor]:
    """One zeroed tensor a layer, [num_blocks, 2, num_kv_heads, block_size, head_dim].

    Zeroed, since what is masked is still multiplied and 0 * NaN is NaN. On a CPU the pages are the
    system's zero page until they are written, so a large pool costs nothing before it is used; see
    ``PagesAhead``.
    Raises ``ConfigError`` with the numbers if there is not enough memory.
    """
    shape = (num_blocks, 2, spec.num_kv_heads, block_size, spec.head_dim)
    try:
        return [zeros(shape, dtype) for _ in range(spec.num_layers)]
    except (RuntimeError, MemoryError, OSError, OverflowError) as error:
        gib = num_blocks * spec.block_bytes(block_size) / (1 << 30)
        raise ConfigError(
            f"no memory for {num_blocks} KV blocks of {block_size} tokens ({gib:.2f} GiB); "
            "lower num_kv_blocks, kv_cache_memory_bytes or memory_utilization"
        ) from error


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeroed host memory of which no page is taken before it is written."""
    num_bytes = dtype.itemsize * math.prod(shape)
    if num_bytes < LARGE:
        return torch.zeros(shape, dtype=dtype)
    # torch.zeros would write every page.
    return own_pages(num_bytes).view(dtype).view(shape)


def keep_freed_memory() -> None:
    """Have the allocator keep what a step's tensors took for those of the next: each page that is
    given back to the system costs a fault when it is taken again, a fiftieth of a prefill."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, KEPT)
        mallopt(M_MMAP_THRESHOLD, MAPPED)


class PagesAhead:
    """Has the system provide the pages of the first KV blocks before a request writes to them.

    A page costs a fault when it is first written, and on a virtual machine what its host takes to
    find memory: tenths of a second for the blocks of a few requests. A thread asks for the pages of
    the blocks that are handed out first, in all layers; what a block holds stays as it is.
    """

    def __init__(self, kv: Sequence[torch.Tensor], num_bytes: int = PAGES_AHEAD) -> None:
        """kv: tensors of ``lazy_zeros``; num_bytes: size of all of them together."""
        self._kv = list(kv)
        self._share = num_bytes // max(len(kv), 1)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._provide, name="kv-pages", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait(self) -> None:
        """Return once they are there, or requested no more."""
        if self._thread.ident is not None:
            self._thread.join()

    def stop(self) -> None:
        """Return once the memory may be given back."""
        self._stopped.set()
        self.wait()

    def _provide(self) -> None:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        for begin in range(0, self._share, PAGES_AT_ONCE):
            for layer in self._kv:
                num_bytes = min(PAGES_AT_ONCE, self._share - begin, layer.nbytes - begin)
                if self._stopped.is_set() or layer.nbytes < LARGE:
                    return
                if num_bytes <= 0:
                    continue
                address = ctypes.c_void_p(layer.data_ptr() + begin)
                if madvise(address, ctypes.c_size_t(num_bytes), MADV_POPULATE_WRITE):
                    return  # an older system: pages are found when they are written


# What torch's allocator, the driver and its libraries say when there is none left.
OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "Failed to allocate")


@contextmanager
def explained(platform: Platform, doing: str) -> Iterator[None]:
    """Explain with numbers when memory runs out before the engine runs."""
    try:
        yield
    except RuntimeError as error:
        if platform.shares_memory or not any(sign in str(error) for sign in OUT_OF_MEMORY):
            raise
        free, total = platform.free_and_total()
        raise ConfigError(shortage(doing, free=free, total=total)) from error
