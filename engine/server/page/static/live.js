// An answer that grows. Only its last block is rendered again when text arrives, and the less often
// the longer that takes, so that the whole costs time in proportion to the text.

import { blocksOf, codeBlock, rendered } from "./markdown.js";
import { el } from "./dom.js";

const LONG = 6000; // characters of a block that is cut while it grows
const SHARE = 8; // between two renderings pass at least this many times the seconds of one
const FENCE = /^ {0,3}(`{3,}|~{3,})/;

export class LiveMarkdown {
  /** onDrawn: called after each change of the element. */
  constructor(onDrawn = () => {}) {
    this._tail = el("div", { class: "tail" });
    this.element = el("div", { class: "prose" }, this._tail);
    this._onDrawn = onDrawn;
    this._text = "";
    this._done = 0; // characters whose blocks are final
    this._is_exact = true; // whether the blocks equal those of the whole text
    this._code = null; // the open block of code: its element, and how much of it is shown
    this._next = 0; // time before which nothing is drawn
    this._timer = 0;
  }

  /** Show `text`, of which the element shows a beginning. */
  grow(text) {
    this._text = text;
    if (this._timer) return;
    const wait = Math.max(this._next - performance.now(), 0);
    this._timer = setTimeout(() => {
      this._timer = 0;
      this._draw();
    }, Math.max(wait, 16));
  }

  /** Show the whole text in its final form. */
  finish(text) {
    clearTimeout(this._timer);
    this._timer = 0;
    this._text = text;
    this._draw();
    if (!this._is_exact) this.element.replaceChildren(rendered(text));
    this._onDrawn();
  }

  _draw() {
    const begin = performance.now();
    const rest = this._text.slice(this._done);
    const blocks = blocksOf(rest);
    const raw = blocks.reduce((sum, block) => sum + block.raw.length, 0);
    if (raw !== rest.length || blocks.some((block) => block.type === "def")) this._is_exact = false;
    let last = blocks.length - 1;
    while (last > 0 && blocks[last].type === "space") last -= 1;
    if (raw === rest.length && last > 0) {
      this._settle(blocks.slice(0, last).reduce((sum, block) => sum + block.raw.length, 0));
    }
    this._drawTail(blocks[Math.max(last, 0)]);
    this._next = performance.now() + SHARE * (performance.now() - begin);
    this._onDrawn();
  }

  /** Make the next `length` characters final. */
  _settle(length) {
    const text = this._text.slice(this._done, this._done + length);
    this._tail.before(rendered(text));
    this._done += length;
    this._code = null;
  }

  _drawTail(block) {
    const text = this._text.slice(this._done);
    if (block?.type === "code" && FENCE.test(text)) {
      this._drawCode(block.text.replace(/\n+$/, ""));
      return;
    }
    this._code = null;
    if (text.length > LONG) this._cut(block);
    this._tail.replaceChildren(rendered(this._text.slice(this._done)));
  }

  _drawCode(text) {
    // While a closing fence is incomplete it is part of the code, and vanishes when it is complete.
    if (this._code && text.startsWith(this._code.shown)) {
      this._code.append(text.slice(this._code.shown.length));
      this._code.shown = text;
      return;
    }
    this._code = { ...codeBlock(text), shown: text };
    this._tail.replaceChildren(this._code.element);
  }

  /** Settle the beginning of a long block at a place where this is hardly seen. */
  _cut(block) {
    let length = 0;
    if (block?.type === "list" && block.items.length > 1) {
      for (const item of block.items.slice(0, -1)) length += item.raw.length;
    } else if (block?.type === "paragraph") {
      length = Math.max(block.raw.lastIndexOf("\n"), block.raw.lastIndexOf(". ") + 1);
    }
    if (length > 0) {
      this._is_exact = false;
      this._settle(length);
    }
  }
}
