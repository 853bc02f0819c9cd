# ruff: noqa: E501, RUF001  (templates; DeepSeek's markers have a vertical line of their own)
"""Chat templates for tests that refuse or lose turns in the manner of model families.

Short, and written for the tests: each has the checks and the omissions of its family, not its
markers' exact spelling nor its default texts.
"""

from __future__ import annotations

ALTERNATE = (
    "{% if (m.role == 'user') != (ns.n % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}{% set ns.n = ns.n + 1 %}"
)
GEMMA_2 = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% set ns = namespace(n=0) %}{% for m in messages %}"
    + ALTERNATE
    + "<start_of_turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
GEMMA_3 = (
    "{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% set ns = namespace(n=0) %}{% for m in rest %}" + ALTERNATE + "<start_of_turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ first if loop.first else '' }}"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# What most of Mistral's templates share: turns alternate, calls and their results not counted.
MISTRAL_HEAD = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% set ns = namespace(n=0) %}{% for m in rest %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    + ALTERNATE
    + "{% endif %}{% endfor %}<s>"
)
MISTRAL_V3 = (
    MISTRAL_HEAD + "{% for m in rest %}{% if m.role == 'user' %}"
    "{% if tools and loop.last %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {{ system + '\n\n' if loop.first and system is defined else '' }}{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "{{ c.function | tojson }}{% endfor %}]</s>"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported, with the exception "
    "of an initial optional system message!') }}{% endif %}{% endfor %}"
)
MAGISTRAL = (
    MISTRAL_HEAD
    + "{% if system is defined %}[SYSTEM_PROMPT]{{ system }}[/SYSTEM_PROMPT]{% endif %}"
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in rest %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %}{% if not m.content and not m.tool_calls %}"
    "{{ raise_exception('Assistant message must have a string or calls') }}{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[ARGS]"
    "{{ c.function.arguments | tojson }}{% endfor %}</s>{% elif m.role == 'tool' %}"
    "[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% else %}"
    "{{ raise_exception('Only user, assistant and tool roles are supported') }}{% endif %}"
    "{% endfor %}"
)
LLAMA_31 = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "<|start_header_id|>system<|end_header_id|>\n\n{{ system }}<|eot_id|>"
    "{% if tools %}{% if messages | length == 0 %}"
    "{{ raise_exception('Cannot put tools in the first user message') }}{% endif %}"
    "{% set first = messages[0].content %}{% set messages = messages[1:] %}"
    "<|start_header_id|>user<|end_header_id|>\n\nRespond in the format "
    '{"name": function name, "parameters": dictionary}{% for t in tools %}{{ t | tojson }}{% endfor %}'
    "{{ first }}<|eot_id|>{% endif %}{% for m in messages %}{% if 'tool_calls' in m %}"
    "{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>"
    "{% elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n"
    "{{ m.content | tojson }}<|eot_id|>{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
QWEN_35 = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}{% endfor %}"
    "<tool_call><function=\n{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "<|im_end|>\n{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}"
    "<|im_end|>\n{% endif %}{% set ns = namespace(found=false) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.found = true %}{% endif %}{% endfor %}"
    "{% if not ns.found %}{{ raise_exception('No user query found in messages.') }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' %}{% if not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "{% elif m.role in ('user', 'assistant') %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}\n<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>{% endfor %}<|im_end|>\n{% elif m.role == 'tool' %}"
    "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n{% else %}"
    "{{ raise_exception('Unexpected message role.') }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and "
    "enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
DEEPSEEK_V3 = (
    "{% set ns = namespace(system='', is_tool=false) %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = ns.system + m.content + '\n\n' %}{% endif %}"
    "{% endfor %}{{ ns.system }}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.is_tool = false %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'assistant' and m.content is none %}{% set ns.is_tool = false %}"
    "<｜Assistant｜><｜tool▁calls▁begin｜>{% for c in m.tool_calls %}"
    "{{ '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.function.name + '\n```json\n' "
    "+ c.function.arguments + '\n```<｜tool▁call▁end｜>' }}{% endfor %}<｜tool▁calls▁end｜>"
    "{% elif m.role == 'assistant' %}{{ '<｜tool▁outputs▁end｜>' if ns.is_tool else '<｜Assistant｜>' }}"
    "{{ m.content }}<｜end▁of▁sentence｜>{% set ns.is_tool = false %}"
    "{% elif m.role == 'tool' %}{% set ns.is_tool = true %}<｜tool▁output▁begin｜>{{ m.content }}"
    "<｜tool▁output▁end｜>{% endif %}{% endfor %}"
    "{% if add_generation_prompt and not ns.is_tool %}<｜Assistant｜>{% endif %}"
)
DEEPSEEK_R1 = DEEPSEEK_V3.replace("ns.system + m.content + '\n\n'", "m.content")
GPT_OSS = (
    "<|start|>system<|message|>Reasoning: medium<|end|>{% if messages[0].role == 'system' %}"
    "{% set instructions = messages[0].content %}{% set rest = messages[1:] %}{% else %}"
    "{% set rest = messages %}{% endif %}{% if instructions or tools %}<|start|>developer<|message|>"
    "{{ instructions }}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}<|end|>{% endif %}"
    "{% set last = namespace(name=none) %}{% for m in rest %}{% if m.role == 'assistant' %}"
    "{% if 'tool_calls' in m %}{% if m.content and m.thinking %}{{ raise_exception("
    "'Cannot pass both content and thinking in an assistant message with tool calls!') }}"
    "{% elif m.content or m.thinking %}<|start|>assistant<|channel|>analysis<|message|>"
    "{{ m.content or m.thinking }}<|end|>{% endif %}{% set c = m.tool_calls[0].function %}"
    "<|start|>assistant to=functions.{{ c.name }}<|channel|>commentary json<|message|>"
    "{{ c.arguments | tojson }}<|call|>{% set last.name = c.name %}{% else %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% set last.name = none %}"
    "{% endif %}{% elif m.role == 'tool' %}{% if last.name is none %}{{ raise_exception("
    "'Message has tool role, but there was no previous assistant message with a tool call!') }}"
    "{% endif %}<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>"
    "{{ m.content | tojson }}<|end|>{% elif m.role == 'user' %}<|start|>user<|message|>"
    "{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
QWEN_25 = (
    "{% if messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n"
    "{% endif %}{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>"
    "<tool_call>{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}<|im_end|>\n{% elif m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content }}"
    '{% for c in m.tool_calls or [] %}\n<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "gemma-2": GEMMA_2,
    "gemma-3": GEMMA_3,
    "mistral-v3": MISTRAL_V3,
    "magistral": MAGISTRAL,
    "llama-3.1": LLAMA_31,
    "qwen-2.5": QWEN_25,
    "qwen-3.5": QWEN_35,
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-r1": DEEPSEEK_R1,
    "gpt-oss": GPT_OSS,
}
WITHOUT_TOOLS = ("gemma-2", "gemma-3")
"""They know no tools, so that calls and results come to them as texts."""
