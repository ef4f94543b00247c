"""The limits of the transport: sizes in bytes, counts, and times in seconds."""

from __future__ import annotations

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

# The header of a message, all its buffers together, and the header of a handshake.
HEADER = MIB
MESSAGE = 2 * GIB
HELLO = 4 * KIB

# Buffers below this size are copied into one piece of a body, each at a multiple of `ALIGNMENT`.
JOINED = 32 * KIB
ALIGNMENT = 64

# Messages are sent in pieces of this size: an urgent one, such as a heartbeat, waits for one piece
# of a large one.
PIECE = 256 * KIB

# The bytes that may be queued in one direction of one connection before the sender has to wait,
# the messages of a client pool for one task that is not connected yet, and the requests of a
# channel in flight.
QUEUE_BYTES = 64 * MIB
QUEUE = 1_000
IN_FLIGHT = 500

# The sessions that a service keeps: when there are more, the least recently used is closed, and its
# peer connects again.
SESSIONS = 4_096

# The connections without a handshake; when there are more, the oldest are closed.
PENDING_CONNECTIONS = 256
# The connections that the kernel queues until they are accepted; the client of a dropped one
# retries only after a second.
BACKLOG = 1_024
# The seconds that a rejected peer has to read the error.
REJECTION = 0.3

# Seconds. A task counts as lost `RESET` after its connection closed; a connection without a
# handshake is closed after `HANDSHAKE`; unsent messages of a closed socket get `LINGER`.
RESET = 0.5
HANDSHAKE = 5.0
LINGER = 0.5
IDLE = 0.1

# The file descriptors that a process reserves, as a fraction of its limit and at most: while only
# these are left, it accepts no connections, for at least `PAUSE` seconds.
RESERVED = 1 / 8
RESERVED_MOST = 4_096
PAUSE = 0.2

# Seconds. The kernel closes a TCP connection whose host has vanished: an idle one after
# `KEEPALIVE`, with three probes, one with data in flight after `USER_TIMEOUT`.
KEEPALIVE = 1
USER_TIMEOUT = 20.0

# The default deadline of a request, in seconds. A request is retried after the fraction `RETRY` of
# its deadline, but not before `MIN_RETRY` seconds; the interval doubles up to the fraction
# `MAX_RETRY`. Large requests get the additional time that they take at `MIN_BANDWIDTH` bytes/s.
DEADLINE = 60.0
RETRY = 1 / 50
MAX_RETRY = 1 / 10
MIN_RETRY = 0.02
MIN_BANDWIDTH = 50 * MIB

# The shared memory of a connection on one machine, in each direction (unused pages take no memory).
# Buffers of at least `SHARED_BUFFER` go through it rather than through the socket if those of a
# message have `SHARED_MESSAGE` bytes together: below, to copy them twice more is faster than to
# allocate a block and to free it.
SHARED_MEMORY_BYTES = 256 * MIB
SHARED_BUFFER = 8 * KIB
SHARED_MESSAGE = 128 * KIB
