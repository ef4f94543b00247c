"""Keys: how tasks prove their role to each other over TCP.

There is one CURVE key pair per role. A task holds the secret of its own role and the public
keys of all: it knows whom it calls and who calls it, and everything in between is encrypted.
"""

from __future__ import annotations

import dataclasses
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from replicax.foundation import errors, lazy
from replicax.transport import messages
from replicax.transport.tasks import ROLES

if TYPE_CHECKING:
    import zmq
else:
    zmq = lazy.module("zmq")

VARIABLE = "REPLICAX_KEYS"

_KEY = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


@dataclasses.dataclass(frozen=True, slots=True)
class Keys:
    """What one task needs to know.

    Attributes:
      role: Whose secret it is.
      public: The public key of the role.
      secret: The secret key of the role; never shown.
      public_keys: The public keys of all roles.
    """

    role: messages.Role
    public: bytes
    secret: bytes = dataclasses.field(repr=False)
    public_keys: dict[messages.Role, bytes] = dataclasses.field(repr=False)


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
            errors.message(
                "New keys go into a directory without keys",
                f"{str(path)!r} has {', '.join(found)}",
                "Choose another directory, or remove the old keys.",
            )
        )
    for role in ROLES:
        public, secret = zmq.curve_keypair()
        _write(path / f"{role}.public", public)
        _write(path / f"{role}.secret", secret)
    return path


def _write(path: Path, key: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(key + b"\n")
        file.flush()
        os.fsync(file.fileno())


def load(directory: str | os.PathLike[str], role: messages.Role) -> Keys:
    """Reads the keys for a task of some role.

    Raises:
      NotFoundError: A file is missing.
      PermissionDeniedError: Others could read or change the directory or a file.
      InvalidArgumentError: A file holds no key.
    """
    path = Path(directory)
    if role not in ROLES:
        raise errors.InvalidArgumentError(
            errors.message(
                f"Keys are for the roles {', '.join(ROLES)}",
                f"{role!r} was given",
                "Use one of them.",
            )
        )
    _check_private(path)
    public_keys: dict[messages.Role, bytes] = {r: _read(path / f"{r}.public") for r in ROLES}
    secret = _read(path / f"{role}.secret")
    if zmq.curve_public(secret) != public_keys[role]:
        raise errors.InvalidArgumentError(
            errors.message(
                "The two keys of a role belong together",
                f"{role}.public in {str(path)!r} is not that of {role}.secret",
                "Copy both from the same `replicax keys make`.",
            )
        )
    return Keys(role, public_keys[role], secret, public_keys)


def from_environment(role: messages.Role) -> Keys | None:
    """Reads the keys from the directory that REPLICAX_KEYS names; None if it is not set."""
    directory = os.environ.get(VARIABLE)
    return load(directory, role) if directory else None


def _read(path: Path) -> bytes:
    _check_private(path)
    content = path.read_bytes().strip()
    if not _KEY.fullmatch(content):
        raise errors.InvalidArgumentError(
            errors.message(
                "A key has 40 characters",
                f"{str(path)!r} holds something else",
                "Make new ones with `replicax keys make DIR`.",
            )
        )
    return content


def _check_private(path: Path) -> None:
    try:
        found = os.stat(path)
    except FileNotFoundError as error:
        raise errors.NotFoundError(
            errors.message(
                "The keys of a cluster lie in one directory",
                f"there is no {str(path)!r}",
                f"Make them with `replicax keys make DIR` and set {VARIABLE}=DIR.",
            )
        ) from error
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077 or found.st_uid not in (os.getuid(), 0):
        raise errors.PermissionDeniedError(
            errors.message(
                "Keys must be readable by their user alone",
                f"{str(path)!r} has mode {mode:o} and belongs to user {found.st_uid}",
                "Run `chmod -R go= ` on the directory, or make new keys if others may have "
                "read them.",
            )
        )
