"""The HTTP server: the APIs of OpenAI, Anthropic and Ollama over an ``AsyncLLMEngine``.

run          start uvicorn and the engine, and end them
app          the routes and the ASGI application
http         connections, request bodies, request ids, CORS and the OpenAPI document
keys         API keys, the admin key and the key file
limits       limits on what one request may contain
gate         refuse requests while the queue is full, before any work is done for them
drain        shut down: finish open requests and refuse new ones
readers      clients that do not read their responses

absent       drop fields of a body that have no effect
bodies       bodies of completions and chat completions, and their engine parameters
diagnosis    find the wrong field in a body
completions  POST /v1/completions
conversation messages of all APIs in one plain form
adapt        change a conversation into what the model's chat template accepts
dialogue     one chat generation: shared by chat, responses and messages
chat         POST /v1/chat/completions
responses    POST /v1/responses and stored responses (responses_body: its requests;
             responses_items: the conversation; responses_tools: kinds of tools)
messages     Anthropic's POST /v1/messages (messages_body: its requests)
ollama       Ollama's API: /api/chat and others
speech       parse the output of a chat model into thinking, text and tool calls
blocks       the blocks of an answer, for responses and messages
tokenize     POST /tokenize and /detokenize

answers      base classes of answers, complete or streamed
logprobs     log-probabilities in the APIs' forms
offsets      character offsets of tokens
direct       streams of one engine request, written where its outputs arrive
streams      server-sent events, and clients that disconnect
errors       errors in the APIs' forms
blame        field names in errors as the client's API spells them

operations   health, load and metrics, and the routes that need the admin key
traffic      open requests, and responses by status
metrics      GET /metrics for Prometheus
tracing      OpenTelemetry spans (an extra)
"""
