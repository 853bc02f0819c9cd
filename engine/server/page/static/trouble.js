// What went wrong, as sentences for people, with what they can do.

export class Trouble extends Error {
  /**
   * kind: "key", "lost", "cut", "busy", "core", "request" or "server"; text: what happened;
   * advice: what can be done; retryAfter: seconds until it is worth trying again.
   */
  constructor(kind, text, advice, retryAfter = null) {
    super(text);
    Object.assign(this, { kind, text, advice, retryAfter });
  }

  static lost() {
    return new Trouble(
      "lost",
      "The server cannot be reached.",
      "It may be stopped, starting, or cut off by the network. Your conversations are kept in this browser.",
    );
  }

  static cut() {
    return new Trouble(
      "cut",
      "The connection ended before the answer did.",
      "What had arrived is kept. Try again to have the whole answer.",
    );
  }
}

const BY_CODE = {
  queue_full: ["busy", "Too many requests are waiting, so the server took no more.", ""],
  too_many_requests: ["busy", "This key has too many open requests.", "Stop or finish another one first."],
  too_many_bodies: ["busy", "The server is reading too many requests at once.", ""],
  refused: ["busy", "The scheduling policy refused this request.", ""],
  draining: ["busy", "The server is finishing its requests before it stops.", ""],
  shutting_down: ["busy", "The server is shutting down.", ""],
  aborted: ["busy", "The request was ended because the server is shutting down.", ""],
  core_died: ["core", "The core that computed this answer has died.", "Try again: another core, or the restarted one, will take it."],
  engine_dead: ["core", "The engine is not running.", "Its operator must restart the server."],
  text_processes_down: ["core", "The processes that read and write text are down.", "They are started again; try again in a moment."],
  deadline_exceeded: ["request", "The request took longer than its time limit.", "Try again, or ask for a shorter answer."],
  context_length_exceeded: ["request", "The conversation is too long for this model.", "Start a new one, or edit an earlier message to shorten it."],
};

/** The trouble of a response that is not 2xx. hadKey: whether a key was sent. */
export async function troubleOf(response, hadKey) {
  const about = await errorOf(response);
  if (response.status === 401) {
    const text = hadKey ? "The server does not accept this key." : "This server asks for a key.";
    return new Trouble("key", text, "Its operator can give you one.");
  }
  const seconds = Number(response.headers.get("Retry-After")) || null;
  return troubleIn(about, response.status, seconds);
}

/** The trouble in an `error` object of the API, of a response or inside a stream. */
export function troubleIn(about, status = 500, retryAfter = null) {
  const message = typeof about?.message === "string" ? about.message : "";
  const known = Object.hasOwn(BY_CODE, String(about?.code)) ? BY_CODE[about.code] : null;
  if (known) {
    const [kind, text, advice] = known;
    return new Trouble(kind, text, advice || again(retryAfter), retryAfter);
  }
  if (status === 429 || status === 503) {
    return new Trouble("busy", message || "The server is busy.", again(retryAfter), retryAfter);
  }
  if (status === 404 && !message) {
    return new Trouble("server", "The server has no such path.", "The page may be from another version: load it again.");
  }
  if (status < 500) {
    return new Trouble("request", `The server refused the request: ${message || status}`, "Change it in the settings or the message.");
  }
  return new Trouble("server", message || `The server failed with status ${status}.`, "Try again; the server's log has the details.");
}

function again(seconds) {
  return seconds ? `Try again in ${seconds} s.` : "Try again in a moment.";
}

async function errorOf(response) {
  try {
    return (await response.json()).error;
  } catch {
    return null;
  }
}
