"""The server checks at its start that libraries have the private parts that it uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import ConfigError
from engine.server.private_parts import (
    TRANSFORMERS,
    UVICORN,
    PrivateParts,
    check_private_parts,
    missing_part,
)


@pytest.mark.parametrize("parts", [UVICORN, TRANSFORMERS], ids=lambda parts: str(parts.package))
def test_the_installed_versions_have_all_parts(parts: PrivateParts) -> None:
    assert missing_part(parts) is None


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A library of version 9.1 with a class, of which parts may be missing."""
    (tmp_path / "partlib").mkdir()
    (tmp_path / "partlib" / "__init__.py").touch()
    (tmp_path / "partlib" / "inner.py").write_text(
        "class Cycle:\n    def __init__(self):\n        self.flow = 1\n    def run(self): ...\n"
    )
    (tmp_path / "partlib" / "broken.py").write_text("import a_library_that_nobody_has\n")
    (tmp_path / "partlib-9.1.dist-info").mkdir()
    (tmp_path / "partlib-9.1.dist-info" / "METADATA").write_text("Name: partlib\nVersion: 9.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    return "partlib"


@pytest.mark.parametrize("name", ["inner:Cycle", "inner:Cycle.run", "inner:Cycle.flow"])
def test_methods_and_attributes_are_found(library: str, name: str) -> None:
    assert missing_part(PrivateParts(library, "9.0", (f"{library}.{name}",))) is None


@pytest.mark.parametrize(
    "name", ["inner:Gone", "inner:Gone.run", "inner:Cycle.gone", "outer:Cycle", "inner.deep:Cycle"]
)
def test_a_missing_part_is_named_with_both_versions(library: str, name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_private_parts(PrivateParts(library, "9.0", (f"{library}.{name}",)))
    message = str(refused.value)
    assert f"partlib 9.1 has no partlib.{name}, " in message
    assert "pip install partlib==9.0" in message


def test_a_library_that_is_not_installed_is_named_as_such(library: str) -> None:
    for name, missing in ((library, "a_library_that_nobody_has"), ("no_such_library",) * 2):
        with pytest.raises(ModuleNotFoundError) as refused:
            check_private_parts(PrivateParts(name, "1", (f"{library}.broken:Cycle",)))
        assert refused.value.name == missing
