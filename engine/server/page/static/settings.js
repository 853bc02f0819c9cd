// The panel of settings: model, system text, sampling, tools and schema of a conversation.

import { button, el, setText } from "./dom.js";

export const NUMBERS = [
  { name: "temperature", label: "Temperature", step: 0.05, min: 0, help: "0: always the likeliest token" },
  { name: "top_p", label: "Top p", step: 0.01, min: 0, max: 1, help: "Only the likeliest tokens of this share" },
  { name: "top_k", label: "Top k", step: 1, min: 0, help: "Only this many of the likeliest tokens" },
  { name: "min_p", label: "Min p", step: 0.01, min: 0, max: 1, help: "No token below this share of the likeliest" },
  { name: "repetition_penalty", label: "Repetition penalty", step: 0.05, min: 0, help: "Above 1: fewer repeats" },
  { name: "max_tokens", label: "Most tokens", step: 1, min: 1, help: "Length of an answer" },
  { name: "seed", label: "Seed", step: 1, help: "The same seed gives the same answer" },
];
const DEFAULTS = { temperature: 1, top_p: 1, top_k: "off", min_p: 0, repetition_penalty: 1, max_tokens: "no limit", seed: "random" };

const TOOL_EXAMPLE = [
  {
    name: "get_weather",
    description: "The weather in a city now",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
];
const SCHEMA_EXAMPLE = {
  type: "object",
  properties: { name: { type: "string" }, age: { type: "integer" } },
  required: ["name", "age"],
  additionalProperties: false,
};

export class Settings {
  /** onChange(name, value): a setting of the open conversation has a new value; "" means none. */
  constructor(root, onChange) {
    this._root = root;
    this._onChange = onChange;
    this._fields = {};
    this._model = null;
  }

  /** Build the fields for a model, the answer of `/page/model`. */
  build(model) {
    this._model = model;
    const makers = model.sampling ?? {};
    const hasMakers = Object.keys(makers).length > 0;
    const models = el("select", { id: "set-model" }, model.models.map((name) => el("option", { value: name }, name)));
    const system = el("textarea", { id: "set-system", rows: "3", placeholder: "You are a helpful assistant." });
    const groups = [
      group("Model", this._field("model", models, "Model")),
      group("System text", this._field("system", system, "System text", { hideLabel: true })),
    ];
    if (model.thinking) groups.push(group("Thinking", this._thinking()));
    groups.push(
      group(
        "Sampling",
        el("p", { class: "hint", text: hasMakers ? "Filled in: what the model's maker recommends." : "Empty fields have the server's defaults." }),
        el("div", { class: "numbers" }, NUMBERS.map((about) => this._number(about, makers[about.name]))),
        this._stop(),
        button("Reset sampling", () => this._reset(), { class: "small" }),
      ),
    );
    if (model.tools !== false) groups.push(this._tools());
    groups.push(this._schema());
    this._root.replaceChildren(...groups);
  }

  /** Show the values of a conversation's settings. */
  show(settings) {
    if (!this._model) return;
    for (const [name, field] of Object.entries(this._fields)) {
      const makers = this._model.sampling?.[name];
      const value = settings[name] ?? makers ?? "";
      field.value = name === "model" ? this._known(value) : String(value);
      this._check(name, field);
    }
    this._openUsed(settings);
  }

  focus() {
    this._root.querySelector("select, textarea, input")?.focus();
  }

  _known(name) {
    return this._model.models.includes(name) ? name : this._model.models[0];
  }

  _field(name, field, label, { hideLabel = false, help = "" } = {}) {
    this._fields[name] = field;
    field.addEventListener("input", () => this._changed(name, field));
    if (help) field.setAttribute("aria-describedby", `help-${field.id}`);
    return el(
      "div",
      { class: "field" },
      el("label", { for: field.id, class: hideLabel ? "unseen" : null }, label),
      field,
      help ? el("span", { class: "hint", id: `help-${field.id}` }, help) : null,
    );
  }

  _number({ name, label, help, step, min, max }, makers) {
    const props = { id: `set-${name}`, type: "number", inputmode: "decimal", step, min, max };
    const input = el("input", { ...props, placeholder: makers === undefined ? DEFAULTS[name] : String(makers) });
    return this._field(name, input, label, { help });
  }

  _stop() {
    const field = el("textarea", { id: "set-stop", rows: "1", placeholder: "one per line" });
    return this._field("stop", field, "Stop texts");
  }

  _thinking() {
    const choices = [["", "As the model does by itself"], ["on", "Think first"], ["off", "Answer at once"]];
    const field = el("select", { id: "set-thinking" }, choices.map(([value, text]) => el("option", { value }, text)));
    return this._field("thinking", field, "Thinking", { hideLabel: true });
  }

  _tools() {
    const tools = el("textarea", { id: "set-tools", rows: "6", spellcheck: "false", class: "mono", placeholder: "JSON: a list of functions" });
    const choices = ["auto", "required", "none"];
    const choice = el("select", { id: "set-choice" }, choices.map((name) => el("option", { value: name }, name)));
    this._problems = { ...this._problems, tools: el("p", { class: "problem", role: "status" }) };
    return folded(
      "Tools",
      "tools",
      el("p", { class: "hint", text: "When the model calls one, you type its result by hand." }),
      this._field("tools", tools, "Functions"),
      this._problems.tools,
      this._field("tool_choice", choice, "Tool choice"),
      button("Insert an example", () => this._insert("tools", TOOL_EXAMPLE), { class: "small" }),
    );
  }

  _schema() {
    const schema = el("textarea", { id: "set-schema", rows: "6", spellcheck: "false", class: "mono", placeholder: "A JSON schema" });
    this._problems = { ...this._problems, schema: el("p", { class: "problem", role: "status" }) };
    return folded(
      "Schema",
      "schema",
      el("p", { class: "hint", text: "The answer can only be JSON that fits this schema." }),
      this._field("schema", schema, "JSON schema"),
      this._problems.schema,
      button("Insert an example", () => this._insert("schema", SCHEMA_EXAMPLE), { class: "small" }),
    );
  }

  _insert(name, example) {
    const field = this._fields[name];
    field.value = JSON.stringify(example, null, 2);
    this._changed(name, field);
    field.focus();
  }

  _reset() {
    for (const { name } of NUMBERS) this._onChange(name, "");
    this._onChange("stop", "");
    for (const { name } of NUMBERS) this._fields[name].value = this._model.sampling?.[name] ?? "";
    this._fields.stop.value = "";
  }

  _changed(name, field) {
    const makers = this._model.sampling?.[name];
    this._onChange(name, makers !== undefined && field.value === String(makers) ? "" : field.value);
    this._check(name, field);
  }

  _check(name, field) {
    const problem = this._problems?.[name];
    if (!problem) return;
    let text = "";
    try {
      if (field.value.trim()) JSON.parse(field.value);
    } catch (error) {
      text = `Not valid JSON yet: ${error.message}`;
    }
    setText(problem, text);
    field.setAttribute("aria-invalid", String(Boolean(text)));
  }

  _openUsed(settings) {
    for (const details of this._root.querySelectorAll("details")) {
      if (settings[details.dataset.name]) details.open = true;
    }
  }
}

function group(title, ...children) {
  return el("section", { class: "group" }, el("h3", {}, title), ...children);
}

function folded(title, name, ...children) {
  return el("details", { class: "group", "data-name": name }, el("summary", {}, el("h3", {}, title)), ...children);
}
