"""Pictures whose content comes later than their requests, in time, damaged, or never."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from threading import Event
from time import process_time
from typing import Any

import pytest
from e2e.picture_cases import as_file, picture
from e2e.seeing_models import make_seeing_model
from e2e.test_pictures import GREEDY, SMALL, expected, prompt_of, tokens_of
from PIL import Image
from support.live_core import wait_until
from support.patience import WAIT_SECONDS
from support.processes import open_files

from engine import LLM, LLMEngine
from engine.config.media import MediaConfig
from engine.config.model import ModelConfig, read_model_info
from engine.core.polling import PARKED_SECONDS
from engine.errors import RequestError
from engine.frontend.picture_workers import PooledPictures
from engine.frontend.processing import Processed, ThreadedPictures
from engine.frontend.text_workers import TextPool
from engine.ipc.sealed_files import namespace
from engine.messages.media import MediaContent, PixelArray, SharedPixels
from engine.pictures.opening import open_picture
from engine.pictures.processing import ImageProcessor
from engine.pictures.prompts import Pictures
from engine.pictures.sources import Given, MediaSources


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing_model(tmp_path_factory.mktemp("seeing") / "llava", "llava")


@pytest.fixture(scope="module")
def apart(llava: Path) -> Iterator[LLM]:
    """An engine whose core is another process."""
    with LLM(llava, multiprocess=True, **SMALL) as llm:
        yield llm


LONGEST_PAUSE = PARKED_SECONDS[1]


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


def test_pictures_are_processed_again_only_when_they_were_dropped(
    apart: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, shown, numbers = ImageProcessor.pixels, picture(77, 70), []

    def pixels(self: Any, image: Image.Image) -> Any:
        numbers.append(image.size)
        return make(self, image)

    monkeypatch.setattr(ImageProcessor, "pixels", pixels)
    for text in ("<image> a", "<image> b", "<image> c"):
        if not text.endswith("b"):
            apart.reset_mm_cache()
            # Else its request could end before the picture is processed: it would need no content.
            apart.llm_engine.reset_encoder_cache()
            assert apart.reset_prefix_cache()
        apart.generate([prompt_of(text, [shown])], GREEDY, use_tqdm=False)
    assert numbers == [(77, 70)] * 2


@pytest.fixture(scope="module", params=["apart", "inside"])
def either(request: pytest.FixtureRequest, llava: Path) -> Iterator[LLM]:
    """An engine whose core is another process, or in this one."""
    if request.param == "apart":
        yield request.getfixturevalue("apart")
        return
    with LLM(llava, **SMALL) as llm:
        yield llm


class Gate:
    """Holds up the processing of pictures of one size."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]) -> None:
        self.begun, self.opened = Event(), Event()
        make = ImageProcessor.pixels

        def pixels(processor: Any, image: Image.Image) -> Any:
            if image.size == size:
                self.begun.set()
                assert self.opened.wait(WAIT_SECONDS)
            return make(processor, image)

        monkeypatch.setattr(ImageProcessor, "pixels", pixels)


def test_others_go_on_while_a_picture_is_processed(
    either: LLM, llava: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = either.llm_engine
    gate, held, other = Gate(monkeypatch, (70, 71)), picture(70, 71), picture(9, 8)
    engine.add_request("held", prompt_of("a <image>", [held]), GREEDY)
    engine.add_request("other", prompt_of("<image>", [other]), GREEDY)
    engine.add_request("text", "none", GREEDY)
    ended: dict[str, Any] = {}
    while len(ended) < 2:
        ended |= {each.request_id: each for each in engine.step() if each.finished}
    assert ended.keys() == {"other", "text"} and gate.begun.wait(WAIT_SECONDS)
    used = process_time()
    assert [engine.step() for _ in range(20)] == [[]] * 20
    assert process_time() - used < 20 * LONGEST_PAUSE, "it sleeps meanwhile"
    gate.opened.set()
    (ended["held"],) = finished(engine)
    for request_id, text, shown in (("held", "a <image>", held), ("other", "<image>", other)):
        assert tokens_of(ended[request_id]) == expected(llava, "llava", text, [shown])


def test_nothing_is_left_of_a_request_that_is_aborted_meanwhile(
    either: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = either.llm_engine
    contents = engine.session.contents
    assert contents is not None
    engine.reset_mm_cache()
    gate, held, files = (
        Gate(monkeypatch, (70, 72)),
        picture(70, 72),
        open_files(),
    )
    for index in range(3):
        engine.add_request(str(index), prompt_of("a <image>", [held]), GREEDY)
        assert gate.begun.wait(WAIT_SECONDS)
        engine.step()
        engine.abort_request(str(index))
    outputs = finished(engine)
    assert {each.outputs[0].finish_reason for each in outputs} == {"abort"}
    assert len(contents) == 0
    gate.opened.set()
    engine.add_request("last", prompt_of("<image>", [picture(9, 7)]), GREEDY)
    (output,) = finished(engine)
    assert output.outputs[0].finish_reason == "length"
    engine.reset_mm_cache()
    assert len(contents) == 0

    def is_closed() -> bool:
        """Also the files of pictures that were finished meanwhile."""
        contents.deliver()
        return open_files() <= files

    assert wait_until(is_closed) is not None


def finished(engine: LLMEngine) -> list[Any]:
    outputs: list[Any] = []
    while engine.has_unfinished_requests():
        outputs += [each for each in engine.step() if each.finished]
    return outputs


@pytest.fixture(scope="module")
def pooled(llava: Path) -> Iterator[LLM]:
    """An engine whose text processes decode."""
    with LLM(llava, tokenizer_pool_size=1, **SMALL) as llm:
        yield llm


WHOLE = as_file(picture(64, 64), "JPEG")
CUT = WHOLE[: len(WHOLE) // 2]


def test_text_processes_decode_pictures(pooled: LLM, llava: Path) -> None:
    """They decode files and PIL images; damaged ones fail alone."""
    shown = [picture(64, 40), picture(9, 9, "RGBA"), picture(30, 50, "L")]
    given = [as_file(shown[0]), shown[1], as_file(shown[2])]
    prompts = [prompt_of("<image>", [each]) for each in (given[0], CUT, *given[1:])]
    prompts.append(prompt_of("<image><image>", [given[0], CUT]))
    outputs = pooled.generate(prompts, GREEDY, use_tqdm=False)
    for index, image in zip((0, 2, 3), shown, strict=True):
        assert tokens_of(outputs[index]) == expected(llava, "llava", "<image>", [image])
    for index in (1, 4):
        (end,) = outputs[index].outputs
        assert end.code == "invalid_media" and "damaged" in str(end.error)


@pytest.fixture(scope="module")
def processes(llava: Path) -> Iterator[tuple[TextPool, PooledPictures]]:
    """A process that decodes, without an engine."""
    pool = TextPool(ModelConfig(model=str(llava)), 1, pictures={})
    pictures = Pictures(read_model_info(llava), None, MediaConfig(), MediaSources(MediaConfig()))
    pool.wait_until_ready()
    pooled = PooledPictures(pool.pictures, ThreadedPictures(pictures, shares=True))
    yield pool, pooled
    pooled.close()
    pool.close()


def begun(pictures: PooledPictures, *images: Image.Image) -> list[Future[Processed]]:
    return [pictures.begin(open_picture(Given(as_file(image, "BMP")))) for image in images]


def bytes_of(made: Processed) -> dict[str, bytes]:
    return {name: bytes(array.data) for name, array in made.pixels.items()}


def test_a_picture_process_that_dies_is_started_again(processes: Any, llava: Path) -> None:
    pool, pictures = processes
    images = [picture(1200, 900), picture(9, 9)]
    futures = begun(pictures, *images)
    os.kill(pool.pids["picture process 0"], signal.SIGKILL)
    processor = ImageProcessor(read_model_info(llava))
    for future, image in zip(futures, images, strict=True):
        made, wanted = future.result(WAIT_SECONDS), Processed(processor.pixels(image))
        assert bytes_of(made) == bytes_of(wanted) and made.segment is not None


@pytest.mark.slow
def test_a_picture_over_which_processes_die_fails_alone(processes: Any) -> None:
    pool, pictures = processes
    large, small = begun(pictures, picture(4000, 3000), picture(5, 6))
    (worker,) = pool.pictures.workers
    idle: dict[int, float] = {}  # processor time of each process when it was ready
    killed: set[int] = set()
    while not large.done():
        if (process := worker.process) is None or not process.is_ready:
            continue
        pid = process.program.pid
        used = seconds_of(pid)
        if pid not in killed and used > idle.setdefault(pid, used) + 0.05:
            killed.add(pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    with pytest.raises(RequestError, match="4000 x 3000 pixels, 3 times") as caught:
        large.result()
    assert caught.value.param == "multi_modal_data"
    assert small.result(WAIT_SECONDS).pixels


def seconds_of(pid: int) -> float:
    """Processor time that a process has used."""
    with suppress(FileNotFoundError, ProcessLookupError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0
