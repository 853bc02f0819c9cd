"""What a model says, taken apart: thinking, text and tool calls.

families   how families of models write them, as response templates; which family a model is of
markers    text in which markers are known by their tokens, not by their looks
turns      one sequence as events: some text, some thinking, a tool call
tools      the tools of a request, and which of them must be called
forms      grammars that make a model write what a request demands
"""
