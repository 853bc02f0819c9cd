"""Triton kernels on the CPU: Triton's interpreter, with 16 and 8 bit floats as devices round them.

The interpreter keeps bfloat16 as bare bits: it adds, multiplies and contracts the bits, and it cuts
off where a cast should round. `repair` computes in float32 and rounds to nearest even; of two
numbers, one of which is none, the larger is the other, as on devices. It also leaves out what the
interpreter does again and again to no effect: three quarters of its time. The variable
TRITON_INTERPRET is read where a kernel is defined, so interpreted tests have a process of their
own: tests/interpreted/, run by `check`; `python -m support.triton_interpreter FILE` runs a program
so.
"""

import dataclasses
import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

ROOT = Path(__file__).resolve().parents[2]
IS_INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

Builder, Handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
MULTIPLIED = {tl.float32, tl.float16, tl.bfloat16}


def check(*names: str, options: tuple[str, ...] = ()) -> None:
    """Run these files of tests/interpreted in a process of their own; raises with its output."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:metronome",  # checks policies
            *options,
            *(f"tests/interpreted/{name}" for name in names),
        ],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    print(done.stdout[-400:])
    assert done.returncode == 0, done.stdout[-12_000:] + done.stderr[-2_000:]


def widen(bits: np.ndarray) -> np.ndarray:
    raised = np.ascontiguousarray(bits).astype(np.uint32) << 16
    return raised.view(np.float32).reshape(np.shape(bits))


def narrow(values: np.ndarray) -> np.ndarray:
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded).reshape(np.shape(values))


def to_fp8(values: np.ndarray) -> np.ndarray:
    """Saturates, as the conversion of the devices does."""
    values = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).clamp(-448, 448)
    return values.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def is_bf16(handle: Handle) -> bool:
    return handle.dtype.scalar.name == tl.bfloat16.name


def values_of(handle: Handle) -> np.ndarray:
    return widen(handle.data) if is_bf16(handle) else handle.data


_binary, _unary = Builder.binary_op, Builder.unary_op
_dot, _cast = Builder.create_dot, Builder.cast_impl
_convert = Builder.create_fp_to_fp


def binary_op(self, left, right, op):
    if not (is_bf16(left) or is_bf16(right)):
        return _binary(self, left, right, op)
    got = op(values_of(left), values_of(right))
    return Handle(got, tl.int1) if got.dtype == bool else Handle(narrow(got), tl.bfloat16)


def unary_op(self, arg, op):
    if not is_bf16(arg):
        return _unary(self, arg, op)
    return Handle(narrow(op(widen(arg.data))), tl.bfloat16)


def create_dot(self, a, b, acc, precision, imprecise):
    """In float64, rounded once: on some processors numpy's library sums a row of float32 otherwise
    for other numbers of rows, which no device's tile does."""
    if not {a.dtype.scalar, b.dtype.scalar} <= MULTIPLIED:
        return _dot(self, a, b, acc, precision, imprecise)
    left, right = (values_of(side).astype(np.float64) for side in (a, b))
    product = np.matmul(left, right).astype(acc.data.dtype)
    return Handle(product + acc.data, acc.dtype.scalar)


def cast_impl(self, source, to):
    if to.scalar == tl.bfloat16 and source.dtype.scalar in (tl.float32, tl.float16):
        return Handle(narrow(source.data.astype(np.float32)), tl.bfloat16)
    if is_bf16(source) and to.scalar != tl.bfloat16:
        return cast_impl(self, Handle(widen(source.data), tl.float32), to)
    return _cast(self, source, to)


def create_fp_to_fp(self, source, to, rounding):
    """What has 8 bits on one side goes through torch, which rounds as the devices do."""
    values = values_of(source)
    if to.scalar == tl.float8e4nv:
        return Handle(to_fp8(values.astype(np.float32)), to.scalar)
    if source.dtype.scalar != tl.float8e4nv:
        return _convert(self, source, to, rounding)
    bits = torch.from_numpy(np.ascontiguousarray(values)).view(torch.float8_e4m3fn)
    return cast_impl(self, Handle(bits.float().numpy(), tl.float32), to)


def repair() -> None:
    """Give the interpreter the arithmetic it lacks. Reductions of bfloat16 stay out of it."""
    np.seterr(all="ignore")  # infinities are no news to a device
    Builder.binary_op, Builder.unary_op = binary_op, unary_op
    Builder.create_dot, Builder.cast_impl = create_dot, cast_impl
    Builder.create_fp_to_fp = create_fp_to_fp
    Builder.create_maxnumf = lambda self, left, right: self.binary_op(left, right, np.fmax)
    Builder.create_minnumf = lambda self, left, right: self.binary_op(left, right, np.fmin)
    _count_by_one()
    _patch_once()
    _keep_types()
    # Computes each integer sum in 64 bits for an assert that is made in debug mode only.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _count_by_one() -> None:
    """Bounds of loops are arrays of one element, which numpy no longer takes for numbers: Triton
    has heeded it since 3.7."""
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patch


def _patch_once() -> None:
    """Calls of kernels within kernels patch Triton's names anew each time: a third of the time."""
    patched: set[int] = set()

    def call(self, *args, **kwargs):
        if (names := id(self.fn.__globals__)) not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(names)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call


def _keep_types() -> None:
    """Each value brings its type and its shape, which are made anew: here once for each name."""
    make_block, make_tensor, find_dtype = (
        *(tl.block_type.__init__, tl.tensor.__init__),
        interpreter._get_np_dtype,
    )
    blocks: dict[tuple[str, tuple[int, ...]], tuple] = {}
    shapes: dict[str, tuple] = {}
    dtypes: dict[str, np.dtype] = {}

    def block_type(self, element_ty, shape):
        sizes = tuple([d.value if isinstance(d, tl.constexpr) else d for d in shape])
        key = element_ty.name, sizes
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = blocks[key]

    def tensor(self, handle, type):
        if type.name not in shapes:
            make_tensor(self, handle, type)
            shapes[type.name] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[type.name]

    def np_dtype(type):
        if type.name not in dtypes:
            dtypes[type.name] = find_dtype(type)
        return dtypes[type.name]

    def is_equal(self, other):
        if isinstance(other, tl.constexpr):
            other = other.value
        return self is other or (isinstance(other, tl.dtype) and self.name == other.name)

    tl.block_type.__init__, tl.tensor.__init__ = block_type, tensor
    interpreter._get_np_dtype = np_dtype
    tl.dtype.__eq__ = is_equal


if __name__ == "__main__":
    repair()
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
