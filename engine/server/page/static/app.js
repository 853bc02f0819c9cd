// Starts the page: the model, the tabs, the question for a key, and whether the server is there.

import { getJson, hasKey, onKeyWanted, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { button, byId, el, setText } from "./dom.js";
import { Now } from "./now.js";
import { Pooled } from "./pooled.js";
import { onStorageFull } from "./store.js";
import { Trouble } from "./trouble.js";

const RETRY_MS = [1000, 2000, 4000, 8000, 15000];
let model = null;
let chat = null;
let tries = 0;
let retryTimer = 0;
const now = new Now(byId("now"), showTrouble);

// -- the question for a key

let pending = null; // a promise while the dialog is open

function askForKey(isWrong) {
  pending ??= new Promise((resolve) => {
    const [dialog, field, problem] = [byId("key-dialog"), byId("key"), byId("key-problem")];
    problem.hidden = !isWrong;
    problem.textContent = isWrong ? "The server does not accept this key. Check it, or ask the server's operator for another." : "";
    field.value = "";
    let hasNew = false;
    byId("key-form").onsubmit = (event) => {
      event.preventDefault();
      hasNew = field.value.trim() !== "";
      if (hasNew) setKey(field.value.trim());
      dialog.close();
    };
    byId("key-cancel").onclick = () => dialog.close();
    dialog.onclose = () => {
      pending = null;
      showKeyButton();
      resolve(hasNew);
    };
    dialog.showModal();
    field.focus();
  });
  return pending;
}

function showKeyButton() {
  const shown = byId("key-button");
  shown.hidden = !hasKey();
  setText(shown, "Forget the key");
}

byId("key-button").addEventListener("click", () => {
  setKey("");
  location.reload();
});
onKeyWanted(askForKey);

// -- trouble, and whether the server is there

function showTrouble(trouble) {
  const banner = byId("banner");
  banner.hidden = !trouble;
  byId("light").className = trouble ? "light bad" : "light good";
  if (!trouble) return;
  const again = trouble.kind === "key" ? button("Enter a key", load, { class: "small" }) : button("Try now", load, { class: "small" });
  const shown = `${trouble.text} ${trouble.advice}`;
  if (banner.dataset.shown === shown && banner.firstChild) return;
  banner.dataset.shown = shown;
  banner.replaceChildren(el("strong", {}, trouble.text), ` ${trouble.advice} `, again);
  if (trouble.kind !== "key") retryLater();
}

function retryLater() {
  clearTimeout(retryTimer);
  retryTimer = setTimeout(load, RETRY_MS[Math.min(tries, RETRY_MS.length - 1)]);
  tries += 1;
}

onStorageFull(() => {
  showTrouble(new Trouble("request", "The browser's storage is full, so this conversation is not kept.", "Delete older ones."));
  clearTimeout(retryTimer);
});

async function load() {
  clearTimeout(retryTimer);
  try {
    model = await getJson("/page/model");
  } catch (error) {
    byId("banner").dataset.shown = "";
    showTrouble(error instanceof Trouble ? error : Trouble.lost());
    return;
  }
  tries = 0;
  showTrouble(null);
  showKeyButton();
  const [first] = model.models;
  setText(byId("served"), model.models.length > 1 ? `${first} and ${model.models.length - 1} more` : first);
  byId("served").title = model.version ? `Metronome ${model.version}` : "";
  if (model.generates && !chat) chat = new Chat(model, showTrouble);
  else if (chat) chat.useModel(model);
  if (!model.generates) new Pooled(byId("pooled"), model);
  show(location.hash === "#now" ? "now" : "chat");
}

// -- tabs

const NAMES = ["chat", "now"];

function show(name) {
  const isPooled = model !== null && !model.generates;
  byId("chat").hidden = name !== "chat" || isPooled;
  byId("pooled").hidden = name !== "chat" || !isPooled;
  byId("now").hidden = name !== "now";
  for (const each of NAMES) {
    const tab = byId(`tab-${each}`);
    tab.setAttribute("aria-selected", String(each === name));
    tab.tabIndex = each === name ? 0 : -1;
  }
  byId("tab-chat").setAttribute("aria-controls", isPooled ? "pooled" : "chat");
  document.title = name === "now" ? "Now · Metronome" : "Metronome";
  if (name === "now" && model !== null) now.start();
  else now.stop();
}

for (const name of NAMES) {
  byId(`tab-${name}`).addEventListener("click", () => {
    history.replaceState(null, "", `#${name}`);
    show(name);
  });
  byId(`tab-${name}`).addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = byId(`tab-${NAMES[1 - NAMES.indexOf(name)]}`);
    other.focus();
    other.click();
  });
}
window.addEventListener("hashchange", () => show(location.hash === "#now" ? "now" : "chat"));
show(location.hash === "#now" ? "now" : "chat");
load();
