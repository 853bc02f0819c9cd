"""The HTTP server: OpenAI's API over an ``AsyncLLMEngine``.

app          routes, keys, limits; errors as OpenAI words them
asked        what may be asked, as structs; what that means for the engine
limits       how much one request may ask for
completions  texts behind prompts
chat         answers to conversations
tokenize     texts to token ids and back
answers      what both are told, whole and in chunks
logprobs     log-probabilities as clients read them
streams      server-sent events, and who has left
http         what comes before a route: connections, bodies, names of requests, the document
run          uvicorn, and the engine behind it
"""
