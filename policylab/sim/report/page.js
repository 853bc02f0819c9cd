"use strict";
// The timeline: which requests run, with how many tokens, and who waits for what, at any time.
const data = JSON.parse(document.getElementById("run-data").textContent);
const COLOURS = { waits: "#0072b2", prefill: "#d55e00", decode: "#009e73", paused: "#cc79a7", preempted: "#e69f00" };
const MOST_ROWS = 400; // of a table
const at = (id) => document.getElementById(id);
let run = null;
let now = 0;

function lastAtOrBefore(rows, time) { // rows are [start, ...] in order of time; -1: none
  let low = 0, high = rows.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (rows[middle][0] <= time) low = middle + 1; else high = middle;
  }
  return low - 1;
}

function because(causes) {
  return Object.entries(causes).sort((a, b) => b[1] - a[1])
    .map(([cause, seconds]) => cause + " " + seconds.toFixed(3) + " s").join(", ");
}

function inMs(seconds) { return seconds < 0.1 ? (1000 * seconds).toFixed(1) + " ms" : seconds.toFixed(3) + " s"; }

function prepared(raw) { // what is looked up often, once for a run
  const found = Object.assign({}, raw);
  found.staysOf = new Map();
  for (const stay of raw.stays) {
    if (!found.staysOf.has(stay[0])) found.staysOf.set(stay[0], []);
    found.staysOf.get(stay[0]).push(stay);
  }
  found.workOf = new Map();
  for (const span of raw.work) {
    if (!found.workOf.has(span[0])) found.workOf.set(span[0], []);
    found.workOf.get(span[0]).push(span);
  }
  const changes = [];
  for (const stay of raw.stays) changes.push([stay[1], 1], [stay[2], -1]);
  changes.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  let number = 0;
  found.queue = changes.map(([time, change]) => [time, number += change]);
  found.end = raw.until || 1;
  return found;
}

function statesOf(place) { // [state, start, end], as the static chart has them
  const found = [], stays = run.staysOf.get(place) || [], spans = run.workOf.get(place) || [];
  const first = run.requests.first[place], last = run.requests.last[place];
  for (const stay of stays) found.push([stay[3] ? "preempted" : "waits", stay[1], stay[2]]);
  stays.forEach((stay, k) => {
    const end = k + 1 < stays.length ? stays[k + 1][1] : last;
    if (end === null) return;
    const mine = spans.filter((s) => run.steps[s[1]][0] >= stay[2] - 1e-6 && run.steps[s[1]][0] < end);
    if (!mine.length) {
      const cut = first === null ? end : Math.min(Math.max(stay[2], first), end);
      found.push(["prefill", stay[2], cut], ["decode", cut, end]);
    }
    let prompts = -1;
    mine.forEach((s, i) => { if (s[3] > 1 || first === null || run.steps[s[2]][1] <= first + 1e-6) prompts = i; });
    mine.forEach((s, i) => {
      if (i && s[1] > mine[i - 1][2] + 1) found.push(["paused", run.steps[mine[i - 1][2]][1], run.steps[s[1]][0]]);
      found.push([i <= prompts ? "prefill" : "decode", run.steps[s[1]][0], run.steps[s[2]][1]]);
    });
  });
  return found;
}

function fitted(canvas, height) {
  const width = canvas.clientWidth || 900, ratio = window.devicePixelRatio || 1;
  canvas.width = width * ratio; canvas.height = height * ratio; canvas.style.height = height + "px";
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio); pen.clearRect(0, 0, width, height); pen.font = "11px sans-serif";
  return [pen, width];
}

function drawStrip() { // KV, running and waiting over the whole run
  const height = 150, [pen, width] = fitted(at("strip"), height);
  const tops = { KV: 1, running: 1, waiting: 1 };
  const rows = { KV: run.steps.map((s) => [s[0], s[5]]), running: run.steps.map((s) => [s[0], s[2]]), waiting: run.queue };
  const hues = { KV: "#555555", running: "#009e73", waiting: "#0072b2" };
  Object.entries(rows).forEach(([name, points], k) => {
    const floor = 46 + 50 * k, tall = 40;
    for (const [, value] of points) tops[name] = Math.max(tops[name], value);
    pen.strokeStyle = hues[name]; pen.beginPath();
    let y = floor;
    pen.moveTo(0, floor);
    for (const [time, value] of points) {
      const x = width * time / run.end;
      pen.lineTo(x, y); y = floor - tall * value / tops[name]; pen.lineTo(x, y);
    }
    pen.stroke();
    pen.fillStyle = "#222";
    pen.fillText(name === "KV" ? "KV in use (top: " + (100 * tops.KV).toFixed(0) + " %)" : name + " (top: " + tops[name] + ")", 4, floor - 30);
  });
  pen.strokeStyle = "#aa0000"; pen.beginPath();
  pen.moveTo(width * now / run.end, 0); pen.lineTo(width * now / run.end, height); pen.stroke();
}

function drawGantt() { // requests that are in the engine around now
  const span = Number(at("span").value), start = Math.max(0, now - span / 2), end = start + span;
  const places = [];
  run.requests.arrival.forEach((arrival, place) => {
    const last = run.requests.last[place];
    if (arrival <= end && (last === null ? arrival : last) >= start) places.push(place);
  });
  const shown = places.slice(0, 80), tall = 12, left = 90;
  const [pen, width] = fitted(at("gantt"), 22 + tall * shown.length);
  const x = (time) => left + (width - left) * (Math.min(end, Math.max(start, time)) - start) / span;
  shown.forEach((place, row) => {
    pen.fillStyle = "#222"; pen.fillText(String(run.requests.id[place]).slice(0, 13), 2, 10 + tall * row);
    for (const [state, from, to] of statesOf(place)) {
      if (to < start || from > end) continue;
      pen.fillStyle = COLOURS[state]; pen.fillRect(x(from), 2 + tall * row, Math.max(0.5, x(to) - x(from)), tall - 3);
    }
  });
  pen.fillStyle = "#222";
  pen.fillText(start.toFixed(3) + " s", left, 18 + tall * shown.length);
  pen.fillText(end.toFixed(3) + " s" + (places.length > shown.length ? "; " + (places.length - shown.length) + " more not shown" : ""), width - 190, 18 + tall * shown.length);
  pen.strokeStyle = "#aa0000"; pen.beginPath();
  pen.moveTo(x(now), 0); pen.lineTo(x(now), 4 + tall * shown.length); pen.stroke();
}

function fill(table, head, rows) { // text only: nothing of the data is ever read as markup
  const body = at(table);
  body.replaceChildren();
  for (const cells of [head, ...rows.slice(0, MOST_ROWS)]) {
    const line = body.insertRow();
    cells.forEach((cell, k) => {
      const box = document.createElement(cells === head ? "th" : "td");
      box.textContent = cell; if (k === cells.length - 1) box.className = "words";
      line.append(box);
    });
  }
}

function show() {
  const place = lastAtOrBefore(run.steps, now), step = run.steps[place];
  const isInside = step && now <= step[1];
  const running = [];
  if (isInside) {
    for (const [request, first, last, tokens] of run.work) {
      if (first <= place && place <= last) running.push([request, tokens]);
    }
  }
  const waiting = run.stays.filter((stay) => stay[1] <= now && now < stay[2]);
  at("when").value = now.toFixed(4);
  at("slider").value = Math.round(1000 * now / run.end);
  at("state").textContent = (isInside
    ? "Step " + (place + 1) + " of " + run.num_steps + ", from " + step[0].toFixed(4) + " to " + step[1].toFixed(4) + " s: "
      + step[2] + " requests are computed, " + step[3] + " tokens (" + step[4] + " of them decodes); " + (100 * step[5]).toFixed(1) + " % of the KV pool in use"
    : "No step is computed at this time" + (run.steps.length ? "" : " (the run kept no steps)"))
    + "; " + waiting.length + " requests wait.";
  fill("running", ["request", "tokens in this step", "what"], running.map(([request, tokens]) => {
    const first = run.requests.first[request];
    return [run.requests.id[request], tokens, tokens === 1 && first !== null && first < now ? "decode" : "prompt"];
  }));
  fill("waiting", ["request", "since", "until", "why, in all of this wait"], waiting.map((stay) => [
    run.requests.id[stay[0]], stay[1].toFixed(3), stay[2].toFixed(3), because(stay[4])]));
  drawStrip(); drawGantt();
}

function tell() { // the story of one request
  const place = run.requests.id.indexOf(at("which").value.trim());
  if (place < 0) { fill("story", ["", "no such request in this run"], []); return; }
  const of = run.requests, lines = [[of.arrival[place], "came: " + of.prompt[place] + " prompt tokens (" + of.cached[place] + " found in the cache), "
    + of.output[place] + " output tokens" + (of.user[place] ? ", user " + of.user[place] : "")]];
  if (of.first[place] !== null) lines.push([of.first[place], "had its first token"]); // before a preemption at that moment
  for (const stay of run.staysOf.get(place) || []) {
    const late = stay[3] ? 0 : stay[1] - of.arrival[place], long = stay[2] - stay[1];
    if (stay[3]) lines.push([stay[1], "was " + (Object.keys(stay[4]).find((cause) => cause.startsWith("preempted by ")) || "preempted")]);
    if (late > 1e-6) lines[0][1] += "; a step was being computed, which ended " + inMs(late) + " later";
    if (long > 1e-6) lines.push([stay[1], "waited " + inMs(long) + (late > 1e-6 ? " from the end of that step on" : "") + ". Why: " + (because(stay[4]) || "next step")]);
    lines.push([stay[2], long > 1e-6 ? "began to be computed" : "began with the next step, without further waiting"]);
  }
  if (of.last[place] !== null) lines.push([of.last[place], "had its last token; outcome: " + of.outcome[place]]);
  lines.sort((a, b) => a[0] - b[0]);
  fill("story", ["seconds", "what happened"], lines.map(([time, what]) => [time.toFixed(4), what]));
}

function go(time) { now = Math.min(run.end, Math.max(0, time)); show(); }

function move(by) { // to the next or the last step
  const place = lastAtOrBefore(run.steps, now) + by;
  if (run.steps[place]) go(run.steps[place][0]);
}

function choose(place) {
  run = prepared(data.runs[place]);
  at("slider").max = 1000; at("which").value = "";
  fill("story", ["", ""], []);
  at("cut").textContent = run.steps.length < run.num_steps || run.requests.id.length < run.num_requests
    ? "The page has the first " + run.requests.id.length + " requests and " + run.steps.length + " steps; the run's file has all." : "";
  go(run.end / 2);
}

if (data.runs.length) {
  at("run").addEventListener("change", (event) => choose(Number(event.target.value)));
  at("slider").addEventListener("input", (event) => go(run.end * event.target.value / 1000));
  at("when").addEventListener("change", (event) => go(Number(event.target.value) || 0));
  at("span").addEventListener("change", show);
  at("which").addEventListener("change", tell);
  at("back").addEventListener("click", () => move(-1));
  at("next").addEventListener("click", () => move(1));
  at("strip").addEventListener("click", (event) => go(run.end * event.offsetX / at("strip").clientWidth));
  window.addEventListener("resize", show);
  // A link may name what to show: #run=1&time=6.5&request=r17
  const told = new URLSearchParams(location.hash.slice(1));
  choose(data.runs[Number(told.get("run"))] ? Number(told.get("run")) : 0);
  at("run").value = String(data.runs.indexOf(data.runs.find((each) => each.label === run.label)));
  if (told.has("time")) go(Number(told.get("time")) || 0);
  if (told.has("request")) { at("which").value = told.get("request"); tell(); }
}
