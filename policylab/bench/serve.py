"""``metronome bench serve``: measures a server of OpenAI's API by the load it gets."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from engine.cli.interrupts import INTERRUPTED
from engine.config.env import client_api_key
from engine.errors import ConfigError
from policylab.bench import report
from policylab.bench.client import MOST_CONNECTIONS, Load
from policylab.bench.datasets import (
    Dataset,
    PrefixRepetition,
    Random,
    Requests,
    arrive,
    read_custom,
    read_sharegpt,
)
from policylab.bench.figures import GOODPUT_EXAMPLE, by_user, figures, read_promises
from policylab.bench.loops import VOCABULARY, Form, Played, play
from policylab.bench.picture import picture
from policylab.bench.target import Target, find_target
from policylab.bench.words import COMMON, Words
from policylab.sim.workloads import find_workload

SUMMARY = "Requests to a server of OpenAI's API: rates, latencies, promises kept, errors."
NUM_PROMPTS = 1000
STALL_SECONDS = 300.0
DATASETS = ("random", "prefix_repetition", "sharegpt", "custom")
SAMPLING: Mapping[str, type] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "frequency_penalty": float,
    "presence_penalty": float,
    "repetition_penalty": float,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_server(parser.add_argument_group("server"))
    _add_load(parser.add_argument_group("load"))
    _add_requests(parser.add_argument_group("requests"))
    _add_result(parser.add_argument_group("result"))


def _add_server(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--base-url", metavar="URL", help="in place of --host and --port")
    group.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    group.add_argument("--port", type=int, default=8000, metavar="N", help="default: %(default)s")
    group.add_argument(
        "--endpoint",
        default="/v1/completions",
        metavar="PATH",
        help="/v1/completions (the default) or /v1/chat/completions",
    )
    group.add_argument("--model", metavar="NAME", help="default: the first that the server lists")
    group.add_argument(
        "--api-key", metavar="KEY", help="default: OPENAI_API_KEY or METRONOME_API_KEY"
    )
    group.add_argument("--header", nargs="*", default=[], metavar="NAME=VALUE", help="of requests")
    group.add_argument(
        "--insecure", action="store_true", help="accept any TLS certificate of the server"
    )
    group.add_argument(
        "--ready-check-timeout-sec",
        type=float,
        default=0.0,
        metavar="S",
        help="seconds to wait until the server accepts connections; default: 0",
    )
    group.add_argument(
        "--stall-timeout",
        type=float,
        default=STALL_SECONDS,
        metavar="S",
        help="a request to which nothing arrives for this many seconds fails; default: %(default)g",
    )


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--request-rate",
        type=float,
        metavar="R",
        help="requests per second; default: all at once, or the workload's own rate",
    )
    group.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="B",
        help="shape of the Gamma distribution of gaps between requests: 1 is a Poisson process "
        "(the default), less comes in bursts, more is more even",
    )
    group.add_argument(
        "--max-concurrency",
        type=int,
        metavar="N",
        help="requests that run at a time: without --request-rate this number, where a refused "
        "one counts for as long as its Retry-After says; else at most this",
    )
    group.add_argument(
        "--num-prompts", type=int, metavar="N", help=f"requests; default: {NUM_PROMPTS}"
    )
    group.add_argument(
        "--duration",
        type=float,
        metavar="S",
        help="send requests for this many seconds, and read those that run to their end",
    )
    group.add_argument(
        "--num-warmups", type=int, default=0, metavar="N", help="requests before the measured ones"
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")


def _add_requests(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dataset-name",
        choices=DATASETS,
        default=None,
        help="default: random. custom: a file of JSON lines with prompt or messages",
    )
    group.add_argument("--dataset-path", type=Path, metavar="FILE", help="of sharegpt or custom")
    group.add_argument(
        "--workload",
        metavar="W",
        help="arrivals, lengths and users of a workload of the lab instead, as in "
        "'azure-conv(scale=0.1)', or the file of a trace; `metronome workload --list` lists them",
    )
    group.add_argument("--input-len", type=int, metavar="N", help="tokens of random prompts")
    group.add_argument("--output-len", type=int, metavar="N", help="tokens of answers")
    for dataset, prefix in ((Random(), "random"), (PrefixRepetition(), "prefix-repetition")):
        for name, default in vars(dataset).items():
            group.add_argument(
                f"--{prefix}-{name.replace('_', '-')}",
                type=type(default),
                metavar="N",
                help=f"default: {default}",
            )
    group.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="prompts are text of this many of its tokens. Without it completions get token ids, "
        "and chats text of about this many",
    )
    group.add_argument(
        "--vocab-size", type=int, default=VOCABULARY, metavar="N", help="ids of prompts are below"
    )
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="answers go on to their full length; default: where their length is made up",
    )
    group.add_argument(
        "--extra-body", metavar="JSON", help="further fields of each request; null removes one"
    )
    for name, kind in SAMPLING.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="X")


def _add_result(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--goodput",
        nargs="+",
        metavar="NAME:MS",
        help="promises to each request: ttft, tpot, itl (99 %% of the gaps) and e2el in "
        f"milliseconds, as in {GOODPUT_EXAMPLE}; default: those of the workload",
    )
    group.add_argument(
        "--metric-percentiles", default="90,99", metavar="P,P", help="default: %(default)s"
    )
    group.add_argument("--json", action="store_true", help="print the result as JSON")
    group.add_argument("--save-result", action="store_true", help="write the result as JSON")
    group.add_argument(
        "--save-detailed", action="store_true", help="with times, text and error of each request"
    )
    group.add_argument("--result-dir", type=Path, metavar="DIR", help="default: this folder")
    group.add_argument(
        "--result-filename", metavar="NAME", help="default: label, rate, model and date"
    )
    group.add_argument("--label", help="beginning of the file's name; default: openai")
    group.add_argument("--metadata", nargs="*", default=[], metavar="NAME=VALUE")
    group.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw a picture")
    group.add_argument("--disable-tqdm", action="store_true", help="show no progress")


def run(parsed: argparse.Namespace) -> int:
    """Run a load test. The exit status is 1 if no request succeeds."""
    _check(parsed)
    percentiles = _percentiles(parsed.metric_percentiles)
    promises = None if parsed.goodput is None else read_promises(parsed.goodput)
    metadata = dict(_pair(each) for each in parsed.metadata)
    url = parsed.base_url or f"http://{parsed.host}:{parsed.port}"
    key = parsed.api_key or client_api_key()
    target = find_target(url, parsed.endpoint, key, parsed.header, is_insecure=parsed.insecure)
    words = None if parsed.tokenizer is None else Words.of(parsed.tokenizer)
    if words is None and target.is_chat:
        words = Words(COMMON)
    requests, is_made_up = _requests(parsed, words or Words(COMMON))
    extra = _extra(parsed)
    target.wait(parsed.ready_check_timeout_sec)
    form = Form(
        model=parsed.model or target.first_model(),
        is_chat=target.is_chat,
        words=words,
        vocabulary=parsed.vocab_size,
        ignore_eos=is_made_up if parsed.ignore_eos is None else parsed.ignore_eos,
        extra=extra,
    )
    if parsed.num_warmups:
        _warm_up(parsed, target, form)
    is_closed = parsed.max_concurrency is not None
    progress = report.Progress(
        _number(parsed),
        is_shown=not parsed.disable_tqdm,
    )
    with _load(parsed, target) as load:
        played = play(
            load,
            requests,
            form,
            seconds=parsed.duration or inf,
            keeps=parsed.save_detailed,
            watch=progress,
        )
    progress.end()
    found = _head(parsed, form, target) | metadata
    found |= {"by_user": by_user(played.rows, percentiles, is_closed=is_closed)}
    found |= figures(played, percentiles=percentiles, promises=promises, is_closed=is_closed)
    _tell(parsed, found, percentiles, played)
    if played.is_interrupted:
        return INTERRUPTED
    return 0 if found["completed"] else 1


def _tell(
    parsed: argparse.Namespace, found: dict[str, Any], percentiles: list[float], played: Played
) -> None:
    """Print, save and draw the result."""
    if parsed.json:
        print(json.dumps(found))
    else:
        report.show(found, percentiles)
    if parsed.save_result or parsed.save_detailed:
        more = report.details(played.rows, played.start) if parsed.save_detailed else {}
        path = _result_path(parsed, found)
        report.keep(path, found | more)
    if parsed.plot is not None:
        title = f"{found['model_id']}, {found['date']}"
        is_closed = parsed.max_concurrency is not None
        report.write(parsed.plot, picture(played, is_closed=is_closed, title=title))


def _load(parsed: argparse.Namespace, target: Target) -> Load:
    load = Load(
        target.host,
        target.port,
        endpoint=target.endpoint,
        most_connections=parsed.max_concurrency or MOST_CONNECTIONS,
        stall_seconds=parsed.stall_timeout,
    )
    has_arrivals = parsed.request_rate is not None or parsed.workload is not None
    load.rests = parsed.max_concurrency is not None and not has_arrivals
    return load


def _warm_up(parsed: argparse.Namespace, target: Target, form: Form) -> None:
    """Send requests whose prompts differ from those that are measured. Their errors are ignored:
    those of the measured requests are reported."""
    dataset = Random(input_len=parsed.input_len or 32, output_len=parsed.output_len or 32)
    requests = arrive(dataset, number=parsed.num_warmups, seed=parsed.seed + 1_000_003)
    with _load(parsed, target) as load:
        if play(load, requests, form).is_interrupted:
            raise KeyboardInterrupt


def _requests(parsed: argparse.Namespace, words: Words) -> tuple[Requests, bool]:
    """The requests of the command line, and whether the lengths of answers are made up."""
    if parsed.workload is not None:
        given = {} if parsed.num_prompts is None else {"num_requests": parsed.num_prompts}
        workload = find_workload(parsed.workload, **given)
        if parsed.request_rate is not None and workload.natural_rate is None:
            raise ConfigError(
                f"--request-rate is {parsed.request_rate:g}, but the workload {workload.kind} is a "
                "closed loop, which has no rate; leave the option out"
            )
        return Requests(workload.source(parsed.seed, parsed.request_rate)), True
    dataset = _dataset(parsed, words)
    requests = arrive(
        dataset,
        number=_number(parsed),
        rate=inf if parsed.request_rate is None else parsed.request_rate,
        burstiness=parsed.burstiness,
        seed=parsed.seed,
        seconds=parsed.duration or inf,
    )
    return requests, isinstance(dataset, Random | PrefixRepetition)


def _number(parsed: argparse.Namespace) -> int | None:
    """The number of requests; ``None`` where a time or a workload limits them."""
    if parsed.num_prompts is not None or parsed.duration or parsed.workload is not None:
        return parsed.num_prompts  # type: ignore[no-any-return]
    return NUM_PROMPTS


def _dataset(parsed: argparse.Namespace, words: Words) -> Dataset:
    name = parsed.dataset_name or DATASETS[0]
    if name in ("sharegpt", "custom"):
        if parsed.dataset_path is None:
            raise ConfigError(f"--dataset-name {name} needs a file: name it with --dataset-path")
        read = read_sharegpt if name == "sharegpt" else read_custom
        return read(parsed.dataset_path, words, parsed.output_len)
    if parsed.dataset_path is not None:
        raise ConfigError(
            f"--dataset-path {str(parsed.dataset_path)!r} has no use with made-up prompts; add "
            "--dataset-name sharegpt or custom"
        )
    if name == "random":
        given = {"input_len": parsed.input_len, "output_len": parsed.output_len}
        return _with_given(Random(), "random", parsed, given)
    given = {"output_len": parsed.output_len}
    return _with_given(PrefixRepetition(), "prefix_repetition", parsed, given)


def _with_given(
    dataset: Any, prefix: str, parsed: argparse.Namespace, general: dict[str, int | None]
) -> Dataset:
    """The dataset with the values of the command line; those of ``general`` count most."""
    own = {name: getattr(parsed, f"{prefix}_{name}") for name in vars(dataset)}
    given = own | {name: value for name, value in general.items() if value is not None}
    made: Dataset = replace(
        dataset, **{name: value for name, value in given.items() if value is not None}
    )
    return made


def _check(parsed: argparse.Namespace) -> None:
    """Raise ``ConfigError`` for values without sense."""
    limits: dict[str, tuple[Callable[[Any], bool], str]] = {
        "request_rate": (lambda value: value > 0, "above 0; leave it out to send all at once"),
        "burstiness": (lambda value: value >= 1e-4, "0.0001 or more; 1 is a Poisson process"),
        "max_concurrency": (
            lambda value: 1 <= value <= MOST_CONNECTIONS,
            f"1 to {MOST_CONNECTIONS}, which the limit of open files allows (ulimit -n)",
        ),
        "num_prompts": (lambda value: value >= 1, "1 or more"),
        "duration": (lambda value: 0 < value < inf, "above 0 seconds"),
        "num_warmups": (lambda value: value >= 0, "0 or more"),
        "seed": (lambda value: value >= 0, "0 or more"),
        "stall_timeout": (lambda value: value > 0, "above 0 seconds"),
        "vocab_size": (lambda value: value > 100, "above 100"),
        "port": (lambda value: 0 < value < 65536, "1 to 65535"),
    }
    for name, (is_right, text) in limits.items():
        value = getattr(parsed, name)
        if value is not None and not is_right(value):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} is {value:g}, must be {text}")
    if parsed.workload is not None:
        _check_workload(parsed)
    elif parsed.duration and parsed.request_rate is None and parsed.max_concurrency is None:
        raise ConfigError(
            f"--duration is {parsed.duration:g} without a limit of requests: give --request-rate "
            "for arrivals or --max-concurrency for a closed loop"
        )


def _check_workload(parsed: argparse.Namespace) -> None:
    for name in ("dataset_name", "dataset_path", "input_len", "output_len"):
        if getattr(parsed, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{flag} is {str(getattr(parsed, name))!r}, but --workload "
                f"{parsed.workload!r} has requests of its own; leave one of them out"
            )
    if parsed.burstiness != 1.0:
        raise ConfigError(
            f"--burstiness is {parsed.burstiness:g}, but --workload has arrivals of its own, as in "
            "--workload \"log-uniform(arrivals='gamma(cv=2)')\"; leave the option out"
        )


def _percentiles(text: str) -> list[float]:
    try:
        found = [float(each) for each in text.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 < each < 100 for each in found):
        raise ConfigError(
            f"--metric-percentiles is {text!r}, must be numbers above 0 and below 100, as in 90,99"
        )
    return found


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--metadata has {text!r}, must be NAME=VALUE")
    return name.strip(), value.strip()


def _extra(parsed: argparse.Namespace) -> dict[str, Any]:
    """Further fields of requests: sampling options, and those of --extra-body."""
    given = {name: getattr(parsed, name) for name in SAMPLING}
    found: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if parsed.extra_body is None:
        return found
    try:
        more = json.loads(parsed.extra_body)
    except ValueError as error:
        more = error
    if not isinstance(more, dict):
        raise ConfigError(
            f"--extra-body is {parsed.extra_body!r}, must be a JSON object, as in "
            "'{\"temperature\": 0}'"
        )
    return found | more


def _head(parsed: argparse.Namespace, form: Form, target: Target) -> dict[str, Any]:
    """What was run, with vLLM's names."""
    rate = parsed.request_rate
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": "openai-chat" if target.is_chat else "openai",
        "endpoint_type": "openai-chat" if target.is_chat else "openai",
        "label": parsed.label,
        "model_id": form.model,
        "tokenizer_id": None if parsed.tokenizer is None else str(parsed.tokenizer),
        "dataset": parsed.workload or parsed.dataset_name or DATASETS[0],
        "num_prompts": _number(parsed),
        "seed": parsed.seed,
        "request_rate": ("inf" if parsed.workload is None else None) if rate is None else rate,
        "burstiness": parsed.burstiness,
        "max_concurrency": parsed.max_concurrency,
    }


def _result_path(parsed: argparse.Namespace, found: Mapping[str, Any]) -> Path:
    model = str(found["model_id"]).rpartition("/")[2]
    limit = f"-concurrency{parsed.max_concurrency}" if parsed.max_concurrency else ""
    label, rate = parsed.label or found["backend"], found["request_rate"]
    name = parsed.result_filename or f"{label}-{rate}qps{limit}-{model}-{found['date']}.json"
    return Path(parsed.result_dir or ".") / name
