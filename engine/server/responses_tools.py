"""Convert the tools of ``POST /v1/responses`` to the format of chat completions. Tools that the
server would have to run are left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from engine.server.errors import field_error

SERVER_TOOLS = (
    "apply_patch", "code_interpreter", "computer", "computer_use_preview", "file_search",
    "image_generation", "local_shell", "mcp", "programmatic_tool_calling", "shell", "tool_search",
    "web_search", "web_search_preview",
)  # fmt: skip
"""Types of tools that the server would have to run, or that only OpenAI's own models can call. They
may have a date at the end."""
BETWEEN = "__"  # separates a namespace from a name


class ToolName(NamedTuple):
    """A tool's name and namespace in the client's request."""

    name: str
    namespace: str | None = None


class ResponseTools:
    """The tools of one request."""

    def __init__(self, given: Iterable[Any]) -> None:
        """given: the tools of the request. Raises ``ApiError`` for a tool of an unknown type."""
        self.left_out: list[str] = []
        """Types of tools that the server would have to run."""
        self._names: dict[str, ToolName] = {}
        self.described = list(self._flat(given, None))
        """The other tools in the form of chat completions."""

    def called(self, name: str) -> ToolName:
        """The client's name and namespace of the tool that the model calls ``name``."""
        return self._names.get(name, ToolName(name))

    def _flat(self, given: Iterable[Any], namespace: str | None) -> Iterator[dict[str, Any]]:
        for tool in given:
            kind = tool.get("type") if isinstance(tool, dict) else tool
            if kind == "namespace" and namespace is None:
                yield from self._flat(tool.get("tools") or [], str(tool.get("name")))
            elif kind in ("function", "custom"):
                yield self._as_chat_has_it(tool, kind, namespace)
            elif is_server_tool(kind, SERVER_TOOLS):
                self.left_out.append(str(kind))
            else:
                raise field_error(
                    "tools",
                    f"has one of type {kind!r:.40}, which is not supported: use function, "
                    f"custom or namespace ({', '.join(SERVER_TOOLS)} are left out)",
                )

    def _as_chat_has_it(
        self, tool: dict[str, Any], kind: str, namespace: str | None
    ) -> dict[str, Any]:
        left_out = ("type", "defer_loading", "allowed_callers", "output_schema", "async")
        about = {k: v for k, v in tool.items() if k not in left_out and v is not None}
        if namespace is not None and isinstance(about.get("name"), str):
            flat = flat_name(about["name"], namespace)
            self._names[flat] = ToolName(about["name"], namespace)
            about["name"] = flat
        return {"type": kind, kind: about}


def flat_name(name: Any, namespace: Any) -> Any:
    """A tool's name for the model, which includes the namespace, if there is one."""
    return f"{namespace.removesuffix(BETWEEN)}{BETWEEN}{name}" if namespace else name


def is_server_tool(kind: Any, known: tuple[str, ...]) -> bool:
    """Whether a tool's type is one of ``known``, with or without a date at its end."""
    if not isinstance(kind, str):
        return False
    return kind in known or kind.rstrip("_0123456789") in known


def tools_in(items: Any) -> list[Any]:
    """Tools that are defined in the input items of a request."""
    found: list[Any] = []
    for item in items if isinstance(items, list) else []:
        if isinstance(item, dict) and item.get("type") in (
            "additional_tools",
            "tool_search_output",
        ):
            found += item.get("tools") or []
    return found
