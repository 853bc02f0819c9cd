// Streams tokens from a running core, without ZeroMQ, msgpack or any package: Node.js 18 or later.
//
//     metronome core --model DIRECTORY          prints its address
//     node examples/wire-client.mjs ipc:///tmp/metronome-core-XXXX/core 1,2,3 [max_tokens]
//
// Prints one token id a line, as they come, and why the request ended. The messages are described
// in docs/internals/wire.md; below are the three layers under them, each as small as it can be.

import { readFileSync } from "node:fs";
import { connect } from "node:net";

// ---- msgpack: values to bytes and back

function head(type, length) {
  const buffer = Buffer.of(type, 0, 0, 0, 0);
  buffer.writeUInt32BE(length, 1);
  return buffer;
}

function number(value) {
  if (Number.isInteger(value) && value >= 0 && value < 128) return Buffer.of(value);
  const buffer = Buffer.alloc(9, Number.isInteger(value) ? 0xd3 : 0xcb);
  if (Number.isInteger(value)) buffer.writeBigInt64BE(BigInt(value), 1);
  else buffer.writeDoubleBE(value, 1);
  return buffer;
}

function pack(value) {
  if (value === null) return Buffer.of(0xc0);
  if (typeof value === "boolean") return Buffer.of(value ? 0xc3 : 0xc2);
  if (typeof value === "number") return number(value);
  if (typeof value === "string") {
    const text = Buffer.from(value);
    return Buffer.concat([head(0xdb, text.length), text]);
  }
  if (value instanceof Uint8Array) return Buffer.concat([head(0xc6, value.length), value]);
  if (Array.isArray(value)) {
    return Buffer.concat([head(0xdd, value.length), ...value.map(pack)]);
  }
  const pairs = Object.entries(value).flat();
  return Buffer.concat([head(0xdf, pairs.length / 2), ...pairs.map(pack)]);
}

function unpack(bytes) {
  let at = 0;
  const uint = (size) => ((at += size), bytes.readUIntBE(at - size, size));
  const int = (size) => ((at += size), bytes.readIntBE(at - size, size));
  const slice = (size) => ((at += size), bytes.subarray(at - size, at));
  const text = (size) => slice(size).toString();
  const array = (size) => Array.from({ length: size }, value);
  const map = (size) => new Map(Array.from({ length: size }, () => [value(), value()]));
  const readers = {
    0xc0: () => null, 0xc2: () => false, 0xc3: () => true,
    0xc4: () => slice(uint(1)), 0xc5: () => slice(uint(2)), 0xc6: () => slice(uint(4)),
    0xca: () => slice(4).readFloatBE(), 0xcb: () => slice(8).readDoubleBE(),
    0xcc: () => uint(1), 0xcd: () => uint(2), 0xce: () => uint(4),
    0xcf: () => Number(slice(8).readBigUInt64BE()), 0xd3: () => Number(slice(8).readBigInt64BE()),
    0xd0: () => int(1), 0xd1: () => int(2), 0xd2: () => int(4),
    0xd9: () => text(uint(1)), 0xda: () => text(uint(2)), 0xdb: () => text(uint(4)),
    0xdc: () => array(uint(2)), 0xdd: () => array(uint(4)),
    0xde: () => map(uint(2)), 0xdf: () => map(uint(4)),
  };
  function value() {
    const type = uint(1);
    if (type < 0x80) return type;
    if (type < 0x90) return map(type & 15);
    if (type < 0xa0) return array(type & 15);
    if (type < 0xc0) return text(type & 31);
    if (type >= 0xe0) return type - 256;
    if (!(type in readers)) throw new Error(`msgpack type ${type} is not part of the protocol`);
    return readers[type]();
  }
  return value();
}

// ---- ZMTP 3.0, the protocol of ZeroMQ: a greeting, a handshake without encryption, frames

const COMMAND = 4, LONG = 2, MORE = 1;

function frame(flags, body) {
  const isLong = body.length > 255;
  const start = Buffer.alloc(isLong ? 9 : 2);
  start[0] = flags | (isLong ? LONG : 0);
  if (isLong) start.writeBigUInt64BE(BigInt(body.length), 1);
  else start[1] = body.length;
  return Buffer.concat([start, body]);
}

function greeting() {
  const bytes = Buffer.alloc(64);
  bytes[0] = 0xff; // signature: ff, eight bytes, 7f
  bytes[9] = 0x7f;
  bytes[10] = 3; // version 3.0
  bytes.write("NULL", 12); // mechanism
  return bytes;
}

function ready() {
  const property = (name, value) => [[name.length], name, [0, 0, 0, value.length], value];
  const parts = [[5], "READY", ...property("Socket-Type", "DEALER"), ...property("Identity", "")];
  return frame(COMMAND, Buffer.concat(parts.map((part) => Buffer.from(part))));
}

// Calls `take` with each message that comes; the returned function sends one.
function dealer(path, take, lost) {
  const socket = connect(path);
  let rest = Buffer.alloc(0);
  let isGreeted = false;
  let waiting = []; // a message before the other side's READY would be taken for part of the handshake
  socket.write(Buffer.concat([greeting(), ready()]));
  socket.on("data", (bytes) => {
    rest = Buffer.concat([rest, bytes]);
    if (!isGreeted && rest.length >= 64) {
      isGreeted = true;
      rest = rest.subarray(64);
    }
    while (isGreeted && rest.length >= 2) {
      const isLong = rest[0] & LONG;
      const start = isLong ? 9 : 2;
      if (rest.length < start) return;
      const end = start + (isLong ? Number(rest.readBigUInt64BE(1)) : rest[1]);
      if (rest.length < end) return;
      const [flags, body] = [rest[0], rest.subarray(start, end)];
      rest = rest.subarray(end);
      if (flags & MORE) throw new Error("a message of this protocol is one frame");
      if (!(flags & COMMAND)) take(unpack(body));
      else if (waiting) {
        for (const bytes of waiting) socket.write(bytes);
        waiting = null; // READY came
      }
    }
  });
  socket.on("close", () => lost("the connection was lost"));
  socket.on("error", (error) => lost(error.message));
  const send = (bytes) => (waiting ? waiting.push(bytes) : socket.write(bytes));
  return { send: (message) => send(frame(0, pack(message))), end: () => socket.end() };
}

// ---- the conversation with the core

const [address, prompt = "1,2,3", maxTokens = "16"] = process.argv.slice(2);
if (!address?.startsWith("ipc://")) {
  console.error("usage: node wire-client.mjs ipc://DIRECTORY/core [token ids] [max_tokens]");
  process.exit(2);
}
const path = address.slice("ipc://".length);
const fail = (why) => {
  console.error(why);
  process.exit(1);
};
const core = dealer(path, take, fail);
core.send(["hello", 3, readFileSync(`${path}-token`), "wire-client.mjs"]);

function take([kind, ...fields]) {
  if (kind === "welcome") submit(fields);
  else if (kind === "submitted") for (const [, [name, why]] of fields[2]) fail(`${name}: ${why}`);
  else if (kind === "outputs") show(fields[0]);
  else if (kind === "fault" || kind === "dead") fail(`${kind}: ${fields[0]}`);
}

function submit([, , idPrefix, , , , eosTokenIds, , , time]) {
  const ids = prompt.split(",").map(Number);
  const params = { temperature: 0 };
  const request = ["add", `${idPrefix}1`, ids, params, 0, time, Number(maxTokens), eosTokenIds];
  core.send(["submit", 0, [request]]);
}

function show([, tokenIds, , , , finished = []]) {
  for (const token of tokenIds) console.log(token);
  core.send(["credit", 1]);
  for (const [, reason, , message = "", , , , , , code] of finished) {
    console.log(["finished:", reason, code && `(${code})`, message].filter(Boolean).join(" "));
    core.send(["bye"]);
    core.end();
    process.exit(reason === "error" ? 1 : 0);
  }
}
