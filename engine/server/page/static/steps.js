// The steps of the last minute as a picture: tokens by request, and requests that waited by cause.

import { el, setText, svg } from "./dom.js";
import { causeWords, count, seconds, shortId } from "./words.js";

const MINUTE = 60; // seconds
const BINS = 120;
const WIDTH = 600; // of the drawing, in its own units
const HEIGHT = 120;
const COLOURS = 8;
const OTHERS = "other";

export class StepPicture {
  constructor() {
    this._steps = [];
    this._colours = new Map(); // by request
    this._cursor = null; // the bin that is read out
    this._tokens = chart("Tokens by request");
    this._causes = chart("Requests that waited, by cause");
    this._legend = el("ul", { class: "legend" });
    this._readout = el("p", { class: "readout", role: "status" });
    this.element = el(
      "div",
      { class: "picture" },
      this._tokens.figure,
      this._causes.figure,
      el("p", { class: "axis", "aria-hidden": "true" }, el("span", {}, "60 s ago"), el("span", {}, "30 s"), el("span", {}, "now")),
      this._readout,
      this._legend,
    );
    for (const { drawing } of [this._tokens, this._causes]) this._listen(drawing);
  }

  /** Add steps, forget those older than a minute, and return the number of the last one. */
  add(steps, time, after) {
    this._steps.push(...steps);
    const begin = this._steps.findIndex((step) => step.at >= time - MINUTE - 1);
    this._steps.splice(0, begin < 0 ? this._steps.length : begin);
    return steps.at(-1)?.step ?? after; // less than before if the server was started again
  }

  /** The class of a request's colour; "" if it has none. */
  colourOf(request) {
    return this._colours.get(request) ?? "";
  }

  /** Tokens per second in the last `span` seconds. */
  speed(time, span) {
    const recent = this._steps.filter((step) => step.at >= time - span);
    return recent.reduce((sum, step) => sum + tokensOf(step), 0) / span;
  }

  draw(time) {
    this._time = time;
    this._bins = binned(this._steps, time);
    this._colour();
    const causes = [...new Set(this._steps.flatMap((step) => Object.keys(step.causes)))].sort();
    const causeColours = new Map(causes.map((cause, i) => [cause, `c${i % COLOURS}`]));
    const tokens = this._bins.map((bin) => this._byColour(bin));
    const waiting = this._bins.map((bin) => {
      const byColour = {};
      for (const [cause, requests] of Object.entries(bin.causes)) {
        const colour = causeColours.get(cause);
        byColour[colour] = (byColour[colour] ?? 0) + requests / bin.steps;
      }
      return byColour;
    });
    const names = Array.from({ length: COLOURS }, (_, i) => `s${i}`).concat(OTHERS);
    this._tokens.show(tokens, names, (most) => `up to ${count(most / (MINUTE / BINS))} tokens/s`);
    this._causes.show(waiting, Array.from({ length: COLOURS }, (_, i) => `c${i}`), (most) => `up to ${count(Math.ceil(most))} at once`);
    this._legend.replaceChildren(
      ...causes.map((cause) => el("li", {}, el("span", { class: `swatch ${causeColours.get(cause)}`, "aria-hidden": "true" }), `waits: ${causeWords(cause)}`)),
    );
    this._describe();
    this._read();
  }

  /** Requests keep their colour as long as they are in the picture; the largest get one first. */
  _colour() {
    const sums = new Map();
    for (const bin of this._bins) {
      for (const [request, tokens] of Object.entries(bin.tokens)) sums.set(request, (sums.get(request) ?? 0) + tokens);
    }
    for (const request of this._colours.keys()) if (!sums.has(request)) this._colours.delete(request);
    const used = new Set(this._colours.values());
    const free = Array.from({ length: COLOURS }, (_, i) => `s${i}`).filter((name) => !used.has(name));
    const rest = [...sums].filter(([request]) => !this._colours.has(request)).sort((a, b) => b[1] - a[1]);
    for (const [request] of rest) {
      if (!free.length) break;
      this._colours.set(request, free.shift());
    }
  }

  _byColour(bin) {
    const byColour = { [OTHERS]: bin.others };
    for (const [request, tokens] of Object.entries(bin.tokens)) {
      const colour = this._colours.get(request) ?? OTHERS;
      byColour[colour] = (byColour[colour] ?? 0) + tokens;
    }
    return byColour;
  }

  _describe() {
    const steps = this._steps.length;
    const tokens = this._steps.reduce((sum, step) => sum + tokensOf(step), 0);
    const text = `In the last minute ${count(steps)} steps computed ${count(tokens)} tokens.`;
    this._tokens.drawing.setAttribute("aria-label", `${text} Arrow keys read parts of it.`);
    this._causes.drawing.setAttribute("aria-label", "Requests that waited, by cause. Arrow keys read parts of it.");
    this._summary = text;
  }

  _listen(drawing) {
    drawing.addEventListener("pointermove", (event) => {
      const box = drawing.getBoundingClientRect();
      this._moveTo(Math.floor(((event.clientX - box.left) / box.width) * BINS));
    });
    drawing.addEventListener("pointerleave", () => this._moveTo(null));
    drawing.addEventListener("blur", () => this._moveTo(null));
    drawing.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
      if (!move) return;
      event.preventDefault();
      this._moveTo((this._cursor ?? BINS) + move);
    });
  }

  _moveTo(bin) {
    this._cursor = bin === null ? null : Math.max(0, Math.min(BINS - 1, bin));
    for (const each of [this._tokens, this._causes]) each.mark(this._cursor);
    this._read();
  }

  _read() {
    const bin = this._cursor === null ? null : this._bins?.[this._cursor];
    if (!bin) {
      setText(this._readout, this._summary ?? "");
      return;
    }
    const ago = MINUTE - (this._cursor * MINUTE) / BINS;
    if (!bin.steps) {
      setText(this._readout, `${ago.toFixed(1)} s ago: no step.`);
      return;
    }
    const top = Object.entries(bin.tokens).sort((a, b) => b[1] - a[1]);
    const who = top.slice(0, 3).map(([request, tokens]) => `${shortId(request)} ${count(tokens)}`);
    const causes = Object.entries(bin.causes).map(([cause, sum]) => `${count(Math.ceil(sum / bin.steps))} waited: ${causeWords(cause)}`);
    const total = top.reduce((sum, [, tokens]) => sum + tokens, bin.others);
    const step = `${count(bin.steps)} ${bin.steps === 1 ? "step" : "steps"} of ${seconds(bin.seconds / bin.steps)}`;
    setText(this._readout, `${ago.toFixed(1)} s ago: ${step}, ${count(total)} tokens (${who.join(", ")}). ${causes.join(". ")}`);
  }
}

function tokensOf(step) {
  return Object.values(step.tokens).reduce((sum, tokens) => sum + tokens, step.others ?? 0);
}

/** The steps of the last minute in `BINS` equal parts of it. */
function binned(steps, time) {
  const bins = Array.from({ length: BINS }, () => ({ steps: 0, seconds: 0, tokens: {}, others: 0, causes: {} }));
  for (const step of steps) {
    const place = Math.floor(((step.at - (time - MINUTE)) / MINUTE) * BINS);
    if (place < 0) continue;
    const bin = bins[Math.min(place, BINS - 1)];
    bin.steps += 1;
    bin.seconds += step.seconds;
    bin.others += step.others ?? 0;
    addTo(bin.tokens, step.tokens);
    addTo(bin.causes, step.causes);
  }
  return bins;
}

function addTo(sums, values) {
  for (const [name, value] of Object.entries(values)) sums[name] = (Object.hasOwn(sums, name) ? sums[name] : 0) + value;
}

/** A chart of stacked bars, one path for each colour. */
function chart(title) {
  const paths = new Map();
  const cursor = svg("rect", { class: "cursor", y: 0, width: WIDTH / BINS, height: HEIGHT, visibility: "hidden" });
  const drawing = svg("svg", { class: "bars", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", tabindex: "0", "aria-label": title }, cursor);
  const scale = el("span", { class: "scale" });
  return {
    drawing,
    figure: el("div", { class: "figure-of-steps" }, el("p", { class: "chart-title" }, el("span", {}, title), scale), drawing),
    show(bins, names, scaleText) {
      const totals = bins.map((bin) => Object.values(bin).reduce((sum, value) => sum + value, 0));
      const most = Math.max(...totals);
      setText(scale, most > 0 ? scaleText(most) : "");
      const floor = bins.map(() => 0);
      const width = (WIDTH / BINS) * 0.84;
      for (const name of names) {
        let shape = "";
        bins.forEach((bin, i) => {
          const value = bin[name] ?? 0;
          if (!value) return;
          const [low, high] = [floor[i], floor[i] + value];
          floor[i] = high;
          const y = (share) => (HEIGHT * (1 - share / most)).toFixed(1);
          const x = ((i * WIDTH) / BINS).toFixed(1);
          shape += `M${x} ${y(low)}h${width.toFixed(1)}V${y(high)}h-${width.toFixed(1)}z`;
        });
        if (!paths.has(name)) {
          if (!shape) continue;
          paths.set(name, svg("path", { class: name }));
          drawing.insertBefore(paths.get(name), cursor);
        }
        paths.get(name).setAttribute("d", shape);
      }
    },
    mark(bin) {
      cursor.setAttribute("visibility", bin === null ? "hidden" : "visible");
      if (bin !== null) cursor.setAttribute("x", String((bin * WIDTH) / BINS));
    },
  };
}
