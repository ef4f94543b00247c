"""The errors of resolvers that are also errors of the standard library."""

from __future__ import annotations

import json
from typing import Any

from replicax.foundation import errors

_EXCERPT = 20


class ConfigDecodeError(errors.InvalidArgumentError, json.JSONDecodeError):
    """Raised for a variable such as TF_CONFIG that is not JSON.

    Its text, and `doc`, show the position of the mistake and never the whole variable.
    """

    def __init__(self, mistake: errors.InvalidArgumentError, doc: str, pos: int) -> None:
        json.JSONDecodeError.__init__(self, str(mistake), doc, pos)
        # The base appends a position; ours counts in the variable, not in the excerpt.
        self.args = (str(mistake),)
        self.required, self.found, self.advice = mistake.required, mistake.found, mistake.advice

    def __reduce__(self) -> tuple[Any, ...]:
        return (
            type(self),
            (errors.InvalidArgumentError(*self.parts), self.doc, self.pos),
            {"lineno": self.lineno, "colno": self.colno},
        )


class DuplicateTaskError(errors.InvalidArgumentError, KeyError):
    """Raised when two resolvers describe the same task of a job."""

    # A KeyError shows its text as a literal.
    __str__ = Exception.__str__


class NotReadyError(errors.UnavailableError, RuntimeError):
    """Raised when a machine of the cluster exists and does not run."""


def decode_error(name: str, text: str, error: json.JSONDecodeError) -> ConfigDecodeError:
    """Returns the error for a mistake in the JSON of a variable, with its position."""
    excerpt = text[max(error.pos - _EXCERPT, 0) : error.pos + _EXCERPT]
    shown = repr(excerpt) if excerpt else "nothing"
    result = ConfigDecodeError(
        errors.InvalidArgumentError(
            f"{name} must be JSON",
            f"line {error.lineno}, column {error.colno} has a mistake ({error.msg}), near {shown}",
            f"Correct {name}, or unset it.",
        ),
        excerpt,
        min(error.pos, _EXCERPT),
    )
    result.lineno, result.colno = error.lineno, error.colno
    return result
