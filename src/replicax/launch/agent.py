"""Starts the tasks of a launcher on this host: `python -m replicax.launch.agent`.

The launcher runs it over ssh, and talks to it through its standard input and output: keys and
commands are on no command line. Its tasks end when the connection does, or when the launcher is
not heard for a while.
"""

from __future__ import annotations

import concurrent.futures
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import BinaryIO

import msgspec

from replicax.foundation import errors, settings
from replicax.launch import agent_protocol as protocol
from replicax.launch import certificates, observing
from replicax.launch.host import Event, Exited, LocalHost, Start, Started
from replicax.observe import job_directory
from replicax.protocol.tasks import Task, library_version, python_version

# The exit code of a process that was told something that it does not understand.
_BAD_MESSAGE = 65
# How many requests are answered at a time: tasks may take a second each.
_MOST_ASKED = 4


def version() -> str:
    """Returns what the launcher and its agents must agree on."""
    return f"replicax {library_version()}, Python {python_version()}"


class _Agent:
    def __init__(self, requests: BinaryIO, replies: BinaryIO) -> None:
        self._requests = requests
        self._replies = replies
        self._lock = threading.Lock()
        self._heard_s = time.monotonic()
        self._directory = Path(tempfile.mkdtemp(prefix="rx-agent-"))
        self._keys: Path | None = None
        self._host: LocalHost | None = None
        # Where the tasks can be observed.
        self._job: Path | None = None
        self._asking = concurrent.futures.ThreadPoolExecutor(_MOST_ASKED, "replicax-agent-ask")

    def run(self) -> None:
        """Serves one launcher, until it disconnects."""
        threading.Thread(target=self._end_without_launcher, daemon=True).start()
        try:
            while (raw := protocol.read(self._requests)) is not None:
                self._heard_s = time.monotonic()
                self._handle(protocol.decode_to_agent(raw))
        finally:
            self._close()

    def _handle(self, message: protocol.ToAgent) -> None:
        if isinstance(message, protocol.Hello):
            if message.keys:
                self._keys = certificates.write(self._directory / "keys", message.keys)
            if message.job:
                self._job = job_directory.root() / job_directory.safe_name(message.job)
            self._host = host = LocalHost(self._on_event, self._on_output, message.address)
            self._reply(protocol.Ready(version(), host.cores, host.gpus, sys.executable))
        elif isinstance(message, protocol.AskTime):
            self._reply(protocol.TimeIs(time.time_ns()))
        elif self._host is None or isinstance(message, protocol.Beat):
            return
        elif isinstance(message, protocol.Reserve):
            try:
                self._reply(protocol.Reserved(self._host.reserve(message.ports)))
            except (errors.DistributeError, OSError) as error:
                self._reply(protocol.Reserved([], str(error)))
        elif isinstance(message, protocol.Send):
            self._host.send(Task(message.job, message.index), message.number)
        elif isinstance(message, protocol.Ask):
            self._asking.submit(self._ask, message)
        else:
            self._host.start(self._with_directories(message.start))

    def _with_directories(self, start: Start) -> Start:
        """Adds the directories of this host to the environment of a task."""
        variables = dict(start.variables)
        if self._keys is not None:
            variables[settings.REPLICAX_KEYS] = str(self._keys)
        if self._job is not None:
            variables[settings.REPLICAX_JOB_DIR] = str(self._job)
        return msgspec.structs.replace(start, variables=variables)

    def _ask(self, message: protocol.Ask) -> None:
        try:
            assert self._job is not None, "a launcher that is not observed does not ask"
            found = observing.answer(message, self._job, self._directory / "traces")
        except Exception as error:
            # The launcher waits for each answer, and the tasks go on without it.
            found = protocol.Answered(
                message.number, [protocol.TaskAnswer("agent", None, None, repr(error))], {}
            )
        self._reply(found)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Started):
            name = event.task.job, event.task.index
            self._reply(protocol.Begun(*name, event.incarnation, event.pid))
        elif isinstance(event, Exited):
            name = event.task.job, event.task.index
            self._reply(protocol.Ended(*name, event.incarnation, event.code))

    def _on_output(self, task: Task, data: bytes) -> None:
        self._reply(protocol.Printed(task.job, task.index, data))

    def _reply(self, message: protocol.FromAgent) -> None:
        try:
            with self._lock:
                protocol.write(self._replies, message)
        except (BrokenPipeError, ValueError):
            pass  # The launcher has gone; the end of the requests says so, too.

    def _end_without_launcher(self) -> None:
        while time.monotonic() < self._heard_s + protocol.LEASE_S:
            time.sleep(protocol.BEAT_S / 2)
        self._close()
        os._exit(0)

    def _close(self) -> None:
        if self._host is not None:
            self._host.close()
        if self._job is not None:
            job_directory.remove_left_over(self._job)
        self._asking.shutdown(wait=False, cancel_futures=True)
        shutil.rmtree(self._directory, ignore_errors=True)


def main() -> None:
    """Serves the launcher at the other end of stdin and stdout."""
    # What a library prints must not end up between the messages.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    replies.write(protocol.BEGINNING)
    replies.flush()
    try:
        _Agent(sys.stdin.buffer, replies).run()
    except (msgspec.DecodeError, errors.ProtocolError) as error:
        sys.stderr.write(f"replicax agent: {error}\n")
        sys.exit(_BAD_MESSAGE)


if __name__ == "__main__":
    main()
