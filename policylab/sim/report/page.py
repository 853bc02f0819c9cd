"""The page: one file that asks nothing of a network."""

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
"""What the browser may load: nothing."""

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
    "<b>seats</b>: as many requests were in computation as may be at once (max_num_seqs); <b>token "
    "budget</b>: the step had all of its tokens (max_num_batched_tokens); <b>KV blocks</b>: too "
    "few were free; <b>policy order</b>: the policy let it wait, or others go first; <b>preempted "
    "by</b> another: that one took its place; <b>next step</b>: nothing but the end of a step."
)
MOST_LISTED = 12  # requests in each list
MOST_CAUSES = 6  # of each of them


def page(
    title: str,
    found: Sequence[Subject],
    sections: Sequence[tuple[str, str, Sequence[Chart]]],
    data: dict[str, Any],
) -> str:
    """The whole page. ``sections``: a heading, what to look for, and plots."""
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
    """What must be known to judge the figures, and to get them again; once where all have it."""
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
        "requests a second": number(subject.rate) if isfinite(subject.rate) else None,
        "seats (requests that can be in computation at once)": engine.get("max_num_seqs"),
        "tokens a step": engine.get("max_num_batched_tokens"),
        "KV blocks": engine.get("num_blocks"),
        "tokens a block": engine.get("block_size"),
        "length predictor": engine.get("length_predictor"),
        "a step takes": head.get("cost"),
        "hash of all decisions": subject.run.totals.get("decisions"),
    }
    return {name: "" if value is None else str(value) for name, value in facts.items()}


def _listed(facts: dict[str, str]) -> str:
    return _text("; ".join(f"{name} {value}".strip() for name, value in facts.items() if value))


def _in_short(data: dict[str, Any]) -> Iterator[str]:
    yield "<h2>In short</h2>"
    if data["left_out"]:
        yield from _items(
            f"{name} is left out, as it has no figures: {why}"
            for name, why in data["left_out"].items()
        )
    if data["rankings"]:
        head, *rows = data["rankings"]
        yield "<h3>Which policy is best at which load</h3>"
        yield (
            "<p>In the order of means over all seeds, the lowest first; the order alone may be "
            "chance. After ± stands half of an interval that holds the true value 19 times in "
            "20, or in brackets its ends. After the semicolon stands what <code>metronome "
            "compare</code> says of the difference from the first policy, of pairs of runs with "
            "the same requests (with <code>--unpaired</code>, of means): better or worse (more "
            "than chance, but for one time in 20), undecided (it may be chance: more seeds would "
            "tell), or equal in each of the runs. Policies with the same values stand on one "
            "line, with = between them.</p>"
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
            "<p>These are not the means over seeds that stand above, and the state is that of this "
            "run alone: a policy may be overloaded at a higher load, or with other seeds.</p>"
        )
    yield (
        "<p>Seconds, of the requests that count (the warm-up is left out). TTFT: to the first "
        "token. TPOT: for each further token, mean of a request. ITL: between two tokens. E2E: to "
        "the last token. Kept: the share of requests that got what they were promised. Preempted: "
        "times for each request. Recomputed: the share of tokens that were computed again.</p>"
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
    """A table of texts and numbers; ``kind``: its class."""
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
<p>Move the slider, or click into the curves: below stands which requests are computed in the step
at that time and with how many tokens, and who waits, since when and for what. The causes of a wait
are those of the whole time from coming (or being preempted) to the next start: {CAUSES}
The address of this page with <code>#run=0&amp;time=6.5&amp;request=r17</code> after it shows
just that.</p>
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
<h3>One request: what happened to it, and why it waited</h3>
<label>its id <input id="which" placeholder="r17"></label><table id="story"></table>
</div>"""


def _lists(found: Sequence[Subject]) -> Iterator[str]:
    """The requests that are looked up most, for readers without scripts too."""
    if not found:
        return
    yield "<h2>Requests that waited longest, and that were preempted most</h2>"
    yield "<p>All others are found by their ids in the panel above, and in the run's file.</p>"
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
            ["request", "user", "came, s", "waited, s", "preempted, times", "why it waited"],
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
