"""Expands the lists of nodes and of counts in the variables of Slurm."""

from __future__ import annotations

import itertools
import re

from replicax.foundation import errors

_HOST = re.compile(r"(?:[^\[\],\s]|\[[^\[\]\s]*\])+")
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)
_COUNT = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?", re.ASCII)
_MAX_HOSTS = 100_000


def expand_hosts(text: str) -> list[str]:
    """Expands a list of nodes.

    >>> expand_hosts("login,n[08-10,12]-ib")
    ['login', 'n08-ib', 'n09-ib', 'n10-ib', 'n12-ib']
    """
    hosts: list[str] = []
    position = 0
    while position < len(text):
        match = _HOST.match(text, position)
        if match is None or text[match.end() : match.end() + 1] not in ("", ","):
            raise _unreadable("list of nodes", text)
        pieces = [
            _numbers(inside, text) if outside is None else [outside]
            for inside, outside in (piece.groups() for piece in _PIECE.finditer(match.group()))
        ]
        hosts += map("".join, itertools.islice(itertools.product(*pieces), _MAX_HOSTS + 1))
        if len(hosts) > _MAX_HOSTS:
            raise _unreadable("list of nodes", text)
        position = match.end() + 1
    if not hosts or text.endswith(","):
        raise _unreadable("list of nodes", text)
    return hosts


def expand_counts(text: str) -> list[int]:
    """Expands the number of tasks on each node.

    >>> expand_counts("2(x3),1")
    [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        repeat = int(match.group(2) or 1) if match else 0
        if match is None or len(counts) + repeat > _MAX_HOSTS:
            raise _unreadable("number of tasks per node", text)
        counts += [int(match.group(1))] * repeat
    return counts


def _numbers(inside: str, text: str) -> list[str]:
    found: list[str] = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise _unreadable("list of nodes", text)
        first, last = match.group(1), match.group(2) or match.group(1)
        if not 0 <= int(last) - int(first) < _MAX_HOSTS - len(found):
            raise _unreadable("list of nodes", text)
        # "08-10" is zero-padded, "8-10" is not.
        found += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return found


def _unreadable(what: str, text: str) -> errors.InvalidArgumentError:
    return errors.InvalidArgumentError(
        f"A {what} of Slurm must look like 'n[01-04],m7' or '2(x3),1', with at most "
        f"{_MAX_HOSTS} entries",
        f"{text[:60]!r} was found",
        "Check the SLURM_* variables of this process.",
    )
