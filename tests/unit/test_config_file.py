"""Options from a YAML file: read as the command line is, which wins; mistakes name line and key."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from engine.cli.main import parse
from engine.cli.options import engine_args

FULL = """
# A comment.
model: /models/one
max-num-seqs: 8
max_model_len: 2048          # as in Python
gpu-memory-utilization: 0.5
async-scheduling: true
enable-prefix-caching: false
dtype: bfloat16
policy-options: {default_deadline: 5.0}
user-weights: '{"ann": 2.0}'
cudagraph-capture-sizes: [1, 2, 4]
logits-processors:
  - a.B
  - c.D
revision: "1.0"
tokenizer:
"""


def read(tmp_path: Path, text: str, line: str = "serve") -> argparse.Namespace:
    path = tmp_path / "options.yaml"
    path.write_text(text)
    return parse([*line.split(), "--config", str(path)])


def options(tmp_path: Path, text: str, line: str = "serve") -> dict[str, Any]:
    args = engine_args(read(tmp_path, text, line))
    return {name: value for name, value in vars(args).items() if name != "log_level"}


@pytest.mark.parametrize("command", ["serve", "generate x", "chat", "core", "bench latency"])
def test_every_kind_of_option_can_be_in_a_file(command: str, tmp_path: Path) -> None:
    found = options(tmp_path, FULL, command)
    wanted = {
        "model": "/models/one",
        "max_num_seqs": 8,
        "max_model_len": 2048,
        "gpu_memory_utilization": 0.5,
        "async_scheduling": True,
        "enable_prefix_caching": False,
        "dtype": "bfloat16",
        "policy_options": {"default_deadline": 5.0},
        "user_weights": {"ann": 2.0},
        "cudagraph_capture_sizes": [1, 2, 4],
        "logits_processors": ["a.B", "c.D"],
        "revision": "1.0",
        "tokenizer": None,
    }
    assert {name: found[name] for name in wanted} == wanted


def test_the_commands_own_options_can_be_in_it(tmp_path: Path) -> None:
    text = (
        "host: 0.0.0.0\nport: 9000\nserved-model-name: [a, b]\napi-key: secret\nreader-timeout: 3"
    )
    parsed = read(tmp_path, text)
    assert (parsed.host, parsed.port, parsed.reader_timeout) == ("0.0.0.0", 9000, 3.0)
    assert (parsed.served_model_name, parsed.api_key) == (["a", "b"], ["secret"])
    parsed = read(tmp_path, "temperature: 1\nignore-eos: true\nstop: [a, '7']", "generate x")
    assert (parsed.temperature, parsed.ignore_eos, parsed.stop) == (1.0, True, ["a", "7"])
    assert read(tmp_path, "num-prompts: 3\njson: true", "bench throughput").num_prompts == 3


@pytest.mark.parametrize(
    ("text", "line", "name", "value"),
    [
        ("max-num-seqs: 8", "serve --max-num-seqs 4", "max_num_seqs", 4),
        ("async-scheduling: true", "serve --no-async-scheduling", "async_scheduling", False),
        ("no-multiprocess: false", "serve", "multiprocess", True),
        ("no-multiprocess: true", "serve --multiprocess", "multiprocess", True),
        ("served-model-name: [a, b]", "serve --served-model-name c", "served_model_name", ["c"]),
        ("port: 9000", "serve --port 8000", "port", 8000),  # the default, and meant
        ("model: one", "serve two", "model_tag", "two"),
        ("model_tag: one", "serve", "model", "one"),
        ("stop: a", "generate -- --stop", "stop", ["a"]),
    ],
)
def test_the_command_line_wins(
    text: str, line: str, name: str, value: object, tmp_path: Path
) -> None:
    command, _, rest = line.partition(" ")
    path = tmp_path / "options.yaml"
    path.write_text(text)
    parsed = parse([command, "--config", str(path), *rest.split()])
    assert getattr(parsed, name) == value
    if name == "model_tag":
        assert "model" not in parsed


@pytest.mark.parametrize("text", ["", "\n# nothing\n", "---\n", "max-num-seqs:\n", "{}"])
def test_a_file_may_say_nothing(text: str, tmp_path: Path) -> None:
    assert "max_num_seqs" not in read(tmp_path, text)


def test_a_file_may_be_json_and_may_have_anchors(tmp_path: Path) -> None:
    assert read(tmp_path, '{"port": 9000, "max-num-seqs": 3}').max_num_seqs == 3
    parsed = read(tmp_path, "max-num-seqs: &n 3\nmax-model-len: *n\n")
    assert (parsed.max_num_seqs, parsed.max_model_len) == (3, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "port: 1\nmax-num-seq: 3",
            "line 2: unknown option '--max-num-seq'; did you mean '--max-num",
        ),
        ("frobnicate: 3", "line 1: unknown option '--frobnicate'; metronome serve --help lists"),
        (
            "enable_expert_parallel: true",
            "line 1: there is no option '--enable-expert-parallel' here: a",
        ),
        ("config: other.yaml", "line 1: --config belongs on the command line: leave it out"),
        ("max-num-seqs: many", "line 1: --max-num-seqs is 'many', must be a whole number"),
        ("max-num-seqs: true", "line 1: max-num-seqs is true, a boolean, must be a text"),
        ("max-num-seqs: [1, 2]", "line 1: max-num-seqs is [1, 2], must be one value"),
        ("async-scheduling: 1", "line 1: async-scheduling is 1, must be true or false"),
        ("policy-options: [1]", "line 1: policy-options is [1], must be a JSON object"),
        ("served-model-name: [a, {b: c}]", "line 1: served-model-name is {'b': 'c'}, must be one"),
        (
            "max-num-seqs: 1\nmax_num_seqs: 2",
            "line 2: max_num_seqs is given twice, as max-num-seqs",
        ),
        ("no-multiprocess: true\nmultiprocess: true", "is given twice, as no-multiprocess"),
        ("- a\n- b", "has no keys: write option names and values"),
        ("a: [1", "is not YAML: line 1: "),
        ("port: *nowhere", "is not YAML: line 1: found undefined alias"),
        (
            "port: !!python/object:os.system x",
            "is not YAML: line 1: could not determine a construc",
        ),
    ],
)
def test_a_mistake_names_file_line_and_key_in_one_line(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leave:
        read(tmp_path, text)
    (said,) = capsys.readouterr().err.splitlines()
    assert leave.value.code == 2
    assert said.startswith(f"metronome serve: error: {tmp_path / 'options.yaml'}")
    assert message in said


def test_a_file_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "nowhere.yaml", tmp_path, tmp_path / "binary"):
        with pytest.raises(SystemExit):
            parse(["serve", "--config", str(path)])
        (said,) = capsys.readouterr().err.splitlines()
        assert f"--config is {str(path)!r}, which cannot be read: " in said
