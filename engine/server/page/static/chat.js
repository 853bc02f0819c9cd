// The chat: the list of conversations, the open one, and the field for the next message.

import { announce, byId, button, el, setText } from "./dom.js";
import { AnswerView, toolView, userView } from "./answer.js";
import * as gallery from "./gallery.js";
import { Run } from "./generate.js";
import { Tray } from "./pictures.js";
import { Settings } from "./settings.js";
import * as store from "./store.js";

const NEAR_END = 80; // pixels from the end within which the view follows the text
const KEPT = ["model", "system"]; // settings that a new conversation takes over
const ANNOUNCED = 1500; // characters of an answer that screen readers are given at its end
const SAVE_MS = 2000;
const TOUCH_MS = 1000; // for which a view goes on to scroll after people touched it
const EXAMPLES = [
  "Explain how photosynthesis works, in three sentences.",
  "Write a table of the planets with their diameters.",
  "Write a Python function that merges two sorted lists.",
];

export class Chat {
  constructor(model, showTrouble) {
    this._showTrouble = showTrouble;
    this._all = store.readAll();
    this._runs = new Map(); // by conversation
    this._views = new Map(); // of the open conversation, by message
    this._settings = new Settings(byId("fields"), (name, value) => this._set(name, value));
    this._list = byId("messages");
    this._follows = true;
    this._touched = -Infinity; // when people last scrolled
    this._sizes = new ResizeObserver(() => this._scroll());
    this._tray = new Tray("Pictures of the message", () => picturesIn(this._now.messages));
    this._listen();
    this.useModel(model);
    const last = this._all.find((each) => each.id === store.lastOpen());
    this._open(last ?? this._all[0] ?? this._begin());
    this._sweep();
  }

  useModel(model) {
    this._model = model;
    this._tray.use(model.pictures ?? null);
    this._settings.build(model);
    if (this._now) this._settings.show(this._now.settings);
  }

  // -- conversations

  _begin() {
    const settings = Object.fromEntries(KEPT.map((name) => [name, this._now?.settings[name] ?? ""]));
    return store.newConversation(settings);
  }

  _open(conversation) {
    this._now = conversation;
    store.setLastOpen(conversation.id);
    this._settings.show(conversation.settings);
    this._draw();
    this._showPanel("history", false);
  }

  _draw() {
    this._views.clear();
    this._sizes.disconnect();
    this._list.replaceChildren(...this._now.messages.map((message) => this._viewOf(message)));
    if (!this._now.messages.length) this._list.append(this._welcome());
    this._drawList();
    this._showRunning();
    this._follows = true;
    this._scroll();
  }

  _viewOf(message) {
    if (message.role === "user") return userView(message, (text, pictures) => this._edit(message, text, pictures), this._editTray(message));
    if (message.role === "tool") return toolView(message);
    const view = new AnswerView(message, this._actions(this._now), () => this._scroll());
    this._views.set(message, view);
    this._sizes.observe(view.element);
    const run = this._runs.get(this._now);
    if (run?.message === message && !run.isOver) {
      view.begin();
      view.update(run);
    } else view.finish();
    return view.element;
  }

  /** The pictures of a message while it is edited. */
  _editTray(message) {
    const { messages } = this._now;
    const tray = new Tray("Pictures of the message", () => picturesIn(messages.slice(0, messages.indexOf(message))));
    tray.use(this._model.pictures ?? null);
    return tray;
  }

  _welcome() {
    const name = this._now.settings.model || this._model.models[0];
    return el(
      "div",
      { class: "welcome" },
      el("p", { class: "big" }, this._model.chats === false ? "Let " : "Talk with ", el("strong", {}, name), this._model.chats === false ? " continue a text" : ""),
      el("p", {}, "Under each answer you see how fast it was written, and why it waited. ", el("a", { href: "#now" }, "Now"), " shows what the server does with all requests."),
      el("div", { class: "examples" }, EXAMPLES.map((text) => button(text, () => this._say(text)))),
    );
  }

  _drawList() {
    const rows = this._all.map((each) => {
      const isOpen = each === this._now;
      const open = button("", () => this._open(each), { "aria-current": isOpen ? "true" : null });
      open.append(el("span", {}, titleOf(each)));
      if (this._runs.has(each)) open.append(el("span", { class: "pulse", role: "img", "aria-label": "being answered" }));
      return el("li", {}, open);
    });
    byId("conversations").replaceChildren(...rows);
    setText(byId("title"), titleOf(this._now));
    const isKept = this._all.includes(this._now);
    byId("rename").hidden = byId("delete").hidden = !isKept;
  }

  _keep(conversation) {
    if (!this._all.includes(conversation)) this._all.unshift(conversation);
    conversation.changed = Date.now();
    store.save(conversation);
  }

  _delete() {
    if (!confirm(`Delete “${titleOf(this._now)}”? It cannot be brought back.`)) return;
    this._runs.get(this._now)?.stop();
    this._all = this._all.filter((each) => each !== this._now);
    store.remove(this._now.id);
    this._sweep();
    this._open(this._all[0] ?? this._begin());
    byId("prompt").focus();
  }

  /** Remove pictures that no conversation has, also none of another tab. */
  _sweep() {
    const named = () => new Set(store.readAll().flatMap(({ messages }) => picturesIn(messages).map(({ id }) => id)));
    gallery.sweep(named).catch(() => {}); // a browser without a database has none to remove
  }

  _rename() {
    const title = prompt("Title of the conversation", titleOf(this._now));
    if (title === null) return;
    this._now.title = title.trim();
    this._keep(this._now);
    this._drawList();
  }

  _set(name, value) {
    if (value === "") delete this._now.settings[name];
    else this._now.settings[name] = value;
    if (this._all.includes(this._now)) store.save(this._now);
  }

  // -- messages

  _say(text, pictures = []) {
    if (!(text.trim() || pictures.length) || this._runs.has(this._now)) return;
    this._now.title ||= (text.trim() || pictures[0].name).replace(/\s+/g, " ").slice(0, 60);
    this._add(text, pictures);
  }

  _edit(message, text, pictures) {
    this._cutFrom(message);
    this._add(text, pictures);
  }

  /** Add a message of the user, and have it answered. */
  _add(text, pictures) {
    this._now.messages.push(store.userMessage(text, pictures));
    this._answer();
    for (const { id } of pictures) gallery.keep(id).catch(() => store.reportFull());
  }

  _retry(message) {
    this._cutFrom(message);
    this._answer();
  }

  _cutFrom(message) {
    this._runs.get(this._now)?.stop();
    this._runs.delete(this._now);
    this._now.messages.length = this._now.messages.indexOf(message);
  }

  _actions(conversation) {
    return {
      retry: (message) => this._retry(message),
      results: (message) => resultsAfter(conversation.messages, message),
      result: (message, call, text) => this._giveResult(conversation, message, call, text),
    };
  }

  /** Add the result of a tool; when all calls of the answer have one, the model goes on. */
  _giveResult(conversation, message, call, text) {
    const { messages } = conversation;
    const place = messages.indexOf(message) + 1 + resultsAfter(messages, message).size;
    messages.splice(place, 0, { role: "tool", call: call.id, name: call.name, text });
    if (resultsAfter(messages, message).size < message.calls.length) {
      this._keep(conversation);
      this._draw();
      return;
    }
    messages.length = place + 1;
    this._answer();
  }

  _answer() {
    const conversation = this._now;
    const message = { role: "assistant", text: "", thinking: "", calls: [], end: "", stats: null, trouble: null };
    conversation.messages.push(message);
    let lastSaved = performance.now();
    const run = new Run(conversation, message, this._model, {
      onChange: () => {
        this._views.get(message)?.update(run);
        if (performance.now() - lastSaved > SAVE_MS) {
          lastSaved = performance.now();
          store.save(conversation);
        }
      },
      onState: (row, ahead) => this._views.get(message)?.showWaiting(row, ahead),
      onEnd: () => this._ended(conversation, run),
    });
    this._runs.set(conversation, run);
    this._keep(conversation);
    this._draw();
    announce("The answer is being written.");
    run.go();
  }

  /** An answer is over, or its record has come. */
  _ended(conversation, run) {
    const isFirst = !run.isOver;
    run.isOver = true;
    if (this._runs.get(conversation) === run) this._runs.delete(conversation);
    if (!conversation.messages.includes(run.message)) return;
    if (this._all.includes(conversation)) store.save(conversation);
    this._views.get(run.message)?.finish();
    this._scroll();
    if (!isFirst) return;
    this._drawList();
    this._showRunning();
    const { trouble, text } = run.message;
    announce(trouble ? `${trouble.text} ${trouble.advice}` : `The answer is complete. ${text.slice(0, ANNOUNCED)}`);
    if (trouble?.kind === "lost") this._showTrouble(trouble);
  }

  _showRunning() {
    const isRunning = this._runs.has(this._now);
    byId("stop").hidden = !isRunning;
    byId("send").hidden = isRunning;
    document.body.classList.toggle("ticking", this._runs.size > 0);
  }

  _stop() {
    this._runs.get(this._now)?.stop();
    byId("prompt").focus();
  }

  _scroll() {
    if (this._follows) this._list.scrollTop = this._list.scrollHeight;
  }

  // -- what people do

  _listen() {
    const field = byId("prompt");
    const fit = () => {
      field.rows = Math.min(8, field.value.split("\n").length + Math.floor(field.value.length / 90));
    };
    byId("composer").prepend(this._tray.element, this._tray.button);
    this._tray.listen(byId("talk"));
    byId("composer").addEventListener("submit", async (event) => {
      event.preventDefault();
      if (!(await this._tray.isReady()) || this._runs.has(this._now)) return;
      if (!field.value.trim() && !this._tray.pictures.length) return;
      const text = field.value;
      field.value = "";
      fit();
      this._say(text, this._tray.take());
    });
    field.addEventListener("input", fit);
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      byId("composer").requestSubmit();
    });
    // Sizes change by themselves, too: only what people do decides whether the view follows.
    for (const event of ["wheel", "touchmove", "pointerdown", "keydown"]) {
      this._list.addEventListener(event, () => (this._touched = performance.now()), { passive: true });
    }
    this._list.addEventListener("scroll", () => {
      if (performance.now() - this._touched > TOUCH_MS) return;
      const { scrollTop, clientHeight, scrollHeight } = this._list;
      this._follows = scrollHeight - scrollTop - clientHeight < NEAR_END;
    });
    byId("stop").addEventListener("click", () => this._stop());
    byId("new-chat").addEventListener("click", () => {
      this._open(this._begin());
      field.focus();
    });
    byId("delete").addEventListener("click", () => this._delete());
    byId("rename").addEventListener("click", () => this._rename());
    for (const name of ["history", "settings"]) {
      byId(`show-${name}`).addEventListener("click", () => this._showPanel(name, !byId(name).classList.contains("open")));
    }
    byId("hide-settings").addEventListener("click", () => {
      this._showPanel("settings", false);
      byId("show-settings").focus();
    });
    this._showPanel("settings", matchMedia("(min-width: 75rem)").matches);
    document.addEventListener("keydown", (event) => this._escape(event));
    window.addEventListener("pagehide", () => this._runs.forEach((_, each) => store.save(each)));
  }

  _escape(event) {
    if (event.key !== "Escape" || byId("key-dialog").open || byId("chat").hidden) return;
    const isNarrow = matchMedia("(max-width: 60rem)").matches;
    const open = ["settings", "history"].find((name) => byId(name).classList.contains("open"));
    if (open && isNarrow) {
      this._showPanel(open, false);
      byId(`show-${open}`).focus();
    } else this._stop();
  }

  _showPanel(name, isOpen) {
    byId(name).classList.toggle("open", isOpen);
    byId(`show-${name}`).setAttribute("aria-expanded", String(isOpen));
    byId("chat").classList.toggle(`with-${name}`, isOpen);
  }
}

function titleOf(conversation) {
  return conversation.title || "New conversation";
}

function picturesIn(messages) {
  return messages.flatMap((message) => message.pictures ?? []);
}

/** The ids of the calls of an answer that have a result. */
function resultsAfter(messages, message) {
  const found = new Set();
  for (const each of messages.slice(messages.indexOf(message) + 1)) {
    if (each.role !== "tool") break;
    found.add(each.call);
  }
  return found;
}
