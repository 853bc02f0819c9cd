// One answer of the model: the request, its stream, and the record of why it waited.

import { ask, eventsOf, getJson, newId } from "./api.js";
import { urlOf } from "./gallery.js";
import { Trouble, troubleIn } from "./trouble.js";
import { NUMBERS } from "./settings.js";

const LOOK_MS = 700; // between two looks at why a request still waits
const CONTINUED = 256; // tokens of a continued text, if the settings name no limit
const NO_STEPS = 1e15 - 1; // as the last known step: none are sent

export class Run {
  /**
   * Write the answer to `conversation` into `message`. onChange(): something of the message
   * changed; onState(row): how the request is listed while it waits; onEnd(): the answer is over.
   */
  constructor(conversation, message, model, { onChange, onState, onEnd }) {
    Object.assign(this, { conversation, message, model, onChange, onState, onEnd });
    this.id = newId();
    this.begin = performance.now();
    this.firstAt = null;
    this.chunks = 0;
    this._lastAt = null;
    this._abort = new AbortController();
    message.stats = { id: this.id };
  }

  stop() {
    this._abort.abort();
  }

  /** Output tokens per second up to now; null before there are two. */
  get speed() {
    const seconds = (this._lastAt - this.firstAt) / 1000;
    const tokens = this.message.stats.output ?? this.chunks;
    return tokens > 1 && seconds > 0 ? (tokens - 1) / seconds : null;
  }

  async go() {
    const { message } = this;
    const looking = setInterval(() => this._look(), LOOK_MS);
    try {
      const body = await bodyOf(this.conversation, message, this.model);
      const path = this.model.chats === false ? "/v1/completions" : "/v1/chat/completions";
      const response = await ask(path, { body, signal: this._abort.signal, id: this.id });
      for await (const event of eventsOf(response)) this._read(event);
      message.end ||= "stop";
    } catch (error) {
      message.end = error.name === "AbortError" ? "stopped" : "error";
      if (message.end === "error") message.trouble = asPlain(error);
    } finally {
      clearInterval(looking);
    }
    Object.assign(message.stats, {
      first: this.firstAt === null ? null : (this.firstAt - this.begin) / 1000,
      seconds: (performance.now() - this.begin) / 1000,
      speed: this.speed,
    });
    this.onEnd();
    await this._readRecord();
  }

  _read(event) {
    if (event.error) throw troubleIn(event.error);
    const { message } = this;
    const choice = event.choices?.[0];
    const delta = choice?.delta ?? { content: choice?.text };
    const calls = delta.tool_calls ?? [];
    const thinking = delta.reasoning_content ?? delta.reasoning ?? "";
    if (delta.content || thinking || calls.length) {
      this._lastAt = performance.now();
      this.firstAt ??= this._lastAt;
      this.chunks += 1;
    }
    message.thinking += thinking;
    message.text += delta.content ?? "";
    for (const call of calls) addCall(message.calls, call);
    if (choice?.finish_reason) message.end = choice.finish_reason;
    if (event.usage) {
      message.stats.output = event.usage.completion_tokens;
      message.stats.prompt = event.usage.prompt_tokens;
      message.stats.cached = event.usage.prompt_tokens_details?.cached_tokens ?? 0;
    }
    this.onChange();
  }

  /** How the request is listed now, as long as it has no token. */
  async _look() {
    if (this.firstAt !== null || this._isLooking) return;
    this._isLooking = true;
    try {
      const options = { quiet: true, signal: this._abort.signal };
      const now = await getJson(`/page/now?after=${NO_STEPS}`, options);
      const place = now.requests.findIndex((row) => String(row.id).includes(this.id));
      if (place >= 0 && this.firstAt === null) {
        const ahead = now.requests.slice(0, place).filter((row) => row.state === "waiting").length;
        this.onState(now.requests[place], now.scope === "all" ? ahead : null);
      }
    } catch {
      // The answer itself reports what is wrong.
    } finally {
      this._isLooking = false;
    }
  }

  async _readRecord() {
    for (const pause of [50, 400, 1500]) {
      await new Promise((resolve) => setTimeout(resolve, pause));
      try {
        const record = await getJson(`/page/request/${this.id}`, { quiet: true });
        const { waited, first_token: first, core, output, prompt, cached } = record;
        const stats = this.message.stats;
        Object.assign(stats, { waited, core, serverFirst: first });
        stats.output ??= output;
        stats.prompt ??= prompt;
        stats.cached ??= cached;
        this.onEnd();
        return;
      } catch {
        // No record yet, or none for this request.
      }
    }
  }
}

function asPlain(error) {
  if (error instanceof Trouble) return { kind: error.kind, text: error.text, advice: error.advice };
  return { kind: "server", text: `The page could not read the answer: ${error.message}`, advice: "Try again." };
}

function addCall(calls, delta) {
  const place = delta.index ?? 0;
  while (calls.length <= place) calls.push({ id: "", name: "", arguments: "" });
  const call = calls[place];
  if (delta.id) call.id = delta.id;
  if (delta.function?.name) call.name += delta.function.name;
  call.arguments += delta.function?.arguments ?? "";
}

/** The body of the request for the answer `message`, which is the conversation's last message. */
async function bodyOf({ settings, messages }, message, model) {
  const body = {
    model: settings.model || model.models[0],
    messages: [],
    stream: true,
    stream_options: { include_usage: true },
  };
  // Without a chat template the model continues the text of the whole conversation.
  const isText = model.chats === false;
  if (settings.system) body.messages.push({ role: "system", content: settings.system });
  for (const each of messages) {
    if (each !== message) body.messages.push(...(await asSent(each, model)));
  }
  for (const { name, label } of NUMBERS) {
    const text = String(settings[name] ?? "").trim();
    if (text === "") continue;
    if (!Number.isFinite(Number(text))) throw wrong(label, `is ${text}, and must be a number`);
    body[name] = Number(text);
  }
  if (settings.stop) body.stop = settings.stop.split("\n").filter(Boolean);
  const tools = toolsOf(settings.tools);
  if (tools.length) Object.assign(body, { tools, tool_choice: settings.tool_choice || "auto" });
  if (settings.schema?.trim()) {
    const schema = parsed(settings.schema, "Schema");
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  if (model.thinking && (settings.thinking === "on" || settings.thinking === "off")) {
    body.chat_template_kwargs = { enable_thinking: settings.thinking === "on" };
  }
  if (isText) {
    body.prompt = body.messages.map((each) => each.content).join("");
    body.max_tokens ??= CONTINUED;
    delete body.messages;
  }
  return body;
}

async function asSent(message, model) {
  if (message.role === "user") return [{ role: "user", content: await contentOf(message, model) }];
  if (message.role === "tool") return [{ role: "tool", tool_call_id: message.call, content: message.text }];
  const calls = message.calls.map(({ id, name, arguments: given }) => {
    return { id, type: "function", function: { name, arguments: given } };
  });
  if (!message.text && !calls.length) return []; // it failed before its first token
  return [{ role: "assistant", content: message.text, ...(calls.length ? { tool_calls: calls } : {}) }];
}

async function contentOf({ text, pictures }, model) {
  if (!pictures?.length) return text;
  if (!model.pictures) {
    throw new Trouble("request", "The conversation has pictures, and this model reads only text.", "Begin a new conversation, or edit the messages with pictures.");
  }
  const parts = [];
  for (const { id, name } of pictures) {
    const url = await urlOf(id);
    if (!url) {
      throw new Trouble("request", `The picture “${name}” is no longer kept in this browser.`, "Edit its message to remove it or to add it again.");
    }
    parts.push({ type: "image_url", image_url: { url } });
  }
  return text.trim() ? [...parts, { type: "text", text }] : parts;
}

/** Tools in OpenAI's form; those that are only a function are wrapped. */
function toolsOf(text) {
  if (!text?.trim()) return [];
  const given = parsed(text, "Tools");
  const list = Array.isArray(given) ? given : [given];
  return list.map((tool) => (tool.type ? tool : { type: "function", function: tool }));
}

function parsed(text, label) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw wrong(label, `is not valid JSON (${error.message})`);
  }
}

function wrong(label, what) {
  return new Trouble("request", `${label} ${what}.`, "Correct it in the settings.");
}
