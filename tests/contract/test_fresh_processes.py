"""What only a fresh process can show: what an import loads, and what is left at an end."""

import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import source_tree as tree
from test_architecture import HEAVY, light_modules

from engine.layers.linear import make_linear
from engine.observe.steplog import StepLog
from kernels.cpu.team import TEAM
from kernels.cpu.threads import num_threads, set_threads

IMPORT_ENGINE_SECONDS = 0.3  # of computing, which another program's load hardly changes
HASHERS = {"sha256": "Sha256Hasher()", "fast": "FastHasher(7)"}


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tree.ROOT
    )


def test_light_modules_import_where_heavy_ones_are_missing() -> None:
    names = light_modules()
    done = run_python(
        "import importlib, sys\n"
        f"for heavy in {HEAVY!r}: sys.modules[heavy] = None\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
    )
    assert done.returncode == 0, done.stderr


def test_import_engine_is_quick_and_light() -> None:
    code = (
        "import sys, time\n"
        "start = time.process_time()\n"
        "import engine\n"
        "print(time.process_time() - start)\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    seconds = []
    for _ in range(3):  # the best of three: the machine may be busy
        done = run_python(code)
        assert done.returncode == 0, done.stderr
        took, loaded = done.stdout.splitlines()
        assert loaded == "[]", loaded
        seconds.append(float(took))
    assert min(seconds) < IMPORT_ENGINE_SECONDS, seconds


def test_finding_the_model_in_the_box_costs_no_torch() -> None:
    assert run_python("import sys, engine.assets; sys.exit('torch' in sys.modules)").returncode == 0


def test_an_engine_on_the_cpu_does_not_pay_for_what_it_does_not_use() -> None:
    """Triton, transformers for native families, and the compiler of torch, which recording a step
    could import: each takes seconds of each start."""
    done = run_python(
        "import sys, torch\n"
        "import engine.worker.worker\n"
        "from engine.assets import BOX_MODEL\n"
        "from engine.config.model import ModelConfig, read_model_info\n"
        "from engine.models.load import load_model\n"
        "from kernels.cpu.recording import Stages, record\n"
        "from kernels.meta import AttentionMeta\n"
        "info = read_model_info(str(BOX_MODEL))\n"
        "load_model(ModelConfig(model='x'), info, device='cpu', max_model_len=64)\n"
        "meta = AttentionMeta(*[torch.zeros(0)] * 5, 16, 0, 0, 0)\n"
        "stages, memory = Stages(lambda x: x, lambda x: x), torch.empty(999, dtype=torch.uint8)\n"
        "assert record(stages, torch.ones(2), meta, memory)[1]\n"
        "print({'triton', 'transformers', 'torch._dynamo'} & sys.modules.keys())\n"
    )
    assert done.stdout.strip() == "set()", done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (["--help"], ("policylab", "engine.cli.generate", "numpy", "rich", *HEAVY)),
        (["generate", "--help"], ("policylab", "engine.cli.serve")),
        (["workload", "--list"], ("policylab.cli.simulate", "engine.cli.generate", *HEAVY)),
    ],
)
def test_a_command_loads_no_other(arguments: list[str], absent: tuple[str, ...]) -> None:
    done = run_python(
        "import sys\n"
        "from engine.cli.main import main\n"
        f"try: main({arguments!r})\n"
        "except SystemExit: pass\n"
        f"sys.exit([name for name in {absent!r} if name in sys.modules] or None)\n"
    )
    assert done.returncode == 0, done.stderr


def test_log_lines_have_somewhere_to_go() -> None:
    """In a program that set up no logging of its own, they go to standard error, once."""
    done = run_python(
        "import logging\n"
        "from engine.observe.logs import set_up_logging\n"
        "for _ in range(2): set_up_logging('info')\n"
        "logging.getLogger('engine.x').info('hello')\n"
        "logging.getLogger('engine.x').debug('too much')\n"
        "logging.getLogger('other').info('not ours')\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("INFO") and done.stderr.endswith("engine.x: hello\n")


def test_the_log_of_a_program_that_shuts_nothing_down(tmp_path: Path) -> None:
    """Scripts and notebooks simply end; an empty file was all that they left."""
    path = tmp_path / "log"
    done = run_python(
        "import gc\n"
        "from engine.observe.steplog import FORMAT, Header, OutputsCall, StepLogWriter\n"
        f"writer = StepLogWriter({str(path)!r}, Header(FORMAT, '0', {{}}, {{}}, 2, 1, 0))\n"
        "writer.write(OutputsCall([0.5]))\n"
        "gc.freeze()\n"
    )
    assert done.returncode == 0, done.stderr
    assert [record.times for record in StepLog(path)] == [[0.5]]


def test_a_process_may_end_while_it_records(tmp_path: Path) -> None:
    done = run_python(
        "import torch\n"
        "from engine.worker.profiler import TorchProfiler\n"
        f"TorchProfiler({str(tmp_path)!r}).start()\n"
        "torch.ones(4) + 1\n"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.behaviour(59)
@pytest.mark.parametrize("name", HASHERS)
def test_hashes_are_the_same_in_every_process(name: str) -> None:
    code = (
        "from support.holders import holder\n"
        "from engine.kv.fast_hash import FastHasher\n"
        "from engine.kv.prefix_index import Chains, Sha256Hasher\n"
        "found = []\n"
        f"chains = Chains({HASHERS[name]}, 16)\n"
        "chains.extend(found, holder(0, list(range(100, 164)), adapter='x'), 64)\n"
    )
    here: dict[str, list[bytes]] = {}
    exec(code, here)
    done = run_python(f"import sys; sys.path.insert(0, 'tests')\n{code}print(found[-1].hex())")
    assert done.stdout.strip() == here["found"][-1].hex(), done.stderr


def _child(layer: Any, x: Any, wanted: Any, answers: Any) -> None:
    # Not a word to torch's own threads: they do not survive a fork.
    answers.put((layer(x).tolist() == wanted.tolist(), TEAM.size))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_helpers_of_its_own(seed: int) -> None:
    before = num_threads()
    set_threads(4)
    try:
        rng = torch.Generator().manual_seed(seed)
        layer = make_linear(torch.randn(700, 300, generator=rng))
        x = torch.randn(5, 300, generator=rng)
        context = multiprocessing.get_context("fork")
        answers = context.Queue()
        child = context.Process(target=_child, args=(layer, x, layer(x), answers))
        child.start()
        assert answers.get() == (True, 4)
        child.join()
        assert child.exitcode == 0
    finally:
        set_threads(before)


def test_a_directory_needs_no_library() -> None:
    code = (
        "import sys\n"
        "from engine import LLM\n"
        "try: LLM('/nowhere')\n"
        "except ValueError: print('huggingface_hub' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
