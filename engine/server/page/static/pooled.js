// In place of the chat, for models that return vectors or scores: two texts compared by hand.

import { ask } from "./api.js";
import { el, setText } from "./dom.js";
import { count } from "./words.js";

export class Pooled {
  constructor(root, model) {
    const name = model.models[0];
    const first = el("textarea", { id: "text-1", rows: "4" }, "How do plants make sugar?");
    const second = el("textarea", { id: "text-2", rows: "4" }, "Photosynthesis converts sunlight into energy.");
    const result = el("p", { class: "score", "aria-live": "polite" });
    const form = el(
      "form",
      {},
      el("label", { for: "text-1" }, "First text, or the question"),
      first,
      el("label", { for: "text-2" }, "Second text, or the document"),
      second,
      el("p", {}, el("button", { class: "primary" }, "Compare")),
    );
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      setText(result, "Computing …");
      const begin = performance.now();
      try {
        const body = { model: name, text_1: first.value, text_2: second.value };
        const answer = await (await ask("/score", { body })).json();
        const { score } = answer.data[0];
        const tokens = answer.usage?.prompt_tokens ?? answer.usage?.total_tokens;
        const seconds = Math.round(performance.now() - begin);
        setText(result, `Score ${Number(score).toFixed(4)} · ${count(tokens)} tokens · ${seconds} ms`);
      } catch (error) {
        setText(result, `${error.text ?? error.message} ${error.advice ?? ""}`);
      }
    });
    root.replaceChildren(
      el("h2", {}, "This model returns vectors or scores, and writes no text"),
      el("p", {}, "Programs use it by ", el("code", {}, "/v1/embeddings"), ", ", el("code", {}, "/rerank"), ", ", el("code", {}, "/score"), " or ", el("code", {}, "/classify"), ". Here you can compare two texts with ", el("strong", {}, name), "."),
      form,
      result,
    );
  }
}
