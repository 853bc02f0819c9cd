"""Stores of KV blocks that fail, hang or answer nonsense: right tokens, no error, nobody waits."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e.references import engine_for, run
from e2e.tiny_models import TinyModels
from safetensors.torch import load_file, save_file
from support.kv_stores import HOOKS, PLACES, counters, drop, hooked, slow_profile

from engine import LLMEngine, RequestOutput, SamplingParams
from engine.core.replay import replay
from engine.errors import ConfigError, RequestError
from engine.kv_transfer import compute, store_thread, tiers
from engine.kv_transfer.pool_blocks import PoolBlocks
from engine.kv_transfer.store_thread import MOST_FAULTS
from engine.kv_transfer.stores import Rows
from engine.worker.platform.host import HostPlatform

NUM_NEW = 6
PROMPTS = [[(n * k) % 281 + 3 for k in range(70 + 3 * n)] for n in (7, 11, 13)]
OTHER = [5, 6]  # with its tokens less than a block
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True, detokenize=False)
LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, detokenize=False)
WAIT = 30.0


class Place:
    """A store, its hooks, and an engine that uses it."""

    def __init__(self, name: str, path: str, options: dict[str, Any]) -> None:
        self.name = name
        self.path = path
        self.hooks = HOOKS[name]
        self.options = options

    def engine(self, **more: Any) -> LLMEngine:
        return engine_for(self.path, **{**self.options, **more})

    @property
    def blocks(self) -> dict[bytes, bytes]:
        """What the store has."""
        (blocks,) = [blocks for name, blocks in PLACES.items() if name.startswith(self.name)]
        return blocks

    def fill(self, engine: LLMEngine) -> None:
        """Store the blocks of all prompts, and drop them from the pool."""
        run(engine, PROMPTS, NUM_NEW)
        run(engine, [OTHER], 1)  # its step stores what the last one computed
        until(lambda: len(self.blocks) >= sum(len(ids) // 8 for ids in PROMPTS))
        self.drop(engine)

    def drop(self, engine: LLMEngine) -> None:
        """Empty the pool, not the store."""
        self.hooks["clear"] = lambda store: None
        assert engine.reset_prefix_cache()
        run(engine, [OTHER], 1)
        del self.hooks["clear"]


@pytest.fixture(scope="module")
def path(tiny_models: TinyModels) -> str:
    return str(tiny_models.path("llama"))


@pytest.fixture(scope="module")
def plain(path: str) -> Iterator[Callable[[list[list[int]]], list[list[int]]]]:
    """Tokens of an engine without a store."""
    with engine_for(path, enable_prefix_caching=False, max_model_len=256) as engine:
        yield lambda prompts: run(engine, prompts, NUM_NEW)[0]


@pytest.fixture
def place(path: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Place]:
    name = request.node.name
    options = {
        "kv_transfer_config": hooked(name),
        "cost_profile": slow_profile(tmp_path / "slow.json"),
        "max_model_len": 256,
    }
    before = set(store_threads())
    yield Place(name, path, options)
    drop(name)
    until(lambda: not store_threads() - before)


def store_threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name.startswith(("kv store", "kv-disk"))}


def until(is_so: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.001)


def is_empty(engine: LLMEngine) -> bool:
    """True if no request and no load holds a block."""
    stats = engine.stats()
    assert stats is not None
    return stats.kv_usage == 0 and not stats.num_running + stats.num_waiting + stats.num_parked


def finish(engine: LLMEngine) -> dict[str, RequestOutput]:
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {out.request_id: out for out in engine.step()}
    return outputs


def tokens(output: RequestOutput) -> list[int]:
    assert output.finished and output.outputs[0].finish_reason == "length", output
    return output.outputs[0].token_ids


class Gate:
    """Makes a method of a store wait."""

    def __init__(self, place: Place, method: str) -> None:
        self.opened = threading.Event()
        self.begun = threading.Event()

        def wait(store: Any, *given: Any) -> Any:
            self.begun.set()
            assert self.opened.wait(WAIT)
            return getattr(type(store).__mro__[1], method)(store, *given)

        place.hooks[method] = wait


def raises(store: Any, *given: Any) -> Any:
    raise OSError("the cable is out")


def garbage(store: Any, keys: Any, rows: Rows) -> list[bool]:
    rows[:] = 0x3C
    return [False] * len(keys)


FAULTS: dict[str, tuple[str, Callable[..., Any]]] = {
    **{f"{m} raises": (m, raises) for m in ("contains", "read", "write", "counts", "forget")},
    "read answers nothing": ("read", lambda *_: None),
    "read answers too little": ("read", lambda *_: [True]),
    "read answers numbers": ("read", lambda store, keys, rows: [1] * len(keys)),
    "read supplies nothing": ("read", garbage),
    "contains answers nothing": ("contains", lambda *_: None),
    "contains promises all": ("contains", lambda store, keys: [True] * len(keys)),
    "contains answers an array": ("contains", lambda store, keys: np.ones(len(keys), bool)),
    "write answers nothing": ("write", lambda *_: None),
    "counts answers words": ("counts", lambda *_: {"evicted": "many"}),
}
LEFT_OUT = [name for name in FAULTS if not name.startswith(("counts", "forget"))]
QUICK = ("read raises", "contains answers nothing")


def test_each_fault_happens_once(place: Place, plain: Any) -> None:
    with place.engine() as engine:
        place.fill(engine)
        for fault, (method, does) in FAULTS.items():
            place.drop(engine)

            def once(store: Any, *given: Any, method: str = method, does: Any = does) -> Any:
                del place.hooks[method]
                return does(store, *given)

            place.hooks[method] = once
            assert run(engine, PROMPTS, NUM_NEW)[0] == plain(PROMPTS), fault
            place.hooks.pop(method, None)
        place.drop(engine)
        found, cached = run(engine, PROMPTS, NUM_NEW)
        assert found == plain(PROMPTS) and min(cached) > 60  # it is still used
        assert counters(engine)["memory.errors"] > 4
        stats = engine.stats()
        assert stats is not None and stats.stores["memory"].num_blocks == len(place.blocks)


@pytest.mark.parametrize(
    "fault", [pytest.param(f, marks=() if f in QUICK else pytest.mark.slow) for f in LEFT_OUT]
)
def test_a_store_that_always_fails_is_named_and_left_out(
    place: Place, plain: Any, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    method, does = FAULTS[fault]
    new = [[n] * 40 for n in range(10, 11 + MOST_FAULTS)]
    wanted, *others = plain([PROMPTS[0], *new])
    with place.engine() as engine, caplog.at_level(logging.WARNING, "engine.kv"):
        place.fill(engine)
        place.hooks[method] = does
        for nth in range(MOST_FAULTS):
            if not fault.startswith("contains"):  # what it has would be supplied
                assert run(engine, [PROMPTS[0]], NUM_NEW)[0] == [wanted]
            assert run(engine, [new[nth]], NUM_NEW)[0] == [others[nth]]
            run(engine, [OTHER], 1)
            until(lambda num=nth + 1: counters(engine).get("memory.errors", 0) >= num)
            place.drop(engine)
        num_calls = counters(engine)[f"memory.{method}_calls"]
        assert run(engine, [PROMPTS[0], new[-1]], NUM_NEW)[0] == [wanted, others[-1]]
        assert counters(engine)[f"memory.{method}_calls"] == num_calls
    messages = [record.getMessage() for record in caplog.records]
    assert sum("the KV store memory is not used any more" in each for each in messages) == 1


def test_nobody_waits_for_a_read_that_hangs(
    place: Place, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third, other = plain([*PROMPTS, OTHER])
    with place.engine() as engine:
        place.fill(engine)
        monkeypatch.setattr(store_thread, "MOST_SECONDS", 0.05)
        gate = Gate(place, "read")
        num_calls = counters(engine)["memory.contains_calls"] + 2  # of the next two requests
        engine.add_request("hung", PROMPTS[0], GREEDY)
        engine.add_request("other", OTHER, GREEDY)
        outputs = finish(engine)
        assert tokens(outputs["hung"]) == first and tokens(outputs["other"]) == other
        assert is_empty(engine)  # though the read has not returned
        assert counters(engine)["memory.errors"] == 1
        assert run(engine, [PROMPTS[1]], NUM_NEW) == ([second], [0])  # is not even looked up
        del place.hooks["read"]
        gate.opened.set()
        new = ([n] * 9 for n in range(10, 250))
        until(
            lambda: (
                run(engine, [next(new)], 1)
                and counters(engine).get("memory.contains_calls", 0) > num_calls
            )
        )
        assert run(engine, [PROMPTS[2]], NUM_NEW) == ([third], [104])


def test_a_request_waits_no_longer_than_the_limit(
    place: Place, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "MAX_SECONDS", 0.02)
    with place.engine() as engine:
        place.fill(engine)
        gate = Gate(place, "read")
        assert run(engine, [PROMPTS[0]], NUM_NEW)[0] == plain([PROMPTS[0]])
        assert counters(engine)["too_slow"] == 1
        gate.opened.set()
        until(lambda: run(engine, [OTHER], 1) and is_empty(engine))


@pytest.mark.parametrize("fault", ["raises", "is late"])
def test_a_request_fails_if_that_is_wanted(
    place: Place, plain: Any, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.options["kv_transfer_config"]["kv_load_failure_policy"] = "fail"
    with place.engine() as engine:
        place.fill(engine)
        if fault == "raises":
            place.hooks["read"] = raises
        else:
            monkeypatch.setattr(tiers, "MAX_SECONDS", 0.02)
            gate = Gate(place, "read")
        engine.add_request("lost", PROMPTS[0], GREEDY)
        engine.add_request("other", OTHER, GREEDY)
        outputs = finish(engine)
        (end,) = outputs["lost"].outputs
        assert (end.finish_reason, end.code) == ("error", "kv_transfer_failed")
        why = "memory did not supply 11 of 11 blocks" if fault == "raises" else "it took more than"
        assert f"its KV could not be loaded: {why}" in str(end.error)
        assert tokens(outputs["other"]) == plain([OTHER])[0]
        if fault == "is late":
            gate.opened.set()
        del place.hooks["read"]
        until(lambda: run(engine, [OTHER], 1) and is_empty(engine))
        assert run(engine, [PROMPTS[1]], NUM_NEW)[0] == plain([PROMPTS[1]])


def test_a_request_limits_what_is_loaded_for_it(place: Place, plain: Any) -> None:
    with place.engine() as engine:
        place.fill(engine)
        for most, cached in [(0, 0), (7, 0), (8, 8), (30, 24), (10**9, 88), (None, 88)]:
            params = {"max_load_tokens": most, "do_remote_prefill": False}
            engine.add_request("one", PROMPTS[0], GREEDY, kv_transfer_params=params)
            output = finish(engine)["one"]
            assert (tokens(output), output.num_cached_tokens) == (plain([PROMPTS[0]])[0], cached)
            place.drop(engine)


def test_blocks_of_a_request_may_stay_out_of_stores(place: Place, plain: Any) -> None:
    with place.engine() as engine:
        place.fill(engine)
        shared, once = PROMPTS[0][:40], list(range(100, 150))
        before = dict(place.blocks)
        engine.add_request("one", shared + once, LONG, kv_transfer_params={"store": False})
        output = finish(engine)["one"]
        assert output.num_cached_tokens == 40  # what is stored is used all the same
        place.drop(engine)
        assert place.blocks == before
        assert run(engine, [shared + once], NUM_NEW) == (plain([shared + once]), [40])
        run(engine, [OTHER], 1)
        until(lambda: len(place.blocks) > len(before))  # those of another request are stored


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_load_tokens": -1}, "max_load_tokens in kv_transfer_params is -1, must be a whole"),
        ({"max_load_tokens": "many"}, "is 'many', must be a whole number from 0 on"),
        ({"max_load_tokens": True}, "is True, must be a whole number"),
        ({"max_load_tokens": 1.5}, "is 1.5, must be a whole number"),
        ({"store": 0}, "store in kv_transfer_params is 0, must be True or False"),
        ({"store": None}, "is None, must be True or False"),
        (
            {"max_loaded": 3},
            "has 'max_loaded', which is not known; it takes max_load_tokens, store",
        ),
        ([1], "kv_transfer_params is [1], must be a dict"),
    ],
)
def test_wrong_params_are_refused(params: Any, message: str, wrong_params: LLMEngine) -> None:
    with pytest.raises(RequestError) as error:
        wrong_params.add_request("one", OTHER, GREEDY, kv_transfer_params=params)
    assert message in str(error.value)
    assert not wrong_params.has_unfinished_requests()


@pytest.fixture(scope="module")
def wrong_params(path: str) -> Iterator[LLMEngine]:
    with engine_for(path, kv_transfer_config=hooked("wrong params")) as engine:
        yield engine


def test_params_need_a_store(path: str) -> None:
    with engine_for(path) as engine, pytest.raises(RequestError, match="kv_transfer_params"):
        engine.add_request("one", OTHER, GREEDY, kv_transfer_params={"store": False})


@pytest.mark.parametrize("phase", ["before it is planned", "reading", "just ended"])
def test_a_request_is_aborted_at_each_phase_of_a_load(place: Place, plain: Any, phase: str) -> None:
    with place.engine() as engine:
        place.fill(engine)
        gate = Gate(place, "read")
        engine.add_request("one", PROMPTS[0], GREEDY)
        engine.add_request("two", PROMPTS[0][:80], GREEDY)
        if phase != "before it is planned":
            engine.step()
            assert gate.begun.wait(WAIT)
        if phase == "just ended":
            gate.opened.set()
            until(lambda: counters(engine).get("memory.reads") and not loading(engine))
        engine.abort_request("one")
        gate.opened.set()
        outputs = finish(engine)
        assert outputs["one"].outputs[0].finish_reason == "abort"
        assert tokens(outputs["two"]) == plain([PROMPTS[0][:80]])[0]
        until(lambda: run(engine, [OTHER], 1) and is_empty(engine))
        assert run(engine, PROMPTS, NUM_NEW)[0] == plain(PROMPTS)


def loading(engine: LLMEngine) -> bool:
    """True while a load has not reported its end."""
    return not engine.session.client.loads._reports  # type: ignore[attr-defined]


@pytest.mark.parametrize("reset_running", [False, True])
def test_what_is_loaded_during_a_reset_is_not_used(
    place: Place, plain: Any, reset_running: bool
) -> None:
    """The blocks in the store are of other weights by then."""
    with place.engine() as engine:
        place.fill(engine)
        gate = Gate(place, "read")

        def old(store: Any, keys: Any, rows: Rows) -> list[bool]:
            gate.begun.set()
            gate.opened.wait(WAIT)
            rows[:] = 0x3C
            return [True] * len(keys)

        place.hooks["read"] = old
        if reset_running:
            engine.add_request("running", OTHER, LONG)
            engine.step()
            engine.step()
        engine.add_request("one", PROMPTS[0], GREEDY)
        engine.step()
        assert gate.begun.wait(WAIT)
        assert engine.reset_prefix_cache(reset_running)
        engine.step()
        del place.hooks["read"]
        gate.opened.set()
        outputs = finish(engine)
        assert tokens(outputs["one"]) == plain([PROMPTS[0]])[0]
        if reset_running:
            assert tokens(outputs["running"])[:NUM_NEW] == plain([OTHER])[0]
        assert is_empty(engine)
        assert run(engine, PROMPTS, NUM_NEW)[0] == plain(PROMPTS)


def test_a_reset_during_writes_leaves_nothing_old_in_the_store(place: Place, plain: Any) -> None:
    with place.engine() as engine:
        gate = Gate(place, "write")
        run(engine, [PROMPTS[0]], NUM_NEW)
        run(engine, [OTHER], 1)
        assert gate.begun.wait(WAIT)
        assert engine.reset_prefix_cache()
        run(engine, [[7] * 20], 1)
        gate.opened.set()
        until(lambda: counters(engine).get("memory.forget_calls"))
        found, cached = run(engine, [PROMPTS[0]], NUM_NEW)
        assert (found, cached) == (plain([PROMPTS[0]]), [0])


def test_loads_go_on_during_a_pause(place: Place, plain: Any) -> None:
    with place.engine() as engine:
        place.fill(engine)
        gate = Gate(place, "read")
        engine.add_request("one", PROMPTS[0], GREEDY)
        engine.step()
        engine.pause()
        gate.opened.set()
        for _ in range(20):
            assert not engine.step()
        engine.resume()
        output = finish(engine)["one"]
        assert tokens(output) == plain([PROMPTS[0]])[0] and output.num_cached_tokens > 60


def test_the_end_of_an_engine_amid_loads_and_writes_leaves_no_thread(
    place: Place, plain: Any
) -> None:
    before = store_threads()
    with place.engine() as engine:
        place.fill(engine)
        read, write = Gate(place, "read"), Gate(place, "write")
        run(engine, [[9] * 50], 1)
        run(engine, [OTHER], 1)
        assert write.begun.wait(WAIT)
        engine.add_request("one", PROMPTS[0], GREEDY)
        engine.step()
        num_before = len(place.blocks)
        read.opened.set()
        threading.Timer(0.05, write.opened.set).start()
    assert not store_threads() - before
    assert len(place.blocks) >= num_before + 6  # what waited has been stored
    with place.engine() as engine:
        assert run(engine, PROMPTS, NUM_NEW)[0] == plain(PROMPTS)


def test_two_engines_share_a_directory(path: str, tmp_path: Path, plain: Any) -> None:
    options = {
        "kv_offload_dir": str(tmp_path / "kv"),
        "kv_offload_dir_gib": 0.01,
        "cost_profile": slow_profile(tmp_path / "slow.json"),
        "max_model_len": 256,
    }
    before = store_threads()
    with engine_for(path, **options) as one:
        run(one, PROMPTS[:1], NUM_NEW)
        run(one, [OTHER], 1)
        until(lambda: counters(one).get("disk.stored", 0) >= len(PROMPTS[0]) // 8)
        with engine_for(path, **options) as two:
            for engine in (two, one, two):
                found, cached = run(engine, PROMPTS, NUM_NEW)
                assert found == plain(PROMPTS) and cached[0] > 60
            assert one.reset_prefix_cache()  # which also clears the directory
            assert run(one, PROMPTS, NUM_NEW)[0] == plain(PROMPTS)
            assert run(two, PROMPTS, NUM_NEW)[0] == plain(PROMPTS)
        assert run(one, PROMPTS, NUM_NEW)[0] == plain(PROMPTS)
    assert not store_threads() - before


def test_plans_with_failed_loads_are_the_same_in_a_replay(place: Place, tmp_path: Path) -> None:
    log = tmp_path / "steps.log"
    place.options["kv_transfer_config"]["kv_load_failure_policy"] = "fail"
    with place.engine(step_log=str(log)) as engine:
        place.fill(engine)
        one_in_two = itertools.cycle([None, OSError("gone")])

        def read(store: Any, keys: Any, rows: Rows) -> list[bool]:
            if error := next(one_in_two):
                raise error
            return type(store).__mro__[1].read(store, keys, rows)  # type: ignore[no-any-return]

        place.hooks["read"] = read
        wishes: list[dict[str, Any]] = [{}, {}, {"max_load_tokens": 20}, {"store": False}, {}]
        for nth, wish in enumerate(wishes):
            ids = [*PROMPTS[nth % 3][: 80 - nth], *range(10, 20)]
            engine.add_request(str(nth), ids, GREEDY, kv_transfer_params=wish)
            engine.step()
        codes = [output.outputs[0].code for output in finish(engine).values()]
        assert "kv_transfer_failed" in codes and None in codes
        engine.add_request("late", PROMPTS[0], GREEDY)
        engine.step()
        assert engine.reset_prefix_cache()
        finish(engine)
    outcome = replay(log)
    assert outcome.num_steps > 10 and outcome.difference is None, outcome


def test_blocks_are_copied_as_a_device_copies_them(
    place: Place, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gathered and scattered copies, as on a GPU; its streams only a GPU can show."""

    def on_device(pieces: Any, platform: Any) -> PoolBlocks:
        return PoolBlocks(pieces, HostPlatform())

    monkeypatch.setattr(compute, "PoolBlocks", on_device)
    with place.engine() as engine:
        place.fill(engine)
        found, cached = run(engine, PROMPTS, NUM_NEW)
        assert found == plain(PROMPTS) and min(cached) > 60


def test_a_start_that_fails_leaves_no_thread_of_a_store(place: Place) -> None:
    before = store_threads()
    modules = ["mine=/no/such/adapter"]
    with pytest.raises(ConfigError, match="/no/such/adapter"):
        place.engine(enable_lora=True, lora_modules=modules)
    assert not store_threads() - before


def changed_copy(path: str, new: Path) -> str:
    """A model of the same shapes with other weights."""
    shutil.copytree(path, new)
    file = new / "model.safetensors"
    tensors = load_file(file)
    save_file({name: tensor.flip(0) for name, tensor in tensors.items()}, file, {"format": "pt"})
    return str(new)


@pytest.mark.parametrize("which", ["quick", pytest.param("all", marks=pytest.mark.slow)])
def test_blocks_of_other_content_are_never_served(
    path: str, tiny_models: TinyModels, tmp_path: Path, which: str
) -> None:
    """Engines that differ in one thing use one directory, one after the other, and twice each."""
    copy = changed_copy(path, tmp_path / "copy")
    touched = str(shutil.copytree(path, tmp_path / "touched"))
    os.utime(tmp_path / "touched" / "model.safetensors", (1, 1))
    dynamic, longrope = (str(tiny_models.path(f"llama-{kind}")) for kind in ("dynamic", "longrope"))
    options = {
        "kv_offload_dir": str(tmp_path / "kv"),
        "kv_offload_dir_gib": 0.02,
        "cost_profile": slow_profile(tmp_path / "slow.json"),
    }
    variants: dict[str, tuple[str, dict[str, Any]]] = {
        "the first": (path, {}),
        "other weights": (copy, {}),
        "a changed file": (touched, {}),
        "dtype": (path, {"dtype": "bfloat16"}),
        "block size": (path, {"block_size": 16}),
        "8 bits": (path, {"kv_cache_dtype": "int8"}),
        "dummy weights": (path, {"load_format": "dummy"}),
        "other dummy weights": (path, {"load_format": "dummy", "seed": 1}),
        "dynamic": (dynamic, {}),
        "dynamic, longer": (dynamic, {"max_model_len": 512}),
        "longrope": (longrope, {}),
        "longrope, longer": (longrope, {"max_model_len": 512}),
    }
    if which == "quick":
        variants = {
            name: variants[name] for name in ("other weights", "dynamic, longer", "dynamic")
        }
    for again in (False, True):
        for name, (model, own) in variants.items():
            every = {"max_model_len": 128, **own}
            with engine_for(model, enable_prefix_caching=False, **every) as engine:
                wanted = run(engine, PROMPTS, NUM_NEW)[0]
            with engine_for(model, **options, **every) as engine:
                found, cached = run(engine, PROMPTS, NUM_NEW)
                assert found == wanted, name
                assert any(cached) == again, name
    if which == "quick":
        return
    with engine_for(path, seed=3, max_model_len=256, **options) as engine:
        assert all(run(engine, PROMPTS, NUM_NEW)[1])  # on these nothing depends
        salted = [{"prompt_token_ids": ids, "cache_salt": "x"} for ids in PROMPTS]
        assert run(engine, salted, NUM_NEW)[1] == [0, 0, 0]
