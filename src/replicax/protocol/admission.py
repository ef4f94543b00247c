"""Which peers a task accepts, by version and role, and which requests it accepts from each role."""

from __future__ import annotations

from collections.abc import Mapping

from replicax.foundation import errors
from replicax.protocol import messages, tasks
from replicax.protocol.tasks import Role, Task

# The requests that each role accepts from each role.
ALLOWED: dict[tuple[Role, Role], frozenset[type[messages.Body]]] = {
    ("coordinator", "ps"): frozenset(
        {
            messages.Hello,
            messages.Attach,
            messages.Detach,
            messages.Ping,
            messages.GetStacks,
            messages.RecordSpans,
            messages.QueryJob,
            messages.CreatePart,
            messages.DropParts,
            messages.SaveParts,
            messages.LoadParts,
            messages.RegisterOptimizer,
            messages.Fence,
            messages.Exchange,
            messages.FlushGradients,
        }
    ),
    ("worker", "ps"): frozenset({messages.Hello, messages.Exchange}),
    ("ps", "ps"): frozenset(
        {messages.Hello, messages.Replicate, messages.Seed, messages.FetchReplica}
    ),
    ("coordinator", "worker"): frozenset(
        {
            messages.Hello,
            messages.Attach,
            messages.Detach,
            messages.Ping,
            messages.GetStacks,
            messages.RecordSpans,
            messages.ShipFunction,
            messages.Run,
            messages.CreateResource,
            messages.DropResources,
            messages.Cancel,
        }
    ),
}

# The requests that the host of a group accepts from each role. A worker of a parameter-server
# cluster accepts none of them.
ALLOWED_IN_GROUP: dict[Role, frozenset[type[messages.Body]]] = {
    "worker": frozenset(
        {
            messages.Hello,
            messages.JoinGroup,
            messages.Contribute,
            messages.GroupBeat,
            messages.GroupNotice,
            messages.CoordinationBytes,
            messages.Stacks,
        }
    ),
}


def requests_to(task: Task) -> dict[Role, frozenset[type[messages.Body]]]:
    """Returns the requests that a task accepts, by the role of the peer."""
    return {sender: types for (sender, to), types in ALLOWED.items() if to == task.job}


def check(
    hello: messages.Hello,
    role: Role,
    task: Task,
    library: str,
    accepted: Mapping[Role, frozenset[type[messages.Body]]] | None = None,
) -> None:
    """Raises if a task must not accept a peer.

    Args:
      hello: The handshake of the peer.
      role: The role in its certificate; without one, the role that it claims.
      task: The task that it connects to.
      library: The version of this library.
      accepted: The requests that the task accepts, by role; those of its role by default.

    Raises:
      ProtocolError: The peer has another version of Python, replicax or the protocol.
      PermissionDeniedError: The peer has, or claims, a role that may not connect to the task.

    Example:
      >>> hello = messages.Hello(messages.VERSION, "1.2.3", tasks.python_version(), "ps", 0, 7)
      >>> check(hello, "ps", Task("worker", 0), "1.2.4")
      Traceback (most recent call last):
        ...
      replicax.errors.PermissionDeniedError: /job:worker/task:0 accepts ...
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
    accepted = requests_to(task) if accepted is None else accepted
    if hello.role != role or role not in accepted:
        raise errors.PermissionDeniedError(
            f"{task} accepts connections of {' and '.join(sorted(accepted))}",
            f"a {hello.role} with the certificate of a {role} connected"
            if hello.role != role
            else f"a {role} connected",
            "Check the role of that task and its certificate.",
        )


def _minor(version: str) -> str:
    """Returns the part of a version that decides about compatibility."""
    return ".".join(version.split(".")[:2])
