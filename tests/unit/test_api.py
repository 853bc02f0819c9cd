"""LLMEngine, LLM and AsyncLLMEngine on a scripted core."""

import logging
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support import made_tokenizers as made
from support.fakes import FakeClient, FakeClock, FakeDecided, counting

import engine
from engine import LLM, AsyncLLMEngine, EngineArgs, LLMEngine, RequestOutput, SamplingParams
from engine.errors import ConfigError, RequestError
from engine.llm import RequestProgress
from engine.messages.requests import CompletionOutput
from engine.messages.stats import GroupUse
from engine.observe.stats_log import StatsLog, TokenCounts

PARAMS = SamplingParams(max_tokens=4)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    """The core that every engine of the test gets."""
    fake = FakeClient(counting, FakeDecided(vocab_size=400))

    monkeypatch.setattr("engine.frontend.session.open_core", lambda config: fake)
    return fake


@pytest.fixture
def model(tmp_path: Path) -> str:
    template = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    return str(made.save(tmp_path, made.metaspace(), {"chat_template.jinja": template}))


# LLMEngine


def test_engine_steps_until_all_is_answered(client: FakeClient, model: str) -> None:
    with LLMEngine.from_engine_args(EngineArgs(model=model)) as llm_engine:
        llm_engine.add_request("a", "Hello", PARAMS)
        llm_engine.add_request("b", [5, 6], SamplingParams(max_tokens=2), priority=1, user="me")
        assert llm_engine.get_num_unfinished_requests() == 2
        finished = []
        while llm_engine.has_unfinished_requests():
            finished += [output for output in llm_engine.step() if output.finished]
        assert [output.request_id for output in finished] == ["b", "a"]
        assert finished[1].prompt == "Hello"
        assert finished[1].outputs[0].token_ids == [10, 11, 12, 13]
        assert llm_engine.step() == []
        assert llm_engine.reset_prefix_cache()
        stats, counts = llm_engine.stats(), llm_engine.token_counts()
        assert stats is not None and stats.num_running == 0  # 125
        assert counts.generation_tokens == 6 and counts.finished["length"] == 2
    assert client.is_shut_down


def test_engine_abort_is_answered_once(client: FakeClient, model: str) -> None:
    llm_engine = LLMEngine.from_engine_args(EngineArgs(model=model))
    for name in "abc":
        llm_engine.add_request(name, "Hello", PARAMS)
    llm_engine.step()
    llm_engine.abort_request("a")
    llm_engine.abort_request(["a", "c", "nobody"])
    answers: list[RequestOutput] = []
    while llm_engine.has_unfinished_requests():
        answers += [output for output in llm_engine.step() if output.finished]
    reasons = [(o.request_id, o.outputs[0].finish_reason) for o in answers]
    assert reasons == [("a", "abort"), ("c", "abort"), ("b", "length")]


def test_tokenizer_can_be_left_out(client: FakeClient, model: str) -> None:
    llm_engine = LLMEngine.from_engine_args(EngineArgs(model=model, skip_tokenizer_init=True))
    llm_engine.add_request("a", {"prompt_token_ids": [5]}, PARAMS)
    completion = llm_engine.step()[0].outputs[0]
    assert (completion.text, completion.token_ids) == ("", [10])
    with pytest.raises(ConfigError, match="skip_tokenizer_init"):
        llm_engine.get_tokenizer()


# LLM


def test_results_stand_in_the_order_of_the_prompts(client: FakeClient, model: str) -> None:
    llm = LLM(model)
    params = [SamplingParams(max_tokens=n) for n in (5, 1, 3)]
    for _ in range(2):
        outputs = llm.generate(["one", [5, 6], {"prompt": "three"}], params, use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [5, 1, 3]
        assert [output.prompt for output in outputs] == ["one", None, "three"]
    assert params[0].output_kind == "cumulative"  # the caller's own are left as they are


@pytest.mark.parametrize("prompt", ["one", [5, 6], {"prompt": "one"}])
def test_one_prompt_alone(client: FakeClient, model: str, prompt: Any) -> None:
    outputs = LLM(model).generate(prompt, PARAMS, use_tqdm=True)
    assert len(outputs) == 1 and len(outputs[0].outputs[0].token_ids) == 4


def test_no_prompts_no_results(client: FakeClient, model: str) -> None:
    assert LLM(model).generate([]) == []


def test_lists_of_the_wrong_length(client: FakeClient, model: str) -> None:
    llm = LLM(model)
    with pytest.raises(RequestError, match="sampling_params has 2 entries for 1 prompts"):
        llm.generate(["one"], [PARAMS, PARAMS])
    with pytest.raises(RequestError, match="priority has 1 entries for 2 prompts"):
        llm.generate(["one", "two"], PARAMS, priority=[1])


def test_one_bad_prompt_and_nothing_is_added(client: FakeClient, model: str) -> None:
    llm = LLM(model)
    with pytest.raises(RequestError, match="token id 9000"):
        llm.generate(["fine", [9000], "fine"], PARAMS)
    assert not client.live and client.aborted == []
    client.fails_on["3"] = RequestError("can never fit")
    with pytest.raises(RequestError, match="can never fit"):
        llm.generate(["fine", "too large"], PARAMS)
    assert not client.live and not llm.llm_engine.has_unfinished_requests()
    assert len(llm.generate("fine", PARAMS)) == 1


def test_interrupt_aborts(client: FakeClient, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(model)
    steps = iter(range(100))

    def interrupted() -> list[RequestOutput]:
        if next(steps) == 2:
            raise KeyboardInterrupt
        return session_step()

    session_step = llm.llm_engine.session.step
    monkeypatch.setattr(llm.llm_engine.session, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["one", "two"], SamplingParams(max_tokens=50), use_tqdm=False)
    assert not client.live and not llm.llm_engine.has_unfinished_requests()


def test_chat(client: FakeClient, model: str) -> None:
    llm = LLM(model)
    hello = [{"role": "user", "content": "Hello"}]
    (one,) = llm.chat(hello, PARAMS, use_tqdm=False)
    assert one.prompt == "<s>user: Hello</s>"
    assert one.prompt_token_ids[0] == 1 and one.prompt_token_ids.count(1) == 1
    two = llm.chat([hello, hello], PARAMS, chat_template="{{ x }}", chat_template_kwargs={"x": 7})
    assert [output.prompt for output in two] == ["7", "7"]


def test_progress_bar_is_drawn_on_terminals_only(capsys: pytest.CaptureFixture[str]) -> None:
    completion = CompletionOutput(0, "", [1, 2, 3])
    for is_terminal, drawn in ((True, True), (False, False)):
        with RequestProgress(1, Console(stderr=True, force_terminal=is_terminal)) as bar:
            bar.advance(RequestOutput("id", None, [1], [completion], True))
        shown = capsys.readouterr().err
        assert ("1/1" in shown) == drawn and ("tokens/s" in shown) == drawn


# AsyncLLMEngine, the rest of which is in test_async_engine.py


async def test_from_engine_args(client: FakeClient, model: str) -> None:
    async_engine = AsyncLLMEngine.from_engine_args(EngineArgs(model=model))
    outputs = [o async for o in async_engine.generate("Hello", PARAMS, "a", priority=2)]
    assert outputs[-1].prompt == "Hello"
    assert async_engine.get_tokenizer().encode("Hello")
    async_engine.shutdown()


# The rest


def test_stats_log_speaks_while_there_is_work(caplog: pytest.LogCaptureFixture) -> None:
    clock, counts = FakeClock(), TokenCounts()
    log = StatsLog(counts, FakeClient(counting).stats, clock, seconds=5.0)
    with caplog.at_level(logging.INFO, logger="engine"):
        for _ in range(12):  # 11 seconds of work
            log.after_step(is_idle=False)
            clock.now += 1.0
            counts.generation_tokens += 7
        assert caplog.text.count("generation 7.0 tokens/s") == 2
        log.after_step(is_idle=True)
        clock.now += 1000.0  # silence, and no part of any rate
        log.after_step(is_idle=False)
        clock.now += 5.0
        counts.generation_tokens += 10
        log.after_step(is_idle=False)
    assert caplog.text.count("generation") == 3
    assert "generation 2.0 tokens/s" in caplog.text


def test_stats_log_tells_what_is_out_of_the_ordinary(caplog: pytest.LogCaptureFixture) -> None:
    stats = FakeClient(counting).stats()
    clock = FakeClock()
    log = StatsLog(TokenCounts(), lambda: stats, clock, seconds=5.0)

    def line() -> str:
        caplog.clear()
        clock.now += 5.0
        with caplog.at_level(logging.INFO, logger="engine"):
            log.after_step(is_idle=False)
        return caplog.text.strip()

    log.after_step(is_idle=False)
    assert line().endswith("prefix hit rate 0.0 %")
    stats.num_parked, stats.num_preemptions, stats.num_refused, stats.num_expired = 2, 3, 4, 5
    stats.num_policy_faults, stats.blocked = 1, "a: KV blocks"
    stats.wait_seconds = {"seats": 1.0, "preempted": 3.0}
    stats.hook_seconds = {"Own.rank": 0.5}
    stats.step_seconds, stats.floor_seconds = 4.0, 1.0
    stats.counters = {"drafts.num_drafts": 8, "drafts.num_accepted_tokens": 0}
    assert line().endswith(
        ", parked 2, preempted 3, refused 4, expired 5, policy faults 1, "
        "drafts.num_drafts 8, waited for preempted 75 %, seats 25 %, "
        "policy hooks 10.0 % of the time, steps at 25 % of the roofline, "
        "blocked: a: KV blocks"
    )
    stats.num_preemptions, stats.blocked, stats.num_parked = 4, "", 0
    stats.step_seconds, stats.floor_seconds = 5.0, 6.65  # faster than memory: in the caches
    assert line().endswith("prefix hit rate 0.0 %, preempted 1")  # news since the last line
    stats.kv_groups = [GroupUse(0, 30), GroupUse(512, 3), GroupUse(512, 4), GroupUse(64, 1, True)]
    stats.prefix_missed = {"never seen": 30, "evicted": 90}
    assert line().endswith(
        "KV blocks by attention: full 30, sliding 512 7, chunked 64 1, "
        "prompt tokens not cached: evicted 75 %, never seen 25 %"
    )
    stats.kv_groups = [GroupUse(0, 30)]
    assert line().endswith("prefix hit rate 0.0 %")


def test_options_reach_the_scheduler() -> None:
    options = {
        "max_policy_faults": 7,
        "length_predictor": "history",
        "user_weights": {"a": 2.0},
        "max_waiting_requests": 5,
        "max_waiting_tokens": 600,
        "stalled_steps": 9,
    }
    config = EngineArgs(**options, resources=["mine.Gate"], step_log="x").create_config()
    assert {name: getattr(config.scheduler, name) for name in options} == options
    assert config.scheduler.resources == ("mine.Gate",) and config.step_log == "x"


def test_public_names() -> None:
    assert dir(engine) == sorted(engine.__all__)
    for name in engine.__all__:
        assert getattr(engine, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        _ = engine.nothing
