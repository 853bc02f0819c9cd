"""Options of other programs that their users look for are there, or refused by name with the way
out; the page about them says the same."""

from __future__ import annotations

import re

import pytest
from support.simulate import make_request, make_run
from support.source_tree import ROOT

from engine import EngineArgs
from engine.cli.main import make_parser
from engine.config.foreign import FOREIGN
from engine.config.sched import SchedulerConfig
from engine.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("max_num_queued_reqs", "max_waiting_requests"),
        ("log_stats", "disable_log_stats"),
        ("max_concurrent_requests", "set max_num_seqs"),
        ("num_gpu_blocks_override", "num_kv_blocks"),
        ("scheduler_reserve_full_isl", "watermark"),
        ("num_speculative_tokens", 'key of speculative_config.*"num_speculative_tokens": 4'),
        ("speculative_model", "key 'model' of speculative_config.*draft_model"),
        ("ngram_prompt_lookup_max", "key 'prompt_lookup_max' of speculative_config.*ngram"),
        ("prompt_lookup_max", 'key of speculative_config.*"prompt_lookup_max": 4'),
        ("speculative_disable_by_batch_size", "leave it out"),
        ("task", "set runner and convert"),
        ("override_pooler_config", "set pooler_config"),
        ("ctx_size", "set max_model_len"),
        ("n_gpu_layers", "no layer is on a CPU next to a GPU"),
        ("tensor_split", "set tensor_parallel_size.*pipeline_layer_split"),
        ("tp", r"set tensor_parallel_size \(-tp\)"),
        ("data_parallel_start_rank", "distributed_executor_backend='ray'"),
        ("speculative_draft_tensor_parallel_size", "the whole draft model; leave it out"),
    ],
)
def test_an_option_that_is_named_otherwise_here_is_refused_with_its_name(name, way_out):
    with pytest.raises(ConfigError, match=rf"no option {name!r}.*{way_out}"):
        EngineArgs(model="m", **{name: 1})


def test_no_foreign_name_is_one_of_ours():
    assert not FOREIGN.keys() & EngineArgs.__dataclass_fields__.keys()


PAGE = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (`.*?) \| (.*?) \|$", PAGE, re.MULTILINE)


def options_in(text):
    """Names of options, with underscores."""
    return [name.strip("-").replace("-", "_") for name in re.findall(r"`(--?[a-z][\w-]*)", text)]


@pytest.mark.parametrize(("theirs", "ours"), ROWS)
def test_the_page_and_the_refusals_say_the_same(theirs, ours):
    known = make_parser(["serve"]).parse_args(["serve"]).command_parser.options
    assert all(f"--{name.replace('_', '-')}" in known for name in options_in(ours))
    for name in options_in(theirs):
        assert name in FOREIGN, f"--{name} is ours, or its refusal is missing"
        if options_in(ours):
            assert any(option in FOREIGN[name] for option in options_in(ours)), name


def test_the_page_has_a_name_for_each_reason():
    shown = {name for theirs, _ in ROWS for name in options_in(theirs)}
    reasons = {FOREIGN[name] for name in shown}
    assert not (missing := {name for name, why in FOREIGN.items() if why not in reasons}), missing


@pytest.mark.parametrize(("watermark", "num_running"), [(None, 5), (0.0, 5), (0.1, 4), (0.5, 2)])
def test_a_watermark_leaves_its_share_of_the_blocks_free(watermark, num_running):
    """Each takes 4 of 20 blocks."""
    run = make_run(num_blocks=21, caching=False, watermark=watermark)
    for index in range(6):
        run.add(make_request(str(index), [index] * 60, 4))
    run.step()
    assert len(run.scheduler.roster.running) == num_running
    run.drain()


def test_a_watermark_holds_nobody_back_who_is_alone():
    run = make_run(num_blocks=5, watermark=0.9)
    run.add(make_request("0", [1] * 60, 4))
    run.drain()
    assert run.finished["0"] == ("length", None)


@pytest.mark.parametrize("watermark", [-0.1, 1.0, "much"])
def test_a_watermark_is_a_share(watermark):
    with pytest.raises(ConfigError, match="watermark is"):
        SchedulerConfig(watermark=watermark)


def test_with_a_watermark_nothing_is_judged_by_measured_times():
    run = make_run(num_blocks=21, caching=False, watermark=0.0)
    run.scheduler.view.headroom.is_kept = True
    for index in range(6):
        run.add(make_request(str(index), [index] * 60, 4))
    run.step()
    assert len(run.scheduler.roster.running) == 5 and not run.scheduler.take_judgements()
    run.drain()
