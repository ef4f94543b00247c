"""One pass over a dataset, whose position can be saved and set."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from replicax.foundation import errors
from replicax.input.builder_plan import Plan
from replicax.input.iterators import DataIterator

if TYPE_CHECKING:
    import grain


class DatasetIterator(DataIterator):
    """What `iter(dataset)` returns.

    Inside an `rx.function`, as an argument or captured, each call takes new elements.

    `get_state` returns a small dict that JSON can hold. A process that builds the same dataset
    and sets it goes on with exactly the element that would have come next.

    >>> from replicax.input.builder import Dataset
    >>> iterator = iter(Dataset.range(4))
    >>> int(next(iterator))
    0
    >>> state = iterator.get_state()
    >>> other = iter(Dataset.range(4))
    >>> other.set_state(state)
    >>> int(next(other))
    1
    """

    def __init__(self, plan: Plan, epoch: int, on_epoch: Callable[[int], None]) -> None:
        super().__init__()
        self._plan = plan
        self._epoch = epoch
        # Tells the dataset which epoch it is in, after a position was set.
        self._on_epoch = on_epoch
        self._iterator: grain.DatasetIterator[Any] = plan.open((epoch,))
        # The last position of an iterator that is closed.
        self._end: dict[str, Any] | None = None

    def __repr__(self) -> str:
        state = "closed" if self._end is not None else f"epoch {self._epoch}"
        return f"<rx.data.DatasetIterator of {self._plan.name}, {state}>"

    @override
    def _read(self) -> Any:
        if self._end is not None:
            raise StopIteration
        try:
            return next(self._iterator)
        except StopIteration:
            self.close()
            raise

    @override
    def _position(self) -> dict[str, Any]:
        return {
            "pipeline": self._plan.name,
            "epoch": self._epoch,
            "seeds": [seed.value for seed in self._plan.seeds],
            "position": self._iterator.get_state() if self._end is None else self._end,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a position that `get_state` returned, in this process or another."""
        found = state.get("pipeline") if isinstance(state, dict) else None
        if found != self._plan.name:
            raise errors.InvalidArgumentError(
                f"The position must be one of a dataset made by {self._plan.name!r}",
                f"it is one of {found!r}",
                "Build the dataset by the same steps as when the position was saved.",
            )
        for seed, value in zip(self._plan.seeds, state["seeds"], strict=True):
            seed.value = value
        with self._lock:
            self._returned = []
            self._iterator.close()
            self._end = None
            self._epoch = state["epoch"]
            self._on_epoch(self._epoch)
            self._iterator = self._plan.open((self._epoch,))
            self._iterator.set_state(state["position"])

    @override
    def close(self) -> None:
        """Ends threads and closes files; the iterator then has no more elements."""
        if self._end is None:
            self._end = self._iterator.get_state()
            self._iterator.close()

    def __del__(self) -> None:
        # An iterator that was left before its end may hold threads and files.
        iterator = getattr(self, "_iterator", None)
        if iterator is not None:
            iterator.close()
