"""`tf.compat.v1.flags`: flags of absl; `FLAGS` reads the command line when it is first asked."""

from __future__ import annotations

import sys
from typing import Any

from absl import flags as absl_flags

from replicax.tf.arguments import Value

_FORWARDED = [
    name
    for name in dir(absl_flags)
    if not name.startswith("_") and name not in ("FLAGS", "annotations", "sys")
]
globals().update({name: getattr(absl_flags, name) for name in _FORWARDED})


class Flags:
    """The values of flags. Without `app.run`, the command line is read at the first access.

    >>> Flags().is_parsed() in (True, False)
    True
    """

    def __getattr__(self, name: str) -> Any:
        values = absl_flags.FLAGS
        if not values.is_parsed() and name in values:
            # Unknown arguments belong to others, such as a test runner.
            values(sys.argv, known_only=True)
        return getattr(values, name)

    def __setattr__(self, name: str, value: Value) -> None:
        setattr(absl_flags.FLAGS, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(absl_flags.FLAGS, name)

    def __getitem__(self, name: str) -> Any:
        return absl_flags.FLAGS[name]

    def __contains__(self, name: str) -> bool:
        return name in absl_flags.FLAGS

    def __iter__(self) -> Any:
        return iter(absl_flags.FLAGS)

    def __dir__(self) -> list[str]:
        return list(dir(absl_flags.FLAGS))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return absl_flags.FLAGS(*args, **kwargs)


FLAGS = Flags()

__all__ = ["FLAGS", *_FORWARDED]  # pyright: ignore[reportUnsupportedDunderAll]
