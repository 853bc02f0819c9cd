"""Pictures whose content comes later than their requests, in time, damaged, or never."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.seeing_models import make_seeing_model
from e2e.test_pictures import GREEDY, SMALL, expected, picture, prompt_of, tokens_of

from engine import LLM
from engine.ipc.sealed_files import namespace
from engine.messages.media import MediaContent, PixelArray, SharedPixels


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing_model(tmp_path_factory.mktemp("seeing") / "llava", "llava")


@pytest.fixture(scope="module")
def apart(llava: Path) -> Iterator[LLM]:
    """An engine whose core is another process."""
    with LLM(llava, multiprocess=True, **SMALL) as llm:
        yield llm


def array(shape: list[int], dtype: str = "<f4") -> PixelArray:
    return PixelArray(dtype, shape, bytes(60))


FIT = array([1, 3, 1, 5])
NONSENSE: dict[str, tuple[Any, str]] = {
    "another shape": ({"pixel_values": FIT}, "cannot be encoded"),
    "fewer dimensions": ({"pixel_values": array([3, 5])}, "the model needs"),
    "no bytes": ({"pixel_values": array([1, 3, 4, 5])}, "must have 240 bytes"),
    "more arrays": ({"pixel_values": FIT, "more": FIT}, "the model needs pixel_values"),
    "no array": ({}, "its arrays are none"),
    "objects": ({"pixel_values": array([1, 3, 1, 5], "O")}, "has dtype 'O'"),
    "a negative side": ({"pixel_values": array([-1, 3, 1, 5])}, "has shape"),
    "2**80 pixels": ({"pixel_values": array([2**40, 2**40, 1, 1])}, "bytes, has 60"),
    "no such file": (SharedPixels(namespace(), os.getpid(), 999, 6, 64, {}), "cannot be opened"),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_of_a_client_ends_only_its_request(apart: LLM, llava: Path, name: str) -> None:
    """A client of its own sends requests and content without our front end."""
    given, message = NONSENSE[name]
    session = apart.llm_engine.session
    shown = picture(9, 9, seed=list(NONSENSE).index(name))
    submission = session.inputs.process(name, prompt_of("<image> b", [shown]), GREEDY, {})
    (request,) = submission.requests
    (item,) = request.media
    is_handle = isinstance(given, SharedPixels)
    content = MediaContent(item.hash, *((None, given) if is_handle else (given,)))
    client = session.client
    client.add(request)
    client.bring([request.request_id], MediaContent("unknown", {"pixel_values": FIT}))
    client.bring(["unknown"], content)
    client.bring([request.request_id], content)
    ends: list[Any] = []
    while not ends:
        ends = [end for batch in client.step() for end in batch.finished]
    assert ends[0].reason == "error" and re.search(message, ends[0].message)
    (output,) = apart.generate([prompt_of("<image> ", [shown])], GREEDY, use_tqdm=False)
    assert tokens_of(output) == expected(llava, "llava", "<image> ", [shown])
