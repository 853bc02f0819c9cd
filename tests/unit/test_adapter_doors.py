"""Adapters through engines and clients: loaded on all cores or on none, replaced, removed."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from support.adapters import FakeReader, digest_of, slots_of
from support.data_plane import FeatureWorker, answer
from support.patience import WAIT_SECONDS
from support.simulate import make_request

from engine.async_engine import AsyncLLMEngine
from engine.config.decide import Decided
from engine.config.engine import EngineConfig
from engine.config.model import ModelConfig
from engine.config.sched import SchedulerConfig
from engine.core.engine_core import EngineCore
from engine.core.inproc_client import InprocClient
from engine.errors import ConfigError, RequestError, RequestTypeError
from engine.frontend.adapters import AdapterLoad
from engine.frontend.session import Session
from engine.kv.manager import KVManager
from engine.llm_engine import LLMEngine
from engine.messages.adapters import AdapterInfo, LoRARequest
from engine.messages.params import SamplingParams
from engine.messages.stats import AdapterUse, SchedulerStats
from engine.rpc.adapter_loads import AdapterLoads
from engine.rpc.balance import Balancer
from engine.rpc.joined import digest_of_all, sum_of
from engine.sched.policies.fcfs import FCFS
from engine.sched.scheduler import Scheduler

PROMPT = {"prompt_token_ids": [7] * 20}


def session_of(reader: FakeReader, max_loras: int = 2, **options) -> Session:
    """The front end of a core with a fake worker."""
    slots = slots_of(reader, max_loras, **options)
    sched = SchedulerConfig(max_num_batched_tokens=256, max_num_seqs=8, max_model_len=256)
    scheduler = Scheduler(sched, KVManager(100, 16), FCFS(), clock=float, resources=[slots])
    decided = Decided(
        max_model_len=256,
        num_kv_blocks=100,
        block_size=16,
        vocab_size=1000,
        eos_token_ids=(),
        device="cpu",
        scheduler=sched,
        capabilities=("adapters",),
    )
    core = EngineCore(scheduler, FeatureWorker(100, 16))
    client = InprocClient(core, decided, adapters=slots)
    config = EngineConfig(model=ModelConfig(model="fake"), disable_log_stats=True)
    return Session(config, client, None, float)


def tokens_with(content: str | None, num_output: int = 3) -> list[int]:
    digest = None if content is None else digest_of(content)
    return answer(make_request("?", [7] * 20, num_output, adapter=digest))


def generated(engine: LLMEngine, **lora) -> list[int]:
    """Output tokens of a request."""
    engine.add_request("a", PROMPT, SamplingParams(max_tokens=3), **lora)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                return output.outputs[0].token_ids
    raise AssertionError("the request has not ended")


def test_an_engine_loads_lists_pins_and_removes() -> None:
    with LLMEngine(session_of(FakeReader(a="A", b="B"))) as engine:
        x = LoRARequest("x", 7, "a")
        assert engine.add_lora(x) and not engine.add_lora(x)
        assert engine.list_loras() == {7}
        assert engine.pin_lora(7) and not engine.pin_lora(8)
        assert engine.lora_adapters() == [AdapterInfo("x", 7, "a", digest_of("A"), 8, 100, True)]
        assert generated(engine, lora_request=x) == generated(engine, adapter="x")
        assert generated(engine, adapter="x") == tokens_with("A") != generated(engine)
        assert generated(engine, lora_request=LoRARequest("y", 8, "b")) == tokens_with("B")
        assert engine.list_loras() == {7, 8}
        assert engine.remove_lora(7) and not engine.remove_lora(7) and engine.remove_lora("y")
        assert engine.list_loras() == set()
        with pytest.raises(RequestError, match="adapter 'x' is not loaded"):
            engine.add_request("b", PROMPT, adapter="x")


def test_an_adapter_from_memory_is_loaded_once_and_replaced_in_place() -> None:
    reader = FakeReader()
    reader.disk[""] = "M"
    with LLMEngine(session_of(reader)) as engine:
        tensors = {"w": torch.ones(2, 2)}
        x = LoRARequest("x", 1, tensors=tensors, config={"r": 1})
        assert generated(engine, lora_request=x) == generated(engine, lora_request=x)
        assert generated(engine, lora_request=x) == tokens_with("M")
        assert [sorted(each.order.files or ()) for each in reader.readings] == [
            ["adapter_config.json", "adapter_model.safetensors"]
        ]
        other = LoRARequest("x", 1, tensors=dict(tensors), config={"r": 1})
        with pytest.raises(RequestError, match="adapter 'x' is loaded already"):
            engine.add_request("b", PROMPT, lora_request=other)
        reader.disk[""] = "M2"
        other = LoRARequest("x", 1, tensors=dict(tensors), config={"r": 1}, load_inplace=True)
        assert generated(engine, lora_request=other) == tokens_with("M2")
        engine.session.client.max_call_bytes = 4000
        large = LoRARequest("z", 2, tensors={"w": torch.ones(64, 64)}, config={})
        with pytest.raises(RequestError, match=r"has 20.* bytes, but a core .* takes at most 4000"):
            engine.add_lora(large)
        wrong = LoRARequest("z", 2, tensors={"w": 3}, config={})
        with pytest.raises(RequestError, match="tensors and config of adapter 'z' cannot be used"):
            engine.add_lora(wrong)


def test_mistakes_of_users_are_refused_with_reasons() -> None:
    with LLMEngine(session_of(FakeReader(a="A", b=ConfigError("adapter 'y': rank 999")))) as engine:
        with pytest.raises(ConfigError, match=r"^adapter 'y': rank 999$"):
            engine.add_lora(LoRARequest("y", 2, "b"))
        with pytest.raises(ConfigError, match=r"adapter 'y'.*no directory none"):
            engine.add_lora(LoRARequest("y", 2, "none"))
        engine.add_lora(LoRARequest("x", 1, "a"))
        with pytest.raises(RequestError, match="lora_int_id 1 is that of adapter 'x'"):
            engine.add_lora(LoRARequest("y", 1, "b"))
        with pytest.raises(RequestTypeError, match="lora_request is 'x', must be a LoRARequest"):
            engine.add_request("b", PROMPT, lora_request="x")
        with pytest.raises(RequestError, match="give only one of them"):
            engine.add_request("b", PROMPT, lora_request=LoRARequest("x", 1, "a"), adapter="x")
    for fields, reason in (
        (("", 1), "lora_name is ''"),
        (("x", 0), "lora_int_id is 0, must be in 1"),
        (("x", True), "lora_int_id is True, must be a whole number"),
        (("x", 1, 3), "lora_path is 3, must be a str"),
        (("x", 1, "a", False, {}, {}), "lora_path is 'a' and tensors are given"),
        (("x", 1, "", False, {}), "tensors and config belong together"),
    ):
        with pytest.raises(RequestError, match=reason):
            LoRARequest(*fields)


def test_an_engine_without_adapters_names_the_option() -> None:
    session = session_of(FakeReader(a="A"))
    session.client.decided = Decided(
        **{name: getattr(session.client.decided, name) for name in Decided.__dataclass_fields__}
        | {"capabilities": ()}
    )
    session = Session(EngineConfig(model=ModelConfig(model="x")), session.client, None, float)
    with LLMEngine(session) as engine:
        for call in (
            lambda: engine.add_request("b", PROMPT, lora_request=LoRARequest("x", 1, "a")),
            lambda: engine.add_lora(LoRARequest("x", 1, "a")),
            lambda: engine.remove_lora(1),
        ):
            with pytest.raises((RequestError, ConfigError), match="enable_lora=True"):
                call()
        assert engine.list_loras() == set()


def test_tasks_load_adapters_while_others_go_on() -> None:
    reader = FakeReader(a="A", is_slow=True)
    engine = AsyncLLMEngine(session_of(reader))

    async def tokens(request_id: str, **lora) -> list[int]:
        params = SamplingParams(max_tokens=3, output_kind="final")
        outputs = [each async for each in engine.generate(PROMPT, params, request_id, **lora)]
        return outputs[-1].outputs[0].token_ids

    async def scenario() -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            loading = asyncio.create_task(engine.add_lora(LoRARequest("x", 1, "a")))
            while not reader.readings:
                await asyncio.sleep(0.001)
            assert await tokens("0") == tokens_with(None)
            assert not loading.done() and await engine.list_loras() == set()
            reader.finish("a")
            assert await loading
            assert await engine.find_adapter("x") is not None
            assert await engine.find_adapter("z") is None
            assert await tokens("1", adapter="x") == tokens_with("A")
            waiting = asyncio.create_task(
                tokens("2", lora_request=LoRARequest("x", 1, "a", load_inplace=True))
            )
            while len(reader.readings) < 2:
                await asyncio.sleep(0.001)
            reader.disk["a"] = "A2"
            reader.finish("a")
            assert await waiting == tokens_with("A2")
            abandoned = asyncio.create_task(engine.load_adapter("y", "b"))
            while len(reader.readings) < 3:
                await asyncio.sleep(0.001)
            abandoned.cancel()
            await asyncio.gather(abandoned, return_exceptions=True)
            assert await engine.pin_lora("x") and await engine.remove_lora("x")
            assert await engine.lora_adapters() == []

    try:
        asyncio.run(scenario())
    finally:
        engine.shutdown()
    assert not [each for each in threading.enumerate() if each.name == "engine-core"]


class Cores:
    """Several cores whose utilities a client calls together, as ``ManyCoresClient`` does."""

    def __init__(self, *readers: FakeReader) -> None:
        self.cores = [slots_of(reader).methods for reader in readers]

    def call(self, name: str, *args):
        answers, errors = [], []
        for methods in self.cores:
            try:
                answers.append(methods[name](*args))
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return digest_of_all(answers) if name == "adapter_state" else answers[0]

    def names(self) -> list[list[str]]:
        return [[each["name"] for each in methods["adapters"]()] for methods in self.cores]


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (FakeReader(a=ConfigError("the disk is damaged")), "the disk is damaged"),
        (FakeReader(a="another A"), "the cores have read different files"),
    ],
)
def test_a_load_reaches_all_cores_or_none(other: FakeReader, reason: str) -> None:
    cores = Cores(FakeReader(a="A"), other)
    load = AdapterLoad(cores, "x", "a")
    load.begin()
    with pytest.raises(ConfigError, match=reason):
        load.poll()
    assert cores.names() == [[], []]
    other.disk["a"] = "A"
    load = AdapterLoad(cores, "x", "a")
    load.begin()
    assert load.poll() is not None
    assert cores.names() == [["x"], ["x"]]


def test_a_core_that_starts_again_knows_what_was_loaded_removed_and_pinned() -> None:
    loads, cores = AdapterLoads(), Cores(FakeReader(a="A", b="B"))

    def call(name: str, *args):
        answer = cores.call(name, *args)
        loads.record(name, args, answer)
        return answer

    client = type("Client", (), {"call": staticmethod(call)})()
    for name, path in (("x", "a"), ("y", "b")):
        load = AdapterLoad(client, name, path)
        load.begin()
        load.poll()
    call("pin_adapter", "x")
    call("remove_adapter", "y")
    assert loads.digests() == {"x": digest_of("A")}
    again = slots_of(FakeReader(a="A", b="B"))
    assert again.library is not None
    again.library.load("y", "b")  # of its own options
    loads.repeat(Cores2(again.methods))
    (known,) = again.library.listed()
    assert (known["name"], known["digest"], known["is_pinned"]) == ("x", digest_of("A"), True)


class Cores2:
    def __init__(self, methods) -> None:
        self.methods = methods

    def call(self, name: str, *args):
        return self.methods[name](*args)


def test_prompts_of_a_replaced_adapter_share_nothing_with_those_before() -> None:
    balancer = Balancer(2, 4)
    for number, (digest, core) in enumerate([("1", 0), ("1", 0), ("2", 1)]):
        balancer.adapters = {"x": digest}
        request = make_request(str(number), [7] * 90, 3, adapter="x")
        assert balancer.choose(request) == core
        balancer.start(str(number))


def test_the_use_of_adapters_is_summed_over_cores() -> None:
    def stats(adapters: AdapterUse | None) -> SchedulerStats:
        return SchedulerStats(1, 0, 0, 0.0, 0, 0, 0, 0, 0, 0, adapters=adapters)

    use = AdapterUse(4, 1, 2, 300, {"x": 1}, {"y": 2})
    both = sum_of([stats(use), stats(use)])
    assert both is not None and both.adapters == AdapterUse(8, 2, 4, 600, {"x": 2}, {"y": 4})
    one = sum_of([stats(None), stats(use)])
    assert one is not None and one.adapters == use
    none = sum_of([stats(None), stats(None)])
    assert none is not None and none.adapters is None
