"""The copies of other parameter servers that a server keeps as their mirror.

A copy is a store that replays the mutations of its owner in order. It serves no requests; a
restarted owner recovers its state from it.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from typing import IO

from replicax.foundation import errors, runtime
from replicax.protocol import messages
from replicax.protocol.codec import Buffer
from replicax.ps.process import snapshot_files
from replicax.ps.process.mirror_log import Target
from replicax.ps.process.mirror_sender import PIECE_BYTES
from replicax.ps.store import journal
from replicax.ps.store.service import ParameterStore, Reply
from replicax.transport.service import Session

# Copies have no lease: they depend on that of the server that keeps them.
_NO_TIME = 0.0

_log = logging.getLogger(__name__)


class _Copy:
    """A copy of one server; its lock protects all use of it."""

    def __init__(self, store: ParameterStore, session: Session, job: str, position: int) -> None:
        self.store = store
        self.label = f"The copy of {session}"
        self.job = job
        # The incarnation that is mirrored; earlier ones are fenced.
        self.incarnation = session.incarnation
        # The position of the next entry, and of the first one that was not in the snapshot.
        self.position = self.seeded = position
        self.lock = runtime.Lock()


class _Transfer:
    """A snapshot in transfer, in an unnamed file."""

    def __init__(self, job: str, incarnation: int, position: int) -> None:
        self.job = job
        self.incarnation = incarnation
        self.position = position
        self.file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self.num_bytes = 0

    def is_for(self, session: Session, position: int) -> bool:
        return (self.incarnation, self.position) == (session.incarnation, position)


class MirrorCopies:
    """All copies that a server keeps; used by its socket thread and its slow-request thread.

    Args:
      index: The index of the server.
    """

    # Requests that may take long.
    SLOW = (messages.Seed, messages.FetchReplica)

    def __init__(self, index: int) -> None:
        self._index = index
        self._lock = runtime.Lock()
        self._copies: dict[int, _Copy] = {}
        # Snapshots being received and sent, by owner; used by the slow-request thread, and dropped
        # by `clear`.
        self._incoming: dict[int, _Transfer] = {}
        self._outgoing: dict[int, _Transfer] = {}

    def handle(
        self,
        session: Session,
        envelope: messages.Envelope,
        buffers: Sequence[Buffer],
        own: Target | None,
    ) -> Reply:
        """Handles a request of another server.

        Args:
          session: The server.
          envelope: Its request.
          buffers: The buffers of the request.
          own: The job that this server is attached to, if that has mirrors.

        Raises:
          NotFoundError: There is no copy that could follow; the owner must send a snapshot.
          FencedError: Another incarnation has replaced the owner.
          UnavailableError: This server is not attached to its job.
          DataLossError: The copy differs from its owner.
        """
        self._check(session, envelope, own)
        body = envelope.body
        if isinstance(body, messages.Replicate):
            return self._replicate(session, envelope.job, body, buffers), ()
        if isinstance(body, messages.Seed):
            return self._seed(session, envelope.job, body, buffers), ()
        assert isinstance(body, messages.FetchReplica), body
        return self._fetch(session, envelope.job, body)

    def clear(self, *, but: str | None = None) -> None:
        """Drops the copies of all jobs but one."""
        with self._lock:
            self._copies = {o: c for o, c in self._copies.items() if c.job == but}
            transfers: list[_Transfer] = []
            for found in (self._incoming, self._outgoing):
                over = [owner for owner, transfer in found.items() if transfer.job != but]
                transfers += map(found.pop, over)
        for transfer in transfers:
            transfer.file.close()

    def counters(self) -> dict[str, int | float]:
        """Returns the number and size of the copies by name."""
        with self._lock:
            found = list(self._copies.values())
        return {
            "replicas": len(found),
            "replica_bytes": sum(int(c.store.counters()["bytes"]) for c in found),
        }

    def _check(self, session: Session, envelope: messages.Envelope, own: Target | None) -> None:
        if own is None or own.job != envelope.job:
            if isinstance(envelope.body, messages.FetchReplica):
                # Copies are dropped with their job.
                raise self._missing(session)
            found = "no mirrored job" if own is None else f"job {own.job!r}"
            raise errors.UnavailableError(
                f"/job:ps/task:{self._index} cannot mirror job {envelope.job!r}: it is attached to "
                f"{found}. Wait until the coordinator attaches it."
            )
        owner = (self._index - 1) % len(own.attach.servers)
        if session.task != owner:
            raise errors.PermissionDeniedError(
                f"/job:ps/task:{self._index} is the mirror of /job:ps/task:{owner}",
                f"the request is of {session}",
                "Check the order of the servers in the cluster of each task.",
            )

    def _replicate(
        self, session: Session, job: str, body: messages.Replicate, buffers: Sequence[Buffer]
    ) -> messages.Replicated:
        copy = self._copy(session, job)
        with copy.lock:
            self._require_followed(copy, session)
            if body.count:
                if session.task in self._outgoing:
                    self._replace(self._outgoing, session.task, None)
                try:
                    self._replay(copy, body, buffers)
                except Exception as error:
                    # Some entries may be applied: the copy must not be used again.
                    with self._lock:
                        self._copies.pop(session.task, None)
                    if not isinstance(error, errors.DistributeError):
                        text = "/job:ps/task:%d could not replay changes of %s"
                        _log.exception(text, self._index, session)
                    if isinstance(error, errors.DataLossError):
                        raise
                    raise _differs(copy.label, error) from error
            return messages.Replicated(copy.position)

    def _replay(self, copy: _Copy, body: messages.Replicate, buffers: Sequence[Buffer]) -> None:
        """Applies the entries that are new."""
        entries = journal.decode(buffers[0]) if buffers else []
        if len(entries) != body.count or body.position > copy.position:
            found = f"{len(entries)} entries from position {body.position} on arrived"
            expected = f"{body.count} from position {copy.position} on"
            raise _differs(copy.label, f"{found} instead of {expected}")
        used = 1
        for position, entry in enumerate(entries, body.position):
            own = buffers[used : used + entry.num_buffers]
            used += entry.num_buffers
            if position < copy.position:
                # The message was repeated.
                continue
            reply, _ = copy.store.handle(
                entry.role,
                entry.incarnation,
                entry.body,
                own,
                job=copy.job,
                epoch=entry.epoch,
                now=_NO_TIME,
            )
            copy.position += 1
            num_failures = len(reply.failures) if isinstance(reply, messages.Exchanged) else 0
            if num_failures != entry.num_failures:
                found = (
                    f"{num_failures} instead of {entry.num_failures} closures of an exchange failed"
                )
                raise _differs(copy.label, found)

    def _seed(
        self, session: Session, job: str, body: messages.Seed, buffers: Sequence[Buffer]
    ) -> messages.Done:
        owner = session.task
        copy = self._copies.get(owner)
        if copy is not None and copy.job == job and copy.incarnation != session.incarnation:
            if not body.is_first:
                raise errors.FencedError(
                    f"Incarnation {session.incarnation:x} of {session} was replaced by another "
                    f"process on its mirror /job:ps/task:{self._index}. Stop this process."
                )
        elif copy is not None and body.offset and copy.seeded == body.position:
            # The last piece was repeated.
            return messages.Done()
        incoming = self._incoming.get(owner)
        if incoming is not None and not incoming.is_for(session, body.position):
            incoming = None
        if body.offset == 0 and incoming is None:
            incoming = _Transfer(job, session.incarnation, body.position)
            self._replace(self._incoming, owner, incoming)
        piece = memoryview(buffers[0]) if buffers else memoryview(b"")
        if incoming is None:
            raise _differs(f"The snapshot of {session}", f"it starts at byte {body.offset}")
        if body.offset + piece.nbytes <= incoming.num_bytes and body.total > incoming.num_bytes:
            return messages.Done()
        if body.offset != incoming.num_bytes or body.offset + piece.nbytes > body.total:
            found = f"byte {body.offset} arrived instead of {incoming.num_bytes}"
            raise _differs(f"The snapshot of {session}", found)
        incoming.file.seek(body.offset)
        incoming.file.write(piece)
        incoming.num_bytes += piece.nbytes
        if incoming.num_bytes == body.total:
            self._load(session, job, body.attach, incoming)
        return messages.Done()

    def _load(
        self, session: Session, job: str, attach: messages.Attach, incoming: _Transfer
    ) -> None:
        """Creates a copy from a complete snapshot."""
        store = ParameterStore(session.task)
        try:
            incoming.file.flush()
            loaded, _ = snapshot_files.read(incoming.file, f"The snapshot of {session}")
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
            self._replace(self._incoming, session.task, None)
        if state.job != job:
            raise _differs(f"The snapshot of {session}", f"it is of job {state.job!r}, not {job!r}")
        copy = _Copy(store, session, job, incoming.position)
        with self._lock:
            self._copies[session.task] = copy

    def _fetch(self, session: Session, job: str, body: messages.FetchReplica) -> Reply:
        owner = session.task
        copy = self._copy(session, job)
        outgoing = self._outgoing.get(owner)
        with copy.lock:
            if outgoing is not None and not outgoing.is_for(session, copy.position):
                outgoing = None
            if body.offset == 0:
                copy.incarnation = session.incarnation
                if outgoing is None:
                    outgoing = self._saved(copy)
                    self._replace(self._outgoing, owner, outgoing)
            self._require_followed(copy, session)
            if outgoing is None:
                raise _differs(copy.label, f"it is fetched from byte {body.offset}")
            outgoing.file.seek(body.offset)
            piece = outgoing.file.read(PIECE_BYTES)
            return messages.ReplicaPiece(outgoing.position, outgoing.num_bytes), [piece]

    def _saved(self, copy: _Copy) -> _Transfer:
        """Writes a snapshot of a copy."""
        outgoing = _Transfer(copy.job, copy.incarnation, copy.position)
        try:
            cut = copy.store.snapshot()
            assert cut is not None, "a copy was attached when it was created"
            try:
                outgoing.num_bytes = snapshot_files.write(outgoing.file, cut)
            finally:
                cut.close()
        except BaseException:
            outgoing.file.close()
            raise
        return outgoing

    def _replace(self, transfers: dict[int, _Transfer], owner: int, new: _Transfer | None) -> None:
        with self._lock:
            old = transfers.pop(owner, None)
            if new is not None:
                transfers[owner] = new
        if old is not None:
            old.file.close()

    def _copy(self, session: Session, job: str) -> _Copy:
        with self._lock:
            found = self._copies.get(session.task)
        if found is None or found.job != job:
            raise self._missing(session)
        return found

    def _require_followed(self, copy: _Copy, session: Session) -> None:
        if copy.incarnation != session.incarnation:
            # An incarnation that was replaced is fenced when it sends a snapshot.
            raise self._missing(session)

    def _missing(self, session: Session) -> errors.NotFoundError:
        return errors.NotFoundError(
            f"/job:ps/task:{self._index} has no copy of incarnation {session.incarnation:x} of "
            f"{session}. Send it a snapshot."
        )


def _differs(what: str, found: object) -> errors.DataLossError:
    return errors.DataLossError(
        f"{what} does not match its owner: {found}. No action is needed: the server sends a new "
        "snapshot to its mirror."
    )
