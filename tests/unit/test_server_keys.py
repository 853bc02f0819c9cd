"""Keys of the HTTP server: which let in, and files of them that change."""

import os
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Scope
from support.fakes import FakeClock

from engine.errors import ConfigError

pytest.importorskip("starlette")

from engine.server.keys import KeyFile, KeyRing, digest_of


def scope(**headers: str) -> dict[str, Any]:
    pairs = [(k.replace("_", "-").encode(), v.encode("latin-1")) for k, v in headers.items()]
    return {"type": "http", "path": "/", "headers": pairs}


def lets_in(ring: KeyRing, shown: Scope) -> bool:
    return not ring.has_any or ring.key_of(shown) is not None


def test_each_key_lets_in_and_nothing_else() -> None:
    ring = KeyRing(["one", "twö"], None, "boss")
    for header in ("Bearer one", "bearer one", "Bearer boss"):
        assert lets_in(ring, scope(authorization=header))
    assert lets_in(ring, {**scope(), "headers": [(b"authorization", "Bearer twö".encode())]})
    assert lets_in(ring, scope(x_api_key="one")) and ring.is_admin(scope(x_api_key="boss"))
    assert lets_in(ring, scope(authorization="Bearer x", x_api_key="one"))
    for header in ("", "one", "Basic one", "Bearer", "Bearer ", "Bearer on", "Bearer onee", "é"):
        assert not lets_in(ring, scope(authorization=header))
    assert not lets_in(ring, scope()) and not lets_in(ring, scope(x_api_key=""))
    assert not ring.is_admin(scope(authorization="Bearer one"))
    assert ring.key_of(scope(x_api_key="one")) == ring.key_of(scope(authorization="Bearer one"))
    assert ring.key_of(scope(x_api_key="boss")) != ring.key_of(scope(x_api_key="one"))
    assert ring.key_of(scope(x_api_key="boss")) and ring.key_of(scope(x_api_key="x")) is None


def test_without_keys_all_are_let_in_and_none_is_admin() -> None:
    assert lets_in(KeyRing(), scope()) and not KeyRing().is_admin(scope(authorization="Bearer "))
    assert lets_in(KeyRing(admin="boss"), scope())
    for keys in ({"keys": ["one", ""]}, {"admin": ""}):
        with pytest.raises(ConfigError, match="_key is empty, must be"):
            KeyRing(**keys)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "no keys"),
        (b"a key\n", "key 1 must have"),
        (b"\xff\n", "utf-8"),
        (None, "No such file"),
    ],
)
def test_a_file_that_is_no_use(
    text: bytes | None, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At the start it is an error; later the keys stay as they were, and it is logged once."""
    path, clock = tmp_path / "keys", FakeClock()
    path.write_text("good\n")
    file = KeyFile(str(path), clock)
    path.unlink() if text is None else path.write_bytes(text)
    with pytest.raises(ConfigError, match=said):
        KeyFile(str(path), clock)
    for _ in range(5):
        clock.now += 2.0
        assert file.digests() == [digest_of(b"good")]
    assert caplog.text.count("the keys stay as they were") == 1


def test_a_file_is_read_again_however_it_changes(tmp_path: Path) -> None:
    """Written anew, replaced by another, or through a link that points elsewhere."""
    path, clock = tmp_path / "keys", FakeClock()
    path.write_text("  one  \r\n# two\n")
    link = tmp_path / "link"
    link.symlink_to(path)
    file = KeyFile(str(link), clock)

    def now() -> list[bytes]:
        clock.now += 2.0
        return file.digests()

    assert now() == [digest_of(b"one")]
    path.write_text("one\ntwo\n")
    assert now() == [digest_of(b"one"), digest_of(b"two")]
    other = tmp_path / "other"
    other.write_text("six\nten\n")
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    link.unlink()
    link.symlink_to(other)
    assert now() == [digest_of(b"six"), digest_of(b"ten")]
    other.unlink()
    assert len(now()) == 2
    other.write_text("new\n")
    assert now() == [digest_of(b"new")]
