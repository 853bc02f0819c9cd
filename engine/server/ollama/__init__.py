"""Ollama's API, for clients that speak no other: the same generation, in its form.

paths        its paths for generating, and what they do
bodies       bodies of its requests, and the chat completions that they mean
options      their field ``options``
turns        its messages
generation   prompts that are no conversation, and conversations that are cut to a context
answers      lines of JSON
details      what a model is made of, for lists of models
routes       the handlers
"""
