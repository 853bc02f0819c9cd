"""Why prefix hits ended, with a real model that has windows: in outputs, and in all that a server
shows."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from e2e.references import engine_for
from e2e.tiny_models import TinyModels
from support.patience import WAIT_SECONDS
from support.served import Served, forked

from engine import SamplingParams
from engine.cli.main import main
from engine.llm_engine import LLMEngine

PROMPT, OTHER = list(range(10, 70)), list(range(100, 144))
SHORTER = [*PROMPT[:9], 5, 5, 5, 5]
OPTIONS = {"block_size": 4, "max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 128}
NUM_BLOCKS = 75  # of two prompts the second evicts blocks that left the window of the first


def ends(engine: LLMEngine, tokens: list[int], n: int = 1, **fields: Any) -> tuple[int, str, bool]:
    """Cached tokens of a prompt, why there were no more, and whether the others were evicted."""
    params = SamplingParams(max_tokens=4, temperature=1.0, ignore_eos=True, n=n)
    engine.add_request(str(time.monotonic()), {"prompt_token_ids": tokens, **fields}, params)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    metrics = outputs[-1].metrics
    assert metrics is not None and all(
        each.metrics.prefix_end == metrics.prefix_end for each in outputs
    )
    return outputs[-1].num_cached_tokens, metrics.prefix_end, metrics.prefix_evicted is not None


def test_each_reason_with_a_real_model(tiny_models: TinyModels) -> None:
    path = str(tiny_models.path("gemma3"))
    with engine_for(path, dtype="float32", num_kv_blocks=NUM_BLOCKS, **OPTIONS) as engine:
        kinds = [(group.attention, group.window) for group in engine.stats().kv_groups]
        assert kinds == [("full", 0), ("sliding", 7), ("sliding", 7)]
        assert ends(engine, PROMPT) == (0, "never seen", False)
        assert ends(engine, PROMPT) == (56, "", False)
        assert ends(engine, OTHER) == (0, "never seen", False)
        assert ends(engine, SHORTER) == (0, "window gone", True)
        assert ends(engine, OTHER[:3]) == (0, "", False)
        assert ends(engine, OTHER, cache_salt="s") == (0, "another cache salt", False)
        assert engine.reset_prefix_cache()
        assert ends(engine, PROMPT, n=2) == (0, "evicted", True)
        missed = engine.stats().prefix_missed
        assert set(missed) == {"never seen", "window gone", "another cache salt", "evicted"}
        assert [group.num_blocks for group in engine.stats().kv_groups] == [0, 0, 0]


def ask(server: Served, name: str, tokens: list[int], **fields: Any) -> dict[str, Any]:
    """The usage that a client reads."""
    body = {"model": "tiny", "prompt": tokens, "max_tokens": 4, "ignore_eos": True, **fields}
    answer = server.ask("/v1/completions", body, X_Request_Id=name)
    assert answer.status == 200, answer.body
    return dict(answer.json["usage"])


def lines_of(log: Path, num: int) -> dict[str, dict[str, Any]]:
    """The lines of this many requests by id, once they are written."""
    end = time.monotonic() + WAIT_SECONDS
    while True:
        text = [line for line in log.read_text().splitlines() if line.startswith("{")]
        if len(text) >= num:
            return {line["id"]: line for line in map(json.loads, text)}
        assert time.monotonic() < end, text
        time.sleep(0.05)


def test_what_a_server_shows(
    tiny_models: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    options += ["--model", str(tiny_models.path("gemma3")), "--served-model-name", "tiny"]
    options += ["--num-kv-blocks", str(NUM_BLOCKS), "--request-log", "json", "--num-threads", "1"]
    log = tmp_path / "log"
    with forked(*options, "--skip-tokenizer-init", log=log) as server:
        for name, tokens in (("a", PROMPT), ("b", OTHER), ("c", SHORTER)):
            ask(server, name, tokens)
        usage = ask(server, "d", OTHER, cache_salt="secret")
        assert "salt" not in json.dumps(usage), "clients would learn of each other's prompts"
        page = server.ask("/metrics").body.decode()
        assert main(["top", "--url", server.url, "--once", "--json", "--interval", "0.2"]) == 0
        shown = json.loads(capsys.readouterr().out)
        lines = lines_of(log, 4)
    reasons = ["never seen", "never seen", "window gone", "another cache salt"]
    assert [lines[name]["prefix_end"] for name in "abcd"] == reasons
    assert [name for name in "abcd" if "prefix_evicted_seconds" in lines[name]] == ["c"]
    assert lines["c"]["prefix_evicted_seconds"] >= 0
    assert 'metronome_kv_blocks_in_use{attention="full",group="0"' in page
    assert 'metronome_kv_blocks_in_use{attention="sliding",group="2"' in page
    missed = {"never seen": 56 + 40, "window gone": 12, "another cache salt": 40}
    assert shown["total"]["prefix_missed"] == missed
    assert [group["window"] for group in shown["kv_groups"]] == [0, 7, 7]
    for text in ("KV groups with full attention: 1", "sliding windows of 7 tokens: 2"):
        assert text in log.read_text()
