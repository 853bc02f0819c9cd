"""Makes the model directory of a GGUF file: JSON files from its metadata, and a link to the file.

Everything that reads model directories then works for GGUF files. Directories are kept in a cache
below the user's cache directory, by the file's path, size and time of change. A directory whose
file has changed or is gone is removed when the next directory is made.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

from engine.config.env import user_cache
from engine.config.model import GGUF_LINK
from engine.errors import ModelError
from engine.gguf.config import read_config
from engine.gguf.header import part_files, read_gguf
from engine.gguf.link import gguf_file, state_of
from engine.gguf.vocabulary import write_tokenizer

FORMAT = 2
"""Part of the key of cached directories; counts changes of what is written."""
MIN_SECONDS_KEPT = 3600.0
"""Age below which a directory is never removed, since an engine may be starting from it."""


def directory_of(value: str) -> Path:
    """The model directory of a GGUF file, made if it is not in the cache. Raises ``ModelError`` if
    the file is missing, damaged or of an unknown kind."""
    # Links are kept: in a hub's cache, the files they lead to are named by their contents.
    path = Path(value).expanduser().absolute()
    try:
        is_file = path.is_file()
    except OSError as error:
        raise ModelError(f"the model file {value!r} cannot be read: {error.strerror}") from error
    if not is_file:
        what = "is no regular file" if path.exists() else "does not exist"
        raise ModelError(f"the model file {value!r} {what}; give the path of a GGUF file")
    root = cache_directory() / key_of(path)
    return root if (root / GGUF_LINK).is_file() else make(path, root)


def cache_directory() -> Path:
    """The directory of derived model directories."""
    return user_cache() / "metronome" / "gguf"


def key_of(path: Path) -> str:
    """The name of a file's derived directory."""
    described = repr((FORMAT, state_of(part_files(path))))
    return f"{path.stem[:80]}-{hashlib.sha256(described.encode()).hexdigest()[:16]}"


def make(path: Path, root: Path) -> Path:
    """Write the directory of a file next to its final place ``root``, then move it there, so that
    several processes may do so at the same time. Returns the directory: a temporary one, which this
    process removes at its end, if the cache cannot be written."""
    header = read_gguf(path)
    config = read_config(header)
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix="new-", dir=root.parent))
    except OSError:
        made = Path(tempfile.mkdtemp(prefix="metronome-gguf-"))
        atexit.register(shutil.rmtree, made, ignore_errors=True)
        root = made
    try:
        write_json(made / "config.json", config)
        link: dict[str, object] = {"file": str(path), "state": state_of(part_files(path))}
        try:
            write_tokenizer(header, made)
        except ModelError as error:  # matters only if this tokenizer is needed
            (made / "tokenizer.json").unlink(missing_ok=True)
            link["no_tokenizer"] = str(error)
        write_json(made / GGUF_LINK, link)
        if made != root:
            os.rename(made, root)
            remove_stale(root.parent)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        if not (root / GGUF_LINK).is_file():  # otherwise another process was faster
            raise
    return root


def remove_stale(cache: Path) -> None:
    """Remove the directories in the cache whose GGUF file has changed or cannot be read, and those
    that were never finished. Directories of the last hour stay."""
    newest = time.time() - MIN_SECONDS_KEPT
    for root in cache.iterdir():
        try:
            if root.stat().st_mtime < newest and is_stale(root):
                shutil.rmtree(root, ignore_errors=True)
        except OSError:  # another process removed it
            continue


def is_stale(root: Path) -> bool:
    """True if a directory is no longer that of its GGUF file, in this format."""
    try:
        file = gguf_file(root)
        return file is None or key_of(file) != root.name
    except ModelError:
        return True


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
