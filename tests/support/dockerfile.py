"""Reads the subset of Dockerfiles that `deploy/` uses, and follows their steps in a directory with
Debian's base system, by chroot: for machines without a builder of images.

Needs root, `unshare`, `mount`, `chroot` and `setpriv`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

KNOWN = (
    "FROM", "ARG", "ENV", "RUN", "COPY", "WORKDIR", "USER",
    "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT", "CMD",
)  # fmt: skip
LEFT_OUT = shutil.ignore_patterns("__pycache__")


class Step(NamedTuple):
    keyword: str
    text: str


def steps_of(file: Path) -> list[Step]:
    """The instructions of a Dockerfile, each on one line, without comments."""
    lines = [each for each in file.read_text().splitlines() if not each.lstrip().startswith("#")]
    found: list[Step] = []
    for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        if line.strip():
            keyword, _, text = line.strip().partition(" ")
            assert keyword in KNOWN, f"{file.name} has {keyword}, which this reader does not know"
            found.append(Step(keyword, text.strip()))
    return found


def substituted(text: str, values: Mapping[str, str]) -> str:
    """The text with the values of ``$NAME`` and ``${NAME}``; without one: an empty string."""
    return re.sub(r"\$\{?(\w+)\}?", lambda found: values.get(found[1], ""), text)


@dataclass
class Image:
    """What the steps so far have set, over a root directory with the files."""

    root: Path
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "0:0"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    check: list[str] = field(default_factory=list)
    base: str = ""


class Bind(NamedTuple):
    """A path of this machine that is mounted, for reading, at a path below the root."""

    source: Path
    target: str


def build(
    file: Path,
    context: Path,
    root: Path,
    chosen: Mapping[str, str],
    lent: Mapping[str, str],
    binds: Sequence[Bind],
    log: IO[bytes],
) -> Image:
    """Follow the steps of a Dockerfile in a root directory, which must have the base system.

    chosen: build arguments. lent: variables for RUN alone, such as where registries are. binds:
    mounts for RUN alone. Raises ``CalledProcessError`` if a step fails.
    """
    image = Image(root)
    arguments: dict[str, str] = {}
    for keyword, text in steps_of(file):
        if keyword == "ARG":
            name, _, default = text.partition("=")
            arguments[name] = chosen.get(name, default.strip('"'))
        elif keyword == "RUN":
            variables = arguments | image.env | dict(lent)
            command = entering(image, ["/bin/sh", "-c", text], variables, binds)
            subprocess.run(command, check=True, stdout=log, stderr=log)
        elif keyword == "COPY":
            _copy(shlex.split(text), context, image)
        else:
            _set(image, keyword, substituted(text, arguments | image.env))
    return image


def _set(image: Image, keyword: str, text: str) -> None:
    match keyword:
        case "FROM":
            image.base = text
        case "ENV":
            image.env |= dict(each.split("=", 1) for each in shlex.split(text))
        case "WORKDIR":
            image.workdir = text
            (image.root / text.lstrip("/")).mkdir(parents=True, exist_ok=True)
        case "USER":
            image.user = text
        case "HEALTHCHECK":
            image.check = json.loads(text[text.index("CMD") + 3 :])
        case "ENTRYPOINT":
            image.entrypoint = json.loads(text)
        case "CMD":
            image.command = json.loads(text)


def _copy(names: Sequence[str], context: Path, image: Image) -> None:
    *sources, target = names
    place = image.root / os.path.join(image.workdir, target).lstrip("/")
    for source in sources:
        path = context / source
        if path.is_dir():  # its content, as Docker copies
            shutil.copytree(path, place, ignore=LEFT_OUT, dirs_exist_ok=True)
        else:
            place.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, place)


def entering(
    image: Image,
    command: Sequence[str],
    variables: Mapping[str, str],
    binds: Sequence[Bind] = (),
    *,
    writable: bool = True,
    tmpfs: Sequence[str] = (),
) -> list[str]:
    """The command line that runs a command in an image as its user: the first process of its own
    namespace of processes, with no capability and no way to gain one unless the user is root."""
    script = "\n".join(["set -e", *_mounts(image, binds, writable=writable, tmpfs=tmpfs)])
    uid, _, gid = image.user.partition(":")
    dropped: list[str] = []
    if uid != "0":
        dropped = ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
    user = ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", *dropped]
    clean = ["env", "-i", *(f"{name}={value}" for name, value in variables.items())]
    inside = f'cd {shlex.quote(image.workdir)} && exec "$@"'
    entered = ["chroot", str(image.root), *user, *clean, "/bin/sh", "-c", inside, "sh", *command]
    script += f"\nexec {shlex.join(entered)}"
    return [
        "unshare", "--mount", "--propagation=private", "--pid", "--fork", "--kill-child",
        "/bin/sh", "-c", script,
    ]  # fmt: skip


def _mounts(
    image: Image, binds: Sequence[Bind], *, writable: bool, tmpfs: Sequence[str]
) -> Iterator[str]:
    root = shlex.quote(str(image.root))
    for source, target in binds:
        place = image.root / target.lstrip("/")
        if source.is_dir():
            place.mkdir(parents=True, exist_ok=True)
        elif not place.exists():
            place.touch()
    yield f"mount --bind {root} {root}"
    if not writable:
        yield f"mount -o remount,bind,ro {root}"
    yield f"mount -t proc proc {root}/proc"
    yield f"mount --rbind /dev {root}/dev"
    for place in tmpfs:
        yield f"mount -t tmpfs -o mode=1777 tmpfs {root}{shlex.quote(place)}"
    for source, target in binds:
        yield f"mount --bind {shlex.quote(str(source))} {root}{shlex.quote(target)}"
        yield f"mount -o remount,bind,ro {root}{shlex.quote(target)}"
