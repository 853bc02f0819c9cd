"""Names that were probably meant are suggested, and no others."""

from __future__ import annotations

import pytest

from engine.config.near import did_you_mean, near_names

FIELDS = (
    "model", "max_tokens", "n", "stop", "stream", "seed", "temperature", "top_p", "top_k", "min_p",
    "presence_penalty", "frequency_penalty", "logit_bias", "user", "response_format", "min_tokens",
    "stop_token_ids", "tools", "tool_choice", "messages", "logprobs", "top_logprobs", "timeout",
    "queue_timeout",
)  # fmt: skip
OPTIONS = (
    "data_parallel_size", "num_threads", "max_num_seqs", "max_model_len", "block_size",
    "gpu_memory_utilization", "max_num_batched_tokens", "scheduling_policy",
)  # fmt: skip


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("temprature", "temperature"),
        ("Temperature", "temperature"),
        ("max_token", "max_tokens"),
        ("maxTokens", "max_tokens"),
        ("top-k", "top_k"),
        ("strem", "stream"),
        ("presense_penalty", "presence_penalty"),
        ("frequency_penality", "frequency_penalty"),
        ("time_out", "timeout"),
    ],
)
def test_slips_are_seen_through(typed: str, meant: str) -> None:
    assert near_names(typed, FIELDS) == [meant]


@pytest.mark.parametrize(
    "typed",
    ["", "_", "x", "k", "id", "top_q", "min_k", "user_id", "num_beams", "best_of", "web_search",
     "functions", "function_call", "audio", "modalities", "stop_sequences", "tool", "m", "max"],
)  # fmt: skip
def test_other_names_are_not_near(typed: str) -> None:
    wrong = near_names(typed, FIELDS)
    assert wrong == (["tools"] if typed == "tool" else []), wrong


@pytest.mark.parametrize(
    "typed", ["tensor_parallel_size", "pipeline-parallel-size", "max_seq_len", "port", "policy"]
)
def test_a_name_of_other_words_is_not_near(typed: str) -> None:
    assert near_names(typed, OPTIONS) == []


def test_the_hint_ends_a_message() -> None:
    assert did_you_mean("temprature", FIELDS) == "; did you mean 'temperature'?"
    assert did_you_mean("num_beams", FIELDS) == ""
