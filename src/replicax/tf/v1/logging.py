"""`tf.compat.v1.logging`: messages to standard error, by the logger of `tf.get_logger()`."""

from __future__ import annotations

import collections
import logging
import sys
from typing import Any

from replicax.tf.running import get_logger

__all__ = [
    "DEBUG",
    "ERROR",
    "FATAL",
    "INFO",
    "WARN",
    "WARNING",
    "debug",
    "error",
    "fatal",
    "flush",
    "get_verbosity",
    "info",
    "log",
    "log_every_n",
    "log_first_n",
    "log_if",
    "set_verbosity",
    "vlog",
    "warn",
    "warning",
]

DEBUG, INFO, WARN, ERROR, FATAL = (
    logging.DEBUG,
    logging.INFO,
    logging.WARNING,
    logging.ERROR,
    logging.CRITICAL,
)
WARNING = WARN

_counts: collections.Counter[str] = collections.Counter()


def _logger() -> logging.Logger:
    found = get_logger()
    if not found.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(levelname)s:%(name)s:%(message)s"))
        found.addHandler(handler)
    return found


def log(level: int, msg: object, *args: Any, **kwargs: Any) -> None:
    """Logs a message at a level.

    >>> log(DEBUG, "%d steps", 3)
    """
    _logger().log(level, msg, *args, **kwargs)


def debug(msg: object, *args: Any, **kwargs: Any) -> None:
    """Logs a message for debugging.

    >>> debug("details")
    """
    log(DEBUG, msg, *args, **kwargs)


def info(msg: object, *args: Any, **kwargs: Any) -> None:
    """Logs a message; shown after `set_verbosity(INFO)`.

    >>> info("loss %f", 0.5)
    """
    log(INFO, msg, *args, **kwargs)


def warning(msg: object, *args: Any, **kwargs: Any) -> None:
    """Logs a warning."""
    log(WARN, msg, *args, **kwargs)


warn = warning


def error(msg: object, *args: Any, **kwargs: Any) -> None:
    """Logs an error."""
    log(ERROR, msg, *args, **kwargs)


def fatal(msg: object, *args: Any, **kwargs: Any) -> None:
    """Logs an error at the highest level; the program goes on."""
    log(FATAL, msg, *args, **kwargs)


vlog = log


def log_every_n(level: int, msg: str, n: int, *args: Any) -> None:
    """Logs a message at the first and then each n-th call.

    >>> log_every_n(DEBUG, "step %d", 100, 1)
    """
    _counts[msg] += 1
    log_if(level, msg, (_counts[msg] - 1) % n == 0, *args)


def log_first_n(level: int, msg: str, n: int, *args: Any) -> None:
    """Logs a message at the first n calls.

    >>> log_first_n(DEBUG, "once", 1)
    """
    _counts[msg] += 1
    log_if(level, msg, _counts[msg] <= n, *args)


def log_if(level: int, msg: object, condition: bool, *args: Any) -> None:
    """Logs a message if a condition holds.

    >>> log_if(DEBUG, "no", False)
    """
    if condition:
        log(level, msg, *args)


def get_verbosity() -> int:
    """Returns the lowest level that is shown.

    >>> isinstance(get_verbosity(), int)
    True
    """
    return _logger().getEffectiveLevel()


def set_verbosity(v: int | str) -> None:
    """Sets the lowest level that is shown."""
    _logger().setLevel(v)


def flush() -> None:
    """Writes what is buffered.

    >>> flush()
    """
    for handler in _logger().handlers:
        handler.flush()
