"""Kernels at the levels of instructions below this processor's; caches that came from another."""

import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu import isa

HERE = Path(__file__).parent

# Each level in a process that has imported torch and Numba, but has compiled nothing yet.
CHOICES = """
import os, sys
import numba, torch
for level in sys.argv[1:]:
    if os.fork():
        os.wait()
        continue
    os.environ["METRONOME_CPU_ISA"] = level
    from kernels.cpu import isa
    try:
        said = isa.requested()
    except ValueError as error:
        said = error
    print(level, isa.LEVEL, said, sep="|", flush=True)
    os._exit(0)
"""
RUN = """
from kernels.cpu import isa, slots
print(isa.requested())
slots.GROW.prepare()
"""


# The compiled hash and the tree of suffix drafts decorate functions of their own.
LATE = """
from numba import config, njit
twice = njit(lambda x: 2 * x)
import engine.kv.fast_hash, engine.spec.context_tree
assert twice(4) == 8
import kernels
from kernels.cpu import isa
print(isa.LEVEL, config.CPU_FEATURES)
"""


def run(*command: str, level: str | None, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        env={isa.VARIABLE: level or "", **more},
        capture_output=True,
        text=True,
        check=False,
    )


LEVELS = [level for level in isa.LEVELS if level != "base"]

# Bodies that no processor of a level below the highest runs by itself.
OF_OTHERS = "soft or ordered or summed_as_tiles"
KERNELS = (
    "test_block_products.py",
    "test_causal_conv.py",
    "test_cpu_products.py",
    "test_delta_rule.py",
    "test_kernels.py",
    "test_low_rank.py",
    "test_selective_scan.py",
)
BITS = ("test_cpu_attention_bits.py",)  # compiles attention for each way to multiply


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (KERNELS, f"not ({OF_OTHERS})"),
        (KERNELS, OF_OTHERS),
        (BITS, "bits"),
    ],
)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.slow  # each compiles all kernels anew
def test_each_level_computes_the_same(level: str, names: tuple[str, ...], chosen: str) -> None:
    """The cases of the kernels' tests that are marked for this level."""
    if level == isa.LEVEL:
        pytest.skip(f"{level} is what this process uses: its cases have run beside this one")
    if level not in isa.available():
        pytest.skip(f"{isa.processor()} has no {level}")
    files = [str(HERE / name) for name in names]
    done = run(
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "isa",
        "-k",
        chosen,
        *files,
        level=level,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout


@pytest.fixture(scope="module")
def told() -> dict[str, list[str]]:
    """For each level, known or not: the level that is used, and the message about it."""
    done = run("-c", CHOICES, *isa.LEVELS, "avx1024", level=None)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split("|") for line in done.stdout.splitlines()]
    assert len(lines) == len(isa.LEVELS) + 1, done.stderr[-2000:]
    return {name: told for name, *told in lines}


def test_a_level_can_be_asked_for(told: dict[str, list[str]]) -> None:
    for level in isa.available():
        assert told[level] == [level, level]


def test_what_this_processor_has_not_is_refused(told: dict[str, list[str]]) -> None:
    for level in ("avx1024", *(set(isa.LEVELS) - set(isa.available()))):
        taken, said = told[level]
        assert taken == isa.available()[-1]
        assert f"{isa.VARIABLE} is '{level}'" in said
        assert isa.available()[-1] in said


def test_a_cache_of_another_processor_is_added_to(tmp_path: Path) -> None:
    """What one level compiled is never run at another, though both keep it in one place."""
    sizes = []
    levels = isa.available()[-2:]
    for level in (*levels, levels[0]):
        done = run("-c", RUN, level=level, NUMBA_CACHE_DIR=str(tmp_path))
        assert (done.returncode, done.stdout.split()) == (0, [level]), done.stderr[-2000:]
        sizes.append(sum(1 for _ in tmp_path.rglob("*.nbc")))
    *first, again = sizes
    assert first == sorted(set(first)), "a level took what another had compiled"
    assert again == first[-1], "a level did not find what it had compiled"


def test_functions_that_others_compiled_before_do_not_change_the_level() -> None:
    """Kernels have the same features, and so the same disk cache, in every process."""
    lines = "import kernels\nfrom kernels.cpu import isa\nfrom numba import config\n"
    alone = run("-c", f"{lines}print(isa.LEVEL, config.CPU_FEATURES)", level=None)
    late = run("-c", LATE, level=None)
    assert late.returncode == alone.returncode == 0, late.stderr + alone.stderr
    assert late.stdout == alone.stdout
