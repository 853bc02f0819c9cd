"""The address of a server: bound at once, kept while the model is loaded, reported as it is."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from engine.errors import ConfigError
from engine.server.listening import bound


def connects(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address).close()
    except ConnectionRefusedError:
        return False
    return True


def refused(said: str, host: str = "127.0.0.1", port: int = 0, uds: str | None = None) -> None:
    with pytest.raises(ConfigError, match=said), bound(host, port, uds):
        pass


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def test_a_port_is_kept_before_it_listens() -> None:
    with bound("127.0.0.1", 0, None) as listening:
        (listener,) = listening.sockets
        port = port_of(listener)
        assert listening.places("http") == [f"http://127.0.0.1:{port}"]
        assert not connects(("127.0.0.1", port))
        refused(f"port is {port}, which another program uses", port=port)
        with socket.socket() as other:  # nor by a program that shares ports
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
        listening.prepare()
        listener.listen()
        assert connects(("127.0.0.1", port))


def test_a_port_is_free_again_while_connections_of_its_last_server_close() -> None:
    with bound("127.0.0.1", 0, None) as listening:
        (listener,) = listening.sockets
        port = port_of(listener)
        listening.prepare()
        listener.listen()
        with socket.create_connection(("127.0.0.1", port)) as client:
            listener.accept()[0].close()  # the server's side closes first, and has to wait
            assert client.recv(1) == b""
    with bound("127.0.0.1", port, None) as again:
        assert port_of(again.sockets[0]) == port
        refused("another program uses", port=port)


def test_all_addresses_of_a_host_have_one_port() -> None:
    with bound("localhost", 0, None) as listening:
        assert len({port_of(each) for each in listening.sockets}) == 1
        assert len(listening.places("http")) == len(listening.sockets)


def test_an_address_of_ipv6_is_in_brackets() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:  # this machine has none: then it is refused in words
        refused("host is '::1'", "::1")
        return
    with bound("::1", 0, None) as listening:
        (place,) = listening.places("https")
        assert place == f"https://[::1]:{port_of(listening.sockets[0])}"


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a b", "x" * 300, "192.0.2.1"])
def test_a_host_that_is_not_here_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="host is "), bound(host, 0, None):
        pass


def test_a_socket_file_is_made_and_removed(tmp_path: Path) -> None:
    path = str(tmp_path / "server.sock")
    with bound("127.0.0.1", 0, path) as listening:
        assert listening.places("http") == [f"http+unix:{path}"]
        mode = os.stat(path).st_mode
        assert stat.S_ISSOCK(mode) and stat.S_IMODE(mode) == 0o666
    assert not os.path.exists(path)


@pytest.mark.parametrize("is_listening", [False, True])
def test_a_living_socket_file_is_refused(tmp_path: Path, is_listening: bool) -> None:
    path = str(tmp_path / "server.sock")
    with bound("", 0, path) as listening:
        if is_listening:
            listening.sockets[0].listen()
        refused("which another server uses", uds=path)
        assert stat.S_ISSOCK(os.stat(path).st_mode)


def test_a_socket_file_of_a_server_that_is_gone_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "server.sock")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    with bound("", 0, path) as listening:
        listening.sockets[0].listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
            assert client.getpeername() == path


def test_a_file_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("kept")
    refused("exists and is not a socket", uds=str(path))
    assert path.read_text() == "kept"


def test_the_socket_file_of_a_successor_stays(tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    with bound("", 0, str(path)):
        path.unlink()
        path.write_text("another's")
    assert path.read_text() == "another's"


@pytest.mark.parametrize("path", ["{}/missing/s", "{}/file/s", "{}/" + "x" * 200, "{}/nul\0"])
def test_a_path_where_nothing_can_be_made_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="uds is "), bound("", 0, path.format(tmp_path)):
        pass


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--port", "99999"), "port is 99999, must be in 0..65535"),
        (("--port", "-1"), "port is -1, must be in 0..65535"),
        (("--host", "no.such.host.invalid"), "host is 'no.such.host.invalid'"),
        (("--uds", "/no/such/directory/s"), "uds is '/no/such/directory/s'"),
    ],
)
def test_the_command_refuses_a_bad_address_before_it_loads_anything(
    options: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model does not exist, which would be the next error."""
    from engine.cli.main import main

    assert main(["serve", str(tmp_path / "no-model"), *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("metronome: error: ") and said in line


def test_the_command_refuses_a_port_in_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from engine.cli.main import main

    with socket.create_server(("127.0.0.1", 0)) as other:
        port = port_of(other)
        assert main(["serve", str(tmp_path / "no-model"), "--port", str(port)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"port is {port}, which another program uses at 127.0.0.1" in line
