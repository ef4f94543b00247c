"""What a process knows about the failure of its group."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from replicax.foundation import errors
from replicax.group.members import Members
from replicax.protocol import error_replies, messages

_log = logging.getLogger(__name__)


class Monitor:
    """The failure of a group, once it is known. Any thread may use it.

    Args:
      members: The members of the group.

    Attributes:
      is_complete: Whether all members run, as far as is known.
      on_failed: Called once, with the error, in the thread that reports the failure.
    """

    def __init__(self, members: Members) -> None:
        self._members = members
        self._changed = threading.Condition()
        self._failure: messages.ErrorReply | None = None
        self._is_lost = False
        self._left: dict[int, str] = {}
        self.is_complete = True
        self.on_failed: Callable[[errors.DistributeError], None] | None = None

    def handle(self, notice: messages.GroupNotice) -> None:
        """Handles a notice of the chief."""
        if notice.kind == "waiting":
            _log.warning("The group is not complete: %s", notice.error.text)
        elif notice.kind == "leaving":
            with self._changed:
                self._left[notice.index] = notice.error.text
                self.is_complete = False
                self._changed.notify_all()
        else:
            self.fail(notice.error, is_lost=notice.kind == "lost")

    def lose(self, index: int, reason: str) -> None:
        """Records that a member is lost."""
        error = errors.UnavailableError(
            f"All tasks of the group must run: {self._members.place(index)} is one of them",
            reason,
            "Restart all tasks of the group; they continue from their last checkpoint.",
        )
        self.fail(error_replies.from_error(error), is_lost=True)

    def fail(self, failure: messages.ErrorReply, *, is_lost: bool) -> None:
        """Records the first failure of the group."""
        with self._changed:
            if self._failure is not None:
                return
            self._failure = failure
            self._is_lost = is_lost
            self.is_complete = False
            self._changed.notify_all()
        if self.on_failed is not None:
            self.on_failed(error_replies.to_error(failure))

    @property
    def has_failed(self) -> bool:
        """Whether the group has failed."""
        return self._failure is not None

    @property
    def has_lost_member(self) -> bool:
        """Whether it has failed because a member is lost: a restart may help."""
        return self._failure is not None and self._is_lost

    def has_left(self, index: int) -> bool:
        """Whether a member has left as planned."""
        return index in self._left

    def error(self) -> errors.DistributeError | None:
        """Returns a new error for the failure of the group; None if it has not failed."""
        failure = self._failure
        return None if failure is None else error_replies.to_error(failure)

    def wait(self, seconds: float) -> errors.DistributeError | None:
        """Waits until the group has failed, or a member has left.

        Returns:
          The error to raise; None if all members still run.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or self._left, seconds)
        return self.error() or self._error_of_left()

    def _error_of_left(self) -> errors.UnavailableError | None:
        if not self._left:
            return None
        index, text = next(iter(self._left.items()))
        return errors.UnavailableError(
            "All tasks of the group must run the same number of steps",
            f"the program of {self._members.place(index)} has ended ({text})",
            "Remove what makes the tasks differ.",
        )
