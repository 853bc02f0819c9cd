"""Selects the GGUF file of a repository by its type of quantisation, as Q4_K_M.

The type is the end of a file's name (``model-Q4_K_M.gguf``) or the name of its directory. A split
file counts as one file; all its parts are fetched.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

from engine.errors import ModelError
from engine.hub.files import Repository

PART = re.compile(r"-(?P<number>\d{5})-of-(?P<count>\d{5})(?=\.gguf$|$)", re.I)
TYPE = re.compile(
    r"(?:^|[-._ ])((?:UD-)?(?:I?Q\d\w*|TQ\d_\d|MXFP4\w*|NVFP4\w*|BF16|F16|F32|FP16|FP32))$", re.I
)
# Files next to a model: image encoders and the like, and statistics used for quantisation.
OTHERS = ("mmproj", "imatrix")
MAX_LISTED = 40


def models_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the GGUF models among the files of a repository: the names of a model's files by the
    name of its first file. Split files that lack parts are left out."""
    files = {name for name in names if is_gguf(name)}
    found: dict[str, list[str]] = {}
    for name in sorted(files):
        part = PART.search(name)
        if part is None:
            found[name] = [name]
        elif int(part["number"]) == 1 and (count := int(part["count"])) <= len(files):
            before, ending = name[: part.start()], name[part.end() :]
            parts = [f"{before}-{n:05d}-of-{count:05d}{ending}" for n in range(1, count + 1)]
            if files.issuperset(parts):
                found[name] = parts
    return found


def is_gguf(name: str) -> bool:
    """Whether a file of a repository is a GGUF model or a part of one."""
    last = PurePosixPath(name).name.lower()
    return last.endswith(".gguf") and not last.startswith(OTHERS)


def type_of(name: str) -> str:
    """Return the type of quantisation that a file's name states, or its directory's; "" if none
    does."""
    path = PurePosixPath(name)
    places = [PART.sub("", path.stem), *(each.name for each in path.parents)]
    found = next(filter(None, map(TYPE.search, places)), None)
    return "" if found is None else found[1]


def fitting(wanted: str, models: Iterable[str]) -> list[str]:
    """Return the models that fit a type or the name of a file: those with exactly this type, or
    else those with this name, or else those with ``wanted`` in their name."""
    names, lower = list(models), wanted.lower()
    ways = (
        [name for name in names if name == wanted],
        [name for name in names if type_of(name).lower() == lower],
        [name for name in names if PurePosixPath(name).name.lower() == lower],
        [name for name in names if lower in PART.sub("", PurePosixPath(name).stem).lower()],
    )
    return next(filter(None, ways), [])


def choose(repository: Repository, names: Iterable[str]) -> list[str]:
    """Return the files to fetch for the model that ``repository.gguf`` names by its type or file.
    Raises ``ModelError`` with a list of what there is unless exactly one model fits."""
    wanted, where = repository.gguf or "", f"{repository.option} {repository.name!r}"
    models = models_of(names)
    fits = fitting(wanted, models)
    if len(fits) == 1:
        return models[fits[0]]
    if fits:
        raise ModelError(
            f"{where} has {len(fits)} GGUF files that fit {wanted!r}; name one of them: "
            f"{options(repository, fits)}"
        )
    if models:
        raise ModelError(
            f"{where} has no GGUF file of the type {wanted!r}; it has "
            f"{options(repository, list(models))}"
        )
    raise ModelError(
        f"{where} has no complete GGUF file; leave out {f':{wanted}'!r} for a model in the layout "
        "of transformers"
    )


def options(repository: Repository, names: Sequence[str]) -> str:
    """Return the ways to name GGUF files of a repository, for errors: by type, or by file where
    several have the same type or none is stated."""
    types = [type_of(name) for name in names]
    spelled = [
        f"{repository.name}:{kind if kind and types.count(kind) == 1 else name}"
        for name, kind in zip(names, types, strict=True)
    ]
    more = len(spelled) - MAX_LISTED
    return ", ".join(spelled[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
