"""Regular expressions on strings."""

from __future__ import annotations

import numpy as np

from replicax.tf.dispatch import op
from replicax.tf.ops.operands import (
    Array,
    Value,
)
from replicax.tf.strings import re2
from replicax.tf.strings.arguments import mapped, placed, strings_of, text_of

__all__ = ["regex_full_match", "regex_replace"]


@op(differentiable=False)
def regex_full_match(input: Value, pattern: Value, name: str | None = None) -> Array:
    """Tells for each string whether a regular expression matches the whole of it.

    >>> regex_full_match(["ab1", "ab"], "[a-z]+").numpy().tolist()
    [False, True]
    """
    strings, compiled = (
        strings_of(input, "regex_full_match"),
        re2.compiled(text_of(pattern)),
    )
    flat = [re2.matches(compiled, data) for data in strings.reshape(-1).tolist()]
    return placed(np.asarray(flat, bool).reshape(strings.shape))


@op(differentiable=False)
def regex_replace(
    input: Value,
    pattern: Value,
    rewrite: Value,
    replace_global: bool = True,
    name: str | None = None,
) -> Array:
    r"""Returns strings with what a regular expression matches replaced.

    Args:
      input: Strings.
      pattern: A regular expression of RE2.
      rewrite: The replacement, in which `\1` is the first group and `\0` the whole match.
      replace_global: Whether all matches are replaced, or the first one.
      name: Accepted for portability.

    >>> regex_replace("a1b22", "[0-9]+", "#").numpy()
    b'a#b#'
    """
    compiled, text = re2.compiled(text_of(pattern)), text_of(rewrite)
    count = 0 if replace_global else 1
    return mapped(
        input,
        "regex_replace",
        lambda data: re2.replaced(compiled, text, data, count),
    )
