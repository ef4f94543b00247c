"""Certificates that authenticate tasks over TCP.

Each job has an authority of its own, and each task, or role, a certificate with the job, the role
and the index in its name: `replicax://JOB/ROLE/INDEX`. Both sides of a connection present one, so
both know who the other is. Certificates of an organisation need the same name, as a URI among the
alternative names; the files are those of a Kubernetes TLS secret. All files are read again when
they change: certificates are renewed while a job runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import logging
import os
import re
import ssl
import stat
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

from replicax.foundation import errors, lazy, settings
from replicax.protocol.tasks import ROLES, Role

if TYPE_CHECKING:
    from replicax.transport import authority
else:
    authority = lazy.module("replicax.transport.authority")

_log = logging.getLogger(__name__)

CA, CERTIFICATE, KEY = "ca.crt", "tls.crt", "tls.key"
_NAME = re.compile(r"replicax://([A-Za-z0-9._-]{1,63})/(coordinator|worker|ps)/(\d{1,6}|\*)")


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """What a certificate proves about a task.

    Attributes:
      job: The job.
      role: The role in it.
      index: The index of the task; None stands for every task of the role.

    Example:
      >>> identity = Identity.parse("replicax://lab/worker/3")
      >>> str(identity), identity.is_of("worker", 3), identity.is_of("worker", 4)
      ('replicax://lab/worker/3', True, False)
      >>> Identity.parse("replicax://lab/worker/*").is_of("worker", 4)
      True
    """

    job: str
    role: Role
    index: int | None

    @classmethod
    def parse(cls, name: str) -> Identity:
        """Parses the name in a certificate."""
        found = _NAME.fullmatch(name)
        if found is None:
            raise errors.InvalidArgumentError(
                "The name of a task in a certificate is 'replicax://JOB/ROLE/INDEX'",
                f"{name!r} was given",
                "A job has letters, digits, '.', '_' and '-'; the index may be '*'.",
            )
        job, role, index = found.groups()
        return cls(job, cast("Role", role), None if index == "*" else int(index))

    def is_of(self, role: str, index: int) -> bool:
        """Returns whether it is the certificate of a task."""
        return self.role == role and self.index in (None, index)

    def __str__(self) -> str:
        return f"replicax://{self.job}/{self.role}/{'*' if self.index is None else self.index}"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Keys:
    """The certificate of one task, its private key, and the authorities that it trusts.

    Attributes:
      identity: What the certificate proves.
      ca: The file with the certificates of the authorities.
      certificate: The file of the certificate.
      key: The file of the private key; its contents stay in OpenSSL.
    """

    identity: Identity
    ca: Path
    certificate: Path
    key: Path
    _loaded: dict[bool, tuple[object, ssl.SSLContext]] = dataclasses.field(
        default_factory=dict, repr=False
    )
    # The state of the files with which they could not be used, which was logged.
    _logged: dict[bool, object] = dataclasses.field(default_factory=dict, repr=False)
    _lock: Any = dataclasses.field(default_factory=threading.Lock, repr=False)

    @property
    def role(self) -> Role:
        """The role that the certificate proves."""
        return self.identity.role

    def client_context(self) -> ssl.SSLContext:
        """Returns what connections are opened with, from the files as they are now."""
        return self._context(is_server=False)

    def server_context(self) -> ssl.SSLContext:
        """Returns what connections are accepted with, from the files as they are now."""
        return self._context(is_server=True)

    def _context(self, is_server: bool) -> ssl.SSLContext:
        stamp = _stamp((self.ca, self.certificate, self.key))
        with self._lock:
            found = self._loaded.get(is_server)
            if found is not None and found[0] == stamp:
                return found[1]
            try:
                _check_key(self.key)
                context = _new_context(self, is_server)
            except (errors.DistributeError, OSError) as error:
                if found is None:
                    raise
                # In the middle of a renewal, or a mistake: connections go on with the old ones. The
                # next one tries again: the cause may be this process, if it has no descriptors.
                if self._logged.get(is_server) != stamp:
                    self._logged[is_server] = stamp
                    _log.warning("Keeping the old certificates: %s", error)
                return found[1]
            self._loaded[is_server] = stamp, context
            return context

    def identify(self, connection: ssl.SSLSocket) -> Identity:
        """Returns what the verified certificate of a peer proves.

        Raises:
          PermissionDeniedError: It names no task, or one of another job.
        """
        found = cast("dict[str, Any]", connection.getpeercert() or {}).get("subjectAltName", ())
        names = [value for kind, value in found if kind == "URI"]
        for name in names:
            with contextlib.suppress(errors.InvalidArgumentError):
                identity = Identity.parse(name)
                if identity.job == self.identity.job:
                    return identity
        raise errors.PermissionDeniedError(
            f"The certificate of a peer must be of the job {self.identity.job!r}",
            f"it is the certificate of {', '.join(names)[:200] or 'no task'}",
            "Use certificates of the same `replicax keys make` for all tasks of a job.",
        )

    def __reduce__(self) -> NoReturn:
        # They would name files that only this host has.
        raise errors.ArgumentTypeError(
            "Keys cannot be pickled or copied",
            f"those of a {self.role} were",
            "Pass the directory of the keys, and read them where they are needed.",
        )


def _new_context(keys: Keys, is_server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The name of the task is checked instead; hosts change.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if is_server:
        context.num_tickets = 0
    try:
        context.load_verify_locations(keys.ca)
        context.load_cert_chain(keys.certificate, keys.key)
    except (ssl.SSLError, OSError) as error:
        raise errors.InvalidArgumentError(
            "A task needs a certificate, its private key, and the certificate of its authority",
            f"{str(keys.certificate.parent)!r} cannot be used: {error.strerror or error}",
            "Make them with `replicax keys make DIR`, or compare the files.",
        ) from error
    return context


def make(
    directory: str | os.PathLike[str],
    job: str = "",
    counts: dict[Role, int] | None = None,
    days: float = 365.0,
) -> Path:
    """Creates an authority for a job, and a certificate for each role or task.

    Each host needs the directories of the tasks that run there, never `authority`.

    Args:
      directory: The directory; it is created, or must be private to this user and empty.
      job: The name of the job in the certificates; random by default.
      counts: The number of tasks of each role, for one certificate per task; a role without a
        number gets one certificate for all its tasks.
      days: The validity of the certificates.

    Returns:
      The directory.
    """
    path = Path(directory)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(path)
    if found := sorted(entry.name for entry in path.iterdir()):
        raise errors.InvalidArgumentError(
            "New keys need an empty directory",
            f"{str(path)!r} has {', '.join(found[:5])}",
            "Choose another directory, or remove the old keys.",
        )
    authority.create(path, job, counts or {}, days)
    return path


def renew(directory: str | os.PathLike[str], days: float = 365.0) -> None:
    """Creates a new authority and new certificates; older ones are trusted until `retire`.

    Running tasks use the new files for new connections. Copy each `ca.crt` first, then the
    certificates and keys: a task whose certificate an old `ca.crt` does not know is rejected.
    """
    path = Path(directory)
    check_private(path)
    authority.renew(path, days)


def add(directory: str | os.PathLike[str], role: Role, index: int, days: float = 365.0) -> Path:
    """Creates the certificate of one more task of a job; returns its directory."""
    path = Path(directory)
    check_private(path)
    return authority.add(path, role, index, days)


def retire(directory: str | os.PathLike[str]) -> None:
    """Trusts the newest authority only: certificates of older ones are rejected from then on."""
    path = Path(directory)
    check_private(path)
    authority.retire(path)


def load(directory: str | os.PathLike[str], role: Role, index: int | None = None) -> Keys:
    """Reads the certificate of a task from a directory of `make`, or of a Kubernetes secret.

    Args:
      directory: Has `ROLE-INDEX` or `ROLE`, or the three files themselves.
      role: The role of the task.
      index: Its index.

    Raises:
      NotFoundError: A file is missing.
      PermissionDeniedError: Others could read the key, or the certificate has expired.
      InvalidArgumentError: A file is invalid, or the certificate is that of another task.
    """
    if role not in ROLES:
        raise errors.InvalidArgumentError(
            f"Keys are for the roles {', '.join(ROLES)}",
            f"{role!r} was given",
            "Use one of them.",
        )
    path = Path(directory)
    own = path / role if index is None else path / f"{role}-{index}"
    if not own.is_dir():
        own = path / role
    if not own.is_dir() and not (path / CERTIFICATE).exists():
        # Tasks of one role can be told apart, and the caller is any of them.
        numbered = sorted(path.glob(f"{role}-*")) if index is None else []
        own = numbered[0] if numbered else own
    if not own.is_dir():
        own = path
    return load_files(own / CA, own / CERTIFICATE, own / KEY, role, index)


def load_files(
    ca: str | os.PathLike[str],
    certificate: str | os.PathLike[str],
    key: str | os.PathLike[str],
    role: Role,
    index: int | None = None,
) -> Keys:
    """Reads the certificate of a task from three files; the errors are those of `load`."""
    files = [Path(ca), Path(certificate), Path(key)]
    for path in files:
        if not path.exists():
            raise errors.NotFoundError(
                "A task needs a certificate, its private key, and the certificate of its authority",
                f"{str(path)!r} does not exist",
                f"Make them with `replicax keys make DIR` and set {settings.REPLICAX_KEYS}=DIR.",
            )
    _check_key(files[2])
    now = datetime.datetime.now(datetime.UTC)
    identity, end = authority.read(files[1])
    if end <= now:
        raise errors.PermissionDeniedError(
            f"The certificate {str(files[1])!r} must be valid",
            f"it has expired on {end:%Y-%m-%d %H:%M} UTC",
            "Run `replicax keys renew DIR`, and copy the new files to all hosts.",
        )
    if identity.role != role or (index is not None and not identity.is_of(role, index)):
        raise errors.InvalidArgumentError(
            f"The certificate must be that of a {role}"
            + ("" if index is None else f", task {index}"),
            f"{str(files[1])!r} is the certificate of {identity}",
            "Use the files of this task.",
        )
    keys = Keys(identity, files[0], files[1], files[2])
    keys.client_context()
    return keys


def from_environment(role: Role, index: int | None = None) -> Keys | None:
    """Reads the certificates that REPLICAX_KEYS or REPLICAX_TLS_* name; None if none is set."""
    ca, certificate, key = (
        settings.REPLICAX_TLS_CA.read(),
        settings.REPLICAX_TLS_CERT.read(),
        settings.REPLICAX_TLS_KEY.read(),
    )
    if ca or certificate or key:
        if not (ca and certificate and key):
            raise errors.InvalidArgumentError(
                f"{settings.REPLICAX_TLS_CA}, {settings.REPLICAX_TLS_CERT} and "
                f"{settings.REPLICAX_TLS_KEY} belong together",
                "one of them is not set",
                "Set all three, or none.",
            )
        return load_files(ca, certificate, key, role, index)
    directory = settings.REPLICAX_KEYS.read()
    return load(directory, role, index) if directory else None


def _stamp(paths: Iterable[Path]) -> object:
    """Returns a value that changes when one of the files does."""
    found: list[object] = []
    for path in paths:
        try:
            status = os.stat(path)
            found.append((status.st_ino, status.st_mtime_ns, status.st_size, status.st_mode))
        except OSError:
            found.append(None)
    return tuple(found)


def _check_key(path: Path) -> None:
    """Raises if another user can read a private key; root may share it with a group."""
    check_private(path, may_share=True)


def check_private(path: Path, may_share: bool = False) -> None:
    """Raises if another user can read a file or enter a directory."""
    try:
        found = os.stat(path)
    except FileNotFoundError as error:
        raise errors.NotFoundError(
            "The keys of a cluster must be in one directory",
            f"{str(path)!r} does not exist",
            f"Make them with `replicax keys make DIR` and set {settings.REPLICAX_KEYS}=DIR.",
        ) from error
    mode = stat.S_IMODE(found.st_mode)
    # Kubernetes shows a secret of root to the group of a pod.
    may_share = may_share and found.st_uid == 0 and os.getuid() != 0
    is_shared = mode & (0o037 if may_share else 0o077)
    if is_shared or found.st_uid not in (os.getuid(), 0):
        raise errors.PermissionDeniedError(
            "Keys must be readable by their user alone",
            f"{str(path)!r} has mode {mode:o} and belongs to user {found.st_uid}",
            "Run `chmod -R go= ` on the directory, or make new keys if others may have read them.",
        )
