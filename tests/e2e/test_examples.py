"""What README and examples/ show works as shown."""

import os
import re
import runpy
import subprocess
import sys
from importlib.metadata import distributions

import pytest
from support import source_tree as tree
from support.forked_runs import run_forked

from engine.assets import BOX_MODEL, PACKAGE

SCRIPTS = sorted(path.name for path in (tree.ROOT / "examples").glob("*.py"))
DEFAULT = "LLM()"
BLOCKS = re.findall(r"```python\n(.*?)```", (tree.ROOT / "README.md").read_text(), re.DOTALL)
UNNAMED_MODEL = str(tree.ROOT / "tests" / "support" / "unnamed_model")
IS_INSTALLED = any(distributions(name=PACKAGE, path=[p for p in sys.path if p != UNNAMED_MODEL]))


def run(*arguments: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=tree.ROOT,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_script(script: str) -> None:
    runpy.run_path(str(tree.ROOT / "examples" / script), run_name="__main__")


@pytest.mark.parametrize("script", SCRIPTS)
def test_example_runs_and_says_something(script: str) -> None:
    done = run_forked(run_script, script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_readme_block_runs(number: int) -> None:
    """A block without a model prints what README says only where its model is installed."""
    assert len(BLOCKS) >= 2
    block = BLOCKS[number]
    told = re.findall(r"^# ?(.*)$", block, re.MULTILINE)  # what it says it prints
    if DEFAULT in block and not IS_INSTALLED:
        block, told = block.replace(DEFAULT, f"LLM({str(BOX_MODEL)!r})"), []
    paths = os.environ["PYTHONPATH"].replace(UNNAMED_MODEL, "")
    printed = run("-c", block, PYTHONPATH=paths).splitlines()
    assert not told or printed == told
