"""Calls of torch as `fake_cuda` takes them: operations, and what never becomes one."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from support.device_memory import HOST

if TYPE_CHECKING:
    from support.fake_cuda import FakeCuda

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


class Operations(TorchDispatchMode):
    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunction():
            return self._cuda.operate(func, args, kwargs or {})


class Calls(TorchFunctionMode):
    """What never reaches the dispatcher, or cannot on a machine without a device."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = f"its_{func.__self__.__name__}"
        if (mine := getattr(self, f"on_{name}", None)) is not None:
            with torch._C._DisableTorchDispatch():
                return mine(*args, **kwargs)
        if kwargs.get("pin_memory"):
            with torch._C._DisableTorchDispatch():
                return self._cuda.pinned(func(*args, **{**kwargs, "pin_memory": False}))
        if is_cuda(kwargs.get("device")) and not isinstance(func, type):
            kwargs = {**kwargs, "device": CPU}
            with torch._C._DisableTorchDispatch():
                if name in ("tensor", "as_tensor"):
                    return self.on_to(func(*args, **kwargs), CUDA)
                return self._cuda.compute(name, func, args, kwargs, [])
        return func(*args, **kwargs)

    def on_its_device(self, x):
        return CUDA if self._cuda.is_here(x) else x.device

    def on_get_device(self, x):
        return CUDA.index if self._cuda.is_here(x) else x.get_device()

    def on_its_is_cuda(self, x):
        return self._cuda.is_here(x)

    def on_its_is_cpu(self, x):
        return x.is_cpu and not self._cuda.is_here(x)

    def on_is_pinned(self, x, device=None):
        return self._cuda.is_ours(x) and not self._cuda.is_here(x)

    def on_pin_memory(self, x, device=None):
        if self._cuda.is_here(x):
            raise RuntimeError("cannot pin memory of the device")
        pinned = self._cuda.pinned(x)
        pinned.copy_(x)
        self._on_host("pin_memory", pinned, is_write=True)
        return pinned

    def on__has_compatible_shallow_copy_type(self, x, other):
        """Modules get new parameters if these go to another device."""
        return self._cuda.is_here(x) == self._cuda.is_here(other)

    def on_cuda(self, x, device=None, non_blocking=False):
        return self.on_to(x, CUDA, non_blocking=non_blocking)

    def on_cpu(self, x):
        return self.on_to(x, CPU)

    def on_tolist(self, x):
        if self._cuda.is_here(x):
            x = self.on_to(x, CPU)
        self._on_host("tolist", x)
        return x.tolist()

    def on_numpy(self, x, *, force=False):
        """It counts as read now; `Sent` finds what the host writes there too early."""
        if self._cuda.is_here(x):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        self._on_host("numpy", x)
        return x.numpy(force=force)

    def on_to(self, x, *args, non_blocking=False, copy=False, **kwargs):
        device, dtype = None, kwargs.get("dtype")
        for value in (*args, kwargs.get("device"), kwargs.get("other")):
            if isinstance(value, torch.Tensor):
                device, dtype = self.on_its_device(value), value.dtype
            elif isinstance(value, torch.dtype):
                dtype = value
            elif isinstance(value, (str, torch.device)):
                device = torch.device(value)
        dtype = dtype or x.dtype
        is_here, cuda = self._cuda.is_here(x), self._cuda
        goes_there = is_here if device is None else is_cuda(device)
        if goes_there == is_here:
            if dtype is x.dtype and not copy:
                return x
            func = partial(torch.Tensor.to, dtype=dtype, copy=True)
            return cuda.compute("to", func, (x,), {}, []) if is_here else func(x)
        if goes_there:
            sent = x if dtype is x.dtype else x.to(dtype)
            made = cuda.new(sent.shape, stride_of_copy(sent), dtype)
            return cuda.copy(made, sent, non_blocking)
        made = torch.empty_strided(x.shape, stride_of_copy(x), dtype=x.dtype)
        return cuda.copy(made, x, False).to(dtype)

    def _on_host(self, what, x, *, is_write=False):
        found = self._cuda.range_of(x)
        if found is not None:
            self._cuda.access(HOST, what, [found], [found] if is_write else [])


def stride_of_copy(x: torch.Tensor) -> tuple[int, ...]:
    """Strides that repeat no element, also where the tensor is expanded."""
    is_expanded = any(
        step == 0 and size > 1 for size, step in zip(x.shape, x.stride(), strict=True)
    )
    return torch.empty(x.shape, device="meta").stride() if is_expanded else x.stride()


def is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"
