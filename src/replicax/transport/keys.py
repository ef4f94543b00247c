"""Keys: how tasks prove their role to each other over TCP.

There is one CURVE key pair per role. A task holds the secret of its own role and the public
keys of all: it knows whom it calls and who calls it, and everything in between is encrypted.
A file of public keys has a line per key: while keys are renewed, the older ones are good, too.
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

from replicax.foundation import errors, lazy
from replicax.protocol.tasks import ROLES, Role

if TYPE_CHECKING:
    import zmq
else:
    zmq = lazy.module("zmq")

_log = logging.getLogger(__name__)

VARIABLE = "REPLICAX_KEYS"

# Keys of one role that are good at the same time.
_MOST_GOOD = 8

_KEY = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


@dataclasses.dataclass(frozen=True, slots=True)
class Keys:
    """What one task needs to know.

    Attributes:
      role: Whose secret it is.
      public: The public key of the role.
      secret: The secret key of the role; never shown.
      public_keys: The public keys of all roles, the newest of each.
      older: Those that are still good, from before keys were renewed.
      directory: Where they were read; None if they were not.
    """

    role: Role
    public: bytes
    secret: bytes = dataclasses.field(repr=False)
    public_keys: dict[Role, bytes] = dataclasses.field(repr=False)
    older: dict[Role, tuple[bytes, ...]] = dataclasses.field(default_factory=dict, repr=False)
    directory: Path | None = None

    def good(self, role: Role) -> tuple[bytes, ...]:
        """Returns the public keys of a role that were good when these were read."""
        return (self.public_keys[role], *self.older.get(role, ()))

    def latest(self) -> Keys:
        """Returns the same with the public keys that are good by now.

        What cannot be read, or is not safe, changes nothing.
        """
        if self.directory is None:
            return self
        try:
            found = _read_public(self.directory)
        except (errors.DistributeError, OSError) as error:
            _log.warning("The keys stay as they were: %s", error)
            return self
        return _with_public(self, found)

    def stamp(self) -> tuple[object, ...]:
        """Returns something that changes when the files of public keys do."""
        if self.directory is None:
            return ()
        return tuple(_stamp(self.directory / f"{role}.public") for role in ROLES)

    def __reduce__(self) -> NoReturn:
        # A closure that captured them would carry the coordinator's secret to the workers.
        raise errors.ArgumentTypeError(
            "Keys stay in the process that has read them",
            f"those of a {self.role} were to be pickled or copied",
            "Pass the directory of the keys, and read them where they are needed.",
        )


def make(directory: str | os.PathLike[str]) -> Path:
    """Makes new keys for a cluster: a secret and a public file per role.

    Each host needs the public files and the secrets of the roles that run there.

    Args:
      directory: Where to put them; it is made, or must be of this user alone and without keys.

    Returns:
      The directory.
    """
    path = Path(directory)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_private(path)
    names = [f"{role}.{kind}" for role in ROLES for kind in ("public", "secret")]
    if found := [n for n in names if (path / n).exists()]:
        raise errors.InvalidArgumentError(
            "New keys go into a directory without keys",
            f"{str(path)!r} has {', '.join(found)}",
            "Choose another directory, or remove the old keys.",
        )
    for role in ROLES:
        public, secret = zmq.curve_keypair()
        _write(path / f"{role}.public", [public])
        _write(path / f"{role}.secret", [secret])
    return path


def renew(directory: str | os.PathLike[str], role: Role) -> None:
    """Makes a new key for a role; the older ones stay good until `retire`.

    Tasks that run take note of the files of public keys. First those go to all hosts; then the
    secret goes to the hosts of the role, whose tasks are started again, one after the other.
    """
    path = Path(directory)
    good = load(path, role).good(role)
    public, secret = zmq.curve_keypair()
    # In this order: a secret whose public key is not there could not be used.
    _replace(path / f"{role}.public", [public, *good])
    _replace(path / f"{role}.secret", [secret])


def retire(directory: str | os.PathLike[str]) -> None:
    """Leaves only the newest key of each role; connections with others are refused."""
    path = Path(directory)
    for role, good in _read_public(path).items():
        _replace(path / f"{role}.public", good[:1])


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
      InvalidArgumentError: A file holds no key.
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
            "The two keys of a role belong together",
            f"{role}.public in {str(path)!r} is not that of {role}.secret",
            "Copy both from the same `replicax keys make`.",
        )
    return _with_public(Keys(role, public, secret, {}, directory=path), found)


def _with_public(keys: Keys, found: Mapping[Role, Sequence[bytes]]) -> Keys:
    return dataclasses.replace(
        keys,
        public_keys={role: good[0] for role, good in found.items()},
        older={role: tuple(good[1:]) for role, good in found.items()},
    )


def _read_public(directory: Path) -> dict[Role, list[bytes]]:
    _check_private(directory)
    return {role: _read(directory / f"{role}.public", most=_MOST_GOOD) for role in ROLES}


def _stamp(path: Path) -> object:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size, found.st_mode


def from_environment(role: Role) -> Keys | None:
    """Reads the keys from the directory that REPLICAX_KEYS names; None if it is not set."""
    directory = os.environ.get(VARIABLE)
    return load(directory, role) if directory else None


def _read(path: Path, most: int) -> list[bytes]:
    _check_private(path)
    lines = path.read_bytes().split()
    if not 1 <= len(lines) <= most or not all(map(_KEY.fullmatch, lines)):
        raise errors.InvalidArgumentError(
            f"A file of keys has a line of 40 characters, or up to {most}"
            if most > 1
            else "A file with a secret has one line of 40 characters",
            f"{str(path)!r} holds something else",
            "Make new ones with `replicax keys make DIR`.",
        )
    return lines


def _check_private(path: Path) -> None:
    try:
        found = os.stat(path)
    except FileNotFoundError as error:
        raise errors.NotFoundError(
            "The keys of a cluster lie in one directory",
            f"there is no {str(path)!r}",
            f"Make them with `replicax keys make DIR` and set {VARIABLE}=DIR.",
        ) from error
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077 or found.st_uid not in (os.getuid(), 0):
        raise errors.PermissionDeniedError(
            "Keys must be readable by their user alone",
            f"{str(path)!r} has mode {mode:o} and belongs to user {found.st_uid}",
            "Run `chmod -R go= ` on the directory, or make new keys if others may have read them.",
        )
