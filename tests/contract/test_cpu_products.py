"""Products of bfloat16: each body that this processor can run, and soft ones of those it cannot."""

import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from engine.layers.linear import make_linear
from kernels import reference
from kernels.cpu import isa, pointwise
from kernels.cpu.matmul import bfloat16
from kernels.cpu.threads import num_threads, set_threads

# [out, in]: a part of a panel, several, more inputs than one pass takes: whole steps of them, an
# odd number.
SHAPES = ((64, 32), (5, 7), (200, 96), (70, 576), (130, 1601))
# The last are more than go through all panels together.
ROWS = (0, 1, 2, 3, 5, 6, 7, 13, 16, 17, 33, 64, 150, 300)
NEEDS = {"dots": "avx512_bf16", "tiles": "amx"}


@pytest.fixture
def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def runs_here(body: str) -> bool:
    return NEEDS.get(body, "base") in isa.LEVELS[: isa.LEVELS.index(isa.LEVEL) + 1]


OWN = [body for body in ("widened", *NEEDS) if runs_here(body)][-1]
"""The body this processor takes. The others are left to the campaign."""


@pytest.fixture(
    params=[
        pytest.param(body, marks=[pytest.mark.slow] * (body != OWN)) for body in bfloat16.BODIES
    ]
)
def body(request: pytest.FixtureRequest) -> str:
    if not runs_here(request.param):
        pytest.skip(f"{isa.processor()} computes without {NEEDS[request.param]}")
    return request.param


def case(shape: tuple[int, int], body: str, rng: torch.Generator) -> tuple[torch.Tensor, ...]:
    weight = torch.randn(shape, generator=rng).bfloat16()
    return weight, packed_for(weight, body), torch.randn(shape[0], generator=rng)


def packed_for(weight: torch.Tensor, body: str) -> torch.Tensor:
    return bfloat16.pack(weight, bfloat16.width_of(body))


@pytest.mark.isa
@pytest.mark.parametrize("shape", SHAPES)
def test_products(shape: tuple[int, int], body: str, rng: torch.Generator) -> None:
    weight, packed, bias = case(shape, body, rng)
    for num, has_bias in product(ROWS, (False, True)):
        x = torch.randn(num, shape[1], generator=rng).bfloat16()
        added = bias if has_bias else None
        got = bfloat16.packed_product(
            x, packed, added, shape[0], out_dtype=torch.float32, body=body
        )
        wanted = F.linear(x.double(), weight.double(), None if added is None else bias.double())
        scale = shape[1] ** 0.5
        torch.testing.assert_close(got.double() / scale, wanted / scale, rtol=0, atol=2e-5)
        rounded = bfloat16.packed_product(x, packed, added, shape[0], body=body)
        assert torch.equal(rounded, got.bfloat16())


@pytest.mark.isa
@pytest.mark.parametrize("act", pointwise.ACTS)
@pytest.mark.parametrize(("half", "num_in"), [(64, 70), (128, 96)])
def test_gates_are_applied_on_the_way(
    half: int, num_in: int, act: str, body: str, rng: torch.Generator
) -> None:
    weight, packed, _ = case((2 * half, num_in), body, rng)
    for num in (0, 1, 7, 16, 33, 150):
        x = torch.randn(num, num_in, generator=rng).bfloat16()
        sums = x.double() @ weight.double().T
        wanted = reference.act_mul(sums, act)
        got = bfloat16.gated_product(x, packed, 2 * half, act, body=body)
        assert got.dtype is torch.bfloat16
        torch.testing.assert_close(got.double(), wanted, rtol=2**-8, atol=1e-4)


@pytest.mark.isa
@pytest.mark.parametrize("shape", [(5, 7), (64, 32), (700, 96), (1000, 130)])
def test_the_largest_is_found_without_storing_any(
    shape: tuple[int, int], body: str, rng: torch.Generator
) -> None:
    weight, packed, _ = case(shape, body, rng)
    weight[shape[0] // 2] = weight[1]  # as large as another, and further down
    packed = packed_for(weight, body)
    for num in (1, 2, 7, 40, 150):
        x = torch.randn(num, shape[1], generator=rng).bfloat16()
        sums = bfloat16.packed_product(
            x, packed, None, shape[0], out_dtype=torch.float32, body=body
        )
        found = bfloat16.largest(x, packed, shape[0], body=body)
        assert found.dtype is torch.int32
        first = (sums == sums.amax(1, keepdim=True)).int().argmax(1)
        assert torch.equal(found.long(), first)


def test_what_is_not_sound_has_no_largest(body: str, rng: torch.Generator) -> None:
    weight = torch.zeros(300, 32, dtype=torch.bfloat16)
    weight[:, 0] = -1.0
    weight[200, 1] = 1.0
    packed = packed_for(weight, body)
    x = torch.zeros(5, 32, dtype=torch.bfloat16)
    x[1, 0] = torch.inf  # all -inf
    x[2, 1] = torch.inf  # one +inf, and NaN where zeros meet it
    x[3, 5] = torch.nan
    x[4, 1] = 2.0
    assert bfloat16.largest(x, packed, 300, body=body).tolist() == [0, -1, -1, -1, 200]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_is_the_same_in_any_company(body: str, threads: int, rng: torch.Generator) -> None:
    before = num_threads()
    set_threads(threads)
    try:
        _, packed, bias = case((200, 96), body, rng)
        x = torch.randn(40, 96, generator=rng).bfloat16()
        together = bfloat16.packed_product(x, packed, bias, 200, body=body)
        for row in range(40):
            alone = bfloat16.packed_product(x[row : row + 1], packed, bias, 200, body=body)
            assert torch.equal(alone[0], together[row])
    finally:
        set_threads(before)


@pytest.mark.slow
@pytest.mark.skipif(isa.LEVEL != "amx", reason=f"{isa.processor()} computes without amx")
@pytest.mark.parametrize("shape", SHAPES)
def test_soft_tiles_are_the_processors(shape: tuple[int, int], rng: torch.Generator) -> None:
    """To the last bit."""
    _, packed, bias = case(shape, "tiles", rng)
    x = torch.randn(50, shape[1], generator=rng).bfloat16()
    soft, tiles = (
        bfloat16.packed_product(x, packed, bias, shape[0], out_dtype=torch.float32, body=name)
        for name in ("soft tiles", "tiles")
    )
    assert torch.equal(soft, tiles)


def test_damage_stays_in_its_row(body: str, rng: torch.Generator) -> None:
    _, packed, _ = case((70, 40), body, rng)
    x = torch.randn(20, 40, generator=rng).bfloat16()
    sound = bfloat16.packed_product(x, packed, None, 70, body=body)
    x[3, 5] = float("nan")
    got = bfloat16.packed_product(x, packed, None, 70, body=body)
    kept = torch.arange(20) != 3
    assert not got[3].isfinite().any() and torch.equal(got[kept], sound[kept])


@pytest.mark.parametrize("shape", SHAPES)
def test_float16_weights_are_multiplied_in_float32(
    shape: tuple[int, int], rng: torch.Generator
) -> None:
    weight = torch.randn(shape, generator=rng).half()
    bias = torch.randn(shape[0], generator=rng).half()
    layer = make_linear(weight.clone(), bias)
    for num in ROWS:
        x = torch.randn(num, shape[1], generator=rng)
        wanted = F.linear(x.double(), weight.double(), bias.double())
        scale = shape[1] ** 0.5
        torch.testing.assert_close(layer(x).double() / scale, wanted / scale, rtol=0, atol=2e-5)


COMPILE = """
from kernels.cpu.attention import dotted_single_kernel, paired_kernel, tiled_single_kernel
from kernels.cpu.matmul import bfloat16
print(bfloat16.BODIES[{body!r}].assembly())
if {body!r} != "widened":
    print({cut!r}, paired_kernel(64, 3, {body!r}).assembly())
    single = tiled_single_kernel if {body!r} == "tiles" else dotted_single_kernel
    print({cut!r}, single(64, 3, {body!r}).assembly())
"""
CUT = "; attention"
# Features as LLVM names them, of a processor that has the body's instructions.
VECTORS = "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl"
TILES = f"{VECTORS},+avx512bf16,+amx-tile,+amx-bf16"
ELSEWHERE = [
    pytest.param(
        *("dots", "znver4", f"{VECTORS},+avx512bf16", ("vdpbf16ps",)), marks=pytest.mark.slow
    ),
    pytest.param(
        *("dots", "cooperlake", f"{VECTORS},+avx512bf16", ("vdpbf16ps",)), marks=pytest.mark.slow
    ),
    pytest.param(
        "tiles",
        "sapphirerapids",
        TILES,
        ("ldtilecfg", "tileloadd", "tdpbf16ps", "tilestored", "tilerelease"),
        marks=pytest.mark.slow,
    ),
    ("widened", "haswell", "+avx,+avx2,+fma,+f16c,+bmi,+bmi2", ("vfmadd",)),
]


@pytest.mark.skipif(not isa.has("avx2"), reason="compiles for processors of this kind")
@pytest.mark.parametrize(("body", "cpu", "features", "instructions"), ELSEWHERE)
def test_bodies_compile_for_processors_that_are_not_here(
    body: str, cpu: str, features: str, instructions: tuple[str, ...], tmp_path: Path
) -> None:
    """Nothing of it is run; registers hold a tile's sums, so none is laid down in memory."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILE.format(body=body, cut=CUT)],
        env={
            "NUMBA_CPU_NAME": cpu,
            "NUMBA_CPU_FEATURES": features,
            "NUMBA_CACHE_DIR": str(tmp_path),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for assembly in done.stdout.split(CUT):
        for instruction in instructions:
            assert instruction in assembly
