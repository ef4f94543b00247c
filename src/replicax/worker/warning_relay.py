"""Warnings of a worker that its coordinator has to see: closures that compile again and again."""

from __future__ import annotations

import logging
import threading

# What a message carries at most; the worker's own log has everything.
MOST_WARNINGS = 8
MOST_CHARACTERS = 1_000

# The part of the library whose warnings concern the author of the closure.
_LOGGER = logging.getLogger("replicax.tracing")


class WarningRelay(logging.Handler):
    """Collects the warnings of the thread that makes it, until they are taken or it is closed."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._thread = threading.get_ident()
        self._texts: list[str] = []
        _LOGGER.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps the text of a warning."""
        if record.thread == self._thread and len(self._texts) < MOST_WARNINGS:
            self._texts.append(record.getMessage()[:MOST_CHARACTERS])

    def take(self) -> list[str]:
        """Returns what was collected since the last time."""
        texts, self._texts = self._texts, []
        return texts

    def close(self) -> None:
        """Collects no more."""
        _LOGGER.removeHandler(self)
        super().close()
