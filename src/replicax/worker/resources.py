"""Objects that stay on a worker between closures: datasets, iterators and other values."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from replicax.foundation import errors
from replicax.input.distributed import DistributedDataset
from replicax.protocol.messages import RemoteError
from replicax.strategies.inputs import UnplacedDataset
from replicax.tracing.function import Function
from replicax.variables import creators
from replicax.worker import error_reports

_log = logging.getLogger(__name__)


class Resources:
    """Resources by number. Used by the thread that computes."""

    def __init__(self, task: str) -> None:
        self._task = task
        self._made: dict[int, Any] = {}
        # Those that could not be made, and why; closures that use them say so.
        self._failed: dict[int, RemoteError] = {}

    def __len__(self) -> int:
        return len(self._made)

    def make(self, number: int, make: Callable[[], Any]) -> RemoteError | None:
        """Makes a resource unless it is there; returns why it could not be made, if so."""
        if number in self._made:
            return None
        try:
            self._made[number] = make()
        except BaseException as error:  # The user's code may raise anything.
            self._failed[number] = error_reports.describe(error, "input")
            return self._failed[number]
        self._failed.pop(number, None)
        return None

    def get(self, number: int) -> Any:
        """Returns a resource.

        Raises:
          ClosureInputError: It could not be made, or is not there.
        """
        try:
            return self._made[number]
        except KeyError:
            failure = self._failed.get(number)
        found = "it was never made there, or was dropped"
        if failure is not None and failure.kind == errors.ClosureInputError.__name__:
            # It is made from another one: that is the one to name.
            raise errors.ClosureInputError(failure.text)
        if failure is not None:
            found = f"making it failed with {failure.kind}: {failure.text}"
        raise errors.ClosureInputError(
            f"A closure on {self._task} needs the per-worker object {number}",
            found,
            "Correct the function that makes it, and make it anew.",
        )

    def drop(self, numbers: Iterable[int]) -> None:
        """Drops resources, and ends what they do in the background."""
        for number in numbers:
            self._failed.pop(number, None)
            if number in self._made:
                self._close(number, self._made.pop(number))

    def close(self) -> None:
        """Drops all of them."""
        self.drop([*self._made, *self._failed])

    def _close(self, number: int, resource: Any) -> None:
        close = getattr(resource, "close", None)
        if not callable(close):
            return
        try:
            close()
        except BaseException:  # Of the user's class; the worker goes on.
            _log.exception("%s: the per-worker object %d could not be closed", self._task, number)


def make_dataset(source: Any, strategy: Any) -> Any:
    """Returns the dataset of a worker, from which `next` works in compiled closures as well.

    Args:
      source: A function without arguments that returns a dataset, or a dataset. One that is
        already distributed stays as it is; of another, each replica gets whole elements.
      strategy: That of the worker.
    """
    with creators.variable_creator_scope(_refuse_variable):
        dataset = source
        if isinstance(source, Function):
            # It returns no arrays, so there is nothing to compile.
            dataset = source.python_function()
        elif callable(source) and not hasattr(source, "__iter__"):
            dataset = source()
        if isinstance(dataset, UnplacedDataset):
            return dataset.distribute(strategy)
        if isinstance(dataset, DistributedDataset):
            return dataset
        if isinstance(dataset, types.GeneratorType):
            dataset = _FromStart(source)
        return strategy.distribute_datasets_from_function(lambda _: dataset)


class _FromStart:
    """What a generator function gives, from the start whenever it is read."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function

    def __iter__(self) -> Any:
        return self._function()


def _refuse_variable(next_creator: Any, **kwargs: Any) -> NoReturn:
    raise errors.InvalidArgumentError(
        "A dataset function makes a dataset and nothing else",
        f"it creates a variable ({kwargs.get('name') or 'without a name'})",
        "Create variables at the coordinator, inside `with strategy.scope():`.",
    )
