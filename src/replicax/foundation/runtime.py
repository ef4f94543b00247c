"""The threads, the locks, the clock and the random numbers that the tasks of a cluster run on.

Note [What a simulation replaces]
    The modules of a task take what waits, and what tells the time, from here, and their network
    from `transport/streams/network.py`. They use the names of these modules when they need them
    (`runtime.now()`), and never import the names themselves: a simulation replaces them with a
    scheduler on a virtual clock, and runs the tasks unchanged. Here the names are those of the
    standard library, so that a call costs the same as without this module.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time

Thread = threading.Thread
Lock = threading.Lock
RLock = threading.RLock
Condition = threading.Condition
Event = threading.Event
SimpleQueue = queue.SimpleQueue
current_thread = threading.current_thread
get_ident = threading.get_ident

now = time.monotonic
sleep = time.sleep

random_bits = secrets.randbits
