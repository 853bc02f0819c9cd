// Schemas as zod writes them: `z.toJSONSchema` of zod 4 for two drafts and for both directions, and
// `zod-to-json-schema` for zod 3. Prints one line of JSON for each, which is kept in zod.jsonl:
//
//     npm install zod@4.6.7 zod3@npm:zod@3.25.76 zod-to-json-schema@3.25.2
//     node zod_schemas.mjs > zod.jsonl

import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

// Packages are those of the folder where the script is called, wherever it lies itself.
const require = createRequire(pathToFileURL(process.cwd() + "/"));
const z4 = require("zod");
const z3 = require("zod3");
const { zodToJsonSchema } = require("zod-to-json-schema");

// What both versions know.
const common = (z) => {
  const address = z.object({ street: z.string().max(40), zip: z.string().regex(/^\d{5}(-\d{4})?$/) });
  const cat = z.object({ kind: z.literal("cat"), lives: z.number().int().min(1).max(9) });
  const dog = z.object({ kind: z.literal("dog"), tricks: z.set(z.enum(["sit", "roll"])).optional() });
  const plain = z.object({ kind: z.literal("dog"), name: z.string() });
  const tree = z.object({ value: z.number(), children: z.lazy(() => z.array(tree)) });
  const list = z.object({ head: z.number().int(), tail: z.lazy(() => list.nullable()) });
  return {
    strings: z.object({ short: z.string().min(2).max(5), starts: z.string().startsWith("ab"),
      ends: z.string().endsWith("yz"), has: z.string().includes("-") }),
    formats: z.object({ mail: z.string().email(), id: z.string().uuid(), when: z.string().datetime(),
      link: z.string().url() }),
    day: z.object({ day: z.string().date(), at: z.string().time(), lasting: z.string().duration() }),
    numbers: z.object({ whole: z.number().int(), positive: z.number().positive(), step: z.number().multipleOf(0.25).min(0).max(4),
      below: z.number().lt(10), even: z.number().int().multipleOf(2) }),
    literals: z.object({ one: z.literal("one"), two: z.literal(2), three: z.literal(true), none: z.null() }),
    enums: z.object({ colour: z.enum(["red", "green", "blue"]) }),
    unions: z.object({ value: z.union([z.string(), z.number(), z.boolean()]) }),
    discriminated: z.discriminatedUnion("kind", [cat, plain]),
    pets: z.object({ pets: z.array(z.discriminatedUnion("kind", [cat, plain])).min(1).max(3) }),
    optional: z.object({ a: z.string().optional(), b: z.number().nullable(), c: z.boolean().default(true) }),
    nested: z.object({ address: address, others: z.array(address).max(2) }),
    extended: address.extend({ country: z.string().length(2) }),
    picked: address.pick({ zip: true }).strict(),
    strict: z.object({ a: z.number(), b: z.string().optional() }).strict(),
    passthrough: z.object({ a: z.number() }).passthrough(),
    catchall: z.object({ a: z.string() }).catchall(z.number()),
    record: z.object({ by_name: z.record(z.string(), z.number()) }),
    recordOfEnum: z.record(z.enum(["a", "b"]), z.number()),
    recordByPattern: z.record(z.string().regex(/^[a-z]{1,3}$/), z.boolean()),
    tuple: z.object({ point: z.tuple([z.number(), z.number()]) }),
    tupleWithRest: z.object({ row: z.tuple([z.string()]).rest(z.number()) }),
    intersection: z.intersection(z.object({ a: z.number() }), z.object({ b: z.string() })),
    overlapping: z.intersection(z.object({ a: z.number().min(1), c: z.string() }), z.object({ a: z.number().max(9), d: z.boolean() })),
    recursive: tree,
    linked: list,
    arrays: z.object({ few: z.array(z.string()).min(1).max(3), two: z.array(z.number().int()).length(2), any: z.array(z.unknown()).max(2) }),
    described: z.object({ a: z.string().describe('Says "a"') }).describe("An object"),
    branded: z.object({ id: z.string().brand("Id"), n: z.number().readonly() }),
    any: z.object({ any: z.any(), unknown: z.unknown() }),
    regexes: z.object({ hex: z.string().regex(/^#[0-9a-f]{6}$/i), words: z.string().regex(/^\w+( \w+)*$/).max(30) }),
    withSet: z.object({ pet: dog, more: z.set(z.number().int()).max(4) }),
  };
};

const only4 = (z) => ({
  templates: z.object({ size: z.templateLiteral([z.number(), z.enum(["px", "em"])]) }),
  json: z.object({ payload: z.json() }),
  manyLiterals: z.object({ side: z.literal(["left", "right", 1]) }),
  kinds: z.object({ mail: z.email(), v4: z.uuidv4(), four: z.ipv4(), six: z.ipv6(), nano: z.nanoid(), base: z.base64(), cuid: z.cuid2(), ulid: z.ulid() }),
  iso: z.object({ day: z.iso.date(), at: z.iso.time(), when: z.iso.datetime({ offset: true }), lasting: z.iso.duration() }),
  int32: z.object({ small: z.int32(), unsigned: z.uint32(), real: z.float32() }),
  partialRecord: z.partialRecord(z.enum(["x", "y", "z"]), z.number().int()),
  looseRecord: z.object({ scores: z.record(z.string().min(2), z.int()) }),
  exclusive: z.xor([z.object({ a: z.number() }).strict(), z.object({ b: z.number() }).strict()]),
  cidr: z.object({ net: z.cidrv4(), mac: z.mac?.() ?? z.string(), jwt: z.string().lowercase() }),
  optionalTuple: z.object({ t: z.tuple([z.string(), z.number().optional()]) }),
  getters: z.object({ name: z.string(), get parent() { return z.lazy(() => z.object({ name: z.string() })).optional(); } }),
  email_list: z.object({ to: z.array(z.email()).min(1).max(2), pipe: z.string().pipe(z.enum(["a", "b"])) }),
});

const seen = new Set(); // schemas but for the draft that they name
const emit = (name, how, write) => {
  let schema;
  try {
    schema = write();
  } catch (error) {
    process.stderr.write(`${name}, ${how}: ${error.message}\n`);
    return;
  }
  const text = JSON.stringify({ ...schema, $schema: "" });
  // A draft that has only numbers here, for which zod-to-json-schema writes what draft 4 had.
  if (/"exclusiveM\w+":true/.test(text)) return;
  if (!seen.has(text)) console.log(JSON.stringify({ name, how, schema }));
  seen.add(text);
};

for (const [name, type] of Object.entries({ ...common(z4.z), ...only4(z4.z) })) {
  for (const target of ["draft-2020-12", "draft-7"]) {
    for (const io of ["output", "input"]) {
      emit(name, `zod 4, ${target}, ${io}`, () => z4.z.toJSONSchema(type, { target, io }));
    }
  }
}
for (const [name, type] of Object.entries(common(z3.z))) {
  for (const target of ["jsonSchema7", "jsonSchema2019-09"]) {
    emit(name, `zod-to-json-schema, ${target}`, () => zodToJsonSchema(type, { target }));
  }
}
