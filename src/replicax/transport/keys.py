"""CURVE keys that authenticate the roles of tasks over TCP.

There is one key pair per role. A task holds the secret key of its own role and the public keys of
all roles: both sides of a connection are authenticated, and its traffic is encrypted. A file of
public keys has one line per key: while keys are renewed, the older ones are accepted, too.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from replicax.foundation import errors, lazy, settings
from replicax.protocol.tasks import ROLES, Role

if TYPE_CHECKING:
    import zmq
else:
    zmq = lazy.module("zmq")

_log = logging.getLogger(__name__)

# The number of keys of one role that are accepted at the same time.
_MOST_ACCEPTED = 8

_KEY = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


@dataclasses.dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one task.

    Attributes:
      role: The role of the secret key.
      public: The public key of the role.
      secret: The secret key of the role; never shown.
      public_keys: The newest public key of each role.
      older: The older public keys that are still accepted.
      directory: The directory of the files; None without.
    """

    role: Role
    public: bytes
    secret: bytes = dataclasses.field(repr=False)
    public_keys: dict[Role, bytes] = dataclasses.field(repr=False)
    older: dict[Role, tuple[bytes, ...]] = dataclasses.field(default_factory=dict, repr=False)
    directory: Path | None = None

    def accepted(self, role: Role) -> tuple[bytes, ...]:
        """Returns the accepted public keys of a role, the newest first."""
        return (self.public_keys[role], *self.older.get(role, ()))

    def latest(self) -> Keys:
        """Returns these keys with the public keys in the files now.

        Files that cannot be read, or are not safe, change nothing.
        """
        if self.directory is None:
            return self
        try:
            found = _read_public(self.directory)
        except (errors.DistributeError, OSError) as error:
            _log.warning("Keeping the old keys: %s", error)
            return self
        return _with_public(self, found)

    def stamp(self) -> tuple[object, ...]:
        """Returns a value that changes when the files of public keys do."""
        if self.directory is None:
            return ()
        return tuple(_stamp(self.directory / f"{role}.public") for role in ROLES)

    def __reduce__(self) -> NoReturn:
        # A closure that captured them would send the coordinator's secret key to the workers.
        raise errors.ArgumentTypeError(
            "Keys cannot be pickled or copied",
            f"those of a {self.role} were",
            "Pass the directory of the keys, and read them where they are needed.",
        )


def make(directory: str | os.PathLike[str]) -> Path:
    """Creates new keys for a cluster: a secret and a public file per role.

    Each host needs the public files and the secrets of the roles that run there.

    Args:
      directory: The directory; it is created, or must be private to this user and without keys.

    Returns:
      The directory.
    """
    path = Path(directory)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_private(path)
    names = [f"{role}.{kind}" for role in ROLES for kind in ("public", "secret")]
    if found := [n for n in names if (path / n).exists()]:
        raise errors.InvalidArgumentError(
            "New keys need a directory without keys",
            f"{str(path)!r} has {', '.join(found)}",
            "Choose another directory, or remove the old keys.",
        )
    for role in ROLES:
        public, secret = zmq.curve_keypair()
        _write(path / f"{role}.public", [public])
        _write(path / f"{role}.secret", [secret])
    return path


def renew(directory: str | os.PathLike[str], role: Role) -> None:
    """Creates a new key for a role; the older ones are accepted until `retire`.

    Running tasks reload the files of public keys. Copy those to all hosts first, then the secret to
    the hosts of the role, and restart its tasks one after the other.
    """
    path = Path(directory)
    accepted = load(path, role).accepted(role)
    public, secret = zmq.curve_keypair()
    # In this order: a secret without its public key could not be used.
    _replace(path / f"{role}.public", [public, *accepted])
    _replace(path / f"{role}.secret", [secret])


def retire(directory: str | os.PathLike[str]) -> None:
    """Removes all keys but the newest of each role; connections with others are rejected."""
    path = Path(directory)
    for role, accepted in _read_public(path).items():
        _replace(path / f"{role}.public", accepted[:1])


def _replace(path: Path, keys: Sequence[bytes]) -> None:
    new = path.with_name(f".{path.name}.{os.getpid()}")
    _write(new, keys)
    os.replace(new, path)


def _write(path: Path, keys: Sequence[bytes]) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(b"".join(key + b"\n" for key in keys))
        file.flush()
        os.fsync(file.fileno())


def load(directory: str | os.PathLike[str], role: Role) -> Keys:
    """Reads the keys for a task of some role.

    Raises:
      NotFoundError: A file is missing.
      PermissionDeniedError: Others could read or change the directory or a file.
      InvalidArgumentError: A file contains no key.
    """
    path = Path(directory)
    if role not in ROLES:
        raise errors.InvalidArgumentError(
            f"Keys are for the roles {', '.join(ROLES)}",
            f"{role!r} was given",
            "Use one of them.",
        )
    _check_private(path)
    found = _read_public(path)
    (secret,) = _read(path / f"{role}.secret", most=1)
    public = zmq.curve_public(secret)
    if public not in found[role]:
        raise errors.InvalidArgumentError(
            "The public and the secret key of a role must be a pair",
            f"{role}.public in {str(path)!r} is not that of {role}.secret",
            "Copy both from the same `replicax keys make`.",
        )
    return _with_public(Keys(role, public, secret, {}, directory=path), found)


def _with_public(keys: Keys, found: Mapping[Role, Sequence[bytes]]) -> Keys:
    return dataclasses.replace(
        keys,
        public_keys={role: accepted[0] for role, accepted in found.items()},
        older={role: tuple(accepted[1:]) for role, accepted in found.items()},
    )


def _read_public(directory: Path) -> dict[Role, list[bytes]]:
    _check_private(directory)
    return {role: _read(directory / f"{role}.public", most=_MOST_ACCEPTED) for role in ROLES}


def _stamp(path: Path) -> object:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size, found.st_mode


def from_environment(role: Role) -> Keys | None:
    """Reads the keys from the directory that REPLICAX_KEYS names; None if it is not set."""
    directory = settings.REPLICAX_KEYS.read()
    return load(directory, role) if directory else None


def _read(path: Path, most: int) -> list[bytes]:
    _check_private(path)
    lines = path.read_bytes().split()
    if not 1 <= len(lines) <= most or not all(map(_KEY.fullmatch, lines)):
        raise errors.InvalidArgumentError(
            f"A file of keys has a line of 40 characters, or up to {most}"
            if most > 1
            else "A file with a secret has one line of 40 characters",
            f"{str(path)!r} contains something else",
            "Make new ones with `replicax keys make DIR`.",
        )
    return lines


def _check_private(path: Path) -> None:
    try:
        found = os.stat(path)
    except FileNotFoundError as error:
        raise errors.NotFoundError(
            "The keys of a cluster must be in one directory",
            f"{str(path)!r} does not exist",
            f"Make them with `replicax keys make DIR` and set {settings.REPLICAX_KEYS}=DIR.",
        ) from error
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077 or found.st_uid not in (os.getuid(), 0):
        raise errors.PermissionDeniedError(
            "Keys must be readable by their user alone",
            f"{str(path)!r} has mode {mode:o} and belongs to user {found.st_uid}",
            "Run `chmod -R go= ` on the directory, or make new keys if others may have read them.",
        )
