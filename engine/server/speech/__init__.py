"""Parse the output of chat models into thinking, text and tool calls, and enforce tool calls.

turns             the chat format of one model: chooses the parser of its answers
families          model families, and how they write thinking and tool calls
answer            the parsed answer of one sequence, as events
events            the events: text, thinking, and the parts of tool calls
markers           distinguish marker tokens from text that looks like them
source            streamed text for parsers that are generators
text_reading      parser of answers with thinking and calls between markers
harmony           parser of gpt-oss's answers
template_reading  parser of answers that the tokenizer's response template describes
calls             base class of the parsers of tool calls
object_calls      calls as JSON objects
named_calls       calls of Mistral and DeepSeek
tagged_calls      calls of Qwen-Coder and GLM (tagged_values: their arguments)
json_text         repair the JSON that models write while it is streamed
tools             the tools of a request, and which of them may or must be called
custom            tools whose input is plain text (lark_regex: their grammars)
generic           describe tools as text for chat templates without tools
enforced          which schemas of tools can be enforced
forms             grammars that enforce tool calls and formats of answers
"""
