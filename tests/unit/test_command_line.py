"""Mistakes of a command line are answered in one line, with what was probably meant."""

from __future__ import annotations

import re

import pytest

from engine.cli.commands import all_commands
from engine.cli.main import main, make_parser
from engine.config.args import EngineArgs
from engine.config.foreign import FOREIGN
from engine.config.near import near_options
from engine.server.bodies import ChatRequest


def complaint(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a mistake is answered with."""
    with pytest.raises(SystemExit) as leave:
        main(line.split())
    printed = capsys.readouterr()
    assert leave.value.code == 2 and printed.out == ""
    (said,) = printed.err.splitlines()
    return said


@pytest.mark.parametrize(
    ("line", "command", "message"),
    [
        ("policies --policy fcfs", "policies", "option '--policy'; did you mean '--policies'?"),
        ("verify --policies=fcfs", "verify", "did you mean '--policy'?"),
        (
            "generate --policy edf x",
            "generate",
            "'--scheduling-policy' or '--cache-policy' or '--state-snapshot-policy'?",
        ),
        ("generate --max_num_seq 3 x", "generate", "did you mean '--max-num-seqs'?"),
        ("serve -port 1", "serve", "option '-port'; did you mean '--port'?"),
        ("serve --max-waiting 1", "serve", "'--max-waiting-requests' or '--max-waiting-tokens'?"),
        ("generate --frobnicate x", "generate", "metronome generate --help lists the known"),
        ("replay a.log b.log", "replay", "unexpected argument 'b.log'; usage: "),
        ("serve --port abc", "serve", "--port is 'abc', must be a whole number"),
        ("serve --dtype bfloat61", "serve", "auto, float32, bfloat16, float16; did you mean 'bflo"),
        ("serve --port", "serve", "--port: expected one argument"),
        ("replay", "replay", "are required: LOG"),
        ("replay a.log --changes [1]", "replay", """one like '{"max_num_seqs": 8}'"""),
        (
            "generate --user-weights 2 x",
            "generate",
            """'2' is not a JSON object; write one like '{"ann": 2.0, "bob": 0.5}', with the""",
        ),
    ],
)
def test_a_mistake_is_one_line_with_what_was_meant(
    line: str, command: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = complaint(line, capsys)
    assert said.startswith(f"metronome {command}: error: ") and message in said


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("gnerate x", "unknown command 'gnerate', there are: generate, chat, .*mean 'generate'"),
        ("bench", "the following arguments are required: MEASURE"),
        ("", "the following arguments are required: COMMAND; metronome --help lists them"),
        ("bench foo", "unknown measure 'foo', there are: throughput, latency, startup, serve$"),
    ],
)
def test_commands_are_named(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert re.search(message, complaint(line, capsys))


def options_of(command: str) -> list[str]:
    return list(make_parser([command]).parse_args([command]).command_parser.options)


@pytest.mark.parametrize("command", ["generate", "serve"])
def test_every_slip_of_one_letter_is_seen_through(command: str) -> None:
    """A letter of each option is left out or doubled."""
    known = [name for name in options_of(command) if len(name) > 8]
    for name in known:
        middle = len(name) // 2
        before, letter, after = name[:middle], name[middle], name[middle + 1 :]
        for typed in (before + after, before + 2 * letter + after):
            assert typed in known or name in near_options(typed, known), typed


@pytest.mark.parametrize("name", FOREIGN)
def test_options_of_others_that_are_missing_say_so_and_suggest_nothing_else(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if f"--{name.replace('_', '-')}" in options_of("serve"):
        pytest.fail(f"{name} is an option now: drop it from the list")
    said = complaint(f"serve --{name} 1", capsys)
    shown = f"--{name.replace('_', '-')}"
    assert f"there is no option {shown!r} here: {FOREIGN[name]}" in said
    assert "did you mean" not in said


def test_what_is_suggested_for_options_of_others_exists() -> None:
    known = {*EngineArgs.__dataclass_fields__, "prompt_lookup_max", "prompt_lookup_min"}
    known |= {name.strip("-").replace("-", "_") for name in options_of("serve")}
    known |= {*ChatRequest.__struct_fields__}
    for name, way_out in FOREIGN.items():
        for word in re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", way_out):
            assert word in known or word in ("num_speculative_tokens", "draft_model", "max_seqs"), (
                name,
                word,
            )


@pytest.mark.parametrize("command", all_commands()[0])
def test_help_begins_with_a_short_usage_and_has_groups(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leave:
        main([command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert leave.value.code == 0
    assert lines[0].startswith(f"usage: metronome {command} [options]") and lines[1] == ""


def test_what_is_used_most_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = capsys.readouterr().out
    places = [shown.index(f"\n  {name} ") for name in ("--config", "--model", "--max-num-seqs")]
    places += [shown.index(f"\n  {name} ") for name in ("--host", "--api-key", "--watermark")]
    assert places == sorted(places)
    assert shown.count("\n  --model ") == 1


def test_options_may_have_underscores_and_texts_keep_theirs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "max_num_seqs is 0" in printed_error(["generate", "--max_num_seqs=0", "x"], capsys)
    assert "'/no_where'" in printed_error(["generate", "--model=/no_where", "x"], capsys)


def printed_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 2
    return capsys.readouterr().err
