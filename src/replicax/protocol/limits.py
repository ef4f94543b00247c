"""The limits of the transport: sizes in bytes, counts, and times in seconds."""

from __future__ import annotations

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

# The header of a message, all its buffers together, and the header of a handshake.
HEADER = MIB
MESSAGE = 2 * GIB
HELLO = 4 * KIB

# Buffers below this size are joined in one part of a message, each at a multiple of `ALIGNMENT`.
JOINED = 32 * KIB
ALIGNMENT = 64

# Larger buffers are split into parts of this size, so that encryption, transfer and decryption
# overlap.
PART = MIB

# Parts of at least this size are sent without a copy. Below, a copy costs less than the thread in
# which pyzmq waits until the memory can be reused.
ZERO_COPY = 512 * KIB

# Queued messages in one direction of one connection, and requests of a channel in flight.
QUEUE = 1_000
IN_FLIGHT = 500

# The sessions that a service keeps. A peer whose session was dropped repeats the handshake.
SESSIONS = 4_096

# The connections without a handshake; when there are more, the oldest are closed.
PENDING_CONNECTIONS = 256
# The connections that the kernel queues until they are accepted; the client of a dropped one
# retries only after a second.
BACKLOG = 1_024
# The bytes that a peer may send before its handshake, and the seconds that a rejected peer has to
# read the error.
PENDING_BYTES = 64 * KIB
REJECTION = 0.3

# Seconds. A task counts as lost `RESET` after its connection closed; a connection without a
# handshake is closed after `HANDSHAKE`; unsent messages of a closed socket get `LINGER`.
RESET = 0.5
HANDSHAKE = 5.0
LINGER = 0.5
IDLE = 0.1

# The file descriptors that a process reserves, as a fraction of its limit and at most: when only
# these are left, it stops listening for at least `PAUSE` seconds. Over `ipc` ZeroMQ aborts the
# process when it runs out, so bursts of connections need more room.
RESERVED = {"tcp": 1 / 8, "ipc": 1 / 2}
RESERVED_MOST = 4_096
PAUSE = 0.2

# The default deadline of a request, in seconds. A request is retried after the fraction `RETRY` of
# its deadline, but not before `MIN_RETRY` seconds; the interval doubles up to the fraction
# `MAX_RETRY`. Large requests get the additional time that they take at `MIN_BANDWIDTH` bytes/s.
DEADLINE = 60.0
RETRY = 1 / 50
MAX_RETRY = 1 / 10
MIN_RETRY = 0.02
MIN_BANDWIDTH = 50 * MIB

# The shared memory of a connection on one machine, in each direction (unused pages take no memory),
# and the size from which buffers go through it rather than through the socket.
SHARED_MEMORY_BYTES = 256 * MIB
SHARED_BUFFER = 8 * KIB
