"""The report's page: one HTML file that needs no network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files
from math import isfinite
from typing import Any

from policylab.sim.report.charts import Chart
from policylab.sim.report.data import ELEMENT, encoded
from policylab.sim.report.states import STATES, because
from policylab.sim.report.subjects import Subject
from policylab.sim.report.svg import colour, number, svg

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""The page's Content-Security-Policy, under which the browser may load nothing."""

COLUMNS = {
    "TTFT mean": "ttft.mean",
    "TTFT p99": "ttft.p99",
    "TPOT mean": "tpot.mean",
    "TPOT p99": "tpot.p99",
    "ITL p99": "itl.p99",
    "E2E mean": "e2e.mean",
    "E2E p99": "e2e.p99",
    "tokens/s": "tokens_per_second",
    "kept": "attainment",
    "preempted": "preempted",
    "recomputed": "recomputed",
    "KV peak": "kv_peak",
}
CAUSES = (
    "<b>seats</b>: max_num_seqs requests were running; <b>token "
    "budget</b>: the step had max_num_batched_tokens tokens; <b>KV blocks</b>: too "
    "few were free; <b>policy order</b>: the policy made it wait, or others go first; <b>preempted "
    "by</b> another: that request took its place; <b>next step</b>: only the end of a step."
)
MOST_LISTED = 12  # requests per list
MOST_CAUSES = 6  # causes per request


def page(
    title: str,
    found: Sequence[Subject],
    sections: Sequence[tuple[str, str, Sequence[Chart]]],
    data: dict[str, Any],
) -> str:
    """The HTML of the report. ``sections``: heading, explanation and charts of each section."""
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">',
        f"<title>{_text(title)}</title><style>{_own('page.css')}</style></head><body>",
        f"<h1>{_text(title)}</h1>",
        *_about(found),
        *_in_short(data),
        *_table(found),
        *(_timeline(found) if found else []),
        *_lists(found),
    ]
    for heading, text, charts in sections:
        parts += _section(heading, text, charts)
    parts.append(f'<script type="application/json" id="{ELEMENT}">{encoded(data)}</script>')
    parts.append(f"<script>{_own('page.js')}</script></body></html>")
    return "\n".join(parts) + "\n"


def _own(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _text(value: object) -> str:
    return escape(str(value))


def _about(found: Sequence[Subject]) -> Iterator[str]:
    """HTML of the settings of all runs: first the common settings, then those that differ."""
    facts = [_facts(each) for each in found]
    same = {n: v for n, v in facts[0].items() if all(f[n] == v for f in facts)} if facts else {}
    yield f'<p class="small">{_listed(same)}</p>'
    for each, own in zip(found, facts, strict=True):
        if differs := {name: value for name, value in own.items() if name not in same}:
            yield f'<p class="small"><b>{_text(each.label)}</b>: {_listed(differs)}</p>'


def _facts(subject: Subject) -> dict[str, str]:
    head = subject.run.head
    engine = head.get("engine") or {}
    facts = {
        "": f"{head.get('kind', 'simulated')}, version {head.get('version', '?')}",
        "workload": head.get("workload"),
        "seed": head.get("seed"),
        "requests per second": number(subject.rate) if isfinite(subject.rate) else None,
        "seats (most requests that run at the same time)": engine.get("max_num_seqs"),
        "tokens a step": engine.get("max_num_batched_tokens"),
        "KV blocks": engine.get("num_blocks"),
        "windows of KV groups (0: full attention)": _windows(engine),
        "tokens a block": engine.get("block_size"),
        "length predictor": engine.get("length_predictor"),
        "a step takes": head.get("cost"),
        "hash of all decisions": subject.run.totals.get("decisions"),
    }
    return {name: "" if value is None else str(value) for name, value in facts.items()}


def _windows(engine: dict[str, Any]) -> str | None:
    """The sliding windows of a model that has some."""
    windows = engine.get("kv_groups") or [0]
    return ", ".join(map(str, windows)) if any(windows) else None


def _listed(facts: dict[str, str]) -> str:
    return _text("; ".join(f"{name} {value}".strip() for name, value in facts.items() if value))


def _in_short(data: dict[str, Any]) -> Iterator[str]:
    yield "<h2>In short</h2>"
    if data["left_out"]:
        yield from _items(
            f"{name} is left out, since it has no figures: {why}"
            for name, why in data["left_out"].items()
        )
    if data["rankings"]:
        head, *rows = data["rankings"]
        yield "<h3>Which policy is best at which load</h3>"
        yield (
            "<p>Policies by their means over all seeds, the lowest first; the order alone may be "
            "chance. The number after ± is half the width of a 95 % interval; in brackets are its "
            "ends. After the semicolon is the verdict of <code>metronome compare</code> on the "
            "difference from the first policy, in pairs of runs with the same requests (with "
            "<code>--unpaired</code>, on means): better or worse (wrong one time in 20), undecided "
            "(may be chance: use more seeds), or equal in all runs. Policies with the same values "
            "share a line, with = between them.</p>"
        )
        yield from table(head, rows, kind="ranks")
    if data["comparison"]:
        yield from _items(data["comparison"])
    for run in data["runs"]:
        yield f"<h3>{_text(run['label'])}{_text(_comma(run['where']))}</h3>"
        yield from _items(run["summary"])


def _comma(text: str) -> str:
    return f", {text}" if text else ""


def _items(sentences: Iterable[str]) -> Iterator[str]:
    yield f"<ul>{''.join(f'<li>{_text(each)}</li>' for each in sentences)}</ul>"


def _table(found: Sequence[Subject]) -> Iterator[str]:
    if not found:
        return
    alike = {each.where for each in found}
    which = alike.pop() if len(alike) == 1 else ""
    yield f"<h2>Figures of single runs{_text(f': {which}' if which else '')}</h2>"
    if any(", of " in each.where for each in found):
        yield (
            "<p>These are not the means over seeds from above, and the state is that of this run "
            "only: a policy may be overloaded at a higher load, or with other seeds.</p>"
        )
    yield (
        "<p>Seconds, for requests that count (without warm-up). TTFT: to the first token. TPOT: "
        "mean time per further token of a request. ITL: between two tokens. E2E: to the last "
        "token. Kept: the share of requests whose promises were kept. Preempted: preemptions per "
        "request. Recomputed: the share of tokens that were computed again.</p>"
    )
    yield from table(
        ["run", *COLUMNS, "state of this run"],
        [
            [
                each.label if which else f"{each.label}{_comma(each.where)}",
                *(_cell(each.figures.value(name)) for name in COLUMNS.values()),
                each.figures.window.state,
            ]
            for each in found
        ],
    )


def table(
    head: Sequence[str], rows: Sequence[Sequence[object]], kind: str = "numbers"
) -> Iterator[str]:
    """An HTML table of texts and numbers; ``head``: column heads. ``kind``: its CSS class."""
    yield (
        f'<table class="{kind}"><tr>'
        + f"{''.join(f'<th>{_text(cell)}</th>' for cell in head)}</tr>"
    )
    for row in rows:
        yield f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>"
    yield "</table>"


def _cell(value: float) -> str:
    return number(value) if isfinite(value) else "–"


def _timeline(found: Sequence[Subject]) -> Iterator[str]:
    options = "".join(
        f'<option value="{place}">{_text(each.label)}</option>' for place, each in enumerate(found)
    )
    keys = "".join(
        f'<span class="key" style="background:{colour(place)}"></span>{state}'
        for place, state in enumerate(STATES)
    )
    yield f"""<h2>Timeline</h2>
<p>Move the slider, or click into the curves. The tables show which requests are computed in the
step at that time and with how many tokens, and which requests wait, since when and for what. The
causes of a wait cover the whole time from arrival (or preemption) to the next start: {CAUSES}
Append <code>#run=0&amp;time=6.5&amp;request=r17</code> to the address of this page to show
this moment and request.</p>
<div class="panel">
<label>run <select id="run">{options}</select></label>
<label>time, s <input id="when" type="number" step="any" min="0" style="width:8em"></label>
<button id="back" type="button">step back</button>
<button id="next" type="button">next step</button>
<label>Gantt shows, s <select id="span"><option>0.2</option><option selected>1</option>
<option>5</option><option>20</option><option>100</option></select></label>
<input id="slider" type="range" min="0" max="1000" aria-label="time">
<canvas id="strip"></canvas>
<p id="state"></p><p id="cut" class="small"></p>
<div class="pair">
<div><h3>Computed in this step</h3><div class="tall"><table id="running"></table></div></div>
<div><h3>Waiting at this time</h3><div class="tall"><table id="waiting"></table></div></div>
</div>
<p>{keys}</p><canvas id="gantt"></canvas>
<h3>One request: its events, and why it waited</h3>
<label>its id <input id="which" placeholder="r17"></label><table id="story"></table>
</div>"""


def _lists(found: Sequence[Subject]) -> Iterator[str]:
    """HTML tables, per run, of the requests that waited longest or were preempted most."""
    if not found:
        return
    yield "<h2>Requests that waited longest or were preempted most</h2>"
    yield "<p>Find all others by their ids in the panel above, or in the run's file.</p>"
    for each in found:
        requests = each.run.requests
        waits = requests.waits
        total = [float(sum(column[p] for column in waits.values())) for p in range(len(requests))]
        counts = requests.counts("num_preempted").tolist()
        longest = sorted(range(len(total)), key=lambda p: (-total[p], p))[:MOST_LISTED]
        most = sorted(range(len(total)), key=lambda p: (-counts[p], p))[:MOST_LISTED]
        places = [p for p in dict.fromkeys([*longest, *most]) if total[p] or counts[p]]
        yield f"<h3>{_text(each.label)}{_text(_comma(each.where))}</h3>"
        yield from table(
            ["request", "user", "arrived, s", "waited, s", "preempted, times", "why it waited"],
            [
                [
                    requests.names["request_id"][p],
                    requests.names["user"][p],
                    f"{requests.times('arrival')[p]:.3f}",
                    f"{total[p]:.3f}",
                    counts[p],
                    because({c: float(column[p]) for c, column in waits.items()}, MOST_CAUSES),
                ]
                for p in places
            ],
        )


def _section(heading: str, text: str, charts: Sequence[Chart]) -> Iterator[str]:
    if not charts:
        return
    yield f"<h2>{_text(heading)}</h2><p>{_text(text)}</p>" + '<div class="plots">'
    for chart in charts:
        caption = f"<figcaption><b>{_text(chart.title)}</b>{_text(chart.caption)}</figcaption>"
        yield f'<figure id="{_text(chart.key)}">{caption}{svg(chart)}</figure>'
    yield "</div>"
