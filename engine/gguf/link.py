"""The file in a model directory that names the GGUF file from which the directory was made."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from engine.config.model import GGUF_LINK, read_json
from engine.errors import ModelError

MAGIC = b"GGUF"


def gguf_file(root: Path) -> Path | None:
    """The GGUF file of a derived directory; ``None`` for another model directory. Raises
    ``ModelError`` if the file has changed since, or is gone."""
    link = read_json(root / GGUF_LINK)
    if link is None:
        return None
    file, state = link.get("file"), link.get("state")
    if not isinstance(file, str) or not isinstance(state, list):
        raise ModelError(f"{root / GGUF_LINK} is damaged: it names no file; delete {root}")
    if state_of(Path(str(each[0])) for each in state) != state:
        raise ModelError(f"{file} has changed since it was opened; start again")
    return Path(file)


def state_of(files: Iterable[Path]) -> list[list[str | int]]:
    """Path, size in bytes and time of the last change of each file. Raises ``ModelError`` for a
    file that cannot be found."""
    found: list[list[str | int]] = []
    for file in files:
        try:
            status = file.stat()
        except OSError as error:
            raise ModelError(f"{file} cannot be read: {error.strerror}") from error
        found.append([str(file), status.st_size, status.st_mtime_ns])
    return found


def is_gguf_path(value: str) -> bool:
    """Whether the option ``model`` names a GGUF file: by its ending, or by its first bytes."""
    path = Path(value).expanduser()
    if path.is_dir():
        return False
    return value.lower().endswith(".gguf") or is_gguf(path)


def is_gguf(path: Path) -> bool:
    """True if the file begins as a GGUF file does."""
    try:
        if not path.is_file():  # reading a pipe would wait
            return False
        with path.open("rb") as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except OSError:
        return False
