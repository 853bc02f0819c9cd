// npm's openai, @anthropic-ai/sdk, ollama, and ai with @ai-sdk/openai-compatible: `node node_clients.mjs URL CLIENT`.
// Packages are looked for from the current directory.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [url, client] = process.argv.slice(2);
const require = createRequire(process.cwd() + "/package.json");
const load = async (name) => import(pathToFileURL(require.resolve(name)).href);
const MODEL = "served";
const CITIES = ["Rome", "Paris"];
const PARAMETERS = {
  type: "object",
  properties: { city: { type: "string", enum: CITIES } },
  required: ["city"],
  additionalProperties: false,
};
const QUESTION = "The weather in Rome?";
const messages = [{ role: "user", content: QUESTION }];
const SCREEN = "iVBORw0KGgoAAAANSUhEUgAAABgAAAAQCAAAAAApT+BJAAAAHUlEQVR42mPkYMAOWPhxSQjikhAYlSBWgvE7DgkADlsCGqxOL98AAAAASUVORK5CYII="; // a PNG file
const SCREEN_URL = "data:image/png;base64," + SCREEN;
const TOO_LONG = "word ".repeat(20000);

function check(condition, what) {
  if (!condition) throw new Error(typeof what === "string" ? what : JSON.stringify(what));
}

function checkCity(value) {
  check(CITIES.includes(value?.city), value);
}

async function waitUntilIdle() {
  const until = Date.now() + 20000;
  for (;;) {
    const load = await (await fetch(url + "/load")).json();
    if (!load.running && !load.waiting) return;
    check(Date.now() < until, `the server still runs a cancelled request: ${JSON.stringify(load)}`);
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}

async function fails(promise, inspect) {
  try {
    await promise;
  } catch (error) {
    return inspect(error);
  }
  throw new Error("no error was raised");
}

async function openaiCells() {
  const { default: OpenAI } = await load("openai");
  const api = new OpenAI({ baseURL: url + "/v1", apiKey: "none", maxRetries: 0 });
  const about = { model: MODEL, messages };
  const tools = [{ type: "function", function: { name: "weather", description: "x", parameters: PARAMETERS } }];
  const flat = [{ type: "function", name: "weather", parameters: PARAMETERS, strict: false }];
  const format = { type: "json_schema", json_schema: { name: "w", schema: PARAMETERS, strict: true } };
  return {
    chat: async () => {
      const whole = await api.chat.completions.create({ ...about, max_tokens: 8 });
      check(whole.usage.completion_tokens > 0, whole);
      const response = await api.responses.create({ model: MODEL, input: QUESTION, max_output_tokens: 8 });
      check(response.usage.output_tokens > 0, response);
    },
    stream: async () => {
      const how = { ...about, max_tokens: 8, temperature: 0 };
      const whole = (await api.chat.completions.create(how)).choices[0].message.content;
      let text = "";
      for await (const chunk of await api.chat.completions.create({ ...how, stream: true })) text += chunk.choices[0]?.delta?.content ?? "";
      check(text === whole, [text, whole]);
      const stream = api.responses.stream({ model: MODEL, input: QUESTION, max_output_tokens: 8, temperature: 0 });
      let parts = "";
      for await (const event of stream) if (event.type === "response.output_text.delta") parts += event.delta;
      const last = await stream.finalResponse();
      check(parts === last.output_text, [parts, last.output_text]);
    },
    tool: async () => {
      for (const tool_choice of ["required", { type: "function", function: { name: "weather" } }]) {
        const how = { ...about, tools, tool_choice, parallel_tool_calls: false, max_tokens: 64 };
        const whole = await api.chat.completions.create(how);
        checkCity(JSON.parse(whole.choices[0].message.tool_calls[0].function.arguments));
        const last = await api.chat.completions.stream(how).finalChatCompletion();
        check(last.choices[0].message.tool_calls.length === 1, last);
        checkCity(JSON.parse(last.choices[0].message.tool_calls[0].function.arguments));
      }
      for (const tool_choice of ["required", { type: "function", name: "weather" }]) {
        const how = { model: MODEL, input: QUESTION, tools: flat, tool_choice, parallel_tool_calls: false, max_output_tokens: 64 };
        const call = (response) => response.output.find((item) => item.type === "function_call");
        checkCity(JSON.parse(call(await api.responses.create(how)).arguments));
        checkCity(JSON.parse(call(await api.responses.stream(how).finalResponse()).arguments));
      }
    },
    schema: async () => {
      const whole = await api.chat.completions.parse({ ...about, response_format: format, max_tokens: 64 });
      checkCity(JSON.parse(whole.choices[0].message.content));
      const response = await api.responses.create({ model: MODEL, input: QUESTION, max_output_tokens: 64, text: { format: { type: "json_schema", name: "w", schema: PARAMETERS } } });
      checkCity(JSON.parse(response.output_text));
    },
    error: async () => {
      const long = [{ role: "user", content: TOO_LONG }];
      await fails(api.chat.completions.create({ model: MODEL, messages: long }), (error) => check(error.status === 400 && error.code === "context_length_exceeded", String(error)));
      await fails(api.chat.completions.create({ ...about, temperature: 9 }), (error) => check(error.status === 400 && error.param === "temperature", JSON.stringify(error)));
      await fails(api.chat.completions.create({ ...about, model: "gpt-9" }), (error) => check(error.status === 404, String(error)));
    },
    cancel: async () => {
      const stream = await api.chat.completions.create({ ...about, max_tokens: 1500, stream: true });
      for await (const _ of stream) break;
      stream.controller.abort();
      await waitUntilIdle();
    },
    picture: async () => {
      const shown = { type: "image_url", image_url: { url: SCREEN_URL } };
      const how = (content) => ({ model: MODEL, messages: [{ role: "user", content }], max_tokens: 8, temperature: 0 });
      const words = { type: "text", text: QUESTION };
      const [text, both] = [await api.chat.completions.create(how([words])), await api.chat.completions.create(how([shown, words]))];
      check(both.usage.prompt_tokens > text.usage.prompt_tokens, [text.usage, both.usage]);
      let parts = "";
      for await (const chunk of await api.chat.completions.create({ ...how([shown, words]), stream: true })) parts += chunk.choices[0]?.delta?.content ?? "";
      check(parts === both.choices[0].message.content, [parts, both]);
      const input = [{ role: "user", content: [{ type: "input_image", image_url: SCREEN_URL, detail: "auto" }, { type: "input_text", text: QUESTION }] }];
      const response = await api.responses.create({ model: MODEL, input, max_output_tokens: 8 });
      check(response.usage.input_tokens === both.usage.prompt_tokens, [response.usage, both.usage]);
    },
  };
}

async function anthropicCells() {
  const { default: Anthropic } = await load("@anthropic-ai/sdk");
  const api = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
  const about = { model: MODEL, messages, max_tokens: 64 };
  const tools = [{ name: "weather", description: "x", input_schema: PARAMETERS }];
  return {
    chat: async () => {
      const whole = await api.messages.create({ ...about, max_tokens: 8 });
      check(whole.usage.output_tokens > 0, whole);
      const count = await api.messages.countTokens({ model: MODEL, messages });
      check(count.input_tokens === whole.usage.input_tokens + (whole.usage.cache_read_input_tokens ?? 0), [count, whole.usage]);
    },
    stream: async () => {
      const how = { ...about, max_tokens: 8, temperature: 0 };
      const whole = await api.messages.create(how);
      const last = await api.messages.stream(how).finalMessage();
      check(JSON.stringify(last.content) === JSON.stringify(whole.content), [last.content, whole.content]);
    },
    tool: async () => {
      for (const tool_choice of [{ type: "any" }, { type: "tool", name: "weather" }]) {
        const how = { ...about, tools, tool_choice: { ...tool_choice, disable_parallel_tool_use: true } };
        for (const message of [await api.messages.create(how), await api.messages.stream(how).finalMessage()]) {
          const calls = message.content.filter((block) => block.type === "tool_use");
          check(calls.length === 1 && message.stop_reason === "tool_use", message);
          checkCity(calls[0].input);
        }
      }
    },
    schema: async () => {
      const message = await api.messages.create({ ...about, output_config: { format: { type: "json_schema", schema: PARAMETERS } } });
      checkCity(JSON.parse(message.content[0].text));
    },
    error: async () => {
      await fails(api.messages.create({ ...about, messages: [{ role: "user", content: TOO_LONG }] }), (error) => check(error.status === 400 && error.message.includes("prompt is too long"), String(error)));
      await fails(api.messages.create({ ...about, temperature: 9 }), (error) => check(error.status === 400 && error.message.includes("temperature"), String(error)));
    },
    cancel: async () => {
      const stream = api.messages.stream({ ...about, max_tokens: 1500 });
      for await (const event of stream) if (event.type === "content_block_delta") break;
      stream.abort();
      await waitUntilIdle();
    },
    picture: async () => {
      const shown = { type: "image", source: { type: "base64", media_type: "image/png", data: SCREEN } };
      const words = { type: "text", text: QUESTION };
      const turns = (content) => ({ model: MODEL, messages: [{ role: "user", content }] });
      const [text, both] = [await api.messages.countTokens(turns([words])), await api.messages.countTokens(turns([shown, words]))];
      check(both.input_tokens > text.input_tokens, [text, both]);
      const how = { ...turns([shown, words]), max_tokens: 8, temperature: 0 };
      const [whole, last] = [await api.messages.create(how), await api.messages.stream(how).finalMessage()];
      check(JSON.stringify(last.content) === JSON.stringify(whole.content), [last.content, whole.content]);
    },
  };
}

async function ollamaCells() {
  const { Ollama } = await load("ollama");
  const api = new Ollama({ host: url });
  const about = { model: MODEL, messages, options: { num_predict: 64 } };
  const tools = [{ type: "function", function: { name: "weather", description: "x", parameters: PARAMETERS } }];
  const short = { num_predict: 8, temperature: 0 };
  const texts = async (stream) => {
    let text = "";
    for await (const part of stream) text += part.message?.content ?? part.response;
    return text;
  };
  return {
    chat: async () => {
      const whole = await api.chat({ ...about, options: short });
      check(whole.done && whole.eval_count > 0 && whole.eval_duration > 0, whole);
      check((await api.generate({ model: MODEL, prompt: QUESTION, options: short })).eval_count > 0, "generate");
    },
    stream: async () => {
      const whole = await api.chat({ ...about, options: short });
      check((await texts(await api.chat({ ...about, options: short, stream: true }))) === whole.message.content, whole);
      const one = { model: MODEL, prompt: QUESTION, options: short };
      check((await texts(await api.generate({ ...one, stream: true }))) === (await api.generate(one)).response, "generate");
    },
    tool: async () => {
      const call = { function: { name: "weather", arguments: { city: "Rome" } } };
      const turns = [...messages, { role: "assistant", content: "", tool_calls: [call] }, { role: "tool", tool_name: "weather", content: "sunny" }];
      check((await api.chat({ ...about, messages: turns, tools })).prompt_eval_count > 0, "result");
      const parts = [];
      for await (const part of await api.chat({ ...about, tools, stream: true })) parts.push(...(part.message.tool_calls ?? []));
      for (const each of parts) check(each.function.name === "weather" && typeof each.function.arguments === "object", each);
    },
    schema: async () => {
      const whole = await api.chat({ ...about, format: PARAMETERS });
      checkCity(JSON.parse(whole.message.content));
      JSON.parse((await api.generate({ model: MODEL, prompt: QUESTION, format: PARAMETERS })).response);
    },
    error: async () => {
      await fails(api.chat({ ...about, options: { temperature: 9 } }), (error) => check(error.status_code === 400 && error.message.includes("options.temperature"), String(error)));
      await fails(api.chat({ ...about, model: "gpt-9" }), (error) => check(error.status_code === 404, String(error)));
      await fails(api.pull({ model: MODEL }), (error) => check(error.message.includes("/api/pull is not supported"), String(error)));
      await fails(api.embed({ model: MODEL, input: "x" }), (error) => check(error.message.includes("no vectors"), String(error)));
    },
    cancel: async () => {
      const stream = await api.chat({ ...about, options: { num_predict: 1500 }, stream: true });
      for await (const _ of stream) break;
      stream.abort();
      await waitUntilIdle();
    },
    picture: async () => {
      const turns = (images) => ({ ...about, messages: [{ role: "user", content: QUESTION, images }], options: short });
      const [text, both] = [await api.chat(turns([])), await api.chat(turns([SCREEN]))];
      check(both.prompt_eval_count > text.prompt_eval_count, [text, both]);
      check((await texts(await api.chat({ ...turns([Buffer.from(SCREEN, "base64")]), stream: true }))) === both.message.content, both);
      check((await api.generate({ model: MODEL, prompt: QUESTION, images: [SCREEN], options: short })).response === both.message.content, "generate");
    },
    lists: async () => {
      check((await api.list()).models[0].name === MODEL + ":latest", "list");
      check((await api.ps()).models[0].context_length > 0, "ps");
      check((await api.show({ model: MODEL })).capabilities.includes("completion"), "show");
      check((await api.version()).version, "version");
    },
  };
}

async function aiCells() {
  const ai = await load("ai");
  const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
  const provider = createOpenAICompatible({ name: "metronome", baseURL: url + "/v1", apiKey: "none", supportsStructuredOutputs: true });
  const model = provider(MODEL);
  const about = { model, prompt: QUESTION, maxRetries: 0, maxOutputTokens: 64 };
  const weather = ai.tool({ description: "x", inputSchema: ai.jsonSchema(PARAMETERS) });
  return {
    chat: async () => {
      const whole = await ai.generateText({ ...about, maxOutputTokens: 8 });
      check(whole.usage.outputTokens > 0, whole.usage);
    },
    stream: async () => {
      const how = { ...about, maxOutputTokens: 8, temperature: 0 };
      const whole = await ai.generateText(how);
      let text = "";
      for await (const part of ai.streamText(how).textStream) text += part;
      check(text === whole.text, [text, whole.text]);
    },
    tool: async () => {
      for (const toolChoice of ["required", { type: "tool", toolName: "weather" }]) {
        const how = { ...about, tools: { weather }, toolChoice };
        const whole = await ai.generateText(how);
        checkCity(whole.toolCalls[0].input);
        checkCity((await ai.streamText(how).toolCalls)[0].input);
      }
    },
    schema: async () => {
      const { object } = await ai.generateObject({ ...about, schema: ai.jsonSchema(PARAMETERS) });
      checkCity(object);
      const stream = ai.streamObject({ ...about, schema: ai.jsonSchema(PARAMETERS) });
      for await (const _ of stream.partialObjectStream);
      checkCity(await stream.object);
    },
    error: async () => {
      await fails(ai.generateText({ ...about, prompt: TOO_LONG }), (error) => check(error.statusCode === 400 && error.message.includes("context length"), String(error)));
    },
    cancel: async () => {
      const controller = new AbortController();
      const stream = ai.streamText({ ...about, maxOutputTokens: 1500, abortSignal: controller.signal });
      for await (const _ of stream.textStream) break;
      controller.abort();
      await waitUntilIdle();
    },
    picture: async () => {
      const turns = (content) => ({ model, maxRetries: 0, maxOutputTokens: 8, temperature: 0, messages: [{ role: "user", content }] });
      const words = { type: "text", text: QUESTION };
      const shown = { type: "image", image: Buffer.from(SCREEN, "base64"), mediaType: "image/png" };
      const [text, both] = [await ai.generateText(turns([words])), await ai.generateText(turns([shown, words]))];
      check(both.usage.inputTokens > text.usage.inputTokens, [text.usage, both.usage]);
    },
  };
}

const cells = await { openai: openaiCells, anthropic: anthropicCells, ollama: ollamaCells, ai: aiCells }[client]();
for (const [cell, use] of Object.entries(cells)) {
  if ((cell === "picture") !== ("SEEING" in process.env)) continue;
  let result = "right", why = "";
  try {
    await use();
  } catch (error) {
    [result, why] = ["WRONG", String(error?.stack ?? error).slice(0, 3000)];
  }
  console.log(JSON.stringify({ cell, result, why }));
}
process.exit(0);
