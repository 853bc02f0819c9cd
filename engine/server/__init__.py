"""The HTTP server: the APIs of OpenAI and Anthropic over an ``AsyncLLMEngine``.

run          uvicorn and the engine
app          the routes
http         what comes before a route: connections, bodies, names of requests, the document
keys         who may ask, by keys that may change
limits       how much one request may ask for
gate         a full queue refuses before any work
drain        the end: open requests go on to theirs
readers      clients that do not read their answers

absent       fields that ask for nothing
bodies       bodies of completions and chats as structs, and what they mean for the engine
diagnosis    what is wrong with a body
completions  texts that go on from prompts
conversation messages in one plain form, whichever API they came by
adapt        conversations as a model's chat template takes them
dialogue     a conversation that goes on by an answer: what the next three share
chat         chat completions
responses    OpenAI's newer form, and those that are stored (responses_body: its requests;
             responses_items: the conversation; responses_tools: kinds of tools)
messages     Anthropic's form (messages_body: its requests)
speech       what a model says, taken apart: thinking, text, tool calls
blocks       an answer as blocks in order, and answers made of them
tokenize     texts to token ids and back

answers      whole answers, and chunks of them
logprobs     log-probabilities as clients read them
offsets      where in a text its tokens begin
direct       streams of one request, written where its outputs arrive
streams      server-sent events, and who has left
errors       errors as clients read them
blame        fields as each API names them

operations   health and load, and what takes the admin key
traffic      what is under way, answers by status
metrics      what Prometheus reads
tracing      spans of OpenTelemetry, an extra
"""
