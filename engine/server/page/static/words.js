// Causes and numbers in words.

const CAUSES = {
  "token budget": ["full step", "Each step computes a limited number of tokens, and others used them."],
  seats: ["no free seat", "As many requests ran at once as the server allows (max_num_seqs)."],
  "KV blocks": ["KV cache full", "There was no memory for its keys and values until others finished."],
  "policy order": ["policy order", "The scheduling policy ranked other requests before it."],
  paused: ["engine paused", "An operator paused the server."],
  preempted: ["preempted", "It gave up its memory to another request, and continued later."],
  "next step": ["next step", "It arrived while a step was being computed."],
  adapter: ["adapter loading", "The LoRA adapter was not in memory yet."],
  grammar: ["schema compiling", "A grammar is made from the schema before the first token."],
  "kv load": ["KV loading", "Keys and values were read from a store."],
  "kv lookup": ["awaited KV", "Another engine core was computing its keys and values."],
};

const MISSES = {
  "never seen": "text that was new",
  evicted: "text that had been evicted",
  "another cache salt": "cached under another salt",
  "another adapter": "cached for another adapter",
  "other media": "cached with other media",
  "window gone": "outside of the kept window",
  "no snapshot there": "no snapshot at that place",
  "prefix caching off": "prefix caching is off",
  "every token wanted": "every token was wanted",
};

/** A cause of waiting in a few words; a cause without words of its own is shown as it is. */
export function causeWords(cause) {
  return known(cause)?.[0] ?? cause;
}

/** A cause in a sentence, or "". */
export function causeReason(cause) {
  return known(cause)?.[1] ?? "";
}

export function missWords(why) {
  return Object.hasOwn(MISSES, why) ? MISSES[why] : why;
}

function known(cause) {
  if (Object.hasOwn(CAUSES, cause)) return CAUSES[cause];
  return cause.startsWith("preempted") ? CAUSES.preempted : null;
}

/** Seconds in a form of about three digits. */
export function seconds(value) {
  if (!Number.isFinite(value)) return "–";
  if (value < 0.0005) return "0 ms";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 10) return `${value.toFixed(2)} s`;
  if (value < 120) return `${value.toFixed(1)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return `${Math.round(value / 3600)} h`;
}

const WHOLE = new Intl.NumberFormat("en");

export function count(value) {
  return Number.isFinite(value) ? WHOLE.format(Math.round(value)) : "–";
}

export function percent(part, whole) {
  if (!(whole > 0)) return "–";
  const value = (100 * part) / whole;
  return value > 0 && value < 1 ? "< 1 %" : `${Math.round(value)} %`;
}

export function plural(number, word) {
  return `${count(number)} ${word}${number === 1 ? "" : "s"}`;
}

/** The part of a request's id that people recognise. */
export function shortId(id) {
  const own = String(id).replace(/^(chatcmpl|cmpl|resp|msg)[-_]/, "").replace(/~[0-9a-f]*$/, "");
  return own.length > 16 ? `${own.slice(0, 13)}…` : own;
}
