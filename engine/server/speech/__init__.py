"""Answers of models, taken apart: thinking, text and tool calls.

families          how families of models write them; which family a model is of
turns             how the answers of one model are read
answer            the answer of one sequence as events
events            what these are
markers           text in which markers are known by their tokens, not by their looks
source            text that comes in pieces, for readers that are generators
text_reading      answers in which thinking and calls stand between markers
harmony           answers of gpt-oss
calls             what readers of calls share
object_calls      calls as JSON objects
named_calls       calls of Mistral and DeepSeek
tagged_calls      calls of Qwen-Coder and GLM, and tagged_values
json_text         JSON as models write it, given on as valid JSON
template_reading  answers that the tokenizer's own template describes
tools             the tools of a request, and which of them must be called
generic           tools for chat templates that know none
enforced          which schemas of tools can be enforced
forms             grammars that make a model write what a request demands
"""
