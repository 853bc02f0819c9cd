"""The command line on a scripted core: options, streaming, figures, errors in one line."""

import argparse
import io
import json
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from support import made_tokenizers as made
from support.fakes import FakeClient, FakeDecided, replay

from engine.cli.main import main
from engine.config.args import EngineArgs
from engine.config.cli import add_options, field_docs, read_options
from engine.config.engine import EngineConfig
from engine.errors import ConfigError
from engine.frontend.session import HeldInterrupt
from engine.messages.requests import AddRequest

TOKENIZER = made.byte_level()
ANSWER = TOKENIZER.encode(" and the dog.").ids


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    fake = FakeClient(replay([*ANSWER, 2]), FakeDecided(vocab_size=TOKENIZER.get_vocab_size()))

    def open_core(config: EngineConfig) -> FakeClient:
        fake.clock, fake.is_shut_down = time.monotonic, False
        return fake

    monkeypatch.setattr("engine.frontend.session.open_core", open_core)
    return fake


@pytest.fixture
def model(tmp_path: Path) -> str:
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    return str(made.save(tmp_path / "model", TOKENIZER, {"chat_template.jinja": template}))


@pytest.fixture
def run(
    client: FakeClient, model: str, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    def run_command(command: str, *args: str) -> tuple[int, str, str]:
        status = main([*command.split(), *args, "--model", model])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run_command


Run = Callable[..., tuple[int, str, str]]


def test_generate_streams_one_prompt(run: Run) -> None:
    status, out, _ = run("generate", "The fox")
    text, figures = out.splitlines()[0], out.splitlines()[-1]
    assert (status, text) == (0, "The fox and the dog.")
    assert f"{len(ANSWER) + 1} output tokens" in figures
    assert "prompt tokens" in figures and "tokens/s" in figures and "first token" in figures


def test_generate_many_prompts(run: Run) -> None:
    status, out, _ = run("generate", "One", "Two", "--max-tokens", "50")
    assert status == 0
    assert "One and the dog." in out and "Two and the dog." in out
    assert out.splitlines()[-1].startswith("[")


def test_generate_reads_standard_input(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("From a pipe\n"))
    assert run("generate")[1].startswith("From a pipe and the dog.")


def test_generate_passes_parameters(run: Run) -> None:
    assert run("generate", "x", "--stop", "dog")[1].startswith("x and the \n")
    assert "3 output tokens" in run("generate", "x", "--max-tokens", "3")[1]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["generate", "x", "--temperature", "-1"], "temperature is -1.0, must be"),
        (["generate", "x", "--block-size", "0"], "block_size is 0, must be in 1..1024"),
        (["generate", "x", "--tokenizer", "/nowhere"], "'/nowhere' does not exist"),
        (["bench", "latency", "--prompts", "/nowhere"], "--prompts /nowhere cannot be read"),
    ],
)
def test_errors_are_one_line(run: Run, args: list[str], message: str) -> None:
    status, _, err = run(" ".join(args[:1]), *args[1:])
    assert status == 2
    assert message in err and len(err.splitlines()) == 1 and "Traceback" not in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--steps", "0"], "--steps is 0, must be at least 1"),
        (["--jobs", "100000"], "--jobs is 100000, must be in 1.."),
        (["--seconds", "nan"], "--seconds is nan, must be above 0"),
        (["--policy", "edf", "--policy-options", '{"a": 1}'], "'a'; its options are: default_d"),
        (["--policy-options", "{}"], "--policy-options needs --policy"),
        (["--corpus", "/no/such/file"], "--corpus /no/such/file cannot be written"),
    ],
)
def test_mistakes_of_verify_are_one_line(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *args]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and len(printed.err.splitlines()) == 1


def test_examples_of_options_are_accepted() -> None:
    options = {option.name: option.metadata.get("example") for option in fields(EngineArgs)}
    examples = {name: example for name, example in options.items() if example is not None}
    assert {"policy_options", "user_weights"} <= examples.keys()
    EngineArgs(scheduling_policy="edf", **examples).create_config()


def test_a_corpus_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes").write_text("not a case")
    assert main(["verify", "--corpus", str(tmp_path / "notes")]) == 2
    assert "notes is not a corpus of cases: JSON is malformed" in capsys.readouterr().err


def test_prompts_that_are_no_text(run: Run, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_bytes(b"\xff\xfe")
    status, _, err = run("bench latency", "--prompts", str(tmp_path / "prompts"))
    assert status == 2 and "cannot be read: 'utf-8' codec" in err


@pytest.mark.parametrize("number", ["0", "x", "-1", "1.5"])
def test_counts_of_a_benchmark_are_whole(run: Run, number: str) -> None:
    with pytest.raises(SystemExit):
        run("bench latency", "--num-prompts", number)


def test_no_prompt_at_all(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    status, _, err = run("generate")
    assert status == 2 and "no prompt" in err


def test_a_dead_core_is_no_usage_error(run: Run, client: FakeClient) -> None:
    client.dies_at = 1
    status, _, err = run("generate", "x")
    assert status == 1 and "the fake core died" in err


def test_chat_remembers(run: Run, client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[str] = []

    def script(request: AddRequest, position: int) -> int:
        if position == 0:
            prompts.append(TOKENIZER.decode(request.prompt_token_ids))
        return [*ANSWER, 2][position]

    client.script = script
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n\nAgain\n/reset\nNew\n"))
    status, out, _ = run("chat", "--system", "Be kind")
    assert status == 0
    assert prompts == [
        "system:Be kind;user:Hi;",
        "system:Be kind;user:Hi;assistant: and the dog.;user:Again;",
        "system:Be kind;user:New;",
    ]
    assert out.count("and the dog.") == 3 and out.count("tokens/s") == 3


def test_chat_goes_on_after_a_message_that_does_not_fit(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("word " * 500 + "\nHi\n"))
    status, out, _ = run("chat")
    assert status == 0
    assert "max_model_len is 256" in out and "/reset forgets" in out
    assert out.count("tokens/s") == 1


def test_chat_without_a_template(
    client: FakeClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = made.save(tmp_path, TOKENIZER)
    assert main(["chat", "--model", str(root)]) == 2
    assert "chat template" in capsys.readouterr().err


@pytest.mark.usefixtures("can_interrupt")
def test_interrupt_ends_an_answer(
    run: Run, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C during a step waits for its end; the answer so far stands, and the status says it."""

    def interrupt() -> None:
        if client.num_steps == 2:
            signal.raise_signal(signal.SIGINT)

    client.pace = interrupt
    status, out, err = run("generate", "x", "--max-tokens", "90", "--ignore-eos")
    assert status == 130 and "3 output tokens" in out
    assert err == "metronome: interrupted\n"


@pytest.mark.usefixtures("can_interrupt")
def test_interrupts_are_held() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), HeldInterrupt():
        signal.raise_signal(signal.SIGINT)
        done.append("the step")
    assert done == ["the step"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("measure", ["throughput", "latency"])
def test_bench(run: Run, measure: str) -> None:
    sizes = ["--num-prompts", "2", "--input-len", "5", "--output-len", "4", "--num-iters", "2"]
    status, out, _ = run(f"bench {measure}", *sizes, "--json")
    result = json.loads(out)
    assert status == 0 and all(value >= 0 for value in result.values())
    if measure == "throughput":
        assert (result["requests"], result["output_tokens"]) == (2, 8)
    else:
        assert {"first_token_ms_mean", "next_token_ms_p50", "whole_request_ms_p99"} <= set(result)
    status, out, _ = run(f"bench {measure}", *sizes)
    assert status == 0 and measure in out


def test_bench_given_prompts(run: Run, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("One prompt\n\nAnother one\nAnd a third\n", encoding="utf-8")
    _, out, _ = run("bench throughput", "--prompts", str(prompts), "--output-len", "2", "--json")
    assert json.loads(out)["requests"] == 3


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--version", "--help"):
        with pytest.raises(SystemExit) as leave:
            main([option])
        assert leave.value.code == 0
    assert "generate" in capsys.readouterr().out


# Options made from dataclasses


def options_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add_options(parser, EngineArgs)
    return parser


def test_every_field_is_an_option_with_help() -> None:
    docs, text = field_docs(EngineArgs), options_parser().format_help()
    for option in fields(EngineArgs):
        assert docs[option.name]
        assert "--" + option.name.replace("_", "-") in text


def test_options_become_arguments() -> None:
    line = (
        "--model m --max-num-seqs 4 --no-enable-prefix-caching --memory-utilization 0.25 "
        "--async-scheduling --dtype bfloat16 --logits-processors a.B --logits-processors c.D"
    )
    parsed = options_parser().parse_args([*line.split(), "--policy-options", '{"a": [1]}'])
    assert read_options(parsed, EngineArgs) == EngineArgs(
        model="m",
        max_num_seqs=4,
        enable_prefix_caching=False,
        memory_utilization=0.25,
        async_scheduling=True,
        dtype="bfloat16",
        logits_processors=["a.B", "c.D"],
        policy_options={"a": [1]},
    )
    assert read_options(options_parser().parse_args([]), EngineArgs) == EngineArgs()


@pytest.fixture
def no_level(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.delenv("METRONOME_LOG_LEVEL", raising=False)
    yield monkeypatch


def test_log_level_comes_from_the_environment(no_level: pytest.MonkeyPatch) -> None:
    assert EngineArgs(model="m").create_config().log_level == "info"
    no_level.setenv("METRONOME_LOG_LEVEL", "DEBUG")
    assert EngineArgs(model="m").create_config().log_level == "debug"
    assert EngineArgs(model="m", log_level="error").create_config().log_level == "error"
    no_level.setenv("METRONOME_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match="METRONOME_LOG_LEVEL is 'loud', must be one of: debug"):
        EngineArgs(model="m").create_config()


def test_sizes_asked_reach_the_configuration() -> None:
    config = EngineArgs(model="m", max_num_seqs=4000, max_model_len=300).create_config()
    assert (config.scheduler.max_num_seqs, config.scheduler.max_model_len) == (4000, 300)
    assert config.scheduler.max_num_batched_tokens is None  # decided with the device
    short = EngineArgs(model="m", long_prefill_token_threshold=100).create_config()
    assert short.scheduler.long_prefill_token_threshold == 100
    unchunked = EngineArgs(
        model="m", enable_chunked_prefill=False, max_num_batched_tokens=512, max_num_seqs=8
    )
    assert unchunked.create_config().scheduler.max_num_batched_tokens == 512


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "device is 'tpu', must be one of: auto, cpu, cuda"),
        ({"num_threads": 0}, r"num_threads is 0, must be in 1\.\.\d+, the cores"),
        ({"logits_processors": ["no.such"]}, "cannot load 'no.such'"),
        ({"logits_processors": [5]}, "logits_processors has 5, must have functions"),
        ({"max_num_batched_tokens": 8}, r"max_num_batched_tokens \(8\) is below max_num_seqs"),
        ({"data_parallel_size": 2}, "multiprocess is False"),
        (
            {"data_parallel_size": 2, "multiprocess": True, "enable_kv_events": True}
            | {"kv_events_endpoint": "tcp://*:65533"},
            "kv_events_endpoint is 'tcp://.*:65533' and data_parallel_size is 2: .* at most 65532",
        ),
        ({"multiprocess": True, "core_address": "ipc:///x"}, "core_address is 'ipc:///x' and"),
        ({"core_address": "ipc:///x,"}, "core_address is 'ipc:///x,', must be one address, or up"),
        ({"core_address": "ipc:///x, ipc:///x"}, "up to 64 different ones separated by commas"),
        ({"core_address": ""}, "core_address is '', must be one address"),
        ({"core_address": "ipc:///x", "max_num_seqs": 4}, "max_num_seqs is 4, but the core at"),
        ({"core_address": "ipc:///x", "policy_options": {"a": 1}}, "policy_options is"),
    ],
)
def test_bad_values_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineArgs(**options).create_config()
