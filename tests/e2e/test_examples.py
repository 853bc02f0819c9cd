"""What README and examples/ show works as shown."""

import contextlib
import re
import subprocess
import sys

import pytest
from support import source_tree as tree
from support.served import served

SCRIPTS = sorted(path.name for path in (tree.ROOT / "examples").glob("*.py"))
SERVED = "http://127.0.0.1:8000"  # where the README has its server
BLOCKS = re.findall(r"```python\n(.*?)```", (tree.ROOT / "README.md").read_text(), re.DOTALL)


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=tree.ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_example_runs_and_says_something(script: str) -> None:
    assert run(f"examples/{script}").strip()


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_readme_block_runs(number: int) -> None:
    assert len(BLOCKS) >= 3
    told = re.findall(r"^# ?(.*)$", BLOCKS[number], re.MULTILINE)  # what it says it prints
    with contextlib.ExitStack() as stack:
        block = BLOCKS[number]
        if SERVED in block:
            server = stack.enter_context(served("--served-model-name", "box"))
            block = block.replace(SERVED, server.url)
        printed = run("-c", block).splitlines()
    assert not told or printed == told
