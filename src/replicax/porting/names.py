"""What becomes of a name of TensorFlow: it runs, it is renamed, or it is not offered.

The truth about what runs is `replicax.tf` itself, which is asked when it is first needed.
"""

from __future__ import annotations

import enum
import functools
import importlib
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from replicax.foundation import errors, lazy
from replicax.foundation.spelling import suggestion
from replicax.porting import table

if TYPE_CHECKING:
    from replicax.tf import not_offered
else:
    not_offered = lazy.module("replicax.tf.not_offered")

_TF = lazy.module("replicax.tf")
_V1 = "compat.v1."


class Kind(enum.StrEnum):
    """What happens to a piece of a program."""

    RUNS = "runs"
    CHANGES = "changes"
    REFUSED = "refused"
    OUTSIDE = "outside"


@dataclass(frozen=True)
class Judgement:
    """What becomes of one name.

    Attributes:
      kind: Whether it runs.
      name: The name to write, below `tf`; the same as before if it does not change.
      advice: What to do about a name that is not offered.
    """

    kind: Kind
    name: str
    advice: str = ""


def below_tf(qualified: str) -> str | None:
    """Returns the name below `tf` of a qualified name; None if it is not one of TensorFlow.

    >>> below_tf("tensorflow.keras.Model"), below_tf("replicax.tf.cast"), below_tf("numpy.sum")
    ('keras.Model', 'cast', None)
    """
    for root in table.ROOTS:
        if qualified == root:
            return ""
        if qualified.startswith(root + "."):
            return qualified[len(root) + 1 :]
    return None


@functools.cache
def judge(name: str) -> Judgement:
    """Returns what becomes of a name below `tf`.

    >>> judge("data.experimental.AUTOTUNE").name
    'data.AUTOTUNE'
    """
    moved = moved_name(name)
    if moved in table.NEED_TENSORFLOW:
        return Judgement(Kind.REFUSED, name, table.NEED_TENSORFLOW[moved])
    if moved != name and is_offered(moved):
        return Judgement(Kind.CHANGES, moved)
    if is_offered(name):
        return Judgement(Kind.RUNS, name)
    if name.startswith(_V1) and not not_offered.advice(name):
        # Most names of `compat.v1` that TensorFlow 2 has too mean the same.
        plain = moved_name(name.removeprefix(_V1))
        if is_offered(plain):
            return Judgement(Kind.CHANGES, plain)
    return Judgement(Kind.REFUSED, name, advice_for(name))


def advice_for(name: str) -> str:
    """Returns what to write instead of a name below `tf` that is not offered.

    >>> advice_for("estimator.Estimator").startswith("Write a Keras model")
    True
    """
    found = not_offered.advice(name)
    if found:
        return found
    module, _, last = name.rpartition(".")
    similar = suggestion([last], _names_of(module)).rstrip(".")
    return similar or "Write it with other names of `tf`, with `jax.numpy` or `tf.numpy_function`"


def _names_of(module: str) -> list[str]:
    """Returns the public names of a module below `tf`; none if it is not offered."""
    # Not the lazy proxy, which lists what was used of it.
    found: Any = importlib.import_module("replicax.tf")
    try:
        for part in filter(None, module.split(".")):
            found = getattr(found, part)
        return [name for name in dir(found) if not name.startswith("_")]
    except (AttributeError, ImportError):
        return []


def is_known(name: str) -> bool:
    """Tells whether a name below `tf` is offered, or refused by its own entry.

    >>> is_known("placeholder"), is_known("no_such_name")
    (True, False)
    """
    return is_offered(moved_name(name)) or is_offered(name) or name in not_offered.ADVICE


def moved_name(name: str) -> str:
    """Returns where a name is now; the same name if it did not move."""
    if name in table.MOVED:
        return table.MOVED[name]
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        target = table.MOVED_MODULES.get(".".join(parts[:length]))
        if target is not None:
            moved = ".".join(filter(None, [target, *parts[length:]]))
            # A name of a private module may have moved within the public ones as well.
            return table.MOVED.get(moved, moved)
    # A member of a class that moved.
    for length in range(len(parts) - 1, 0, -1):
        target = table.MOVED.get(".".join(parts[:length]))
        if target is not None:
            return ".".join([target, *parts[length:]])
    return name


@functools.cache
def is_offered(name: str) -> bool:
    """Tells whether `replicax.tf` has a name.

    >>> is_offered("estimator")
    False
    """
    found: Any = _TF
    for part in filter(None, name.split(".")):
        try:
            found = getattr(found, part)
        except errors.MissingDependencyError:
            # The name is there, and says what to install when it is used.
            return True
        except (AttributeError, ImportError):
            return False
        if not _is_namespace(found):
            # What the attributes of an object are is known when the program runs.
            return True
    return True


@functools.cache
def known_part(name: str) -> str:
    """Returns a name without the attributes of objects, which are not names of TensorFlow.

    >>> known_part("estimator.Estimator")
    'estimator.Estimator'
    """
    found: Any = _TF
    parts = name.split(".")
    for index, part in enumerate(parts):
        try:
            found = getattr(found, part)
        except (errors.MissingDependencyError, AttributeError, ImportError):
            return name
        if not _is_namespace(found):
            return ".".join(parts[: index + 1])
    return name


def _is_namespace(value: object) -> bool:
    """Tells whether all names below a value are known: a module, a class, or a namespace object."""
    cls = type(value)
    is_own = cls.__module__.startswith("replicax.tf") and cls.__name__.startswith("_")
    return isinstance(value, types.ModuleType | type | types.SimpleNamespace) or is_own


def fits(family: str, name: str) -> bool:
    """Tells whether a name is the one, or belongs to the family "prefix*".

    >>> fits("keras.optimizers.*", "keras.optimizers.Adam"), fits("argmax", "argmin")
    (True, False)
    """
    if family.endswith("*"):
        return name.startswith(family[:-1])
    return name == family
