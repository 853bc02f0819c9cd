"""The HTTP server: OpenAI's API over an ``AsyncLLMEngine``.

app          routes, limits; errors as OpenAI words them
keys         who may ask, by keys that may change
operations   health and load, and what takes the admin key
traffic      what is under way, answers by status
metrics      what Prometheus reads
tracing      spans of OpenTelemetry, an extra
asked        what may be asked, as structs; what that means for the engine
completions  texts behind prompts
chat         answers to conversations
answers      what both are told, whole and in chunks
streams      server-sent events, and who has left
run          uvicorn, and the engine behind it
"""
