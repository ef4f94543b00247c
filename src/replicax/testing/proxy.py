"""A proxy in front of a task that injects network faults."""

from __future__ import annotations

import collections
import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from replicax.foundation import errors
from replicax.testing.faults import Dice, Faults
from replicax.testing.links import Link, Stream
from replicax.transport.wakeup import Wakeup

# The poll interval in seconds.
_IDLE = 1.0
_JOIN_SECONDS = 5.0


class Proxy:
    """Forwards between a task and its peers, in a thread of this process.

    Where nothing is encrypted (`ipc://`), it knows messages and callers, and every fault is
    possible; callers then share no memory with the task. With keys (TCP) it sees bytes: they
    can be cut, slowed, broken off, reset and flipped.

        proxy = Proxy("ipc:///run/me/proxy", "ipc:///run/me/ps0")
        proxy.harm(drop_requests=0.1, drop_replies=0.1)
        ...
        proxy.heal()
        assert proxy.landed["drop_requests"] > 100
        proxy.close()

    Args:
      address: Its address: `ipc://PATH`, or `HOST:PORT` with port 0 for any.
      target: The address of the task.
      seed: Random faults depend on it, and on the order of messages.

    Attributes:
      address: Its address, with the real port.

    >>> import socket
    >>> with socket.create_server(("127.0.0.1", 0)) as task:
    ...     proxy = Proxy("127.0.0.1:0", f"127.0.0.1:{task.getsockname()[1]}")
    ...     proxy.cut()
    ...     proxy.mend()
    ...     proxy.close()
    """

    def __init__(self, address: str, target: str, seed: int = 0) -> None:
        self._target = target
        self._sees_messages = target.startswith("ipc://")
        self._dice = Dice(Faults(), seed)
        self._lock = threading.Lock()
        self._links: list[Link] = []
        # The peers that are cut off; None stands for all.
        self._cut: set[tuple[str, int] | None] = set()
        self._breaking: bool | None = None
        self._is_closing = False
        self._listener = _listen(address)
        self.address = address
        if not address.startswith("ipc://"):
            host, port = self._listener.getsockname()[:2]
            self.address = f"{host}:{port}"
        self._wakeup = Wakeup()
        self._thread = threading.Thread(target=self._run, name="replicax-proxy", daemon=True)
        self._thread.start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Proxy({self.address!r}, {self._target!r})"

    # Public methods, thread-safe.

    def harm(self, **faults: Any) -> None:
        """Injects faults from now on, and replaces earlier ones; see `Faults`.

        Raises:
          UnsupportedError: The faults affect messages, and the messages are encrypted.
        """
        wanted = Faults(**faults)
        if wanted.needs_messages and not self._sees_messages:
            raise self._unsupported("Faults of messages", "ipc")
        if wanted.flips and self._sees_messages:
            # Within a machine bits do not flip, and nothing protects against it.
            raise self._unsupported("Flipped bits", "tcp")
        with self._lock:
            self._dice.faults = wanted
        self._wakeup.set()

    def heal(self) -> None:
        """Ends all faults and cuts."""
        with self._lock:
            self._dice.faults = Faults()
            self._cut.clear()
        self._wakeup.set()

    def cut(self, caller: tuple[str, int] | None = None) -> None:
        """Holds back all messages silently.

        They arrive after `mend`, as after a real network partition.

        Args:
          caller: The peer that is cut off, such as ("worker", 1); all by default.

        Raises:
          UnsupportedError: One peer was named, and the peers use sockets of this host.
        """
        if caller is not None and not self._sees_messages:
            raise self._unsupported("Cutting off one peer", "ipc")
        with self._lock:
            self._cut.add(caller)
        self._wakeup.set()

    def mend(self) -> None:
        """Ends a `cut`."""
        with self._lock:
            self._cut.clear()
        self._wakeup.set()

    def blip(self, is_reset: bool = False) -> int:
        """Closes all connections; peers may reconnect at once.

        Args:
          is_reset: Whether TCP connections end with a reset, not in order.

        Returns:
          How many there were.
        """
        with self._lock:
            self._breaking = is_reset or bool(self._breaking)
            found = len(self._links)
            self._dice.landed["blips"] += found
        self._wakeup.set()
        return found

    @property
    def landed(self) -> Mapping[str, int]:
        """How often each fault was injected, by the names of `Faults`."""
        with self._lock:
            return collections.Counter(self._dice.landed)

    @property
    def callers(self) -> list[tuple[str, int] | None]:
        """The connected peers; None for those without a handshake yet."""
        with self._lock:
            return [link.caller for link in self._links]

    def close(self) -> None:
        """Closes all connections, and stops the thread. Idempotent."""
        self._is_closing = True
        self._wakeup.set()
        self._thread.join(_JOIN_SECONDS)

    def _unsupported(self, what: str, scheme: str) -> errors.UnsupportedError:
        return errors.UnsupportedError(
            f"{what} need {scheme}",
            f"{self._target} is reached in another way",
            f'Use `LocalCluster(protocol="{scheme}")`.',
        )

    # The thread.

    def _run(self) -> None:
        try:
            while not self._is_closing:
                ready = self._wait()
                with self._lock:
                    self._turn(ready, time.monotonic())
        finally:
            for link in self._links:
                link.close()
            self._listener.close()
            if self.address.startswith("ipc://"):
                with contextlib.suppress(OSError):
                    os.unlink(self.address.removeprefix("ipc://"))
            self._wakeup.close()

    def _is_cut(self, link: Link | None) -> bool:
        return None in self._cut or (
            link is not None and link.caller is not None and link.caller in self._cut
        )

    def _wait(self) -> dict[int, int]:
        """Waits for events; returns them."""
        poller = select.poll()
        poller.register(self._wakeup.fd, select.POLLIN)
        now = time.monotonic()
        next_s = now + _IDLE
        if not self._is_cut(None):
            poller.register(self._listener, select.POLLIN)
        for link in self._links:
            if self._is_cut(link):
                continue
            masks = {link.near.fileno(): 0, link.far.fileno(): 0}
            for stream in (link.requests, link.replies):
                if stream.can_read:
                    masks[stream.source.fileno()] |= select.POLLIN
                due_s = stream.next_s(now)
                if stream.is_blocked and due_s <= now:
                    masks[stream.sink.fileno()] |= select.POLLOUT
                else:
                    next_s = min(next_s, due_s)
            for fd, mask in masks.items():
                if mask:
                    poller.register(fd, mask)
        timeout = max(0, int((next_s - now) * 1e3) + 1)
        found = dict(poller.poll(timeout))
        self._wakeup.clear()
        return found

    def _turn(self, ready: dict[int, int], now: float) -> None:
        if self._breaking is not None:
            for link in self._links:
                link.close(self._breaking)
            self._links.clear()
            self._breaking = None
            return
        for link in self._links:
            if not self._is_cut(link):
                self._serve(link, ready, now)
        for link in [link for link in self._links if link.is_broken]:
            link.close()
            self._links.remove(link)
        if self._listener.fileno() in ready and not self._is_cut(None):
            self._accept()

    def _serve(self, link: Link, ready: dict[int, int], now: float) -> None:
        for stream in (link.requests, link.replies):
            events = ready.get(stream.source.fileno(), 0)
            if events & (select.POLLIN | select.POLLHUP | select.POLLERR) and stream.can_read:
                link.read(stream, self._dice, now)
            if link.is_broken or self._is_cut(link):
                # The handshake may have identified a peer that is cut off.
                return
            self._write(link, stream, now)

    def _write(self, link: Link, stream: Stream, now: float) -> None:
        try:
            stream.write(now, self._dice.faults.bytes_per_s)
        except OSError:
            link.is_broken = True
        if stream.is_ended and stream.is_empty:
            link.is_broken = True

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            near = self._listener.accept()[0]
            far = _connect(self._target)
            if far is None:
                # No task listens: the peer gets a connection that closes at once.
                near.close()
                return
            for end in (near, far):
                if end.family == socket.AF_INET:
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._links.append(Link(near, far, self._sees_messages))


def _listen(address: str) -> socket.socket:
    if address.startswith("ipc://"):
        path = address.removeprefix("ipc://")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        made = socket.socket(socket.AF_UNIX)
        where: Any = path
    else:
        host, _, port = address.rpartition(":")
        made = socket.socket(socket.AF_INET)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        where = (host, int(port))
    try:
        made.bind(where)
        made.listen(128)
        made.setblocking(False)
    except BaseException:
        made.close()
        raise
    return made


def _connect(target: str) -> socket.socket | None:
    is_ipc = target.startswith("ipc://")
    made = socket.socket(socket.AF_UNIX if is_ipc else socket.AF_INET)
    host, _, port = target.rpartition(":")
    try:
        # A local connection succeeds or fails at once.
        made.settimeout(1.0)
        made.connect(target.removeprefix("ipc://") if is_ipc else (host, int(port)))
    except OSError:
        made.close()
        return None
    return made
