"""The copies that a parameter server keeps of another: it is the mirror of that one.

A copy is a store like that of its owner, and is told every change in the order in which the owner
made it. It answers nobody; when its owner comes back empty, it gives everything back.
"""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Sequence
from typing import IO, Any

from replicax.foundation import errors
from replicax.protocol import messages
from replicax.ps.process import snapshot_files
from replicax.ps.process.mirror_log import Target
from replicax.ps.process.mirroring import PIECE_BYTES
from replicax.ps.store import journal
from replicax.ps.store.service import ParameterStore
from replicax.transport.sessions import Session

Answer = tuple[messages.Body, Sequence[Any]]

# For a copy no time passes: its lease is that of the server that keeps it.
_NO_TIME = 0.0

_log = logging.getLogger(__name__)


class _Replica:
    """A copy of one server; its lock is taken for whatever is done with it."""

    def __init__(self, store: ParameterStore, job: str, incarnation: int, position: int) -> None:
        self.store = store
        self.job = job
        # The process that is followed; a process before it is not listened to any more.
        self.incarnation = incarnation
        # The place of the next change, and of the first that was not in the snapshot.
        self.position = self.seeded = position
        self.lock = threading.Lock()


class _Transfer:
    """A snapshot that is on its way, in a file that has no name."""

    def __init__(self, job: str, incarnation: int, position: int) -> None:
        self.job = job
        self.incarnation = incarnation
        self.position = position
        self.file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self.num_bytes = 0

    def close(self) -> None:
        self.file.close()


class Replicas:
    """All copies that a server keeps; used by the thread of its socket and by its slow lane.

    Args:
      index: The index of the server.
    """

    # What may take long.
    SLOW = (messages.Seed, messages.FetchReplica)

    def __init__(self, index: int) -> None:
        self._index = index
        self._lock = threading.Lock()
        self._replicas: dict[int, _Replica] = {}
        # Snapshots that come, and snapshots that go, by owner; used in the slow lane, and dropped
        # by `clear`.
        self._coming: dict[int, _Transfer] = {}
        self._going: dict[int, _Transfer] = {}

    def handle(
        self,
        session: Session,
        envelope: messages.Envelope,
        buffers: Sequence[Any],
        mine: Target | None,
    ) -> Answer:
        """Answers another server.

        Args:
          session: The server.
          envelope: What it asks.
          buffers: What comes with it.
          mine: The job that this server is in, if that wants mirrors.

        Raises:
          NotFoundError: There is no copy of it that could follow; it must send everything.
          FencedError: Another process has taken its place.
          UnavailableError: This server is not in its job.
          DataLossError: The copy is not what it should be.
        """
        self._check(session, envelope, mine)
        body = envelope.body
        if isinstance(body, messages.Replicate):
            return self._replicate(session, envelope.job, body, buffers), ()
        if isinstance(body, messages.Seed):
            return self._seed(session, envelope.job, body, buffers), ()
        assert isinstance(body, messages.FetchReplica), body
        return self._fetch(session, envelope.job, body)

    def clear(self, *, but: str | None = None) -> None:
        """Drops all copies whose job is over: all but those of one job."""
        with self._lock:
            self._replicas = {o: r for o, r in self._replicas.items() if r.job == but}
            transfers: list[_Transfer] = []
            for found in (self._coming, self._going):
                over = [owner for owner, transfer in found.items() if transfer.job != but]
                transfers += map(found.pop, over)
        for transfer in transfers:
            transfer.close()

    def figures(self) -> dict[str, int | float]:
        """Returns how much there is, by name."""
        with self._lock:
            found = list(self._replicas.values())
        return {
            "replicas": len(found),
            "replica_bytes": sum(int(r.store.figures()["bytes"]) for r in found),
        }

    def _check(self, session: Session, envelope: messages.Envelope, mine: Target | None) -> None:
        if mine is None or mine.job != envelope.job:
            if isinstance(envelope.body, messages.FetchReplica):
                # Copies live as long as the job does here.
                raise self._unknown(session)
            raise errors.UnavailableError(
                f"/job:ps/task:{self._index} must be in job {envelope.job!r} to be a mirror",
                "it is in another one" if mine is not None else "it is in none",
                "Wait until its coordinator has attached it.",
            )
        owner = (self._index - 1) % len(mine.attach.servers)
        if session.task != owner:
            raise errors.PermissionDeniedError(
                f"/job:ps/task:{self._index} is the mirror of /job:ps/task:{owner}",
                f"{session} asked",
                "Check the order of the servers in the cluster of each task.",
            )

    def _replicate(
        self, session: Session, job: str, body: messages.Replicate, buffers: Sequence[Any]
    ) -> messages.Replicated:
        replica = self._replica(session, job)
        with replica.lock:
            self._require_followed(replica, session)
            if body.count:
                self._drop_going(session.task)
                try:
                    self._make(replica, body, buffers)
                except Exception as error:
                    # Some may be made: it must not be used again.
                    with self._lock:
                        self._replicas.pop(session.task, None)
                    raise self._differs(session, error) from error
            return messages.Replicated(replica.position)

    def _make(self, replica: _Replica, body: messages.Replicate, buffers: Sequence[Any]) -> None:
        """Makes the changes that are new."""
        changes = journal.decode(buffers[0]) if buffers else []
        if len(changes) != body.count or body.position > replica.position:
            required = f"{body.count} changes from place {replica.position} on are expected"
            raise _broken(required, f"{len(changes)} from {body.position} on")
        used = 1
        for place, change in enumerate(changes, body.position):
            own = buffers[used : used + change.num_buffers]
            used += change.num_buffers
            if place < replica.position:
                # The message was repeated.
                continue
            answer, _ = replica.store.handle(
                change.role,
                change.incarnation,
                change.body,
                own,
                job=replica.job,
                epoch=change.epoch,
                now=_NO_TIME,
            )
            replica.position += 1
            num_failures = len(answer.failures) if isinstance(answer, messages.Exchanged) else 0
            if num_failures != change.num_failures:
                required = f"{change.num_failures} closures of an exchange fail at its owner"
                raise _broken(required, num_failures)

    def _seed(
        self, session: Session, job: str, body: messages.Seed, buffers: Sequence[Any]
    ) -> messages.Done:
        owner = session.task
        replica = self._replicas.get(owner)
        if (
            replica is not None
            and replica.job == job
            and replica.incarnation != session.incarnation
        ):
            if not body.is_first:
                raise self._replaced(session)
        elif replica is not None and body.offset and replica.seeded == body.position:
            # The last piece was repeated.
            return messages.Done()
        coming = self._coming.get(owner)
        if body.offset == 0 and not _is_same(coming, session, body.position):
            coming = _Transfer(job, session.incarnation, body.position)
            self._replace(self._coming, owner, coming)
        piece = memoryview(buffers[0]) if buffers else memoryview(b"")
        if coming is None or not _is_same(coming, session, body.position):
            raise _broken(f"{session} must send a snapshot from its beginning", body.offset)
        if body.offset + piece.nbytes <= coming.num_bytes and body.total > coming.num_bytes:
            return messages.Done()
        if body.offset != coming.num_bytes or body.offset + piece.nbytes > body.total:
            raise _broken(f"{session} must send the pieces of a snapshot in order", body.offset)
        coming.file.seek(body.offset)
        coming.file.write(piece)
        coming.num_bytes += piece.nbytes
        if coming.num_bytes == body.total:
            self._load(session, job, body.attach, coming)
        return messages.Done()

    def _load(self, session: Session, job: str, attach: messages.Attach, coming: _Transfer) -> None:
        """Makes a copy from a snapshot that is complete."""
        store = ParameterStore(session.task)
        try:
            coming.file.flush()
            loaded, _ = snapshot_files.read(coming.file, f"The snapshot of {session}")
            store.restore(loaded)
            state = loaded.state
            again = messages.Attach(attach.servers, attach.settings, [])
            store.handle(
                "coordinator",
                state.coordinator,
                again,
                job=state.job,
                epoch=state.epoch,
                now=_NO_TIME,
            )
        finally:
            self._replace(self._coming, session.task, None)
        if state.job != job:
            raise _broken(f"{session} must send a snapshot of job {job!r}", state.job)
        replica = _Replica(store, job, session.incarnation, coming.position)
        with self._lock:
            self._replicas[session.task] = replica

    def _fetch(self, session: Session, job: str, body: messages.FetchReplica) -> Answer:
        owner = session.task
        replica = self._replica(session, job)
        going = self._going.get(owner)
        with replica.lock:
            if body.offset == 0:
                replica.incarnation = session.incarnation
                if not _is_same(going, session, replica.position):
                    going = self._cut_of(replica)
                    self._replace(self._going, owner, going)
            self._require_followed(replica, session)
            if going is None or not _is_same(going, session, replica.position):
                raise _broken(f"{session} must fetch a snapshot from its beginning", body.offset)
            going.file.seek(body.offset)
            piece = going.file.read(PIECE_BYTES)
            return messages.ReplicaPiece(going.position, going.num_bytes), [piece]

    def _cut_of(self, replica: _Replica) -> _Transfer:
        going = _Transfer(replica.job, replica.incarnation, replica.position)
        try:
            cut = replica.store.snapshot()
            assert cut is not None, "a copy was attached when it was made"
            try:
                going.num_bytes = snapshot_files.write(going.file, cut)
            finally:
                cut.close()
        except BaseException:
            going.close()
            raise
        return going

    def _replace(self, transfers: dict[int, _Transfer], owner: int, new: _Transfer | None) -> None:
        with self._lock:
            old = transfers.pop(owner, None)
            if new is not None:
                transfers[owner] = new
        if old is not None:
            old.close()

    def _drop_going(self, owner: int) -> None:
        if owner in self._going:
            self._replace(self._going, owner, None)

    def _replica(self, session: Session, job: str) -> _Replica:
        with self._lock:
            found = self._replicas.get(session.task)
        if found is None or found.job != job:
            raise self._unknown(session)
        return found

    def _require_followed(self, replica: _Replica, session: Session) -> None:
        if replica.incarnation != session.incarnation:
            # One that was replaced learns so when it sends everything.
            raise self._unknown(session)

    def _unknown(self, session: Session) -> errors.NotFoundError:
        return errors.NotFoundError(
            f"/job:ps/task:{self._index} must have a copy of this life of {session}",
            "it has none",
            "Send it everything.",
        )

    def _replaced(self, session: Session) -> errors.FencedError:
        return errors.FencedError(
            f"/job:ps/task:{self._index} follows one process of {session}",
            "another one has taken its place",
            "End this process.",
        )

    def _differs(self, session: Session, error: Exception) -> errors.DataLossError:
        if not isinstance(error, errors.DistributeError):
            _log.exception("/job:ps/task:%d could not follow %s", self._index, session)
        return errors.DataLossError(
            f"The copy of {session} must lead to the same as the original",
            f"it does not: {error}",
            "Nothing is to be done: it is made anew.",
        )


def _is_same(transfer: _Transfer | None, session: Session, position: int) -> bool:
    found = None if transfer is None else (transfer.incarnation, transfer.position)
    return found == (session.incarnation, position)


def _broken(required: str, found: object) -> errors.DataLossError:
    todo = "Nothing is to be done: it is tried again."
    return errors.DataLossError(required, f"it is {found!r} here", todo)
