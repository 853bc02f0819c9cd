// Requests to the server that this page came from, with the key of this tab.

import { Trouble, troubleOf } from "./trouble.js";

const KEY = "metronome.key";
let wantKey = async () => false;

/** `asker(isWrong)`: shows the question for a key; resolves to whether there is a new one. */
export function onKeyWanted(asker) {
  wantKey = asker;
}

export function hasKey() {
  return Boolean(sessionStorage.getItem(KEY));
}

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/**
 * Send a request and return its response if the status is 2xx; throws a `Trouble` otherwise.
 * body: sent as JSON; id: the request's id; quiet: throw on a 401 instead of showing the question.
 */
export async function ask(path, { body, signal, id, quiet = false } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = {};
    if (key) headers.Authorization = `Bearer ${key}`;
    if (body !== undefined) headers["Content-Type"] = "application/json";
    if (id) headers["X-Request-Id"] = id;
    const sent = body === undefined ? undefined : JSON.stringify(body);
    const method = body === undefined ? "GET" : "POST";
    let response;
    try {
      response = await fetch(path, { method, headers, body: sent, signal, redirect: "error" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw Trouble.lost();
    }
    if (response.ok) return response;
    const trouble = await troubleOf(response, Boolean(key));
    if (trouble.kind !== "key" || quiet) throw trouble;
    // Another request may have had its key replaced meanwhile: then this one tries again.
    if (sessionStorage.getItem(KEY) === key && !(await wantKey(Boolean(key)))) throw trouble;
  }
}

export async function getJson(path, options = {}) {
  const response = await ask(path, options);
  try {
    return await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw Trouble.lost();
  }
}

/** The data of the server-sent events of a response, parsed as JSON, until `[DONE]`. */
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw Trouble.cut();
      }
      if (part.done) throw Trouble.cut();
      const lines = (rest + part.value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** A random id for a request, by which its record is found again. */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(9));
  return "page-" + Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
