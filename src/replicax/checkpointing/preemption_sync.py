"""The common step at which the workers of a group save, once one of them is preempted.

Note [The common step]
    JAX's preemption service catches SIGTERM and tells all workers. Each asks for the notice once a
    second, in a thread. When it has arrived, the threads of all workers exchange the numbers of the
    steps that they have begun. No worker begins another step meanwhile, so the step after the
    largest number is one that every worker will still reach.

    JAX has the same protocol, `multihost_utils.reached_preemption_sync_point`, but its call holds
    Python's lock while it waits for the others, and the group passes the bytes of JAX's service on
    in a Python thread: they would wait for each other forever.
"""

from __future__ import annotations

import logging
import threading

from replicax.bundle.writers import Writers
from replicax.checkpointing.preemption_notice import Poller
from replicax.foundation import errors, jax_compat

_log = logging.getLogger(__name__)


class _Steps:
    """The step of this worker, and the common step; the thread refers to it."""

    def __init__(self, writers: Writers, next_step: int) -> None:
        self._writers = writers
        self._lock = threading.Lock()
        self._begun = next_step - 1
        self._common: int | None = None

    def begin(self, step: int) -> bool:
        """Records the next step; returns whether it is the common step."""
        with self._lock:
            self._begun = step
            return step == self._common

    def agree(self) -> None:
        """Chooses the common step together with the other workers, whose threads call this too."""
        with self._lock:
            try:
                begun = self._writers.together("the step of a preemption", lambda: self._begun, int)
            except errors.DistributeError as error:
                # A worker has ended: the steps of this one will fail as well, or are done.
                _log.warning("No common step for a preemption: %s", error)
                return
            self._common = max(begun) + 1
        _log.warning("A worker will be preempted: all save before step %d", self._common)


class SyncPoint:
    """Tells when to save; see Note [The common step].

    Args:
      writers: The workers, all of which create this.
      next_step: The step that all of them begin with.
    """

    def __init__(self, writers: Writers, next_step: int) -> None:
        self._steps = _Steps(writers, next_step)
        self._poller = Poller(_is_noticed, self._steps.agree)

    def reached(self, step: int) -> bool:
        """Returns whether all workers save before this step; each calls it once per step."""
        return self._steps.begin(step)

    def stop(self) -> None:
        """Ends the thread. Idempotent."""
        self._poller.stop()


def _is_noticed() -> bool:
    return jax_compat.preemption_notice() is not None
