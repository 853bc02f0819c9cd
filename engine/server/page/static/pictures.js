// Pictures of messages: read from files, checked, shown, and removed again before they are sent.

import { announce, button, el, setText } from "./dom.js";
import * as gallery from "./gallery.js";
import { count } from "./words.js";

const NAME_CHARS = 80;
const BODY_CHARS = 1 << 16; // of a request, for all but its pictures
const MEGA = 1 << 20;
// By the first bytes: names and types of files may be wrong.
const KINDS = [
  ["PNG", "image/png", /^\x89PNG\r\n\x1a\n/],
  ["JPEG", "image/jpeg", /^\xff\xd8\xff/],
  ["GIF", "image/gif", /^GIF8[79]a/],
  ["WEBP", "image/webp", /^RIFF[^]{4}WEBP/],
  ["BMP", "image/bmp", /^BM/],
];

/** The pictures of the next message, with what adds them: a button, pasting and dropping. */
export class Tray {
  /** before(): pictures of the messages that are sent along. */
  constructor(label, before) {
    this.pictures = []; // each with id, name and chars, the length of its data URL
    this._before = before;
    this._limits = null;
    this._reading = Promise.resolve();
    this._numReading = 0; // calls of `add` that are not over
    this._thumbs = el("ul", { class: "thumbs", "aria-label": label });
    this._problem = el("p", { class: "problem", role: "alert" });
    this._files = el("input", { type: "file", multiple: true, hidden: true, "aria-label": "Picture files" });
    this._files.addEventListener("change", () => {
      this.add([...this._files.files]);
      this._files.value = "";
    });
    this.button = button("Pictures", () => this._files.click(), { "aria-label": "Add pictures", title: "Pictures can also be pasted and dropped" });
    this.element = el("div", { class: "tray" }, this._thumbs, this._problem, this._files);
    this.use(null);
    this._draw();
  }

  /** limits: those of the model's pictures; null: it reads none. */
  use(limits) {
    this._limits = limits;
    this.button.hidden = !limits;
    if (limits) this._files.setAttribute("accept", this._kinds().map(([, type]) => type).join());
  }

  /** Take what is pasted into an element, or dropped on it. */
  listen(place) {
    place.addEventListener("paste", (event) => {
      // Programs that copy texts add pictures of them.
      if (!event.clipboardData.files.length || event.clipboardData.getData("text/plain")) return;
      this._take(event, event.clipboardData);
    });
    const mark = (event, isOver) => {
      if (!this._limits || !event.dataTransfer.types.includes("Files")) return;
      event.preventDefault();
      event.stopPropagation();
      place.classList.toggle("dropping", isOver);
    };
    place.addEventListener("dragover", (event) => mark(event, true));
    place.addEventListener("dragleave", (event) => mark(event, false));
    place.addEventListener("drop", (event) => {
      mark(event, false);
      if (event.dataTransfer.files.length) this._take(event, event.dataTransfer);
    });
  }

  set(pictures) {
    this.pictures = [...pictures];
    setText(this._problem, "");
    this._draw();
  }

  /** Wait for files that are being read. Returns whether all of them were added. */
  async isReady() {
    if (!this._numReading) return true;
    await this._reading;
    return !this._problem.textContent;
  }

  /** Remove the pictures and return them. */
  take() {
    const { pictures } = this;
    this.set([]);
    return pictures;
  }

  /** Add files, or say why that is not possible. */
  add(files) {
    setText(this._problem, "");
    this._numReading += 1;
    this._reading = this._reading.then(async () => {
      const problems = [];
      for (const file of files) {
        const problem = await this._addOne(file).catch(() => `${nameOf(file)} cannot be read.`);
        if (problem) problems.push(problem);
      }
      this._numReading -= 1;
      setText(this._problem, problems.join(" "));
      this._draw();
    });
    return this._reading;
  }

  _take(event, data) {
    if (!this._limits) return;
    event.preventDefault();
    event.stopPropagation();
    this.add([...data.files]);
  }

  _kinds() {
    return KINDS.filter(([name]) => this._limits.formats.includes(name));
  }

  /** Add a file. Returns why it cannot be added, or "". */
  async _addOne(file) {
    const { most_bytes: mostBytes, most_pixels: mostPixels, most_pictures: most, most_chars: mostChars } = this._limits;
    const name = nameOf(file);
    const all = [...this._before(), ...this.pictures];
    if (most !== null && all.length >= most) return `${name} was not added: a conversation can have ${count(most)} pictures. Remove one, or begin a new conversation.`;
    const left = mostChars - BODY_CHARS - all.reduce((sum, each) => sum + each.chars, 0);
    const room = Math.min(mostBytes, Math.floor(left / 4) * 3);
    if (file.size > room) {
      const together = room < mostBytes && all.length ? " together with the pictures before it" : "";
      return `${name} has ${megabytes(file.size)}, and the server takes ${megabytes(Math.max(0, room))}${together}. Shrink it.`;
    }
    const head = String.fromCharCode(...new Uint8Array(await file.slice(0, 12).arrayBuffer()));
    const kind = this._kinds().find(([, , begin]) => begin.test(head));
    if (!kind) return `${name} was not added: the server takes ${this._limits.formats.join(", ")}. Convert it.`;
    const url = await dataUrl(file.slice(0, file.size, kind[1]));
    const [width, height] = await sizeOf(url);
    if (width * height > mostPixels) return `${name} has ${count(width)} × ${count(height)} pixels, and the server takes ${count(mostPixels)}. Shrink it.`;
    this.pictures.push({ id: gallery.hold(url), name, chars: url.length });
    announce(`${name} was added.`);
    return "";
  }

  _remove(picture) {
    const place = this.pictures.indexOf(picture);
    this.pictures.splice(place, 1);
    if (!this._before().some(({ id }) => id === picture.id)) gallery.drop(picture.id);
    setText(this._problem, "");
    this._draw();
    announce(`${picture.name} was removed.`);
    const buttons = this._thumbs.querySelectorAll("button");
    (buttons[Math.min(place, buttons.length - 1)] ?? this.button).focus();
  }

  _draw() {
    this._thumbs.hidden = !this.pictures.length;
    this._thumbs.replaceChildren(
      ...this.pictures.map((picture) => {
        const remove = button("Remove", () => this._remove(picture), { class: "small", "aria-label": `Remove ${picture.name}` });
        return el("li", {}, pictureView(picture), el("span", { class: "name", title: picture.name }, picture.name), remove);
      }),
    );
  }
}

/** The pictures of a message; null if it has none. */
export function picturesView(pictures) {
  if (!pictures?.length) return null;
  return el("ul", { class: "pictures", "aria-label": "Pictures" }, pictures.map((picture) => el("li", {}, pictureView(picture))));
}

function pictureView(picture) {
  const image = el("img", { alt: picture.name });
  gallery.urlOf(picture.id).then((url) => {
    if (url) image.setAttribute("src", url);
    else image.replaceWith(el("span", { class: "gone" }, `${picture.name} is no longer kept in this browser`));
  });
  return image;
}

function nameOf(file) {
  return file.name.slice(0, NAME_CHARS) || "Picture";
}

function megabytes(bytes) {
  return bytes < MEGA / 10 ? `${count(bytes)} bytes` : `${(bytes / MEGA).toFixed(1)} MB`;
}

function dataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}

/** Width and height of a picture. Throws if the browser cannot decode it. */
async function sizeOf(url) {
  const image = new Image();
  image.src = url;
  await image.decode();
  return [image.naturalWidth, image.naturalHeight];
}
