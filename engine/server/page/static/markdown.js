// The one place where text becomes markup: Markdown, sanitised twice. Nothing in it loads anything.

import { Marked } from "./vendor/marked.js";
import DOMPurify from "./vendor/purify.js";
import { button, copyText, el } from "./dom.js";

const TAGS = (
  "p br hr h1 h2 h3 h4 h5 h6 ul ol li blockquote pre code em strong del a table thead tbody tr th td span"
).split(" ");
const RULES = {
  ALLOWED_TAGS: TAGS,
  ALLOWED_ATTR: ["href", "start", "align", "title"],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  ALLOWED_URI_REGEXP: /^https?:\/\//i,
  RETURN_DOM_FRAGMENT: true,
};

const marked = new Marked({
  gfm: true,
  renderer: {
    html: ({ text }) => escaped(text), // markup of models and users is shown as it was written
    image: ({ href, text }) => {
      const name = escaped(text || "image");
      return isWeb(href) ? `<a href="${escaped(href)}">${name} (image, not loaded)</a>` : `${name} (image, not loaded)`;
    },
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

function escaped(text) {
  const names = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
  return String(text).replace(/[&<>"']/g, (letter) => names[letter]);
}

function isWeb(address) {
  return /^https?:\/\//i.test(String(address));
}

/** The blocks of a Markdown text, each with its `type` and `raw` text. */
export function blocksOf(text) {
  return marked.lexer(text);
}

/** A Markdown text as a document fragment. */
export function rendered(text) {
  const fragment = DOMPurify.sanitize(marked.parse(text), RULES);
  for (const link of fragment.querySelectorAll("a")) {
    if (!isWeb(link.getAttribute("href"))) {
      link.replaceWith(...link.childNodes);
      continue;
    }
    link.setAttribute("rel", "noopener noreferrer nofollow");
    link.setAttribute("target", "_blank");
    link.setAttribute("referrerpolicy", "no-referrer");
  }
  for (const table of fragment.querySelectorAll("table")) {
    const frame = el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Table in the answer" });
    table.replaceWith(frame);
    frame.append(table);
  }
  for (const pre of fragment.querySelectorAll("pre")) pre.replaceWith(codeBlock(pre.textContent.replace(/\n+$/, "")).element);
  return fragment;
}

/** A block of code with a button that copies it; `append(text)` adds to its end. */
export function codeBlock(text) {
  const node = document.createTextNode(text);
  const code = el("code", {}, node);
  const copy = button("Copy", () => copyText(node.data, copy), { class: "small copy" });
  const pre = el("pre", { tabindex: "0", role: "region", "aria-label": "Code" }, code);
  return { element: el("div", { class: "code" }, copy, pre), append: (more) => node.appendData(more) };
}
