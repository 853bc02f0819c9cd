// Small helpers to build elements. Text becomes text nodes, never markup.

const HTML = document;
const SVG = "http://www.w3.org/2000/svg";

/**
 * Create an element. `props`: attributes; `class`, `text` and `on` (event: listener) are special.
 * Children may be nodes, strings, null or arrays of these.
 */
export function el(tag, props = {}, ...children) {
  return filled(HTML.createElement(tag), props, children);
}

/** Create an SVG element, in the same way. */
export function svg(tag, props = {}, ...children) {
  return filled(HTML.createElementNS(SVG, tag), props, children);
}

function filled(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    } else if (name === "text") {
      element.textContent = value;
    } else if (name === "style" || name === "srcdoc" || name.startsWith("on")) {
      throw new Error(`el() sets no ${name}`);
    } else {
      element.setAttribute(name, value === true ? "" : String(value));
    }
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

export function byId(id) {
  return HTML.getElementById(id);
}

/** A button with a text. */
export function button(text, listener, props = {}) {
  return el("button", { type: "button", ...props, on: { click: listener } }, text);
}

/** Say something to screen readers, politely. */
export function announce(text) {
  byId("announcer").textContent = text;
}

/** Set a text only where it changes, so that selections and screen readers are left alone. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export async function copyText(text, source) {
  const before = source.textContent;
  try {
    await navigator.clipboard.writeText(text);
    source.textContent = "Copied";
  } catch {
    source.textContent = "Copying is not allowed here";
  }
  setTimeout(() => (source.textContent = before), 1500);
}
