"""`metronome bench serve`: arrivals, prompts, what is read, figures and mistakes."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.assets import BOX_MODEL
from engine.cli.main import main
from policylab.bench.answers import Answer, UnreadableAnswer, read_chunk
from policylab.bench.client import Row
from policylab.bench.datasets import PrefixRepetition, Random, arrive, due_times, read_sharegpt
from policylab.bench.figures import (
    by_user,
    figures,
    longest_silence,
    read_promises,
    summary,
    values_of,
)
from policylab.bench.loops import Form, Played
from policylab.bench.picture import picture
from policylab.bench.words import COMMON, Words
from policylab.sim.job import Job, Span
from policylab.sim.workloads import find_workload

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def gaps_of(number: int | None, rate: float, burstiness: float, seed: int) -> np.ndarray:
    times = due_times(number, rate, burstiness, seed)
    return np.diff([0.0, *(next(times) for _ in range(number or 20_000))])


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0, inf])
def test_gaps_have_the_rate_and_the_burstiness(burstiness: float, seed: int) -> None:
    gaps = gaps_of(None, 50.0, burstiness, seed)
    cv = burstiness**-0.5 if burstiness < inf else 0.0
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, abs=0.1)


def test_a_run_of_a_given_number_ends_when_it_should(seed: int) -> None:
    assert gaps_of(40, 8.0, 0.5, seed).sum() == pytest.approx(5.0)
    assert gaps_of(40, inf, 1.0, seed).sum() == 0.0


def test_prompts_have_their_lengths_and_share_what_they_should(seed: int) -> None:
    jobs = list(arrive(Random(input_len=100, range_ratio=0.5), number=200, seed=seed).source)
    lengths = [job.num_prompt for job in jobs]
    assert min(lengths) >= 50 and max(lengths) <= 150 and len(set(lengths)) > 30
    assert len({tuple(job.tokens()[:8]) for job in jobs}) == len(jobs)
    other = arrive(Random(input_len=100), number=1, seed=seed + 1).source.take()
    assert other.tokens()[:8] not in [job.tokens()[:8] for job in jobs]
    dataset = PrefixRepetition(prefix_len=32, suffix_len=8, num_prefixes=5)
    rows = [job.tokens() for job in arrive(dataset, number=100, seed=seed).source]
    assert len({tuple(row[:32]) for row in rows}) == 5
    assert len({tuple(row[32:]) for row in rows}) == 100


def test_text_of_a_tokenizer_has_the_number_of_tokens(seed: int) -> None:
    words = Words.of(BOX_MODEL)
    dice = random.Random(seed)
    for length in (1, 7, 100):
        text = words.text([dice.randrange(50_000) for _ in range(length)])
        assert words.count(text) == length


def test_conversations_without_a_question_or_an_answer_are_left_out(tmp_path: Path) -> None:
    file, words = tmp_path / "talks.json", Words.of(BOX_MODEL)
    talks = [("hello there", ""), (" ", "fine"), ("how are you", "fine thanks"), ("alone",)]
    each = [{"conversations": [{"value": text} for text in talk]} for talk in talks]
    file.write_text(json.dumps(each))
    counts = words.count("how are you"), words.count("fine thanks")
    assert read_sharegpt(file, words, None).rows == (("how are you", *counts),)


def test_bodies_say_what_the_options_say() -> None:
    job = Job(request_id="a", arrival=0.0, prompt=(Span("t", 3),), num_output=5, user="ann")
    body = json.loads(Form(model="m", extra={"temperature": 0, "user": None}).body(job))
    assert len(body["prompt"]) == 3 and body["max_tokens"] == 5 and body["ignore_eos"]
    assert body["temperature"] == 0 and "user" not in body
    chat = Form(model="m", is_chat=True, words=Words(COMMON), ignore_eos=False)
    body = json.loads(chat.body(job))
    assert len(body["messages"][0]["content"].split()) == 3 and "ignore_eos" not in body
    assert json.loads(chat.body(job, "real"))["messages"][0]["content"] == "real"


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def test_answers_are_read_in_parts_of_any_size(seed: int) -> None:
    dice = random.Random(seed)
    events = [b'{"choices":[{"text":"%d"}]}' % number for number in range(50)]
    stream = b": ping\n\n" + b"".join(b"data: %s\n\n" % event for event in [*events, b"[DONE]"])
    body, at = b"", 0
    while at < len(stream):
        size = dice.randint(1, 60)
        body, at = body + chunked(stream[at : at + size]), at + size
    whole, at = b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + body + b"0\r\nx-time: 1\r\n\r\n", 0
    answer, found = Answer(), []
    while at < len(whole):
        size = dice.choice((1, 2, 3, 40, 400))
        assert not answer.is_complete
        found += answer.feed(whole[at : at + size])
        at += size
    assert found == [*events, b"[DONE]"] and answer.is_complete and not answer.closes
    assert [read_chunk(event).added for event in events[:3]] == ["0", "1", "2"]


def test_answers_with_a_length_or_without_are_read_too() -> None:
    refused = Answer()
    refused.feed(b"HTTP/1.1 429 Too Many\r\nContent-Length: 4\r\nConnection: close\r\n\r\nab")
    assert refused.status == 429 and not refused.is_complete
    refused.feed(b"cd")
    assert refused.is_complete and refused.closes and refused.body.endswith(b"abcd")
    plain = Answer()
    assert plain.feed(HEAD.replace(b"Transfer-Encoding: chunked\r\n", b"") + b"data: x\n") == [b"x"]
    plain.end()
    assert plain.is_complete and plain.closes
    with pytest.raises(UnreadableAnswer, match="SSH"):
        Answer().feed(b"SSH-2.0\r\n\r\n")
    with pytest.raises(UnreadableAnswer, match="zz"):
        Answer().feed(HEAD + b"zz\r\n")
    with pytest.raises(UnreadableAnswer, match="-5"):
        Answer().feed(HEAD + b"-5\r\nabcdefgh")


def test_the_end_of_a_stream_is_known_whenever_it_came() -> None:
    """Servers send the last event, and then the end of the answer."""
    last = chunked(b"data: [DONE]\n\n")
    for parts in ([last + b"0\r\n\r\n"], [last, b"0\r\n\r\n"], [b"0\r\n\r\n"]):
        answer = Answer()
        for part in [HEAD, *parts]:
            answer.feed(part)
        assert answer.is_complete and answer.is_done == (last in b"".join(parts))
    for text, is_done in ((b"data: [DONE]", True), (b"data: [DO", False)):
        answer = Answer()
        answer.feed(HEAD.replace(b"Transfer-Encoding: chunked\r\n", b"") + text)
        answer.end()
        assert answer.is_complete and answer.is_done == is_done


def test_a_role_is_no_token_and_thoughts_are() -> None:
    def added(delta: dict[str, Any]) -> str | None:
        return read_chunk(json.dumps({"choices": [{"delta": delta}]})).added

    assert added({"role": "assistant", "content": ""}) is None
    assert added({"content": "a"}) == added({"reasoning_content": "a"}) == "a"
    assert added({"tool_calls": [{}]}) == ""


def made_rows(seed: int, number: int = 200) -> list[Row]:
    dice, rows = random.Random(seed), []
    for place in range(number):
        job = Job(request_id=f"{place}", arrival=place / 10, prompt=(Span("t", 4),), num_output=9)
        row = Row(10.0 + place / 10, b"", about=job, how="done", status=200)
        row.sent = row.due + dice.random() / 100
        at = row.sent + dice.expovariate(5)
        for _ in range(dice.randint(1, 20)):
            row.times.append(at)
            at += dice.expovariate(20)
        row.num_output, row.ended = len(row.times), row.times[-1] + 0.01
        rows.append(row)
    return rows


def test_figures_are_those_of_a_straightforward_reference(seed: int) -> None:
    rows = made_rows(seed)
    rows[3].error, rows[4].how, rows[5].how = "HTTP 429", "left", "cut"
    rows[5].error = "the connection was closed"
    limits = {"ttft": 0.3, "tpot": 0.06, "e2el": 0.8}
    promises = read_promises([f"{name}:{1e3 * most}" for name, most in limits.items()])
    played = Played(rows, 10.0, max(row.ended for row in rows), cpu_seconds=0.5)
    found = figures(played, percentiles=[99], promises=promises, is_closed=True)
    whole = [row for place, row in enumerate(rows) if place not in (3, 4, 5)]
    seconds = played.end - played.start
    ttfts = [row.times[0] - row.sent for row in whole]
    e2els = [row.times[-1] - row.sent for row in whole]
    tpots = [
        (row.times[-1] - row.times[0]) / (len(row.times) - 1) if len(row.times) > 1 else 0.0
        for row in whole
    ]
    kept = sum(
        a <= 0.3 and b <= 0.06 and c <= 0.8 for a, b, c in zip(ttfts, tpots, e2els, strict=True)
    )
    assert found["request_goodput"] == pytest.approx(kept / seconds)
    assert found["promised"] == 199 and found["promises_kept"] == kept
    assert (found["completed"], found["failed"], found["unfinished"]) == (197, 2, 1)
    assert found["errors_by_kind"] == {"HTTP 429": 1, "the connection was closed": 1}
    assert found["p99_ttft_ms"] == pytest.approx(1e3 * np.percentile(ttfts, 99))
    assert found["mean_e2el_ms"] == pytest.approx(1e3 * np.mean(e2els))
    longer = [tpot for tpot, row in zip(tpots, whole, strict=True) if len(row.times) > 1]
    assert found["median_tpot_ms"] == pytest.approx(1e3 * np.median(longer))
    gaps = [b - a for row in whole for a, b in pairwise(row.times)]
    assert found["p99_itl_ms"] == pytest.approx(1e3 * np.percentile(gaps, 99))
    tokens = sum(len(row.times) for row in whole)
    assert found["output_throughput"] == pytest.approx(tokens / seconds)
    assert found["client_cpu_us_per_token"] == pytest.approx(5e5 / tokens)
    assert picture(played, is_closed=True, title="<m>").startswith("<svg")


def test_users_have_figures_of_their_own(seed: int) -> None:
    rows = made_rows(seed, 40)
    assert by_user(rows) == {}
    for place, row in enumerate(rows):
        row.about = replace(row.about, user="ann" if place % 4 else "bob")
    rows[0].error = "HTTP 503"
    found = by_user(rows, [90], is_closed=True)
    assert list(found) == ["ann", "bob"]
    assert (found["bob"]["completed"], found["bob"]["failed"]) == (9, 1)
    ttfts = [row.times[0] - row.sent for row in rows[4::4]]
    assert found["bob"]["p90_ttft_ms"] == pytest.approx(1e3 * np.percentile(ttfts, 90))


def test_intervals_hold_the_truth_about_as_often_as_they_promise(seed: int) -> None:
    rng = np.random.default_rng(seed)
    hits = {"mean": 0, "median": 0, "p90": 0}
    truth = {"mean": 1.0, "median": np.log(2), "p90": np.log(10)}
    for number in range(120):
        rows = [Row(0.0, b"", times=[value], num_output=1) for value in rng.exponential(size=150)]
        values = values_of(rows, [0.0] * len(rows))["ttft"]
        for name, (_, low, high) in summary(values, len(rows), [90], number).items():
            hits[name] += low <= truth[name] <= high
    assert all(100 <= count <= 120 for count in hits.values()), hits


def test_a_silence_counts_only_while_requests_run() -> None:
    def row(sent: float, *times: float) -> Row:
        return Row(sent, b"", sent=sent, times=list(times), ended=times[-1])

    assert longest_silence([row(0.0, 1.0, 2.0), row(10.0, 10.5, 13.0)]) == 2.5
    assert longest_silence([row(0.0, 1.0, 9.0), row(2.0, 3.0, 5.0)]) == 4.0
    assert longest_silence([]) == 0.0


def test_options_in_options_need_no_quotes() -> None:
    bare = find_workload("two-users(num_requests=3,lengths=fixed(prompt=8,output=2))")
    quoted = find_workload("two-users(num_requests=3,lengths='fixed(prompt=8,output=2)')")
    assert bare == quoted and bare.max_prompt == 8


def test_files_of_the_lab_and_of_traces_are_workloads(tmp_path: Path) -> None:
    azure = tmp_path / "azure.csv"
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.1,374,44\n")
    assert next(iter(find_workload(str(azure)).source(0))).num_output == 44
    made = tmp_path / "made.jsonl"
    assert main(["workload", "log-uniform(num_requests=3)", "--out", str(made)]) == 0
    assert len(list(find_workload(str(made)).source(0))) == 3
    assert len(list(find_workload("azure-conv", num_requests=7).source(0))) == 7


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--request-rate 0", "--request-rate is 0, must be above 0; leave it out"),
        ("--burstiness 0", "--burstiness is 0, must be 0.0001 or more; 1 is a Poisson process"),
        ("--max-concurrency 0", "--max-concurrency is 0, must be 1 to"),
        ("--duration 5", "give --request-rate for arrivals or --max-concurrency"),
        ("--goodput ttft=5", "--goodput has 'ttft=5', must be NAME:MILLISECONDS with one of: ttft"),
        ("--goodput ttft:1 ttft:2", "--goodput has 'ttft' twice"),
        ("--metric-percentiles 100", "--metric-percentiles is '100', must be numbers above 0 and"),
        ("--workload nosuch", "nosuch"),
        ("--workload azure-conv --burstiness 2", "--burstiness is 2, but --workload has arrivals"),
        ("--workload closed-loop --request-rate 2", "closed loop, which has no rate"),
        ("--workload azure-conv --input-len 9", "--input-len is '9', but --workload 'azure-conv'"),
        ("--dataset-name sharegpt", "needs a file: name it with --dataset-path"),
        ("--dataset-name custom --dataset-path /no", "--dataset-path '/no' cannot be read"),
        ("--dataset-path /no", "has no use with made-up prompts"),
        ("--random-range-ratio 1", "--random-range-ratio is 1, must be at least 0 and below 1"),
        ("--input-len 0", "must be 1 to 10000000 tokens"),
        ("--endpoint v1/responses", "--endpoint is 'v1/responses', must be a path that ends in"),
        ("--base-url ftp://x", "--base-url is 'ftp://x', must be as in http://127.0.0.1:8000"),
        ("--header a", "--header has 'a', must be NAME=VALUE"),
        ("--extra-body [1]", "--extra-body is '\\[1\\]', must be a JSON object"),
        ("--tokenizer /no", "--tokenizer is '/no', must be a tokenizer.json or a directory"),
        ("--metadata a", "--metadata has 'a', must be NAME=VALUE"),
    ],
)
def test_mistakes_name_the_value_and_the_way_out(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["bench", "serve", *line.split()])
    error = capsys.readouterr().err
    assert status in (1, 2) and error.count("\n") == 1
    assert re.search(message, error), error
