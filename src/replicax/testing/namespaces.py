"""Network namespaces: each task of a local cluster as if on a host of its own."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import threading

from replicax.foundation import errors

_SECONDS = 20.0
_BRIDGE = "br0"
_numbers = itertools.count()


class Namespaces:
    """Several namespaces, each with one address, and a switch that connects all.

    The namespaces and the switch are connected with nothing else, neither with this process nor
    with the network of the machine: other networks may use the same addresses.

    Args:
      count: The number of namespaces.

    Attributes:
      hosts: Their addresses.
      prefixes: For each, the words before a command that run it there.

    Raises:
      UnsupportedError: This process may not create namespaces.
    """

    def __init__(self, count: int) -> None:
        _check_allowed()
        name = f"rx{os.getpid()}n{next(_numbers)}"
        self._switch = f"{name}s"
        self._names = [f"{name}h{i}" for i in range(count)]
        self.hosts = [f"10.231.40.{i + 1}" for i in range(count)]
        self.prefixes = [["ip", "netns", "exec", space] for space in self._names]
        self._owner = os.getpid()
        # Any thread may cut a connection, and remove all.
        self._lock = threading.Lock()
        self._is_open = True
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", _BRIDGE, "type", "bridge")
        _ip("-n", self._switch, "link", "set", _BRIDGE, "up")
        for i, (space, host) in enumerate(zip(self._names, self.hosts, strict=True)):
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
            ends = ["eth0", "netns", space, "type", "veth", "peer", "name", f"port{i}"]
            _ip("link", "add", *ends, "netns", self._switch)
            _ip("-n", self._switch, "link", "set", f"port{i}", "master", _BRIDGE, "up")
            _ip("-n", space, "addr", "add", f"{host}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")

    def cut(self, index: int) -> None:
        """Disconnects a namespace from the switch; its own end of the cable stays up."""
        with self._lock:
            _ip("-n", self._switch, "link", "set", f"port{index}", "nomaster")

    def mend(self, index: int) -> None:
        """Connects a namespace with the switch again."""
        with self._lock:
            _ip("-n", self._switch, "link", "set", f"port{index}", "master", _BRIDGE)

    def close(self) -> None:
        """Removes the namespaces; what runs in them must have ended. Idempotent."""
        with self._lock:
            if not self._is_open or os.getpid() != self._owner:
                return
            self._is_open = False
            for space in (*self._names, self._switch):
                _ip("netns", "del", space, is_needed=False)


def _check_allowed() -> None:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        raise errors.UnsupportedError(
            "Network namespaces need the rights of root, and the command `ip`",
            "this process lacks one of them",
            "Run the test in a container, as its root, with the package iproute2.",
        )


def _ip(*words: str, is_needed: bool = True) -> None:
    done = subprocess.run(
        ["ip", *words], capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    if done.returncode and is_needed:
        raise errors.UnsupportedError(
            "This machine must allow network namespaces",
            f"`ip {' '.join(words)}` failed: {done.stderr.strip()}",
            "Run the test in a privileged container, or without `namespaces`.",
        )
