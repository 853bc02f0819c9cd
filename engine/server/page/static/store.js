// Conversations and settings, kept in this browser only. What is read back is checked: other
// programs on this origin, or an older page, may have written it.

const PREFIX = "metronome.chat.";
const LAST = "metronome.last";
let onFull = () => {};

/** `listener()`: called when the browser's storage is full. */
export function onStorageFull(listener) {
  onFull = listener;
}

/** Tell people that something could not be stored. */
export function reportFull() {
  onFull();
}

export function newConversation(settings = {}) {
  const now = Date.now();
  const id = now.toString(36) + Math.random().toString(36).slice(2, 8);
  return { id, title: "", created: now, changed: now, settings: { ...settings }, messages: [] };
}

/** All conversations, the latest first. */
export function readAll() {
  const found = [];
  for (let i = 0; i < localStorage.length; i += 1) {
    const name = localStorage.key(i);
    if (!name.startsWith(PREFIX)) continue;
    const one = checked(parsed(localStorage.getItem(name)));
    if (one && PREFIX + one.id === name) found.push(one);
  }
  return found.sort((a, b) => b.changed - a.changed);
}

export function save(conversation) {
  put(PREFIX + conversation.id, JSON.stringify(conversation));
}

export function remove(id) {
  localStorage.removeItem(PREFIX + id);
}

export function lastOpen() {
  return localStorage.getItem(LAST);
}

export function setLastOpen(id) {
  put(LAST, id);
}

function put(name, text) {
  try {
    localStorage.setItem(name, text);
  } catch {
    onFull();
  }
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

function checked(one) {
  if (!one || typeof one.id !== "string" || !Array.isArray(one.messages)) return null;
  return {
    id: one.id,
    title: text(one.title),
    created: Number(one.created) || 0,
    changed: Number(one.changed) || 0,
    settings: isObject(one.settings) ? one.settings : {},
    messages: one.messages.filter(isObject).map(checkedMessage).filter(Boolean),
  };
}

function checkedMessage(message) {
  if (message.role === "user") return userMessage(text(message.text), checkedPictures(message.pictures));
  if (message.role === "tool") {
    return { role: "tool", call: text(message.call), name: text(message.name), text: text(message.text) };
  }
  if (message.role !== "assistant") return null;
  const calls = Array.isArray(message.calls) ? message.calls.filter(isObject) : [];
  return {
    role: "assistant",
    text: text(message.text),
    thinking: text(message.thinking),
    calls: calls.map((call) => ({ id: text(call.id), name: text(call.name), arguments: text(call.arguments) })),
    // One that was being written when the page was closed was stopped by that.
    end: text(message.end) || "stopped",
    stats: isObject(message.stats) ? message.stats : null,
    trouble: isObject(message.trouble)
      ? { text: text(message.trouble.text), advice: text(message.trouble.advice) }
      : null,
  };
}

/** A message of the user. pictures: each has an id, a name, and the length of its data URL. */
export function userMessage(text, pictures = []) {
  return { role: "user", text, ...(pictures.length ? { pictures } : {}) };
}

function checkedPictures(pictures) {
  const some = Array.isArray(pictures) ? pictures.filter(isObject) : [];
  return some
    .map(({ id, name, chars }) => ({ id: text(id), name: text(name), chars: Number(chars) || 0 }))
    .filter(({ id }) => id);
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function text(value) {
  return typeof value === "string" ? value : "";
}
