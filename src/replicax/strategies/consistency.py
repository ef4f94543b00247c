"""Consistency of training with parameter servers: asynchronous, bounded staleness, synchronous."""

from __future__ import annotations

import dataclasses

from typing_extensions import TypeIs

from replicax.foundation import errors


@dataclasses.dataclass(frozen=True)
class Staleness:
    """Bounds the staleness of gradients in asynchronous training.

    Pass it as `consistency` to a `ParameterServerStrategy`. Between the time a step reads values
    and the time its gradient is applied, at most `bound` other steps change them. With 0, workers
    run one step at a time in turn. Twice the number of other workers (6 for 4 workers) keeps
    equally fast workers busy; more lets some run ahead of others.

    Args:
      bound: How many other steps a gradient may miss.

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
                "Pass a number of steps; with 0, steps run one at a time.",
            )


def settings_of(
    consistency: object, backup_workers: object, num_workers: int, pull_ahead: bool
) -> dict[str, int | bool]:
    """Returns the settings of tasks for a consistency.

    Raises:
      InvalidArgumentError: The arguments are inconsistent.
    """
    is_name = isinstance(consistency, str) and consistency in ("async", "sync")
    if not is_name and not isinstance(consistency, Staleness):
        raise errors.InvalidArgumentError(
            '`consistency` must be "async", "sync" or rx.Staleness(bound)',
            f"it is {consistency!r}",
            'Leave it out for "async".',
        )
    num_backups = _checked_backups(consistency, backup_workers, num_workers)
    if consistency == "async":
        return {}
    if pull_ahead:
        raise errors.InvalidArgumentError(
            f"With consistency={consistency!r} each step needs current values",
            "`pull_ahead=True` fetches them before the previous step ends",
            'Leave `pull_ahead` out, or use consistency="async".',
        )
    if isinstance(consistency, Staleness):
        return {"staleness": consistency.bound}
    return {"aggregate": num_workers - num_backups, "drops_stale": num_backups > 0}


def _checked_backups(consistency: object, backup_workers: object, num_workers: int) -> int:
    if not _is_count(backup_workers):
        found, todo = f"it is {backup_workers!r}", "Pass a number of workers."
    elif backup_workers and consistency != "sync":
        found = f"it is {backup_workers} with consistency={consistency!r}"
        todo = 'Leave it out, or pass consistency="sync".'
    elif backup_workers >= num_workers:
        found = f"it is {backup_workers} of {num_workers}"
        todo = "Choose fewer: a step needs the gradient of at least one worker."
    else:
        return backup_workers
    raise errors.InvalidArgumentError(
        "`backup_workers` must be an int from 0 on, below the number of workers, and needs "
        'consistency="sync"',
        found,
        todo,
    )


def _is_count(value: object) -> TypeIs[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
