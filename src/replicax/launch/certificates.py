"""The certificates that a launcher hands to tasks: those of a role, never the authority's."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath

from replicax.foundation import errors
from replicax.protocol.tasks import ROLES, Role
from replicax.transport.keys import CA, CERTIFICATE, KEY


def of_role(directory: Path, role: Role) -> list[Path]:
    """Returns the files that all tasks of a role share, in a directory of `replicax keys make`.

    Raises:
      NotFoundError: The directory has no certificate for the whole role.
    """
    found = [directory / role / name for name in (CA, CERTIFICATE, KEY)]
    for path in found:
        if not path.is_file():
            raise errors.NotFoundError(
                "A launcher needs certificates that all tasks of a role share",
                f"there is no file {str(path)!r}",
                "Make them with `replicax keys make DIR`, without numbers of tasks.",
            )
    return found


def read(directory: Path, roles: Iterable[Role] = ROLES) -> dict[str, bytes]:
    """Returns the files of roles by name, such as "worker/tls.key"."""
    return {
        f"{role}/{path.name}": path.read_bytes()
        for role in roles
        for path in of_role(directory, role)
    }


def write(directory: Path, files: Mapping[str, bytes]) -> Path:
    """Writes files of `read` to a new directory that only this user can read, and returns it."""
    directory.mkdir(mode=0o700, exist_ok=True)
    for name, data in files.items():
        # At most one directory deep, whatever the sender wrote.
        parts = [part for part in PurePath(name).parts if part not in ("/", "..")][-2:]
        path = directory.joinpath(*parts)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
    return directory
