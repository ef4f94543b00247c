"""A step over the global batch: one program over all replicas, which XLA divides among them.

Keras computes loss, metrics and batch statistics of a batch as a whole. So the step is not cut
into replica code: the batch is sharded over the replicas, the state is on all of them, and the
result is that of one device, whatever the size of the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jax.typing import ArrayLike

from replicax.foundation import device_spans, gate, jax_compat, spans
from replicax.foundation.types import Tree
from replicax.keras import worker_batches
from replicax.keras.worker_batches import Rows
from replicax.observe import progress
from replicax.values.layout import AXIS, ReplicaLayout

# Takes the state and a batch; returns outputs and the new state.
StepFunction = Callable[[Tree, Tree], tuple[Tree, Tree]]


class GlobalStep:
    """A compiled step of a model.

    Args:
      name: The step, for messages.
      function: Computes outputs and the new state.
      layout: The replicas.
      has_rows: Whether the outputs have the rows of the batch; otherwise they are equal on all
        replicas.
    """

    def __init__(
        self, name: str, function: StepFunction, layout: ReplicaLayout, *, has_rows: bool = False
    ) -> None:
        def program(state: Tree, batch: Tree) -> tuple[Tree, Tree, jax.Array | None]:
            shared = jax.tree.map(self._shared, batch, is_leaf=worker_batches.is_rows)
            outputs, state = function(state, shared)
            # For the gate: a result that nothing else refers to.
            return outputs, state, jnp.zeros((), jnp.int8) if self._takes_turns else None

        self._name, self._layout, self._peers = name, layout, layout.peers
        self._takes_turns = layout.is_mesh and gate.needs_turns(layout.devices)
        is_local = has_rows and not layout.spans_processes
        outputs = None if is_local else layout.replicated
        token = layout.replicated if self._takes_turns else None
        shardings = (outputs, layout.replicated, token)
        self._run = jax.jit(program, donate_argnums=0, out_shardings=shardings)
        # The number of each program that all processes have agreed on, by the shapes of a batch.
        self._numbers: dict[Hashable, int] = {}
        self._runs = progress.counter_of(name, changes_state=True)

    def __call__(self, state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        """Runs the step on a placed batch; the buffers of the state are taken over."""
        self._runs.count += 1
        with gate.state():
            if self._peers is None:
                return self._dispatch(state, batch)
            number = self._agreed(state, batch)
            with self._peers.guarded():
                self._peers.record(number)
                outputs, state = self._dispatch(state, batch)
            # Code of one process, such as a callback, can compute with copies of its own only.
            return jax.tree.map(lambda array: self._layout.copy_for(array, 0), outputs), state

    def _dispatch(self, state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        if self._takes_turns:
            gate.wait_for_previous(self)
        began = spans.now()
        outputs, state, token = self._run(state, batch)
        if began:
            spans.record("call", began, label=self._name)
            results, values = jax.tree.leaves(outputs), jax.tree.leaves(state)
            output = device_spans.output_to_watch(token, results, values)
            device_spans.watch(output, began, "compute", self._name)
        if self._takes_turns:
            gate.set_running(token)
        return outputs, state

    def _agreed(self, state: Tree, batch: Tree) -> int:
        """Compares the program with those of the other processes, before its first run."""
        assert self._peers is not None
        leaves, structure = jax.tree.flatten(batch)
        key = structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        if key not in self._numbers:
            jaxpr = self._run.trace(state, batch).jaxpr.jaxpr
            self._numbers[key] = self._peers.confirm(self._name, jax_compat.fingerprint(jaxpr))
        return self._numbers[key]

    def _shared(self, leaf: jax.Array | Rows) -> jax.Array:
        """Divides a batch that arrives whole: its size is not a multiple of the replicas."""
        array = leaf.whole() if isinstance(leaf, Rows) else leaf
        layout = self._layout
        if not layout.is_mesh or not array.ndim or array.shape[0] % layout.num_replicas == 0:
            return array
        return jax.lax.with_sharding_constraint(
            array, NamedSharding(layout.mesh, PartitionSpec(AXIS))
        )


def placed(batch: Tree, layout: ReplicaLayout) -> Tree:
    """Puts a batch that this process has as a whole on the devices of the replicas.

    Rows are divided evenly; a batch whose size is not a multiple of the replicas goes to each of
    them, and the step divides it. Nothing is padded: padding would enter the statistics. Of
    several processes, each places its own rows; see `worker_batches.py`.
    """
    if layout.spans_processes:
        place = functools.partial(worker_batches.placed_leaf, layout=layout)
        return jax.tree.map(place, batch, is_leaf=worker_batches.is_rows)
    leaves, structure = jax.tree.flatten(batch)
    if not layout.is_mesh:
        # A program on one device takes arrays of the host by itself, in less time.
        return structure.unflatten(
            jax.device_put(leaf, layout.replicated) if isinstance(leaf, jax.Array) else leaf
            for leaf in leaves
        )
    shardings = [_sharding_of(leaf, layout) for leaf in leaves]
    return structure.unflatten(jax.device_put(leaves, shardings))


def _sharding_of(leaf: ArrayLike, layout: ReplicaLayout) -> Sharding:
    if isinstance(leaf, jax.Array) and len(leaf.devices()) > 1:
        return leaf.sharding
    shape = np.shape(leaf)
    is_even = bool(shape) and shape[0] > 0 and shape[0] % layout.num_replicas == 0
    return layout.per_replica if is_even else layout.replicated
