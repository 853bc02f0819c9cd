"""Log lines are written by a thread: a reader that does not read holds nobody up."""

from __future__ import annotations

import logging
import threading

import pytest

from engine.observe.background import BackgroundHandler


class Slow(logging.Handler):
    """Writes nothing before it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_write = threading.Event()
        self.has_begun = threading.Event()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.has_begun.set()
        self.may_write.wait()
        self.lines.append(record.getMessage())


@pytest.fixture
def target() -> Slow:
    return Slow()


def logger_to(handler: logging.Handler) -> logging.Logger:
    logger = logging.Logger("apart")
    logger.addHandler(handler)
    return logger


def test_lines_come_in_order_and_as_they_were(target: Slow) -> None:
    handler = BackgroundHandler([target])
    logger, values = logger_to(handler), [1]
    logger.info("values %s", values)
    values.append(2)
    logger.info("values %s", values)
    target.may_write.set()
    handler.close()
    assert target.lines == ["values [1]", "values [1, 2]"]


def test_lines_that_nobody_reads_are_dropped_and_counted(target: Slow) -> None:
    handler = BackgroundHandler([target], max_lines=3)
    logger = logger_to(handler)
    logger.info("first")
    target.has_begun.wait()
    for number in range(10):  # three wait, the others are lost
        logger.info("line %d", number)
    assert handler.num_dropped == 7
    target.may_write.set()
    handler.close()
    kept = [line for line in target.lines if not line.startswith("7 log lines")]
    assert kept == ["first", "line 0", "line 1", "line 2"]
    assert "7 log lines were dropped, because they were not read in time" in target.lines


def test_a_target_gets_its_levels_only(target: Slow) -> None:
    target.setLevel(logging.WARNING)
    target.may_write.set()
    handler = BackgroundHandler([target])
    logger = logger_to(handler)
    logger.info("quiet")
    logger.error("loud")
    handler.close()
    assert target.lines == ["loud"]
