"""What tests share. Index:

Schedulers and KV
  simulate: A scheduler run against the digest worker, with every check on. Shared by several
      tests.
  fakes: Stand-ins that do exactly what a test says: a core without a model, a clock without
      time.
  faulty_policies: policies with one fault each, which `metronome verify` has to find
  stretched: Random engines and workloads on a virtual clock, run step by step and with stretches:
      two traces that must be equal to the last bit.
  timed: Runs on a clock of their own, for tests of what a policy prefers.
  lab_policies: Policies that experiments are tried with, by dotted path: other processes must
      find them.
  holders: Requests as the KV manager sees them, without a scheduler.
  data_plane: Fake data planes: what workers do with the parts of a plan, and what goes wrong if
      one is wrong.
  words: A tokenizer with a word for each token of the digest worker, so that its answers are
      texts.

The house
  house: Rules that are counted and shown at the end of a run, and fail nothing.

Time
  patience: How long tests wait.
  permissions: children that are bound by permissions, though they are root's

A core in a process, and its clients
  spawned: Cores without a model that a spawned process can build: everything here is importable
      there.
  scripted: a logits processor by which a model writes what a test says
  served: A server in a process of its own, as users start it.
  openai_events: Streamed events as they are on the wire, for checks by the types of clients.
  api_types: Bodies of requests from the parameter types of clients, null tried for each.
  chat_templates: Chat templates that write tool calls and thinking as families of models do.
  turn_templates: Chat templates that refuse or lose turns as families of models do.
  raw_http: Bytes to a server and what it says to them, where no client would send such bytes.
  schema_makers: Random schemas, and values near what they allow.
  schema_fuzz: schemathesis over the document of a running server, in a process of its own.
  core_clients: Every kind of client of a core, for tests that hold for all.
  live_core: A core in a process of its own, sized at will and looked at from outside.
  gated: A core whose steps a test lets through one by one.
  streams: Many streams at once, each checked token by token: nothing lost, doubled or out of
      order.
  forking: Cores whose processes are hard to end, and scripts of parents that are killed or
      fork.
  hostile: Those who say anything to a core: damaged messages, out of turn, and bytes that are
      none.
  kv_subscriber: A listener of cache events that misses none: what a router does with them.
  fake_router: The socket of a core's clients, without one.
  wire_frames: One of every message of the wire, their recorded bytes, and bytes that are none.
  wire_samples: Good messages to damage, by the union of messages that one reader knows.
  plan_socket: A worker behind a socket: plans go there and results come back as bytes, nothing
      else is shared.

Who dies, and what becomes of the others
  kill_cells: One fault in one process of an engine in one phase, and what the others must do
      about it.
  kill_actor: A process that uses a core and is then killed, stopped or led astray.
  kill_server: A server with streams, whose core or which itself dies or is stopped.
  deadly_program: The program of a text process, with inputs that kill it, hang it, or make it
      talk rubbish.
  poison: Requests that nobody should send, as they come over the wire, and what must become of
      each.
  one_bad: Twelve requests of a model that adds up its tokens; the sixth has a token that it
      cannot bear.

Text processes
  pooled: Sessions with text processes on scripted cores, for tests of what becomes of them.

Models, kernels, devices
  sum_model: A model that says the sum of all tokens, and the worker's step around it on any
      platform.
  sampling: A sampler and the tables of the worker that would call it, for tests.
  watched: An engine that shows the logits of every position, of texts that its requests must
      follow.
  precision: How far logits are from those of float32: the engine's, and transformers' in bfloat16.
  company: Requests answered alone and in random company: batches, chunks, cache states,
      preemption, drafts.
  fingerprint: What one fresh process computes for some requests, to the last bit.
  paged_cache: A paged cache whose blocks lie scattered, and where NaN is what no sequence owns.
  triton_interpreter: Triton kernels on the CPU: Triton's interpreter, with 16 and 8 bit floats
      as devices round them.
  compile_keys: What a GPU would compile, by Triton's own keys: the GPU's worker driven where
      nothing is compiled and no kernel runs.
  lent_to_gpu: Triton kernels given tensors on the CPU, computed by a GPU: what an interpreter
      is held to, a device is held to.
  fake_cuda: A made-up `torch.cuda` under the real platform, runner and kernels: what only a
      device does.
  fake_calls: Its calls of torch: operations, and what never becomes one.
  fake_graphs: Its streams, events and graphs: what orders work, and what repeats it.
  fake_nccl: Its group of ranks, each on a made-up device in a process of its own.
  device_memory: Its memory: who touched which bytes when, and what is freed is handed out again.
  made_quantized: Random quantised matrices of every kind that files hold.
  made_tokenizers: Small tokenizers of the kinds that models ship with, made on the spot, as
      model directories.
  fake_hub: A small hub on loopback: as much of the protocol as huggingface_hub speaks to fetch
      a model.

Of all tests
  source_tree: Reads the project's own source as syntax trees: imports, sizes, signatures.
  pairwise: Few cases in which every two values of two factors meet at least once.
"""
