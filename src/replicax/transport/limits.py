"""The bounds of the transport: how much, how many, how long."""

from __future__ import annotations

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

# Of a message: its header, all its buffers together, the header of a caller that is not known yet.
HEADER = MIB
MESSAGE = 2 * GIB
GREETING = 4 * KIB

# Buffers below this travel joined in one frame, each at a multiple of `ALIGNMENT`.
SMALL = 32 * KIB
ALIGNMENT = 64

# Frames from here on are sent from the memory they lie in. Below, a copy costs less than the
# thread that ZeroMQ's Python side needs to learn when the memory is free again.
LENT = 512 * KIB

# Messages that wait in one direction of one connection, and questions of a channel without answer.
QUEUE = 1_000
UNANSWERED = 500

# Connections whose callers a service remembers. Forgotten ones are asked to say hello again.
CALLERS = 4_096

# Seconds. A closed connection is a lost task after `RESET`; a silent stranger is cut off after
# `HANDSHAKE`; messages not sent when a socket is closed get `LINGER`.
RESET = 0.5
HANDSHAKE = 5.0
LINGER = 0.5
IDLE = 0.1

# Seconds until an answer must be there, unless the caller says otherwise.
DEADLINE = 60.0

# Shared memory of a connection on one machine, in each direction (only what is used takes memory),
# and the buffers that go through it rather than through the socket.
LANE_BYTES = 256 * MIB
LANE = 8 * KIB
