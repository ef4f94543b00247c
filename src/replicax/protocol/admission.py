"""Who is let in: versions and roles of a caller that says hello."""

from __future__ import annotations

from collections.abc import Collection

from replicax.foundation import errors
from replicax.protocol import messages, tasks
from replicax.protocol.tasks import Role, Task


def check(
    hello: messages.Hello,
    role: Role,
    task: Task,
    callers: Collection[str],
    library: str,
) -> None:
    """Raises if a caller must not be let in.

    Args:
      hello: What it says about itself.
      role: The role that its key stands for; without keys, the one that it claims.
      task: Whom it calls.
      callers: The roles that may call that task.
      library: The version of this library.

    Raises:
      ProtocolError: It has another version of something that must be equal.
      PermissionDeniedError: It has, or claims, the wrong role.

    Example:
      >>> hello = messages.Hello(messages.VERSION, "1.2.3", tasks.python_version(), "ps", 0, 7)
      >>> check(hello, "ps", Task("worker", 0), ["coordinator"], "1.2.4")
      Traceback (most recent call last):
        ...
      replicax.errors.PermissionDeniedError: /job:worker/task:0 is called by ...
    """
    mine = (messages.VERSION, tasks.python_version(), _minor(library))
    theirs = (hello.version, hello.python, _minor(hello.library))
    if mine != theirs:
        raise errors.ProtocolError(
            f"All tasks must have the same versions; {task} has protocol "
            f"{mine[0]}, Python {mine[1]}, replicax {library}",
            f"/job:{role}/task:{hello.task} has protocol {theirs[0]}, Python "
            f"{theirs[1]}, replicax {hello.library}"[:200],
            "Install the same versions everywhere.",
        )
    if hello.role != role or role not in callers:
        raise errors.PermissionDeniedError(
            f"{task} is called by {' and '.join(sorted(callers))}",
            f"a {hello.role} with the key of a {role} called"
            if hello.role != role
            else f"a {role} called",
            "Check the role of that task and its keys.",
        )


def _minor(version: str) -> str:
    """Returns the part of a version that decides about compatibility."""
    return ".".join(version.split(".")[:2])
