"""Media items are encoded together where their arrays allow it, and a bad one fails alone."""

import re

import numpy as np
import pytest
import torch

from engine.messages.media import MediaContent, PixelArray
from engine.messages.requests import MediaItem
from engine.mm.encoding import Encoded, ItemEncoder
from engine.mm.store import PixelStore

WIDTH = 3


class Tower:
    """Encodes each row of ``x`` to a token; refuses negative numbers."""

    def __init__(self) -> None:
        self.num_rows: list[int] = []

    def __call__(self, arrays: dict[str, torch.Tensor]) -> torch.Tensor:
        self.num_rows.append(len(arrays["x"]))
        if (arrays["x"] < 0).any():
            raise ValueError("negative")
        return 2 * arrays["x"].reshape(1, -1, WIDTH)


def array(value: float, *shape: int) -> PixelArray:
    data = np.full(shape, value, dtype=np.float32)
    return PixelArray("<f4", list(shape), data.tobytes())


CONTENTS = {
    "a": {"x": array(1, 2, WIDTH)},
    "b": {"x": array(2, 4, WIDTH)},
    "wide": {"x": array(3, 1, 2 * WIDTH)},
    "bad": {"x": array(-1, 1, WIDTH)},
    "short": {"x": array(4, 1, WIDTH)},
}
ITEMS = {
    "a": MediaItem(0, 2, "a"),
    "b": MediaItem(2, 6, "b", ((0, 1), (3, 3))),  # with two tokens that are text
    "wide": MediaItem(8, 2, "wide"),
    "bad": MediaItem(10, 1, "bad"),
    "short": MediaItem(11, 5, "short"),
    "absent": MediaItem(16, 1, "absent"),
}


def encoded(tower: Tower, names: list[str], *, are_batched: bool = True) -> Encoded:
    store = PixelStore()
    for key, pixels in CONTENTS.items():
        assert not store.take(["0"], MediaContent(key, pixels)).fault
    encoder = ItemEncoder(tower, store, are_batched=are_batched)
    return encoder.run([ITEMS[name] for name in names])


def test_items_of_equal_shapes_are_encoded_in_one_run() -> None:
    tower = Tower()
    found = encoded(tower, ["a", "wide", "b", "a"])
    assert tower.num_rows == [6, 1] and not found.failed
    for name, value, count in (("a", 1, 2), ("b", 2, 4), ("wide", 3, 2)):
        assert torch.equal(found.outputs[name], torch.full((1, count, WIDTH), 2.0 * value))


def test_an_output_keeps_no_memory_of_the_others() -> None:
    found = encoded(Tower(), ["a", "b"])
    assert found.outputs["a"].untyped_storage().nbytes() == 4 * 2 * WIDTH


def test_each_is_encoded_alone_where_batches_must_change_nothing() -> None:
    tower = Tower()
    assert set(encoded(tower, ["a", "b", "wide"], are_batched=False).outputs) == {"a", "b", "wide"}
    assert tower.num_rows == [2, 4, 1]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("bad", "token 10 cannot be encoded: ValueError: negative"),
        ("short", "token 11 cannot be encoded: .*has 5 placeholder tokens, .* made 1 vectors"),
        ("absent", "token 16 has not arrived"),
    ],
)
def test_an_item_that_cannot_be_encoded_fails_alone(bad: str, message: str) -> None:
    found = encoded(Tower(), ["a", bad, "b"])
    assert set(found.outputs) == {"a", "b"}
    assert set(found.failed) == {bad}
    assert re.search(message, found.failed[bad])
