"""The HTTP server: OpenAI's API over an ``AsyncLLMEngine``.

app          routes, keys, limits; errors as OpenAI words them
asked        what may be asked, as structs; what that means for the engine
completions  texts behind prompts
chat         answers to conversations
answers      what both are told, whole and in chunks
streams      server-sent events, and who has left
plain        events that bring nothing but text, with no task woken for them
gate         a full queue refuses before any work
drain        the end: open requests go on to theirs
readers      those who do not read what they asked for
run          uvicorn, and the engine behind it
"""
