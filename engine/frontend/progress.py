"""A progress bar over requests, with tokens a second, on terminals only."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from engine.messages.outputs import RequestOutput


class RequestProgress:
    """Counts finished requests. ``tokens_per_second`` of output is shown beside the bar."""

    def __init__(self, num_requests: int, console: Console | None = None) -> None:
        console = Console(stderr=True) if console is None else console
        self._bar = Progress(
            TextColumn("requests"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]:.1f} tokens/s"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("requests", total=num_requests, speed=0.0)
        self._num_tokens = 0

    def advance(self, output: RequestOutput) -> None:
        """A request has finished."""
        self._num_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        elapsed = self._bar.tasks[0].elapsed or 0.0
        speed = self._num_tokens / elapsed if elapsed else 0.0
        self._bar.update(self._task, advance=1, speed=speed)

    def __enter__(self) -> RequestProgress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()
