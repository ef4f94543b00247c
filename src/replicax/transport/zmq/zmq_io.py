"""Frames through sockets: what is copied, what is lent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from replicax.foundation import errors, lazy
from replicax.protocol import limits

if TYPE_CHECKING:
    import zmq
else:
    zmq = lazy.module("zmq")

# The number of an option: which of receiving and sending would not wait.
_EVENTS = 15

# More frames than any message of ours can have: its header could not name them.
_MAX_FRAMES = limits.MESSAGE // limits.JOINED + 3


def send(socket: zmq.Socket, frames: list[Any], can_lend: bool = True) -> None:
    """Sends a message at once.

    Args:
      socket: Where to.
      frames: What.
      can_lend: Whether large frames may be sent from where they lie. Inside a process the
        receiver would then share the memory of the sender.

    Raises:
      zmq.Again: The queue is full.
    """
    # Plain numbers: the flags of pyzmq are enums, and combining those costs more than sending.
    last = len(frames) - 1
    for i, frame in enumerate(frames):
        flags = 1 if i == last else 3  # NOBLOCK, SNDMORE
        socket.send(frame, flags, not (can_lend and len(frame) >= limits.ZERO_COPY))


def has_message(socket: zmq.Socket) -> bool:
    """Says whether a message waits: a third of the price of an error that says there is none."""
    return bool(cast(int, socket.get(_EVENTS)) & 1)


def receive(socket: zmq.Socket) -> list[zmq.Frame]:
    """Receives a message without waiting, and without copying it.

    Raises:
      zmq.Again: There is none.
      ProtocolError: It has more frames than a message can have; it is dropped.
    """
    frame = socket.recv(1, False)
    frames = [frame]
    while frame.more:
        frame = socket.recv(0, False)
        if len(frames) < _MAX_FRAMES:
            frames.append(frame)
    if len(frames) >= _MAX_FRAMES:
        raise errors.ProtocolError("A message has more frames than there may be.")
    return frames
