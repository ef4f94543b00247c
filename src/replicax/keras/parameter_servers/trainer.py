"""`fit`, `evaluate` and `predict` on the coordinator: steps are scheduled, results are added up."""

from __future__ import annotations

import collections
import contextlib
import inspect
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import keras
import numpy as np

from replicax.coordinator.cluster_coordinator import ClusterCoordinator
from replicax.coordinator.remote_value import RemoteValue
from replicax.foundation import errors
from replicax.foundation.types import Tree
from replicax.keras import internals
from replicax.keras.parameter_servers import metric_trial, steps
from replicax.keras.parameter_servers import optimizer as optimizers
from replicax.keras.parameter_servers.clipping import Clipping
from replicax.keras.parameter_servers.data import WorkerDataAdapter, is_creator
from replicax.keras.parameter_servers.worker_model import WorkerModel
from replicax.strategies.base import Strategy
from replicax.strategies.parameter_server import ParameterServerExtended
from replicax.tracing.function import Function
from replicax.training.optimizer.remote import RemoteOptimizer

# How many batches per worker wait to be computed.
_AHEAD = 16
# How often the numbers of the progress bar are computed.
_LOGS_S = 0.2

_sessions: weakref.WeakKeyDictionary[Any, Session] = weakref.WeakKeyDictionary()

# A step of a batch: takes the number of the step and the batch.
_Step = Callable[[jax.Array, Tree], Tree]


def is_for(strategy: Strategy | None) -> bool:
    """Tells whether the models of a strategy are trained here."""
    extended = None if strategy is None else strategy.extended
    return isinstance(extended, ParameterServerExtended) and extended.cluster is not None


def session_of(model: keras.Model, strategy: Strategy) -> Session:
    """Returns the session of a model; a new one the first time."""
    found = _sessions.get(model)
    if found is None:
        found = _sessions[model] = Session(model, strategy)
    return found


class Session:
    """The steps of one model.

    Args:
      model: The model.
      strategy: Its strategy.
    """

    def __init__(self, model: keras.Model, strategy: Strategy) -> None:
        # Weak: sessions are found by their model, as long as it is there.
        self._model = weakref.ref(model)
        self.strategy = strategy
        self._coordinator: ClusterCoordinator | None = None
        self._functions: dict[tuple[str, Any], Function[..., Tree]] = {}
        self._worker_models: dict[str, WorkerModel] = {}
        # Where workers read the data of a kind of step themselves.
        self._sources: dict[str, WorkerDataAdapter | None] = {}
        self._pending: collections.deque[RemoteValue] = collections.deque()
        self._predictions: collections.deque[RemoteValue] = collections.deque()
        self._totals: list[np.ndarray] = []
        self._num_steps = 0
        self._logs: dict[str, Any] = {}
        self._logs_s = -np.inf
        self._waits = False
        self._has_failed = False

    @property
    def model(self) -> keras.Model:
        """The model."""
        model = self._model()
        assert model is not None
        return model

    @property
    def coordinator(self) -> ClusterCoordinator:
        """The coordinator of the strategy; a new one if there is none."""
        # Kept: it ends with its last reference.
        self._coordinator = ClusterCoordinator(self.strategy)
        return self._coordinator

    @property
    def _num_workers(self) -> int:
        return len(self.strategy.extended.worker_devices)

    # Data.

    def adapted(self, kind: str, data: object) -> object:
        """Returns data that Keras can read, and notes whether workers read it."""
        if is_creator(data):
            assert callable(data)
            data = WorkerDataAdapter(data, self.coordinator, self._num_workers)
        self._sources[kind] = data if isinstance(data, WorkerDataAdapter) else None
        return data

    # Steps.

    def forget(self, kind: str) -> None:
        """Forgets the functions of a kind of step: the model may have changed."""
        self._worker_models.pop(kind, None)
        self._functions = {key: f for key, f in self._functions.items() if key[0] != kind}

    def schedule(self, kind: str, batch: Tree) -> RemoteValue:
        """Schedules a step of a kind."""
        source = self._sources.get(kind)
        number = np.asarray(self._num_steps % (1 << 32), np.uint32)
        self._num_steps += 1
        if source is not None:
            return self._schedule(self._function(kind, None, batch), (number, source.iterator))
        leaves, structure = jax.tree.flatten(batch)
        template = structure.unflatten(list(range(len(leaves))))
        function = self._function(kind, (structure, template), batch)
        return self._schedule(function, (number, *map(np.asarray, leaves)))

    def _schedule(self, function: Function[..., Tree], args: Sequence[object]) -> RemoteValue:
        try:
            return self.coordinator.schedule(function, args)
        except BaseException:
            self._has_failed = True
            raise

    def _function(
        self, kind: str, structure: tuple[Any, Tree] | None, batch: Tree
    ) -> Function[..., Tree]:
        key = kind, None if structure is None else structure[0]
        if key not in self._functions:
            if kind != "predict":
                metric_trial.require_sums(self.model, batch)
            step = self._step(kind)
            template = None if structure is None else structure[1]
            name = f"{kind}_step of {self.model.name}"
            make = _of_iterator if structure is None else _of_batch
            self._functions[key] = Function(make(step, template), name=name)
        return self._functions[key]

    def _step(self, kind: str) -> _Step:
        model = self.model
        worker_model = self._worker_models.get(kind)
        if worker_model is None:
            worker_model = self._worker_models[kind] = WorkerModel.of(model)
        if kind == "train":
            remote = optimizers.on_servers(model.optimizer, self.strategy)
            return _Training(worker_model, remote, Clipping.of(model.optimizer))
        return _Other(worker_model, steps.test if kind == "test" else steps.predict)

    # Results.

    def begin(self) -> None:
        """Starts to add up results, from the current state of the metrics."""
        self._pending.clear()
        self._predictions.clear()
        self._has_failed = False
        self._totals = [_wide(np.asarray(v.value)) for v in self.model.metrics_variables]
        self._logs, self._logs_s = {}, -np.inf

    def submit(self, kind: str, batch: Tree) -> None:
        """Schedules a step whose result is added up; waits if too many are under way."""
        self._pending.append(self.schedule(kind, batch))
        limit = 0 if self._waits else _AHEAD * self._num_workers
        while len(self._pending) > limit:
            self._take()
        while self._pending and self._pending[0].is_settled:
            self._take()

    def _take(self) -> None:
        try:
            added = self._pending.popleft().fetch()
        except BaseException:
            self._has_failed = True
            raise
        for total, more in zip(self._totals, added, strict=True):
            total += more

    def finish(self) -> None:
        """Waits for all steps, and stores what they add up to in the metrics."""
        if not self._has_failed:
            while self._pending:
                self._take()
            self.coordinator.join()
        self._store()

    def finish_pending(self) -> None:
        """Waits for the steps of a call around this one, if there are any."""
        if self._pending:
            self.finish()

    def abandon(self) -> None:
        """Forgets all steps after one has failed; the next ones are not affected."""
        self._pending.clear()
        self._predictions.clear()
        # The error was raised already; `join` raises it again, and then no more.
        with contextlib.suppress(Exception):
            self.coordinator.join()

    def _store(self) -> None:
        for variable, total in zip(self.model.metrics_variables, self._totals, strict=True):
            variable.assign(total)

    def logs(self) -> dict[str, Any]:
        """Returns the results of the metrics so far; they are computed now and then."""
        if not self._logs and self._pending:
            # The first numbers of an epoch are those of a step.
            self._take()
        now = time.monotonic()
        if self._waits or now - self._logs_s >= _LOGS_S:
            self._store()
            self._logs = dict(self.model.get_metrics_result())
            self._logs_s = time.monotonic()
        return self._logs

    @contextlib.contextmanager
    def one_by_one(self) -> Iterator[None]:
        """Waits for each step."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def predict(self, iterator: Iterator[Tree]) -> Tree:
        """Returns the outputs of the next batch; schedules the batches after it, too."""
        limit = _AHEAD * self._num_workers
        while len(self._predictions) < limit:
            try:
                batch = next(iterator)
            except StopIteration:
                break
            self._predictions.append(self.schedule("predict", batch))
        if not self._predictions:
            raise StopIteration
        return self._predictions.popleft().fetch()


def _wide(value: np.ndarray) -> np.ndarray:
    """Returns a copy in which sums are exact for longer."""
    if np.issubdtype(value.dtype, np.floating):
        return value.astype(np.float64)
    return value.astype(np.int64) if np.issubdtype(value.dtype, np.integer) else value.copy()


# Steps, as workers get them.


class _Training:
    """Trains on a batch."""

    def __init__(
        self, worker_model: WorkerModel, optimizer: RemoteOptimizer, clipping: Clipping
    ) -> None:
        self._given = worker_model, optimizer, clipping

    def __call__(self, step: jax.Array, batch: Tree) -> Tree:
        return steps.train(*self._given, step, batch)


class _Other:
    """Evaluates a batch, or predicts."""

    def __init__(self, worker_model: WorkerModel, compute: Callable[..., Tree]) -> None:
        self._worker_model, self._compute = worker_model, compute

    def __call__(self, step: jax.Array, batch: Tree) -> Tree:
        return self._compute(self._worker_model, step, batch)


def _of_batch(step: _Step, template: Tree) -> Callable[..., Tree]:
    def run(number: jax.Array, *leaves: jax.Array) -> Tree:
        return step(number, jax.tree.map(lambda index: leaves[index], template))

    return run


def _of_iterator(step: _Step, template: Tree) -> Callable[..., Tree]:
    del template

    def run(number: jax.Array, iterator: Iterator[Tree]) -> Tree:
        return step(number, next(iterator))

    return run


# What Keras calls.


def call(
    original: Callable[..., Any],
    model: keras.Model,
    strategy: Strategy,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Calls `fit`, or another method that runs steps, with data that it can read."""
    session = session_of(model, strategy)
    try:
        return _call(original, model, session, args, kwargs)
    except BaseException:
        session.abandon()
        raise


def _call(
    original: Callable[..., Any],
    model: keras.Model,
    session: Session,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    name = original.__name__
    if name == "compile":
        return original(model, *args, **kwargs)
    # A callback of `fit` may call `evaluate`.
    session.finish_pending()
    if name.endswith("_on_batch"):
        with session.one_by_one():
            return original(model, *args, **kwargs)
    bound = inspect.signature(original).bind(model, *args, **kwargs)
    given = bound.arguments
    kind = {"fit": "train", "evaluate": "test"}.get(name, "predict")
    given["x"] = session.adapted(kind, given.get("x"))
    if isinstance(given["x"], WorkerDataAdapter):
        _require_steps(name, given)
    if name == "fit" and given.get("validation_data") is not None:
        given["validation_data"] = session.adapted("test", given["validation_data"])
        if isinstance(given["validation_data"], WorkerDataAdapter):
            _require_steps("validation", given)
    return original(*bound.args, **bound.kwargs)


_STEPS = {
    "fit": "steps_per_epoch",
    "evaluate": "steps",
    "predict": "steps",
    "validation": "validation_steps",
}


def _require_steps(name: str, given: dict[str, Any]) -> None:
    argument = _STEPS[name]
    if name == "predict":
        raise errors.UnsupportedError(
            "`predict` returns rows in the order of its data",
            "each worker has its own data, made by a function",
            "Pass arrays, or a dataset.",
        )
    if given.get("class_weight") is not None:
        raise errors.UnsupportedError(
            "`class_weight` needs data that the coordinator reads",
            "workers make their data by a function",
            "Let the dataset have sample weights.",
        )
    if given.get(argument) is None and not given.get("_use_cached_eval_dataset"):
        raise errors.InvalidArgumentError(
            f"`{argument}` must be the number of steps if workers make their data by a function",
            "it is None",
            f"Pass `{argument}=`; all workers together make as many.",
        )


def take_state(model: keras.Model, strategy: Strategy) -> None:
    """Replaces `_get_jax_state`: the state is on the servers, except for the metrics."""
    session_of(model, strategy).begin()


def sync_state(model: keras.Model, strategy: Strategy) -> None:
    """Replaces `jax_state_sync`: waits for all steps."""
    if internals.state_of(model) and not internals.is_state_synced(model):
        internals.set_state_synced(model)
        session_of(model, strategy).finish()


def make_function(model: keras.Model, strategy: Strategy, name: str, force: bool) -> Any:
    """Replaces `make_train_function` and its siblings."""
    kind = name.split("_")[1]
    attribute = f"{kind}_function"
    if getattr(model, attribute) is None or force:
        _require_own_step(model, kind)
        session = session_of(model, strategy)
        session.forget(kind)
        made = _predicting(session) if kind == "predict" else _adding(session, kind)
        setattr(model, attribute, made)
    return getattr(model, attribute)


def _require_own_step(model: keras.Model, kind: str) -> None:
    name = f"{kind}_step"
    if getattr(type(model), name) is not getattr(keras.Model, name):
        raise errors.UnsupportedError(
            "With parameter servers, workers run the steps of `keras.Model`",
            f"{type(model).__name__} overrides `{name}`",
            "Override `call`, `compute_loss` or `compute_metrics` instead, or write the loop with "
            "a ClusterCoordinator.",
        )


_Execution = Callable[[Tree, Iterator[Tree]], tuple[Tree, Tree]]


def _adding(session: Session, kind: str) -> _Execution:
    weak = weakref.ref(session)

    def execution(state: Tree, iterator: Iterator[Tree]) -> tuple[Tree, Tree]:
        session = weak()
        assert session is not None
        session.submit(kind, next(iterator))
        with contextlib.suppress(StopIteration):
            for _ in range(session.model.steps_per_execution - 1):
                session.submit(kind, next(iterator))
        return session.logs(), state

    return execution


def _predicting(session: Session) -> _Execution:
    weak = weakref.ref(session)

    def execution(state: Tree, iterator: Iterator[Tree]) -> tuple[Tree, Tree]:
        session = weak()
        assert session is not None
        found = [session.predict(iterator)]
        with contextlib.suppress(StopIteration):
            for _ in range(session.model.steps_per_execution - 1):
                found.append(session.predict(iterator))
        if len(found) == 1:
            return found[0], state
        return jax.tree.map(lambda *rows: np.concatenate(rows), *found), state

    return execution
