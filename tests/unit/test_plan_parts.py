"""Parts of a plan: who writes one meets who computes it, before the start or on arrival."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.data_plane import EvenTokens, answer, guess, make_feature_run
from support.simulate import expected, make_request, make_run, make_scheduler

from engine import EngineArgs
from engine.assets import BOX_MODEL
from engine.config.decide import Decided
from engine.core.build import build_core, check_capabilities, parts_of
from engine.core.engine_core import EngineCore
from engine.core.inproc_client import InprocClient
from engine.errors import ConfigError, RequestError, WireError
from engine.ipc import plans
from engine.lora.decide import AdapterSlots
from engine.messages.kv_orders import KVOrders, LoadOrder
from engine.messages.params import SamplingParams
from engine.messages.requests import AddRequest, MediaItem, TokenLogprobs
from engine.messages.step import (
    PARTS,
    AdapterPart,
    DraftPart,
    MaskPart,
    Masks,
    MediaPart,
    NewSeq,
    SnapshotPart,
    StepPlan,
    StepResult,
    check_parts,
)
from engine.messages.vectors import PooledPart
from engine.sched.resource import Resource
from engine.spec.worker_drafts import WorkerDrafts
from policylab.verify.fake import DigestWorker

GOLDEN = Path(__file__).parents[1] / "golden" / "plans.txt"


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def full_plan() -> StepPlan:
    """One of every field."""
    new = NewSeq("r", 1, [5, 6], 2, SamplingParams(temperature=0.5, stop=["x"]), 7, [2], [[3, 4]])
    return StepPlan(
        step=3,
        rows=np.array([2, 9], dtype=np.intp),
        slots=ints(0, 1),
        generations=ints(1, 4),
        starts=ints(40, 0),
        counts=ints(3, 2),
        samples=ints(1, 1),
        new=[new],
        block_slots=ints(1),
        block_indices=ints(0),
        block_ids=ints(77),
        freed_slots=[5],
        num_tokens=5,
        drafts=DraftPart(ints(2, 0), ints(11, -1)),
        masks=MaskPart(ints(1)),
        adapters=AdapterPart({0: "A"}, {1: 0}),
        media=MediaPart(["old"], {1: [MediaItem(0, 1, "m")]}, [(1, 0)]),
        kv_transfer=KVOrders([b"a"], [7], [LoadOrder(1, [b"b"], [8], [0])], [b"c"]),
        block_groups=ints(1),
        proposals=ints(2),
        snapshots=SnapshotPart(1, ints(2), ints(70), ints(1), ints(16), ints(71)),
        new_token_ids=ints(9, -1),
    )


def full_result() -> StepResult:
    scores = [TokenLogprobs([4, 5], [-0.5, -1.5], 2)]
    return StepResult(
        step=3,
        token_ids=ints(11, 12),
        counts=ints(2, 0),
        errors={1: "no"},
        logprobs={0: scores},
        prompt_logprobs={1: scores},
        seconds=0.25,
        drafts=DraftPart(ints(1, 0), ints(13)),
        lost_snapshots=ints(0),
        pooled=PooledPart.of([(1, np.array([0.5, -2.0], dtype=np.float32))]),
    )


MESSAGES = {
    "plan": full_plan(),
    "result": full_result(),
    "masks": Masks(ints(-1, 7, 0, 1), 2),
}


# -- bytes


def test_plans_are_the_recorded_bytes() -> None:
    """Appending fields changes them, and is allowed: METRONOME_UPDATE_GOLDEN=1 records them."""
    frames = {name: plans.encode(message) for name, message in MESSAGES.items()}
    if os.environ.get("METRONOME_UPDATE_GOLDEN"):
        GOLDEN.write_text("".join(f"{name}: {frame.hex(' ')}\n" for name, frame in frames.items()))
    lines = (line.split(": ") for line in GOLDEN.read_text().splitlines())
    assert frames == {name: bytes.fromhex(text) for name, text in lines}


@pytest.mark.parametrize("name", MESSAGES)
def test_what_travels_arrives_as_it_was(name: str) -> None:
    message = MESSAGES[name]
    back = plans.decode(plans.encode(message), type(message))
    assert plans.encode(back) == plans.encode(message)
    assert repr(back) == repr(message)
    column = back.rows if name == "plan" else back.words if name == "masks" else back.counts
    column += 1  # whoever reads it may write to it


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", StepPlan),
        (b"\xc1", StepResult),
        (plans.encode(MESSAGES["masks"]), StepPlan),
        (msgspec.msgpack.encode([b"\x01\x02\x03", 1]), Masks),
        (msgspec.msgpack.encode([[1, 2], 1]), Masks),
        (msgspec.msgpack.encode([msgspec.msgpack.Ext(1, b""), 1]), Masks),
    ],
)
def test_what_is_no_plan_is_a_wire_error(data: bytes, kind: type) -> None:
    with pytest.raises(WireError, match=f"not a {kind.__name__}"):
        plans.decode(data, kind)


def test_a_value_that_cannot_travel_is_named() -> None:
    for wrong in (np.array([5, 6]), ints(5, 6).reshape(1, 2), np.array([0.5])):
        with pytest.raises(TypeError, match=r"token_ids is an array .*, must be of int32 with one"):
            plans.encode(StepResult(1, wrong, ints(1, 1)))
        with pytest.raises(TypeError, match=r"drafts.tokens is an array of"):
            plans.encode(StepResult(1, ints(5), ints(1), drafts=DraftPart(ints(2), wrong)))
    with pytest.raises(TypeError, match="object"):
        plans.encode(msgspec.structs.replace(full_result(), errors={0: object()}))


# -- before the start


@pytest.mark.parametrize("resource", [AdapterSlots(2)])
def test_a_resource_whose_part_the_worker_cannot_compute_is_refused_at_the_start(resource) -> None:
    """It was taken, and its part of the plan ignored: wrong tokens without a word."""
    with pytest.raises(ConfigError, match=r"AdapterSlots needs a worker .*'adapters'.*leave"):
        build_core(EngineArgs(model=str(BOX_MODEL), resources=[resource]).create_config())


def test_a_part_that_is_none_is_named() -> None:
    class Odd(Resource):
        needs = ("colours",)

    with pytest.raises(ConfigError, match=r"Odd\.needs has 'colours'.*drafts, masks"):
        parts_of([Odd()])


class OneMask(Resource):
    needs = ("masks",)


class OtherMask(Resource):
    needs = ("adapters", "masks")


def test_two_resources_that_write_the_same_part_are_refused_at_the_start() -> None:
    """Only what the last one wrote would have reached the worker."""
    with pytest.raises(
        ConfigError, match=r"OneMask and OtherMask both write.*'masks'.*leave one out"
    ):
        check_capabilities([OneMask(), Resource(), OtherMask()], frozenset(PARTS))


@pytest.mark.parametrize("cls", [Resource, OneMask])
def test_one_object_twice_is_refused_at_the_start(cls: type[Resource]) -> None:
    one = cls()
    with pytest.raises(ConfigError, match=rf"the same {cls.__name__} object twice: leave one"):
        check_capabilities([one, one], frozenset(PARTS))


def test_two_objects_that_write_nothing_may_be_of_one_class() -> None:
    resources = [Resource(), Resource()]
    check_capabilities(resources, frozenset())
    run = make_run(resources=resources)
    run.add(make_request("a", [1], 3))
    run.drain()
    assert run.outputs["a"] == expected([1], 3)


@pytest.mark.parametrize("wrong", ["masks", None, 3])
def test_needs_that_are_no_tuple_are_named(wrong: object) -> None:
    class Wrong(Resource):
        needs = wrong

    with pytest.raises(ConfigError, match=rf"Wrong\.needs is {wrong!r} .*must be a tuple of names"):
        check_capabilities([Wrong()], frozenset(PARTS))


def test_several_missing_capabilities_are_named_in_the_plural() -> None:
    with pytest.raises(ConfigError, match="the capabilities 'masks' and 'adapters'; this one"):
        check_capabilities([OtherMask()], frozenset({"drafts"}))
    with pytest.raises(ConfigError, match="the capability 'adapters'; this one has masks"):
        check_capabilities([OtherMask()], frozenset({"masks"}))


# -- on arrival


def decided(*resources: Resource) -> Decided:
    return Decided(
        max_model_len=2048,
        num_kv_blocks=64,
        block_size=16,
        vocab_size=1000,
        eos_token_ids=(),
        device="cpu",
        scheduler=make_scheduler().config,
        capabilities=parts_of(resources),
    )


def client_of(*resources: Resource) -> InprocClient:
    scheduler = make_scheduler(resources=resources)
    core = EngineCore(scheduler, DigestWorker(1000, 16))
    return InprocClient(core, decided(*resources))


ASKS = {
    "adapter": ({"adapter": "A"}, "adapters"),
    "grammar": ({"grammar": "even"}, "masks"),
    "media": ({"media": [MediaItem(0, 1, "m")]}, "media"),
    "kv_transfer_params": ({"kv_transfer_params": {"a": 1}}, "kv_transfer"),
}


@pytest.mark.parametrize("name", ASKS)
def test_a_request_that_asks_for_what_is_not_served_is_refused_by_name(name: str) -> None:
    fields, part = ASKS[name]
    client = client_of()
    with pytest.raises(RequestError, match=rf"{name} is .*capability '{part}'.*has none: leave"):
        client.add(make_request("a", [1, 2], 3, **fields))
    client.add(make_request("b", [1, 2], 3))


def test_a_request_that_asks_for_what_is_served_is_taken() -> None:
    client = client_of(AdapterSlots(1))
    client.add(make_request("a", [1, 2], 3, adapter="A"))
    with pytest.raises(RequestError, match="'masks', but this core has adapters"):
        client.add(make_request("b", [1, 2], 3, grammar="even"))
    client.shutdown()


# -- in a step


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_nobody_computes_fails_the_step_loudly(part: str) -> None:
    plan = full_plan()
    for other in PARTS:
        if other != part:
            setattr(plan, other, None)
    check_parts(plan, frozenset({part}))
    with pytest.raises(RuntimeError, match=rf"step 3 has {part}.*cannot compute"):
        check_parts(plan, frozenset(PARTS) - {part})
    worker = DigestWorker(8, 4)
    worker.capabilities = frozenset(PARTS) - {part}
    with pytest.raises(RuntimeError, match=part):
        worker.launch(plan)


def test_a_plan_with_something_to_tell_is_a_step() -> None:
    plan = replace_all(full_plan(), num_tokens=0, freed_slots=[])
    assert not plan.is_empty and plan.parts == list(PARTS)
    for part in ("adapters", "media", "kv_transfer"):
        setattr(plan, part, None)
    assert plan.is_empty


def replace_all(plan: StepPlan, **fields) -> StepPlan:
    return msgspec.structs.replace(plan, **fields)


# -- masks


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_tokens_are_drawn_among_those_that_their_mask_allows(depth: int) -> None:
    """In as many steps at a time as any other, and nobody else's tokens change."""
    run = make_feature_run(depth=depth, resources=[EvenTokens()], max_num_batched_tokens=24)
    for index in range(6):
        grammar = "even" if index % 2 else None
        run.add(make_request(str(index), [index + 1] * (9 + index), 12, grammar=grammar))
    run.drain()
    for index in range(6):
        tokens = run.outputs[str(index)]
        assert len(tokens) == 12
        if index % 2:
            assert all(token % 2 == 0 for token in tokens)
        else:
            assert tokens == expected([index + 1] * (9 + index), 12)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_core_draws_a_step_when_all_before_it_are_settled(depth: int) -> None:
    """It launches no step after one that waits for results."""
    done: list[str] = []

    class Watching(DigestWorker):
        def launch(self, plan):
            done.append(f"launch {plan.step}")
            return super().launch(plan)

        def sample(self, ticket, masks):
            done.append(f"draw {ticket.step}")
            super().sample(ticket, masks)

        def collect(self, ticket):
            done.append(f"collect {ticket.step}")
            return super().collect(ticket)

    scheduler = make_scheduler(resources=[EvenTokens()], num_steps_in_flight=depth)
    core = EngineCore(scheduler, Watching(1000, 16), depth)
    scheduler.add_request(make_request("a", [1, 2, 3], 4, grammar="even"))
    scheduler.add_request(make_request("b", [4], 4))
    while scheduler.has_unfinished_requests():
        core.step()
    steps = [line for line in done if line.startswith("launch")]
    assert len(steps) >= 4
    for index, line in enumerate(done):
        kind, step = line.split()
        if kind == "draw":
            before = int(step) - 1
            assert before == 0 or f"collect {before}" in done[:index]
        if kind == "launch" and int(step) > 1:
            assert f"draw {int(step) - 1}" in done[:index]
    if depth > 1:  # the forward pass of the next step was launched before the last one settled
        assert done.index("launch 2") < done.index("collect 1")


def test_masks_and_drafts_together() -> None:
    """Each draft is judged by a mask of its own."""
    run = make_feature_run(
        resources=[EvenTokens(), WorkerDrafts(3)],
        propose=lambda tokens: guess(tokens, 3, 3),
        num_drafts=3,
    )
    run.add(make_request("a", [7] * 20, 16, grammar="even"))
    run.add(request := make_request("b", [8] * 20, 16))
    run.drain()
    assert all(token % 2 == 0 for token in run.outputs["a"])
    assert run.outputs["b"] == answer(request)


def test_a_resource_that_fails_to_give_masks_is_named() -> None:
    class Broken(EvenTokens):
        def masks(self, plan):
            raise LookupError("no masks today")

    run = make_run(resources=[Broken()])
    run.add(make_request("a", [1], 2, grammar="even"))
    assert run.launch()
    assert run.scheduler.masks(run.flight[0][0]) is None
    assert "no masks today" in str(run.scheduler.guard.faults.messages)


# -- a seat


def test_a_resource_learns_who_takes_a_seat_before_it_takes_tokens() -> None:
    class Seats(Resource):
        def __init__(self) -> None:
            self.calls: list[str] = []

        def seated(self, req, step):
            assert req.slot >= 0
            self.calls.append(f"seated {req.request_id}")

        def take(self, req, num_tokens, step):
            self.calls.append(f"take {req.request_id}")

    seats = Seats()
    run = make_run(resources=[seats], max_num_batched_tokens=8, max_num_seqs=8)
    run.add(AddRequest("a", [1] * 20, SamplingParams(max_tokens=2), 0, 0.0, 2))
    run.drain()
    assert seats.calls == ["seated a", "take a", "take a", "take a", "take a"]
