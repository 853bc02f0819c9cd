"""An interrupt ends the command with one line and status 130, whenever it comes, and leaves no
process behind. The moments are events of the program itself, so nothing depends on its speed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from support.patience import WAIT_SECONDS

from engine.assets import BOX_MODEL

pytestmark = pytest.mark.usefixtures("can_interrupt")

# Runs in every process of the command before anything else: at the moment that it waits for, a
# process sends the signal to the whole group, as a terminal does, or to the command alone.
SITE = """
import atexit, os, signal, sys

kind, event, name = os.environ["MOMENT"].split(":")
number, to = int(os.environ["NUMBER"]), os.environ["RECEIVER"]
command = int(os.environ.setdefault("COMMAND", str(os.getpid())))

def send():
    global event
    event = ""  # once
    with open(os.environ["SENT"], "a") as sent:
        sent.write("sent\\n")
    os.killpg(command, number) if to == "group" else os.kill(command, number)

def watch(what, values):
    if what == event and (not name or (values and name in str(values[0]))):
        send()

if (kind == "child") == (os.getpid() != command):
    if event == "exit":
        atexit.register(send)  # the first that is registered is the last that runs
    else:
        sys.addaudithook(watch)
"""
# A policy that has a moment of its own: the first time that it orders requests.
POLICY = """
import sys
from engine.sched.policies.fcfs import FCFS

class Interrupted(FCFS):
    def rank(self, req, view):
        sys.audit("test.rank")
        return super().rank(req, view)
"""
RUN = "import sys; from engine.cli.entry import run; sys.exit(run())"
MODEL = ["--model", str(BOX_MODEL)]
GENERATE = ["generate", "--num-threads", "1", *MODEL, "--max-tokens", "9", "Hello"]
OWN = "users_policy.Interrupted"
JOBS = ["--requests", "300", "--loads", "0.5", "--seeds", "2", "--jobs", "2"]


def run(
    tmp_path: Path,
    moment: str,
    *command: str,
    number: int = signal.SIGINT,
    receiver: str = "group",
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """What the command wrote and its status; nothing of its group is left after it."""
    (tmp_path / "sitecustomize.py").write_text(SITE)
    (tmp_path / "users_policy.py").write_text(POLICY)
    sent = tmp_path / "sent"
    about = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()]),
        "MOMENT": moment,
        "NUMBER": str(int(number)),
        "RECEIVER": receiver,
        "SENT": str(sent),
        **variables,
    }
    with subprocess.Popen(
        [sys.executable, "-c", RUN, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=about,
        start_new_session=True,
    ) as running:
        out, err = running.communicate(timeout=WAIT_SECONDS)
    assert sent.exists(), f"the moment {moment} has not come: {out}{err}"
    until = time.monotonic() + WAIT_SECONDS
    while _is_there(running.pid):
        assert time.monotonic() < until, f"processes are left behind after: {err}"
        time.sleep(0.05)
    return subprocess.CompletedProcess(command, running.returncode, out, err)


def _is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def check(done: subprocess.CompletedProcess[str]) -> None:
    assert (done.stderr, done.returncode) == ("metronome: interrupted\n", 130), done.stdout


SERVE = ["serve", "--port", "0", "--num-threads", "1", *MODEL]
BENCH = ["bench", "throughput", "--num-prompts", "4"]
VERIFY = ["verify", "--policy", OWN, "--steps", "50000"]
APART = [*GENERATE, "--multiprocess"]
OF_OWN = ["--scheduling-policy", OWN]
MOMENTS = {
    "first import": ("main:import:engine.cli.main", GENERATE),
    "import of a library": ("main:import:numpy", GENERATE),
    "import within a library": ("main:import:numpy.linalg", GENERATE),
    "import of torch": ("main:import:torch._C", GENERATE),
    "import behind torch": ("main:import:engine.worker.worker", GENERATE),
    "reading the model": ("main:open:config.json", GENERATE),
    "compiling": ("main:open:.nbi.lock", [*GENERATE[:2], "2", *GENERATE[3:]]),
    "starting a core": ("main:import:multiprocessing.popen_spawn_posix", APART),
    "a core that imports": ("child:import:torch", APART),
    "a core that loads": ("child:open:config.json", APART),
    "a prompt that is typed": ("main:builtins.input:", ["chat", "--num-threads", "1", *MODEL]),
    "a step": ("main:test.rank:", [*GENERATE, *OF_OWN]),
    "a step of a core": ("child:test.rank:", [*APART, *OF_OWN]),
    "a measured start": ("child:import:torch", ["bench", "startup", "--num-iters", "1"]),
    "a benchmark": ("main:test.rank:", [*BENCH, *OF_OWN]),
    "a simulation": ("main:test.rank:", ["simulate", "--policy", OWN, "--load", "0.5"]),
    "simulations at once": ("child:test.rank:", ["compare", "fcfs", OWN, *JOBS]),
    "processes of simulations": ("child:import:numpy", ["compare", "fcfs", OWN, *JOBS]),
    "a proof": ("main:test.rank:", VERIFY),
    "proofs at once": ("child:test.rank:", [*VERIFY, "--jobs", "2"]),
    "a server that loads": ("child:open:config.json", SERVE),
    "a core by itself that loads": ("main:open:config.json", ["core", "--num-threads", "1"]),
    "the end": ("main:exit:", GENERATE),
}  # fmt: skip


def names(chosen: Iterable[str], often: Iterable[str]) -> list[Any]:
    """Parameters of a test: only the long form of the tests runs those that are not chosen."""
    slow = pytest.mark.slow
    return [pytest.param(each, marks=() if each in often else slow) for each in chosen]


OFTEN = (
    *("first import", "import within a library", "starting a core"),
    *("a step", "a server that loads"),
)


@pytest.mark.parametrize("name", names(MOMENTS, OFTEN))
def test_an_interrupt_ends_in_one_line(name: str, tmp_path: Path) -> None:
    moment, command = MOMENTS[name]
    variables = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")} if name == "compiling" else {}
    done = run(tmp_path, moment, *command, **variables)
    assert done.returncode == 130, done.stderr
    lines = [line for line in done.stderr.splitlines(keepends=True) if not is_log(line)]
    assert "".join(lines) == "metronome: interrupted\n", done.stderr


def is_log(line: str) -> bool:
    """A line of the log before the interrupt, not something that broke."""
    return line.startswith(("INFO ", "WARNING "))


TERMINATED = (
    *("import of a library", "reading the model", "a core that loads", "a step"),
    *("a step of a core", "a measured start", "simulations at once", "proofs at once"),
)


@pytest.mark.parametrize("name", names(TERMINATED, ("import of a library", "a step of a core")))
@pytest.mark.parametrize("receiver", ["command", pytest.param("group", marks=pytest.mark.slow)])
def test_sigterm_leaves_nothing(name: str, receiver: str, tmp_path: Path) -> None:
    moment, command = MOMENTS[name]
    done = run(tmp_path, moment, *command, number=signal.SIGTERM, receiver=receiver)
    assert done.returncode == 143, done.stderr
    assert "metronome: ended by SIGTERM\n" in done.stderr and "Traceback" not in done.stderr


def test_a_command_without_standard_streams_runs() -> None:
    """What it opens must not become standard error, to which libraries write."""
    generate = f"generate --model {BOX_MODEL} --max-tokens 2 x"
    command = f"exec {sys.executable} -c '{RUN}' {generate} <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], timeout=WAIT_SECONDS, check=False).returncode == 0


def test_an_error_that_nobody_can_read_keeps_its_status() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", RUN, "generate", "--model", "/nowhere", "x"]
        done = subprocess.run(command, stderr=full, timeout=WAIT_SECONDS, check=False)
    assert done.returncode == 2
