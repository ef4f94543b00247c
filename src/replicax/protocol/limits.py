"""The bounds of the transport: how much, how many, how long."""

from __future__ import annotations

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

# Of a message: its header, all its buffers together, the header of a caller that is not known yet.
HEADER = MIB
MESSAGE = 2 * GIB
HELLO = 4 * KIB

# Buffers below this travel joined in one frame, each at a multiple of `ALIGNMENT`.
JOINED = 32 * KIB
ALIGNMENT = 64

# Larger buffers are cut into frames of this size: one is ciphered while the one before travels,
# and the one before that is deciphered.
PART = MIB

# Frames from here on are sent from the memory they lie in. Below, a copy costs less than the
# thread that ZeroMQ's Python side needs to learn when the memory is free again.
ZERO_COPY = 512 * KIB

# Messages that wait in one direction of one connection, and questions of a channel without answer.
QUEUE = 1_000
IN_FLIGHT = 500

# Connections whose callers a service remembers. Forgotten ones are asked to say hello again.
SESSIONS = 4_096

# Connections of callers that have not said who they are; the oldest are closed for new ones.
PENDING_CONNECTIONS = 256
# Connections that the kernel holds until they are accepted; who finds no place there tries again
# only after a second.
BACKLOG = 1_024
# What a caller may send before it has said who it is, in bytes; how many seconds one that is
# refused has to read why.
PENDING_BYTES = 64 * KIB
REJECTION = 0.3

# Seconds. A closed connection is a lost task after `RESET`; a silent stranger is cut off after
# `HANDSHAKE`; messages not sent when a socket is closed get `LINGER`.
RESET = 0.5
HANDSHAKE = 5.0
LINGER = 0.5
IDLE = 0.1

# File descriptors that a process keeps for itself, as a part of all and at most: when only these
# are left, it listens no more for `PAUSE` seconds, and until there are others. Over `ipc` ZeroMQ
# aborts the process when there is none, so callers in a burst need more room.
RESERVED = {"tcp": 1 / 8, "ipc": 1 / 2}
RESERVED_MOST = 4_096
PAUSE = 0.2

# Seconds until an answer must be there, unless the caller says otherwise. A question is repeated
# after this part of it, but not before `PATIENCE`, and then each time after twice as long, up to
# the larger part. Large ones get as much more as they take at `SLOWEST` bytes a second.
DEADLINE = 60.0
RETRY = 1 / 50
MAX_RETRY = 1 / 10
MIN_RETRY = 0.02
MIN_BANDWIDTH = 50 * MIB

# Shared memory of a connection on one machine, in each direction (only what is used takes memory),
# and the buffers that go through it rather than through the socket.
SHARED_MEMORY_BYTES = 256 * MIB
SHARED_BUFFER = 8 * KIB
