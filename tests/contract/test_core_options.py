"""What ``metronome core`` is told wrong is said in one line, before a model is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from support.core_clients import own_place
from support.spawned import FakeBuild

from engine.cli import core
from engine.cli.main import main
from engine.config.args import EngineArgs
from engine.errors import ConfigError, EngineDeadError
from engine.rpc.host import EngineCoreHost
from engine.worker.device import resolve_device

SECRET = "a secret that both sides know"


@pytest.fixture(autouse=True)
def _nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METRONOME_CORE_SECRET", SECRET)
    monkeypatch.setattr(core, "build_core", lambda _: pytest.fail("a model was loaded"))


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with own_place(monkeypatch) as path:
        yield path


@pytest.fixture
def complaint(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The one line that a command line is answered with."""

    def complain(*args: str) -> str:
        assert main(["core", *args]) == 2
        printed = capsys.readouterr()
        (line,) = printed.err.splitlines()
        assert not printed.out
        return str(line)

    return complain


@pytest.mark.parametrize(
    "args",
    [
        ("--multiprocess",),
        ("--core-address", "ipc:///x/core"),
        ("--data-parallel-size", "2"),
        ("--tokenizer-pool-size", "2"),
        ("--tokenizer", "/somewhere"),
        ("--skip-tokenizer-init",),
        ("--disable-log-stats",),
        ("--core-hang-timeout", "30"),
        ("--core-ready-timeout", "30"),
    ],
)
def test_options_of_clients_are_not_taken_and_forgotten(
    args: tuple[str, ...], complaint: Callable[..., str]
) -> None:
    assert f"{args[0]} is for clients of a core: give it to them" in complaint(*args)


@pytest.mark.parametrize("is_control", [False, True])
def test_an_address_in_use_is_seen_before_the_model_is_loaded(
    is_control: bool, complaint: Callable[..., str]
) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as other:
        taken = other.bind_to_random_port("tcp://127.0.0.1", min_port=20_000)
        line = complaint("--listen", f"tcp://127.0.0.1:{taken - is_control}")
    assert f"cannot listen at tcp://127.0.0.1:{taken}: Address already in use" in line


@pytest.mark.parametrize(
    ("listen", "told"),
    [
        ("ipc:///tmp/x", "must start with tcp://, or be left out"),
        ("127.0.0.1:5000", "must start with tcp://"),
        ("tcp://127.0.0.1", "must be tcp://HOST:PORT with a port in 1..65534"),
        ("tcp://127.0.0.1:0", "must be tcp://HOST:PORT"),
        ("tcp://127.0.0.1:65535", "must be tcp://HOST:PORT"),
        ("tcp://127.0.0.1:" + "9" * 5000, "must be tcp://HOST:PORT"),
        ("tcp://127.0.0.1:\u0663", "must be tcp://HOST:PORT"),
        ("tcp://192.0.2.1:5000", "cannot listen at tcp://192.0.2.1:5000: "),
    ],
)
def test_an_address_that_is_none_is_named(
    listen: str, told: str, complaint: Callable[..., str]
) -> None:
    line = complaint("--listen", listen)
    assert told in line and listen in line


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("METRONOME_CORE_SECRET", "short", "at least 16 characters: set METRONOME_CORE_SECRET"),
        ("METRONOME_CORE_SECRET", os.fsdecode(b"\xf6" * 20), "METRONOME_CORE_SECRET is not UTF-8"),
        ("METRONOME_LOG_LEVEL", "loud", "METRONOME_LOG_LEVEL is 'loud', must be one of: debug"),
        ("METRONOME_DECODE_POLL_TIMEOUT_MS", "1.5", "METRONOME_DECODE_POLL_TIMEOUT_MS is '1.5'"),
    ],
)
def test_a_variable_of_the_environment_is_named(
    name: str, value: str, told: str, monkeypatch: pytest.MonkeyPatch, complaint: Callable[..., str]
) -> None:
    monkeypatch.setenv(name, value)
    line = complaint("--listen", "tcp://127.0.0.1:5000")
    assert told in line
    if "SECRET" in name:
        assert value not in line


def test_of_a_death_the_operator_has_the_traceback(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    place: Path,
) -> None:
    def die(_: EngineCoreHost) -> None:
        try:
            raise ArithmeticError("the policy fell over")
        except ArithmeticError as error:
            raise EngineDeadError("the engine core died") from error

    monkeypatch.setattr(core, "build_core", FakeBuild())
    monkeypatch.setattr(EngineCoreHost, "handle_signals", lambda *_: None)
    monkeypatch.setattr(EngineCoreHost, "serve", die)
    assert main(["core"]) == 1
    assert capsys.readouterr().err == "metronome: error: the engine core died\n"
    assert "in die" in caplog.text and "ArithmeticError: the policy fell over" in caplog.text


def test_a_device_is_interpreted_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METRONOME_INTERPRET_CUDA", "yes")
    with pytest.raises(ConfigError, match="METRONOME_INTERPRET_CUDA is 'yes', must be 0 or 1"):
        resolve_device("cuda")


def test_a_variable_that_is_nearly_one_of_ours_is_not_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("METRONOME_DECODE_POLL_TIMEOUT", "5")
    monkeypatch.setenv("METRONOME_SERVICE_HOST", "10.0.0.1")  # somebody else's
    EngineArgs(model="m").create_config()
    (line,) = caplog.messages
    assert line.startswith("METRONOME_DECODE_POLL_TIMEOUT is unknown and has no effect; did you")
    assert line.endswith("METRONOME_DECODE_POLL_TIMEOUT_MS?")


def test_a_secret_may_be_of_any_language(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METRONOME_CORE_SECRET", "ein schönes Geheimnis 秘密")
    config = EngineArgs(model="m").create_config()
    assert config.core.core_secret == "ein schönes Geheimnis 秘密"
    assert "Geheimnis" not in repr(config)


def test_nobody_is_sent_where_an_option_is_not_taken(complaint: Callable[..., str]) -> None:
    assert "--core-ready-timeout is for clients of" in complaint("--core-ready-timeout", "5")
    with pytest.raises(
        ConfigError, match=r"core_ready_timeout is 5.0.*runs already; leave it out$"
    ):
        EngineArgs(core_address="ipc:///x/core", core_ready_timeout=5.0).create_config()
    with pytest.raises(ConfigError, match=r"max_num_seqs is 5.*; give it to metronome core, or"):
        EngineArgs(core_address="ipc:///x/core", max_num_seqs=5).create_config()
