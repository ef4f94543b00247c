"""Which threads of this process wait for the coordinator, and since when: for people."""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclasses.dataclass(frozen=True)
class Waiter:
    """A thread that waits.

    Attributes:
      thread: Its name.
      call: What the user called.
      since_s: When that was.
    """

    thread: str
    call: str
    since_s: float


def noted(
    call: str,
) -> Callable[[Callable[Concatenate[Any, _P], _R]], Callable[Concatenate[Any, _P], _R]]:
    """Makes a method note, while it runs, that its thread waits in `call`.

    The object of the method has a dict `waiters` for that, by the number of the thread.
    """

    def decorate(method: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[Any, _P], _R]:
        @functools.wraps(method)
        def noting(self: Any, *args: _P.args, **kwargs: _P.kwargs) -> _R:
            ident = threading.get_ident()
            name = threading.current_thread().name
            self.waiters[ident] = Waiter(name, call, time.monotonic())
            try:
                return method(self, *args, **kwargs)
            finally:
                del self.waiters[ident]

        return noting

    return decorate
