"""Adapters in the memory of a GPU: what is there, what makes room, and what does not fit."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from support.low_rank_checks import in_float64, rows_of

from engine.lora import device_slots
from engine.lora.adapter import AdapterError
from engine.lora.device_slots import USUAL_RANK, DeviceSlots, check
from engine.lora.placing import PlacedAdapter
from engine.worker.platform.host import HostPlatform
from kernels.cpu.low_rank import add_low_rank
from kernels.low_rank import DeviceTable, LowRankProduct, ProductTable, in_panels

SHAPES = {"0.qkv": (40, 99), "0.down": (24, 40)}
NUMS = {"0.qkv": 3, "0.down": 1}
MAX_RANK = 256


def products(rank: int, seed: int = 0) -> dict[str, list[LowRankProduct]]:
    """The most products of a rank that the layers can have, which also scale and add."""
    rng, made = torch.Generator().manual_seed(seed), dict[str, list[LowRankProduct]]()
    for name, (num_in, num_out) in SHAPES.items():
        width, made[name] = num_out // NUMS[name], []
        for number in range(NUMS[name]):
            a, b = torch.randn(rank, num_in, generator=rng), torch.randn(width, rank, generator=rng)
            ends = torch.randn(2, width, generator=rng)
            made[name].append(LowRankProduct(number * width, width, a, in_panels(b), 0.5, *ends))
    return made


class Slots:
    """Three slots, whose memory is the host's, so that a CPU's kernel can read it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(device_slots, "most_products", lambda spec: NUMS)
        self._tables: dict[str, DeviceTable] = {}
        layers = {
            name: SimpleNamespace(
                in_features=num_in,
                out_features=num_out,
                attach_device=partial(self._tables.__setitem__, name),
            )
            for name, (num_in, num_out) in SHAPES.items()
        }
        self.slots = DeviceSlots(layers, None, 3, MAX_RANK, HostPlatform(), itemsize=4)

    def put(self, slot: int, rank: int, seed: int = 0) -> None:
        self.slots.put(slot, self.slots.pack(products(rank, seed)))

    def has(self, slot: int, rank: int, seed: int = 0) -> bool:
        """Whether the layers find an adapter in a slot."""
        right = []
        for name, mine in products(rank, seed).items():
            table, wanted, which = ProductTable(0), ProductTable(4), torch.full((2,), slot)
            table.entries = self._tables[name].entries.numpy()
            wanted.put(slot, mine)
            x, y = torch.ones(2, SHAPES[name][0]), torch.ones(2, SHAPES[name][1])
            got = add_low_rank(y.clone(), x, table, rows_of(which))
            right.append(torch.allclose(got.double(), in_float64(y, x, wanted, which), atol=1e-4))
        return all(right)


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Slots:
    return Slots(monkeypatch)


def test_layers_find_adapters_of_different_ranks(three: Slots) -> None:
    for slot, rank in enumerate((MAX_RANK, 1, USUAL_RANK)):
        three.put(slot, rank, seed=slot)
        assert three.slots.bring(slot, {0, 1, 2}) == ""
    assert all(three.has(slot, (MAX_RANK, 1, USUAL_RANK)[slot], seed=slot) for slot in range(3))
    three.put(1, 7, seed=9)  # another adapter in the same slot
    assert three.slots.bring(1, {0, 1, 2}) == ""
    assert three.has(1, 7, seed=9) and three.has(0, MAX_RANK) and three.has(2, USUAL_RANK, seed=2)


def test_those_that_no_request_uses_make_room_and_come_again(three: Slots) -> None:
    for slot in range(3):
        three.put(slot, MAX_RANK if slot < 2 else 1, seed=slot)
    assert three.slots.bring(0, {0}) == three.slots.bring(2, {0, 2}) == ""
    assert "its adapter takes" in three.slots.bring(1, {0, 1, 2})
    three.slots.rest(0)
    assert three.slots.bring(1, {1, 2}) == ""
    assert three.has(1, MAX_RANK, seed=1) and three.has(2, 1, seed=2)
    three.slots.rest(1)
    assert three.slots.bring(0, {0, 2}) == ""
    assert three.has(0, MAX_RANK) and three.has(2, 1, seed=2)


def test_free_pieces_are_gathered(three: Slots) -> None:
    """What fits but for its place does fit: those that requests use are copied together."""
    most = three.slots.pack(products(MAX_RANK)).num_bytes
    half = MAX_RANK * three.slots.num_bytes // most // 2  # fills the memory up to the middle
    ranks = {0: half, 1: 1, 2: MAX_RANK}
    for slot, rank in ranks.items():
        three.put(slot, rank, seed=slot)
    assert three.slots.bring(0, {0}) == three.slots.bring(1, {0, 1}) == ""
    three.slots.rest(0)
    assert three.slots.bring(2, {1, 2}) == ""
    assert all(three.has(slot, ranks[slot], seed=slot) for slot in (1, 2))


def test_what_only_a_cpu_changes_is_refused() -> None:
    placed = PlacedAdapter(name="one", digest="d", rank=1, num_bytes=1)
    layers = dict.fromkeys(SHAPES)
    check(placed, layers)
    placed.linears = {"0.3.gate_up": ()}
    with pytest.raises(AdapterError, match="'one' changes experts, which is supported on a CPU"):
        check(placed, layers)
    placed.linears, placed.replaced = {}, {"head": torch.zeros(1)}
    with pytest.raises(AdapterError, match="the whole output layer"):
        check(placed, layers)
