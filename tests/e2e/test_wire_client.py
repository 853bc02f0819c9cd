"""A client in another language, written from the document of the wire, streams from a core."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.live_core import MAX_MODEL_LEN, VOCAB_SIZE, start
from support.streams import Streams

from engine.rpc.zmq_client import EngineCoreClient
from policylab.verify.fake import token_after

CLIENT = Path(__file__).resolve().parents[2] / "examples" / "wire-client.mjs"
NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="Node.js is not installed")


@pytest.fixture
def owner() -> Iterator[EngineCoreClient]:
    client = start()
    yield client
    client.shutdown()


def run(*args: str) -> subprocess.CompletedProcess[str]:
    assert NODE is not None
    return subprocess.run([NODE, str(CLIENT), *args], capture_output=True, text=True, check=False)


def expected(prompt: list[int], num: int) -> list[str]:
    tokens = list(prompt)
    for _ in range(num):
        tokens.append(token_after(tokens, VOCAB_SIZE))
    return [str(token) for token in tokens[len(prompt) :]]


@pytest.mark.parametrize("num_prompt", [1, 3, 300])
def test_it_streams_the_tokens_of_a_prompt(owner: EngineCoreClient, num_prompt: int) -> None:
    prompt = [7 * i % VOCAB_SIZE for i in range(1, num_prompt + 1)]
    done = run(owner.address.data, ",".join(map(str, prompt)), "40")
    assert done.returncode == 0, done.stderr
    *tokens, end = done.stdout.split("\n")[:-1]
    assert end == "finished: length"
    assert tokens == expected(prompt, 40)


def test_it_streams_beside_others(owner: EngineCoreClient, seed: int) -> None:
    assert NODE is not None
    args = [NODE, str(CLIENT), owner.address.data, "5,6", "400"]
    with subprocess.Popen(args, stdout=subprocess.PIPE, text=True) as client:
        streams = Streams(owner, 8, random.Random(seed))
        while client.poll() is None:
            streams.turn()
        streams.finish()
        assert client.stdout is not None
        assert client.stdout.read().split("\n")[:-2] == expected([5, 6], 400)


def test_it_says_what_was_refused(owner: EngineCoreClient) -> None:
    done = run(owner.address.data, str(VOCAB_SIZE), "4")
    assert done.returncode == 1
    assert f"RequestError: prompt_token_ids has token id {VOCAB_SIZE}" in done.stderr
    too_long = run(owner.address.data, ",".join("1" * MAX_MODEL_LEN), "4")
    assert too_long.returncode == 1 and "RequestError" in too_long.stderr


def test_it_says_that_no_core_is_there(tmp_path: Path) -> None:
    (tmp_path / "core-token").write_bytes(b"x" * 16)
    done = run(f"ipc://{tmp_path}/core")
    assert done.returncode == 1 and "ENOENT" in done.stderr
