"""What a client's own types say of streamed events."""

from __future__ import annotations

import json
import urllib.request
from typing import Any


def events_of(url: str, body: dict[str, Any], **headers: str) -> list[tuple[str, dict[str, Any]]]:
    """Names and data of the events that a server sends, as they are on the wire."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json", **headers}
    )
    with urllib.request.urlopen(request) as answer:
        text = answer.read().decode()
    events = []
    for block in text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        if fields["data"] != "[DONE]":
            events.append((fields.get("event", ""), json.loads(fields["data"])))
    return events
