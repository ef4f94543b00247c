"""How much of each other's work workers on parameter servers see: `Staleness` and the others."""

from __future__ import annotations

import dataclasses
from typing import Any

from replicax.foundation import errors


@dataclasses.dataclass(frozen=True)
class Staleness:
    """Lets workers run apart, but not far: no gradient is applied to values that are too old.

    Pass it as `consistency` to a `ParameterServerStrategy`. Between the moment when a step
    reads values and the moment when its gradient is applied, at most `bound` steps of others
    change them. 0 runs one step at a time, on all workers in turn. Twice the number of the
    other workers, 6 for 4 workers, keeps all busy for as long as they are equally fast; more
    lets some run ahead of others.

    Args:
      bound: How many steps of others a gradient may lack.

    >>> Staleness(3)
    Staleness(bound=3)
    >>> Staleness(-1)
    Traceback (most recent call last):
      ...
    replicax.errors.InvalidArgumentError: ... it is -1. ...
    """

    bound: int

    def __post_init__(self) -> None:
        if not _is_count(self.bound):
            raise errors.InvalidArgumentError(
                "The bound of `Staleness` must be an int from 0 on",
                f"it is {self.bound!r}",
                "Pass a number of steps; 0 runs one step at a time.",
            )


def settings_of(
    consistency: Any, backup_workers: Any, num_workers: int, pull_ahead: bool
) -> dict[str, int | bool]:
    """Returns what tasks are told about how workers train together.

    Raises:
      InvalidArgumentError: The arguments do not go together.
    """
    is_name = isinstance(consistency, str) and consistency in ("async", "sync")
    if not is_name and not isinstance(consistency, Staleness):
        raise errors.InvalidArgumentError(
            '`consistency` must be "async", "sync" or rx.Staleness(bound)',
            f"it is {consistency!r}",
            'Leave it out for "async".',
        )
    _check_backups(consistency, backup_workers, num_workers)
    if consistency == "async":
        return {}
    if pull_ahead:
        raise errors.InvalidArgumentError(
            f"With consistency={consistency!r} each step needs the values of its own time",
            "`pull_ahead=True` fetches them before",
            'Leave `pull_ahead` out, or use consistency="async".',
        )
    if isinstance(consistency, Staleness):
        return {"staleness": consistency.bound}
    return {"aggregate": num_workers - backup_workers, "drops_stale": backup_workers > 0}


def _check_backups(consistency: Any, backup_workers: Any, num_workers: int) -> None:
    if not _is_count(backup_workers):
        found, todo = f"it is {backup_workers!r}", "Pass a number of workers."
    elif backup_workers and consistency != "sync":
        found = f"it is {backup_workers} with consistency={consistency!r}"
        todo = 'Leave it out, or pass consistency="sync".'
    elif backup_workers >= num_workers:
        found = f"it is {backup_workers} of {num_workers}"
        todo = "Choose fewer: a step needs the gradient of at least one worker."
    else:
        return
    raise errors.InvalidArgumentError(
        "`backup_workers` must be an int from 0 on, below the number of workers, and needs "
        'consistency="sync"',
        found,
        todo,
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
