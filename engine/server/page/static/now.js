// What the server does at the moment: requests, why they wait, memory, prefix cache, steps, cores.

import { getJson } from "./api.js";
import { el, setText } from "./dom.js";
import { StepPicture } from "./steps.js";
import { Trouble } from "./trouble.js";
import { causeReason, causeWords, count, missWords, percent, plural, seconds, shortId } from "./words.js";

const EVERY_MS = 1000;
const MOST_ROWS = 60; // of the table of requests
const SPEED_SECONDS = 5; // over which tokens per second are counted

export class Now {
  constructor(root, showTrouble) {
    this._showTrouble = showTrouble;
    this._after = 0;
    this._timer = 0;
    this._isOn = false;
    this._picture = new StepPicture();
    this._note = el("p", { class: "note" });
    this._tiles = el("dl", { class: "tiles" });
    this._requests = tableOf(
      "Requests",
      ["Request", "State", "Priority", "Since", "Prompt", "Cached", "Output", "Core"],
      ["", "", "minor num", "num", "num", "minor num", "num", "minor num"],
    );
    this._more = el("p", { class: "hint" });
    this._kv = el("div", { class: "meters" });
    this._prefix = el("div", { class: "meters" });
    this._waits = el("div", { class: "meters" });
    this._cores = tableOf("Cores", ["Core", "State", "Running", "Waiting"], ["", "", "num", "num"]);
    this._ranks = el("div", { class: "meters" });
    this._ofAll = [
      card("The last minute", this._picture.element, "wide-card"),
      card("Waited for, in total", this._waits),
      card("KV cache", this._kv),
      card("Prefix cache", this._prefix),
      card("Cores", el("div", {}, this._cores.element, this._ranks)),
    ];
    root.replaceChildren(
      el("h2", { class: "unseen" }, "Now"),
      this._note,
      this._tiles,
      el("div", { class: "cards" }, this._ofAll[0], card("Requests", el("div", {}, this._requests.element, this._more), "wide-card"), this._ofAll.slice(1)),
    );
    document.addEventListener("visibilitychange", () => this._isOn && this._schedule(0));
  }

  start() {
    if (this._isOn) return;
    this._isOn = true;
    this._schedule(0);
  }

  stop() {
    this._isOn = false;
    clearTimeout(this._timer);
  }

  _schedule(pause) {
    clearTimeout(this._timer);
    if (this._isOn && !document.hidden) this._timer = setTimeout(() => this._look(), pause);
  }

  async _look() {
    const round = (this._round = (this._round ?? 0) + 1);
    try {
      const now = await getJson(`/page/now?after=${this._after}`, { quiet: this._wasRefused });
      if (round !== this._round) return;
      this._wasRefused = false;
      this._show(now);
      this._showTrouble(null);
    } catch (error) {
      const trouble = error instanceof Trouble ? error : Trouble.lost();
      if (!(error instanceof Trouble)) console.error(error);
      this._wasRefused = trouble.kind === "key";
      this._showTrouble(trouble);
      setText(this._note, "This view shows the last state that arrived.");
    }
    this._schedule(EVERY_MS);
  }

  _show(now) {
    const isAll = now.scope === "all";
    const isMany = now.cores.length > 1;
    this._after = this._picture.add(now.steps, now.time, this._after);
    for (const each of this._ofAll) each.hidden = !isAll;
    setText(this._note, isAll ? "" : "You see the requests of your key. The admin key shows all requests, steps and memory.");
    this._showTiles(now, isAll);
    if (isAll) {
      this._picture.draw(now.time);
      this._showMemory(now, isMany);
      this._showWaits(now.waits);
      this._showCores(now.cores);
    }
    this._showRequests(now, isMany);
  }

  _showTiles(now, isAll) {
    const waiting = now.requests.filter((row) => row.state !== "running").length;
    const total = (name) => now.cores.reduce((sum, core) => sum + core[name], 0);
    const tiles = [
      ["Running", count(isAll ? total("running") : now.requests.length - waiting)],
      ["Waiting", count(isAll ? total("waiting") : waiting)],
    ];
    if (isAll) {
      const kv = now.cores.flatMap((core) => core.kv);
      const [used, blocks] = [sumOf(kv, "used"), sumOf(kv, "total")];
      const prefix = now.cores.map((core) => core.prefix);
      tiles.push(
        ["Tokens/s", count(this._picture.speed(now.time, SPEED_SECONDS))],
        ["KV in use", percent(used, blocks)],
        ["Cache hits", percent(sumOf(prefix, "hits"), sumOf(prefix, "queries"))],
      );
    }
    this._tiles.replaceChildren(...tiles.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  }

  _showRequests(now, isMany) {
    const order = { running: 0, waiting: 1, parked: 2 };
    const rows = [...now.requests].sort((a, b) => order[a.state] - order[b.state]).slice(0, MOST_ROWS);
    this._requests.show(
      rows.map((row) => [
        [el("span", { class: `swatch ${this._picture.colourOf(row.id)}`, "aria-hidden": "true" }), el("span", { class: "mono", title: row.id }, shortId(row.id)), senderOf(row)],
        stateOf(row),
        count(row.priority),
        seconds(row.since),
        `${count(Math.min(row.computed, row.prompt))} / ${count(row.prompt)}`,
        count(row.cached),
        count(row.output),
        isMany ? String(row.core) : "0",
      ]),
      "No request is running or waiting.",
    );
    const hidden = now.num_requests - rows.length;
    setText(this._more, hidden > 0 ? `and ${plural(hidden, "more request")}` : "");
  }

  _showMemory(now, isMany) {
    const name = (core, text) => (isMany ? `Core ${core.core}: ${text}` : text);
    this._kv.replaceChildren(
      ...now.cores.flatMap((core) =>
        core.kv.map(({ group, used, total }) => meter(name(core, group), used, total, `${count(used)} of ${count(total)} blocks`)),
      ),
    );
    const parts = now.cores.flatMap((core) => {
      const { queries, hits, missed } = core.prefix;
      const found = meter(name(core, "found"), hits, queries, `${count(hits)} of ${count(queries)} tokens`);
      const why = Object.entries(missed).sort((a, b) => b[1] - a[1]);
      return [found, ...why.map(([reason, tokens]) => meter(name(core, missWords(reason)), tokens, queries, `${count(tokens)} tokens`, "miss"))];
    });
    this._prefix.replaceChildren(...parts);
  }

  _showWaits(waits) {
    const sorted = Object.entries(waits).filter(([, time]) => time > 0).sort((a, b) => b[1] - a[1]);
    const most = sorted[0]?.[1] ?? 0;
    const rows = sorted.map(([cause, time]) => meter(causeWords(cause), time, most, seconds(time), "wait", causeReason(cause)));
    this._waits.replaceChildren(...(rows.length ? rows : [el("p", { class: "hint" }, "No request has waited yet.")]));
  }

  _showCores(cores) {
    this._cores.show(
      cores.map((core) => [
        core.role ? `${core.core} (${core.role})` : String(core.core),
        el("span", { class: core.alive ? "state-good" : "state-bad" }, core.alive ? "alive" : "has died"),
        count(core.running),
        count(core.waiting),
      ]),
      "No core is known.",
    );
    const ranks = cores.flatMap(({ core, ranks }) =>
      ranks.map(({ rank, steps, waited }) =>
        meter(`${cores.length > 1 ? `Core ${core}, rank` : "Rank"} ${rank} waits for others`, waited, steps, percent(waited, steps), "wait"),
      ),
    );
    this._ranks.replaceChildren(...ranks);
    const dead = cores.filter((core) => !core.alive);
    if (!dead.length) return;
    const names = dead.map((core) => core.core).join(", ");
    const rest = dead.length < cores.length ? "The others go on." : "No request can be computed.";
    setText(this._note, `Core ${names} has died: its requests ended with an error. ${rest} A server started with --on-core-death restart starts it again; otherwise its operator must restart the server.`);
  }
}

/** Who sent a request, which only the admin key sees: the user that it names, or else its key. */
function senderOf(row) {
  const known = [row.user && `user ${row.user}`, row.key && `key ${row.key}`].filter(Boolean);
  return known.length ? el("span", { class: "cause", title: known.join(", ") }, known[0]) : null;
}

function stateOf(row) {
  const state = el("span", { class: `state-${row.state}` }, row.state);
  if (!row.cause) return state;
  const waited = Object.entries(row.waited ?? {}).map(([cause, time]) => `${causeWords(cause)} ${seconds(time)}`);
  return [state, el("span", { class: "cause", title: waited.join(", ") || null }, causeWords(row.cause))];
}

function sumOf(rows, name) {
  return rows.reduce((sum, row) => sum + row[name], 0);
}

function card(title, content, kind = "") {
  return el("section", { class: `card ${kind}` }, el("h3", {}, title), content);
}

function meter(name, value, whole, text, kind = "", reason = "") {
  const bar = el("meter", { class: kind, min: "0", max: String(whole || 1), value: String(value), "aria-label": name });
  return el("div", { class: "metered", title: reason || null }, el("span", {}, name), el("span", { class: "num" }, text), bar);
}

/** A table whose rows are replaced; kinds: a class for each column. */
function tableOf(caption, heads, kinds) {
  const body = el("tbody");
  const head = el("tr", {}, heads.map((text, i) => el("th", { scope: "col", class: kinds[i] || null }, text)));
  const table = el("table", {}, el("caption", { class: "unseen" }, caption), el("thead", {}, head), body);
  const empty = el("p", { class: "hint" });
  return {
    element: el("div", {}, table, empty),
    show(rows, otherwise) {
      table.hidden = !rows.length;
      setText(empty, rows.length ? "" : otherwise);
      const cell = (content, i) =>
        i === 0 ? el("th", { scope: "row" }, content) : el("td", { class: kinds[i] || null }, content);
      body.replaceChildren(...rows.map((row) => el("tr", {}, row.map(cell))));
    },
  };
}
