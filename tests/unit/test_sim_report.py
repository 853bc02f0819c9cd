"""A report's page says why requests waited; its plots' numbers are those of the figures."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from math import inf, isnan
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from engine.cli.main import main
from engine.errors import ConfigError
from policylab.sim.compare import Experiment, compare
from policylab.sim.estimate import weighted_quantile
from policylab.sim.figures import figures
from policylab.sim.history import History, Stay
from policylab.sim.job import Job, Span
from policylab.sim.promises import slo
from policylab.sim.records import DONE, Requests
from policylab.sim.report import (
    charts_of,
    points_from,
    read_report,
    write_plots,
    write_report,
    write_trace,
)
from policylab.sim.report.charts import Grid, Lines, Series
from policylab.sim.report.distributions import cdf
from policylab.sim.report.svg import HEIGHT, WIDTH, labels, scale, svg
from policylab.sim.run import FORMAT, Engine, Run, run
from policylab.sim.workloads import find_workload

TIGHT = Engine(num_blocks=250, max_num_seqs=16)
WORKLOAD = "log-uniform(num_requests=150,num_users=3)"
LIMITS = slo("ttft<0.2,e2e<2")
VOID = {"meta", "input", "img", "link", "br"}


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    return [run(name, WORKLOAD, TIGHT, rate=12.0, steps=True) for name in ("fcfs", "vtc")]


@pytest.fixture(scope="module")
def written(runs: list[Run], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "out.html"
    write_report(path, runs, slo=LIMITS, title="two & three")
    write_plots(path.parent / "plots", charts_of(runs, slo=LIMITS), images=False)
    return path


class Page(HTMLParser):
    """Checks that elements end where they should; keeps their names and what they refer to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: Counter[str] = Counter()
        self.refers: list[str] = []
        self.scripts: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names[tag] += 1
        self.refers += [str(v) for name, v in attrs if name in ("src", "href", "xlink:href")]
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        else:
            self.text += data


def test_the_page_says_why_a_request_waited_and_when_it_was_preempted(
    runs: list[Run], written: Path
) -> None:
    report = read_report(written)
    for shown, had in zip(report["runs"], runs, strict=True):
        requests, history = had.requests, had.history
        assert history is not None and requests.counts("num_preempted").any()
        assert shown["requests"]["id"] == requests.names["request_id"]
        for place in range(len(requests)):
            stays = [stay for stay in shown["stays"] if stay[0] == place]
            why: dict[str, float] = {}
            for stay in stays:
                for cause, seconds in stay[4].items():
                    why[cause] = why.get(cause, 0.0) + seconds
            waits = {c: w for c, of in requests.waits.items() if (w := float(of[place]))}
            assert why == pytest.approx(waits, abs=1e-5)
            preempted = [stay[1] for stay in stays if stay[3]]
            events = [time for name, time in history.events[place] if name == "preempted"]
            assert preempted == pytest.approx(events, abs=1e-6)


def test_the_page_says_who_was_computed_in_which_step(runs: list[Run], written: Path) -> None:
    shown = read_report(written)["runs"][0]
    assert runs[0].steps is not None and len(shown["steps"]) == len(runs[0].steps)
    tokens = [0] * len(shown["steps"])
    for _, first, last, count in shown["work"]:
        for step in range(first, last + 1):
            tokens[step] += count
    assert tokens == [step[3] for step in shown["steps"]]


def test_the_page_asks_nothing_of_a_network_and_is_well_formed(written: Path) -> None:
    text = written.read_text()
    page = Page(text)
    assert not page.refers and not page.names["link"] and not page.names["img"]
    assert not re.findall(r"https?:|//\w+\.|@import|url\(|fetch|XMLHttp|import\(", text)
    assert page.names["meta"] == 2 and "default-src &#x27;none&#x27;" in text
    assert page.names["script"] == 2 and page.names["svg"] == page.names["figure"] > 20
    assert "<h1>two &amp; three</h1>" in text


def test_names_cannot_become_markup(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&\"'\u2028"
    requests = Requests()
    history = History()
    for number in range(3):
        name = f"{evil}{number}"
        place = requests.add(
            Job(
                request_id=name,
                arrival=0.1 * number,
                prompt=(Span("a", 5),),
                num_output=2,
                user=name,
            )
        )
        for column, time in (("scheduled", 1.0), ("first", 2.0), ("last", 3.0)):
            requests.times(column)[place] = time + number
        requests.wait(place, {f"preempted by {evil}": 0.5})
        requests.end(place, DONE)
        history.came()
        history.stays[place].append(Stay(0.1 * number, 1.0 + number, {evil: 0.5}))
    names = ("num_scheduled_tokens", "prefix_hits", "num_preemptions", "num_steps")
    totals = dict.fromkeys(names, 1) | {"num_policy_faults": 0, "num_rescued_steps": 0}
    made = Run(
        head={"format": FORMAT, "policy": evil, "workload": evil, "rate": 1.0, "engine": {}},
        requests=requests,
        gaps=np.array([[3.0, 1.0, 1.0]]),
        steps=None,
        totals={**totals, "kv_peak": 0.5, "counters": {}},
        history=history,
    )
    path = tmp_path / "out.html"
    write_report(path, [made, made], title=evil)
    write_plots(tmp_path / "plots", charts_of([made, made]), images=False)
    page = Page(path.read_text())
    assert page.names["script"] == 2 and not page.names["img"]
    assert evil in page.text
    assert read_report(path)["runs"][0]["requests"]["id"][2] == f"{evil}2"
    for file in (tmp_path / "plots").glob("*.svg"):
        assert not [e for e in ElementTree.parse(file).iter() if e.tag.endswith("script")]


def rows_of(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


@pytest.mark.parametrize("kind", ["ttft", "tpot", "itl", "e2e"])
def test_percentiles_read_off_the_files_are_those_of_the_figures(
    kind: str, runs: list[Run], written: Path
) -> None:
    _, *rows = rows_of(written.parent / "plots" / f"cdf-{kind}.csv")
    for had in runs:
        found = figures(had, slo=LIMITS)
        mine = [(float(x), float(y)) for name, x, y in rows if name == had.policy]
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
            read = next(x for x, y in mine if y >= share * (1.0 - 1e-12))
            assert read == found.value(f"{kind}.{name}")


def test_percentiles_of_many_values_stand_among_the_few_that_are_drawn() -> None:
    rng = np.random.default_rng(5)
    values, weights = rng.exponential(size=20_000), rng.integers(1, 30, 20_000).astype(float)
    x, y = cdf(values, weights)
    assert len(x) < 600 and y[-1] == 1.0
    for share in (0.5, 0.9, 0.99, 0.999):
        read = next(a for a, b in zip(x, y, strict=True) if b >= share * (1.0 - 1e-12))
        assert read == weighted_quantile(values, weights, share).value


def test_every_plot_is_a_file_that_can_be_read(runs: list[Run], written: Path) -> None:
    charts = charts_of(runs, slo=LIMITS)
    keys = [chart.key for chart in charts]
    assert len(set(keys)) == len(keys)
    wanted = "cdf-ttft slowdown-1 bounds kv-1 tokens-2 gantt-1 preemptions-1 service-2 pressure"
    assert {*wanted.split(), "attainment-scale", "hooks", "requests-1"} <= set(keys)
    grids = {chart.key: np.ravel(chart.values) for chart in charts if isinstance(chart, Grid)}
    cells = list(zip(grids["slowdown-1"], grids["slowdown-p99-1"], strict=True))
    assert all(p99 >= 1.0 for _, p99 in cells if p99 == p99) and any(a < b for a, b in cells)
    numbers = read_report(written)["charts"]
    for chart in charts:
        tree = ElementTree.parse(written.parent / "plots" / f"{chart.key}.svg")
        assert tree.getroot().tag.endswith("svg") and chart.caption
        drawn = [e.get("d") or "" for e in tree.iter() if e.tag.endswith("path")]
        assert not any("nan" in path or "inf" in path for path in drawn)
        rows = rows_of(written.parent / "plots" / f"{chart.key}.csv")
        assert len(rows) == len(list(chart.rows())) == len(numbers[chart.key]) > 1


def test_curves_over_time_add_up(runs: list[Run]) -> None:
    """The area under a curve is what was counted elsewhere."""
    had = runs[0]
    charts = {c.key: c for c in charts_of([had], slo=LIMITS) if isinstance(c, Lines)}
    assert had.steps is not None

    def area(key: str, name: str) -> float:
        [series] = [each for each in charts[key].series if each.name == name]
        return float(np.sum(series.y) * (series.x[1] - series.x[0]))

    tokens = area("tokens-1", "prompts") + area("tokens-1", "decodes")
    assert tokens == pytest.approx(had.totals["num_scheduled_tokens"])
    outputs = had.requests.counts("num_output").sum()
    assert area("throughput-1", "output") == pytest.approx(outputs)
    waits = sum(float(column.sum()) for column in had.requests.waits.values())
    assert area("requests-1", "waiting") == pytest.approx(waits)
    seconds = had.steps[:, 1] - had.steps[:, 0]
    assert area("kv-1", "KV") == pytest.approx(float((had.steps[:, 7] * seconds).sum()))


def test_attainment_at_scale_one_is_that_of_the_figures(runs: list[Run]) -> None:
    [chart] = [c for c in charts_of(runs, slo=LIMITS) if c.key == "attainment-scale"]
    assert isinstance(chart, Lines)
    for series, had in zip(chart.series, runs, strict=True):
        at_one = series.y[list(series.x).index(1.0)]
        assert at_one == pytest.approx(figures(had, slo=LIMITS).kept.attainment)


def test_a_comparison_has_curves_over_load(tmp_path: Path) -> None:
    workload = find_workload("log-uniform(num_requests=60)")
    cells = compare(Experiment(policies=["fcfs", "lpm"], workload=workload, loads=[0.5, 0.9]))
    points = points_from(cells)
    path = tmp_path / "out.html"
    write_report(path, [], points=points)
    rows = read_report(path)["charts"]["load-ttft-p99"]
    assert rows[0][:3] == ["series", "load, over what fcfs can serve", "TTFT p99, seconds"]
    wanted = [
        (name, cell.load, cell.figures[place][0].value("ttft.p99"))
        for place, name in enumerate(("fcfs", "lpm"))
        for cell in cells
    ]
    for row, (name, load, value) in zip(rows[1:], wanted, strict=True):
        assert (row[0], row[1]) == (name, load) and row[2] == pytest.approx(value, abs=1e-8)
    more = charts_of([], points=points, figures=["slowdown.p99", "ttft.p99"])
    keys = [chart.key for chart in more]
    assert "load-slowdown-p99" in keys and keys.count("load-ttft-p99") == 1
    assert read_report(path)["rankings"][0] == [
        "seconds",
        "at load 0.5, 1 seed",
        "at load 0.9, 1 seed",
    ]


@pytest.mark.parametrize("low", [0.36, 0.971, 2.0, 1234.5])
@pytest.mark.parametrize("width", [1.0001, 1.04, 1.3, 2.5, 30.0])
@pytest.mark.parametrize("is_log", [False, True])
def test_every_axis_has_ticks_that_differ(low: float, width: float, is_log: bool) -> None:
    found = scale([low, low * width], 0.0, 100.0, is_log=is_log)
    ticks = found.ticks()
    assert len(ticks) > 1 and len(set(labels(ticks))) == len(ticks)
    assert all(-0.5 <= found(tick) <= 100.5 for tick in ticks)


def test_bars_of_intervals_end_in_the_picture_and_say_so() -> None:
    """An arrow stands where one goes on beyond."""
    series = Series(
        name="a", x=[1, 2, 3], y=[1.0, 2.0, 3.0], low=[-900, 1.9, -inf], high=[2, 2.1, inf]
    )
    chart = Lines(key="k", title="t", caption="c", x_label="x", y_label="y", series=[series])
    tree = ElementTree.fromstring(svg(chart, is_file=True))
    paths = [(e.get("class"), e.get("d") or "") for e in tree.iter() if e.tag.endswith("path")]
    assert [name for name, _ in paths].count("cut") == 1
    for _, path in paths:
        places = [float(n) for n in re.findall(r"-?[\d.]+", path)]
        assert all(0 <= place <= WIDTH for place in places[::2])
        assert all(0 <= place <= HEIGHT for place in places[1::2])


def test_a_trace_is_in_the_trace_event_format(runs: list[Run], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, runs[0])
    whole = json.loads(path.read_text())
    events = whole["traceEvents"]
    assert {each["ph"] for each in events} == {"M", "X", "C", "i"}
    tracks: dict[tuple[int, int], list[dict]] = {}
    for each in events:
        assert isinstance(each["name"], str) and isinstance(each["pid"], int)
        if each["ph"] != "M":
            assert not isnan(each["ts"]) and each["ts"] >= 0
        if each["ph"] == "X":
            assert each["dur"] >= 0
            tracks.setdefault((each["pid"], each["tid"]), []).append(each)
        if each["ph"] == "C":
            assert all(isinstance(value, int | float) for value in each["args"].values())
    assert runs[0].steps is not None and len(tracks[1, 1]) == len(runs[0].steps)
    assert len(tracks) == 1 + len(runs[0].requests)
    for slices in tracks.values():
        for one, other in pairwise(slices):
            assert one["ts"] + one["dur"] <= other["ts"] + 1e-3
    whys = [e["args"]["why"] for e in events if e["ph"] == "X" and e["name"] == "preempted"]
    assert whys and all("preempted by r" in why for why in whys)


def test_a_file_of_a_run_without_steps_has_a_page_too(tmp_path: Path) -> None:
    plain = run("fcfs", "log-uniform(num_requests=60)", TIGHT, rate=12.0)
    plain.write(tmp_path / "run.jsonl")
    read = Run.read(tmp_path / "run.jsonl")
    write_report(tmp_path / "out.html", [read])
    shown = read_report(tmp_path / "out.html")["runs"][0]
    assert shown["steps"] == [] and len(shown["stays"]) == 60
    write_trace(tmp_path / "trace.json", read)


def test_what_draws_images_is_named_where_it_is_missing(tmp_path: Path, runs: list[Run]) -> None:
    [said] = write_plots(tmp_path, charts_of(runs[:1])[:1], images=False)
    assert "metronome-engine[plots]" in said
    assert {path.suffix for path in tmp_path.iterdir()} == {".svg", ".csv"}


@pytest.mark.parametrize("text", ["", "<html></html>", "{}"])
def test_what_is_no_report_is_said_to_be_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.html").write_text(text)
    with pytest.raises(ConfigError, match="is not a report"):
        read_report(tmp_path / "x.html")


def test_a_place_that_is_none_is_said_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--report", str(tmp_path / "no" / "out.html")]) != 0
    assert "create its directory first" in capsys.readouterr().err


def test_other_runs_are_laid_over_one(
    runs: list[Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of which was served in real time: then the simulation's error is shown, too."""
    files = [tmp_path / "run.jsonl", tmp_path / "real.jsonl"]
    runs[0].write(files[0])
    replace(runs[0], head={**runs[0].head, "kind": "real"}).write(files[1])
    out = tmp_path / "out.html"
    command = ["simulate", "--read", str(files[0]), "--report", str(out), "--beside"]
    assert main([*command, str(files[1])]) == 0
    report = read_report(out)
    assert [each["label"] for each in report["runs"]] == ["fcfs, simulated", "fcfs, real"]
    assert {row[0] for row in report["charts"]["cdf-e2e"][1:]} == {"fcfs, simulated", "fcfs, real"}
    assert {row[2] for row in report["charts"]["error"][1:]} == {0.0}
    assert main([*command, str(tmp_path / "none.jsonl")]) != 0
    assert "is no file" in capsys.readouterr().err
