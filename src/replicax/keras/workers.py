"""`fit`, `evaluate` and `predict` of a model whose replicas run in several processes.

All workers make the same calls with the same data. Callbacks run on the chief, which alone shows
its progress; shuffled data has the chief's order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import keras

from replicax.input.dataset.dataset import Dataset, seeds_of
from replicax.keras import chief_callbacks, training
from replicax.keras.worker_calls import WorkerCall


def together(
    original: Callable[..., Any], model: keras.Model, *args: object, **kwargs: object
) -> Any:
    """Makes a call of Keras with the other workers, if there are any."""
    layout = training.layout_of(model)
    if layout is None or layout.peers is None:
        return original(model, *args, **kwargs)
    bound = inspect.signature(original).bind(model, *args, **kwargs)
    if "callbacks" not in bound.signature.parameters:
        return original(model, *args, **kwargs)
    given = bound.arguments.get("callbacks")
    if chief_callbacks.are_shared(given):
        return original(model, *args, **kwargs)
    api = original.__name__
    call = WorkerCall(f"`{api}` of {model.name!r}", layout.peers)
    try:
        seeds = [seed for own in _datasets(bound.arguments) for seed in seeds_of(own)]
        bound.arguments["callbacks"] = chief_callbacks.shared(call, api, given, layout, seeds)
        if not call.is_chief:
            bound.arguments["verbose"] = 0
        if api == "fit" and isinstance(x := bound.arguments.get("x"), Dataset):
            # Each worker reads its part, in the order of the chief.
            strategy = training.strategy_of(model)
            assert strategy is not None
            bound.arguments["x"] = strategy.experimental_distribute_dataset(x)
        result = original(*bound.args, **bound.kwargs)
    except BaseException as error:
        call.tell_of(error)
        raise
    call.end()
    return result


def _datasets(arguments: Mapping[str, object]) -> list[Dataset]:
    """Returns the datasets of replicax among the arguments of a call."""
    given = (arguments.get(name) for name in ("x", "validation_data"))
    return [one for one in given if isinstance(one, Dataset)]
