"""Where a core can be reached, by whom, and what a client of it costs."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from support.core_clients import HostedCore, RawClient, drain
from support.processes import open_files
from support.simulate import expected, make_request
from support.spawned import FakeBuild

from engine.errors import ConfigError, EngineDeadError
from engine.ipc.address import Directory, address_of, tcp_address
from engine.messages.wire import (
    PROTOCOL_VERSION,
    Hello,
)
from engine.rpc.zmq_client import WELCOME_SECONDS, EngineCoreClient

SECRET = "a secret of some length"


pytestmark = pytest.mark.usefixtures("place")


def test_the_directory_is_for_its_user_alone(core: HostedCore) -> None:
    directory = Path(core.address.data.removeprefix("ipc://")).parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert sorted(path.name for path in directory.iterdir()) == [
        "core",
        "core-control",
        "core-token",
        "lock",
    ]
    assert address_of(core.address.data, None) == core.address


def test_directories_that_killed_processes_left_are_removed(place: Path) -> None:
    code = (
        "import os, signal, sys, tempfile\n"
        f"tempfile.tempdir = {str(place)!r}\n"
        "from engine.ipc.address import Directory\n"
        "held = Directory.create()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    (left,) = place.iterdir()
    lives = Directory.create()
    assert not left.exists() and lives.path.exists()
    other = Directory.create()  # does not remove one that lives
    assert lives.path.exists()
    for each in (lives, other):
        each.remove()


def test_a_directory_whose_maker_was_killed_before_it_took_the_lock_is_removed_too(
    place: Path,
) -> None:
    old, new = place / "metronome-core-old", place / "metronome-core-new"
    for each in (old, new):
        each.mkdir(0o700)
    os.utime(old, (time.time() - 120, time.time() - 120))
    held = Directory.create()
    assert not old.exists() and new.exists()  # that one may get its lock in a moment
    held.remove()
    new.rmdir()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_tcp_works_with_the_shared_secret_alone() -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    with HostedCore(FakeBuild(), address=tcp_address(address, SECRET)):
        client = EngineCoreClient.connect(address, SECRET)
        client.add(make_request("a", [1], 20))
        assert drain(client)[0] == {"a": expected([1], 20)}
        client.shutdown()
        with pytest.raises(EngineDeadError):
            wrong = address_of(address, "another secret of some length")
            EngineCoreClient(wrong, welcome_timeout=1.0)
        with RawClient(address) as plain:  # without encryption
            plain.send(Hello(PROTOCOL_VERSION, tcp_address(address, SECRET).token))
            assert plain.receive(0.5) is None


@pytest.mark.parametrize(
    ("address", "secret", "message"),
    [
        ("tcp://127.0.0.1:5000", None, "needs a shared secret of at least 16 characters"),
        ("tcp://127.0.0.1:5000", "short", "needs a shared secret of at least 16 characters"),
        ("tcp://127.0.0.1", SECRET, "must be tcp://HOST:PORT"),
        ("tcp://:5000", SECRET, "must be tcp://HOST:PORT"),
        ("tcp://x:0", SECRET, "must be tcp://HOST:PORT"),
        ("tcp://x:65535", SECRET, "must be tcp://HOST:PORT"),
        ("udp://x:5000", SECRET, "must begin with ipc:// or tcp://"),
        ("ipc:///nowhere/core", None, "there is no core at"),
    ],
)
def test_addresses_that_cannot_work_are_refused(
    address: str, secret: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        address_of(address, secret)


@pytest.mark.parametrize("host", ["a b", "a,b", "*", "\udcff", "a\0b"])
def test_hosts_that_are_none_are_refused_and_leave_nothing(host: str) -> None:
    num_open = open_files()
    with pytest.raises(ConfigError, match="cannot connect to 'tcp://"):
        EngineCoreClient(address_of(f"tcp://{host}:5000", SECRET))
    assert open_files() == num_open


def test_where_no_core_listens_a_client_says_so_at_once() -> None:
    directory = Directory.create()
    with socket.socket(socket.AF_UNIX) as left:  # as by a core that was killed
        left.bind(directory.address.data.removeprefix("ipc://"))
    start = time.monotonic()
    with pytest.raises(EngineDeadError, match="no core answers at ipc://"):
        EngineCoreClient(directory.address)
    with pytest.raises(EngineDeadError, match=r"no core answers at tcp://.*, or it has another se"):
        EngineCoreClient(address_of(f"tcp://127.0.0.1:{free_port()}", SECRET))
    assert time.monotonic() - start < WELCOME_SECONDS
    directory.remove()


def test_without_any_temporary_directory_the_error_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nowhere() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    with pytest.raises(ConfigError, match=r"No usable temporary directory .* set TMPDIR to"):
        Directory.create()


@pytest.mark.parametrize("name", ["none", "x" * 100])
def test_where_no_socket_can_be_the_error_says_what_to_set(
    name: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name != "none":
        (place / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place / name))
    with pytest.raises(ConfigError, match=r"the directory of a core's sockets .* set TMPDIR"):
        Directory.create()
    if name != "none":
        (place / name).rmdir()


# -- what a client costs


@pytest.mark.behaviour(112)
def test_a_client_is_quick_to_import_and_needs_no_torch() -> None:
    code = (
        "import sys, time\nstart = time.process_time()\n"
        "import engine.rpc.zmq_client\n"
        "print(time.process_time() - start)\n"
        "print([m for m in ('torch', 'transformers', 'numpy', 'tokenizers') if m in sys.modules])\n"
    )
    seconds = []
    for _ in range(3):  # the best of three: the machine may be busy
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        took, loaded = done.stdout.splitlines()
        assert loaded == "[]"
        seconds.append(float(took))
    assert min(seconds) < 0.3


@pytest.mark.behaviour(112)
def test_a_core_is_built_where_no_accelerator_is_visible() -> None:
    code = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from support.spawned import FakeBuild, fake_config\n"
        "FakeBuild()(fake_config()).shutdown()\n"
        "assert 'torch' not in sys.modules\n"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    assert done.returncode == 0
