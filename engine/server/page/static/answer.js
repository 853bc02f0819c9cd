// Messages of a conversation on the screen.

import { button, copyText, el, setText } from "./dom.js";
import { LiveMarkdown } from "./live.js";
import { picturesView } from "./pictures.js";
import { causeReason, causeWords, count, seconds } from "./words.js";

/** Shows one answer, also while it is being written. */
export class AnswerView {
  /** actions: `retry(message)` and `result(message, call, text)`; onDrawn(): its size may differ. */
  constructor(message, actions, onDrawn) {
    this.message = message;
    this._actions = actions;
    this._prose = new LiveMarkdown(onDrawn);
    this._thought = document.createTextNode("");
    this._thinking = el(
      "details",
      { class: "thinking", hidden: true },
      (this._thinkingTitle = el("summary", {}, "Thinking")),
      el("div", { class: "thought" }, this._thought),
    );
    this._calls = el("div", { class: "calls" });
    this._callViews = [];
    this._trouble = el("div", { class: "trouble", hidden: true });
    this._foot = el("footer", { class: "foot" });
    this.element = el(
      "article",
      { class: "message answer", "aria-label": "Answer" },
      this._thinking,
      this._prose.element,
      this._calls,
      this._trouble,
      this._foot,
    );
  }

  /** Show what was added to the message while `run` writes it. */
  update(run) {
    this._showThinking(true);
    this._prose.grow(this.message.text);
    this._showCalls(false);
    const speed = run.speed;
    if (run.firstAt !== null) setText(this._state(), speed ? `${speed.toFixed(1)} tokens/s` : "Writing …");
  }

  /** Show why there is no token yet: how the request is listed, and how many wait before it. */
  showWaiting(row, ahead) {
    const before = ahead ? `, ${count(ahead)} before it` : "";
    const why = row.cause ? `: ${causeWords(row.cause)}${before}` : before;
    const state = row.state === "running" ? `Reading the prompt: ${count(row.computed)} of ${count(row.prompt)} tokens` : `Waiting${why}`;
    setText(this._state(), state);
  }

  begin() {
    this._foot.replaceChildren(el("span", { class: "pulse", "aria-hidden": "true" }), el("span", { class: "state" }, "Sent …"));
  }

  /** Show the message as it is at its end. */
  finish() {
    const { message } = this;
    this._showThinking(false);
    this._prose.finish(message.text);
    this._showCalls(true);
    this._showTrouble();
    this._showFoot();
  }

  _state() {
    if (!this._foot.querySelector(".state")) this.begin();
    return this._foot.querySelector(".state");
  }

  _showThinking(isOpenEnded) {
    const { thinking, text } = this.message;
    this._thinking.hidden = !thinking;
    if (thinking.length > this._thought.length) this._thought.appendData(thinking.slice(this._thought.length));
    setText(this._thinkingTitle, isOpenEnded && !text ? "Thinking …" : "Thinking");
  }

  _showCalls(isOver) {
    const { calls } = this.message;
    while (this._callViews.length < calls.length) {
      const view = callView();
      this._callViews.push(view);
      this._calls.append(view.element);
    }
    calls.forEach((call, place) => this._callViews[place].show(call, isOver));
    if (!isOver) return;
    const answered = this._actions.results(this.message);
    calls.forEach((call, place) => {
      if (!answered.has(call.id)) this._callViews[place].ask((text) => this._actions.result(this.message, call, text));
      else this._callViews[place].close();
    });
  }

  _showTrouble() {
    const { end, trouble } = this.message;
    const notes = {
      stopped: "Stopped.",
      length: "The answer ended because it has as many tokens as allowed.",
    };
    const text = trouble ? trouble.text : notes[end];
    this._trouble.hidden = !text;
    this._trouble.classList.toggle("bad", Boolean(trouble));
    this._trouble.setAttribute("role", trouble ? "alert" : "note");
    this._trouble.replaceChildren(...(text ? [el("strong", {}, text), trouble ? ` ${trouble.advice}` : ""] : []));
  }

  _showFoot() {
    const { stats, text } = this.message;
    const copy = button("Copy", () => copyText(text, copy), { class: "small" });
    const retry = button("Retry", () => this._actions.retry(this.message), { class: "small" });
    const had = this._foot.querySelector("details")?.open;
    this._foot.replaceChildren(...figures(stats), el("span", { class: "actions" }, text ? copy : null, retry));
    const why = whyItWaited(stats);
    if (why) {
      why.open = Boolean(had);
      this._foot.append(why);
    }
  }
}

function figures(stats) {
  if (!stats) return [];
  const shown = [];
  if (stats.speed) shown.push(["Speed", `${stats.speed.toFixed(1)} tokens/s`]);
  if (Number.isFinite(stats.first)) shown.push(["Time to the first token", `first token ${seconds(stats.first)}`]);
  if (Number.isFinite(stats.output)) shown.push(["Tokens of the answer", `${count(stats.output)} tokens`]);
  if (Number.isFinite(stats.prompt)) {
    const cached = stats.cached > 0 ? `, ${count(stats.cached)} cached` : "";
    shown.push(["Tokens of the prompt, and how many the prefix cache had", `prompt ${count(stats.prompt)}${cached}`]);
  }
  return shown.map(([title, text]) => el("span", { class: "figure", title }, text));
}

/** A folded list of what a request waited for; null if it is not known. */
function whyItWaited(stats) {
  if (!stats?.waited || typeof stats.waited !== "object") return null;
  const waits = Object.entries(stats.waited)
    .filter(([, time]) => Number(time) >= 0.0005)
    .sort((a, b) => b[1] - a[1]);
  const total = waits.reduce((sum, [, time]) => sum + Number(time), 0);
  const title = waits.length ? `Waited ${seconds(total)}: ${causeWords(waits[0][0])}` : "Did not wait";
  const rows = waits.map(([cause, time]) => {
    const reason = causeReason(cause);
    return [
      el("dt", {}, causeWords(cause), el("span", { class: "time" }, seconds(Number(time)))),
      el("dd", {}, el("meter", { min: "0", max: String(total), value: String(time), "aria-label": causeWords(cause) }), reason ? el("p", {}, reason) : null),
    ];
  });
  const core = Number.isFinite(stats.core) ? el("p", { class: "hint" }, `Computed by core ${stats.core}, request ${stats.id}`) : null;
  const none = waits.length ? null : el("p", {}, "It was computed from the first step on.");
  return el("details", { class: "why" }, el("summary", {}, title), none, el("dl", {}, rows), core);
}

/** A call of a tool, with a form for its result. */
function callView() {
  const name = el("strong", { class: "mono" });
  const given = el("pre", { tabindex: "0", role: "region", "aria-label": "Arguments of the call" });
  const place = el("div");
  const element = el("section", { class: "call", "aria-label": "Call of a tool" }, el("p", {}, "The model calls ", name), given, place);
  return {
    element,
    show(call, isOver) {
      setText(name, call.name);
      setText(given, isOver ? pretty(call.arguments) : call.arguments);
    },
    ask(send) {
      if (place.firstChild) return;
      const field = el("textarea", { rows: "2", class: "mono", "aria-label": "Result of the tool", placeholder: "Result of the tool, e.g. 21 °C, sunny" });
      const form = el("form", {}, field, el("button", { class: "small" }, "Send the result"));
      form.addEventListener("submit", (event) => {
        event.preventDefault();
        send(field.value);
      });
      place.append(form);
    },
    close() {
      place.replaceChildren();
    },
  };
}

function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}

/**
 * A message of the user, which can be edited. edit(text, pictures): send it again with these; tray:
 * for the pictures while it is edited.
 */
export function userView(message, edit, tray) {
  const text = el("div", { class: "spoken" }, picturesView(message.pictures), message.text);
  const change = button("Edit", () => open(), { class: "small" });
  const element = el("article", { class: "message user", "aria-label": "You" }, text, el("footer", { class: "foot" }, el("span", { class: "actions" }, change)));
  function close() {
    form.replaceWith(text);
    change.hidden = false;
    change.focus();
  }
  const field = el("textarea", { "aria-label": "Edit the message", rows: "3" });
  tray.button.classList.add("small");
  const form = el(
    "form",
    { class: "edit" },
    tray.element,
    field,
    el("p", {}, tray.button, button("Cancel", close, { class: "small" }), el("button", { class: "small primary" }, "Send again")),
    el("p", { class: "hint" }, "The messages after this one are replaced."),
  );
  tray.listen(form);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (!(await tray.isReady())) return;
    if (field.value.trim() || tray.pictures.length) edit(field.value, tray.take());
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      close();
    } else if (event.key === "Enter" && event.target === field && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  function open() {
    field.value = message.text;
    tray.set(message.pictures ?? []);
    text.replaceWith(form);
    change.hidden = true;
    field.focus();
  }
  return element;
}

/** The result of a tool, as the user typed it. */
export function toolView(message) {
  const title = el("p", {}, "Result of ", el("strong", { class: "mono" }, message.name));
  return el("article", { class: "message tool", "aria-label": "Result of a tool" }, title, el("pre", { tabindex: "0", role: "region", "aria-label": "Result" }, message.text));
}
