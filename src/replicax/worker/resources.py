"""Resources: objects that a worker keeps between closures, such as datasets and iterators."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, Protocol, runtime_checkable

from replicax.foundation import errors
from replicax.foundation.types import Tree
from replicax.input.distributed import DistributedDataset
from replicax.protocol.messages import RemoteError
from replicax.strategies.base import Strategy
from replicax.strategies.inputs import UnplacedDataset
from replicax.tracing.function import Function
from replicax.variables import creators
from replicax.worker import error_reports

_log = logging.getLogger(__name__)


@runtime_checkable
class Closeable(Protocol):
    """A resource that runs in the background."""

    def close(self) -> object: ...


class Resources:
    """All resources by id. Used by the compute thread."""

    def __init__(self, task: str) -> None:
        self._task = task
        self._created: dict[int, object] = {}
        # The errors of those that could not be created; closures that use them raise these.
        self._failed: dict[int, RemoteError] = {}

    def __len__(self) -> int:
        return len(self._created)

    def create(self, number: int, create: Callable[[], object]) -> RemoteError | None:
        """Creates a resource unless it exists; returns the error if that fails."""
        if number in self._created:
            return None
        try:
            self._created[number] = create()
        except BaseException as error:  # The user's code may raise anything.
            self._failed[number] = error_reports.describe(error, "input")
            return self._failed[number]
        self._failed.pop(number, None)
        return None

    def get(self, number: int) -> Any:
        """Returns a resource.

        Raises:
          ClosureInputError: It could not be created, or was dropped.
        """
        try:
            return self._created[number]
        except KeyError:
            failure = self._failed.get(number)
        found = "it was never created there, or was dropped"
        if failure is not None and failure.kind == errors.ClosureInputError.__name__:
            # It depends on another resource, which the text names.
            raise errors.ClosureInputError(failure.text)
        if failure is not None:
            found = f"creating it failed with {failure.kind}: {failure.text}"
        raise errors.ClosureInputError(
            f"A closure on {self._task} needs the per-worker object {number}",
            found,
            "Correct the function that creates it, and create it again.",
        )

    def drop(self, numbers: Iterable[int]) -> None:
        """Drops and closes resources."""
        for number in numbers:
            self._failed.pop(number, None)
            if number in self._created:
                self._close(number, self._created.pop(number))

    def close(self) -> None:
        """Drops all resources."""
        self.drop([*self._created, *self._failed])

    def _close(self, number: int, resource: object) -> None:
        if not isinstance(resource, Closeable):
            return
        try:
            resource.close()
        except BaseException:  # Of the user's class; the worker continues.
            _log.exception("%s: the per-worker object %d could not be closed", self._task, number)


def create_dataset(source: Any, strategy: Strategy) -> Iterable[Tree]:
    """Returns the dataset of a worker; compiled closures can call `next` of its iterators.

    Args:
      source: A function without arguments that returns a dataset, or a dataset. A distributed
        dataset is returned unchanged; of others, each replica gets whole elements.
      strategy: The strategy of the worker.
    """
    with creators.variable_creator_scope(_reject_variable):
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
    """The elements of a generator function, from the start for each iterator."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function

    def __iter__(self) -> Iterator[object]:
        return self._function()


def _reject_variable(next_creator: Callable[..., object], **kwargs: object) -> NoReturn:
    raise errors.InvalidArgumentError(
        "A dataset function creates a dataset and nothing else",
        f"it creates a variable ({kwargs.get('name') or 'without a name'})",
        "Create variables at the coordinator, inside `with strategy.scope():`.",
    )
