"""Device names, in all spellings of TensorFlow. Pure: it knows no device."""

from __future__ import annotations

import dataclasses
import re

from replicax.foundation import errors

_PART = re.compile(
    r"(?P<key>job|replica|task|device):(?P<value>[^/]+)|(?P<kind>[A-Za-z]\w*)(:(?P<index>\d+|\*))?"
)


class _Task:
    # The task of this process, in the names of its devices; set when it joins a group.
    job = "localhost"
    index = 0


def set_task(job: str, index: int) -> None:
    """Sets the task in the names of the devices of this process."""
    _Task.job, _Task.index = job, index


@dataclasses.dataclass(frozen=True)
class DeviceSpec:
    """A parsed device name; absent parts are None."""

    job: str | None = None
    replica: int | None = None
    task: int | None = None
    kind: str | None = None
    index: int | None = None

    @property
    def is_local(self) -> bool:
        """Whether the name is one of a device of this process."""
        if self.job in (None, "localhost"):
            return True
        return (self.job, self.task or 0) == (_Task.job, _Task.index)

    def __str__(self) -> str:
        """Returns the canonical name, with the parts of this process filled in."""
        return (
            f"/job:{self.job or _Task.job}/replica:{self.replica or 0}"
            f"/task:{_Task.index if self.task is None else self.task}"
            f"/device:{self.kind or 'CPU'}:{self.index or 0}"
        )


def parse(name: str) -> DeviceSpec:
    """Parses a device name.

    >>> str(parse("/gpu:1"))
    '/job:localhost/replica:0/task:0/device:GPU:1'
    >>> parse("/job:worker/replica:0/task:2/device:CPU:0").task
    2
    """
    fields: dict[str, str | int] = {}
    for part in name.strip("/").split("/"):
        match = _PART.fullmatch(part)
        if match is None:
            raise _bad_name(name)
        key, value, kind, index = match.group("key", "value", "kind", "index")
        if key == "device":
            kind, _, index = value.partition(":")
        if key in ("job",):
            fields["job"] = value
        elif key in ("replica", "task"):
            if not value.isdigit():
                raise _bad_name(name)
            fields[key] = int(value)
        else:
            if not kind or (index and not (index.isdigit() or index == "*")):
                raise _bad_name(name)
            fields["kind"] = kind.upper()
            if index and index != "*":
                fields["index"] = int(index)
    return DeviceSpec(**fields)  # type: ignore[arg-type]


def _bad_name(name: str) -> errors.InvalidArgumentError:
    return errors.InvalidArgumentError(
        "A device name looks like 'CPU:1', '/gpu:0' or '/job:worker/replica:0/task:0/device:GPU:0'",
        f"{name!r} was given",
        "Correct the name.",
    )
