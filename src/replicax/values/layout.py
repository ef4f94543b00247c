"""`ReplicaLayout`: the devices of the replicas, and how their values are stored together.

A layout stores the values of all replicas as *one* array: concatenated along axis 0, or
stacked if the values are scalars. On a mesh that costs no copy in either direction.

Note [Local replicas]
    The devices of a layout may belong to several processes, all of which run the same program.
    Eager code of a process handles the values of its own replicas, numbered from 0: `assemble`
    takes them, `split` returns them. Compiled code is one program for all processes, and numbers
    all replicas: replica `first_local + i` of the program is the local replica `i`.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jax.typing import ArrayLike

from replicax.foundation import jax_compat, placement
from replicax.foundation.jax_compat import Device
from replicax.foundation.peers import Peers
from replicax.foundation.types import Tree
from replicax.values import printing

AXIS = "replica"


@functools.lru_cache(maxsize=256)
def copier(sharding: Sharding) -> Callable[[Any], Any]:
    """Returns a function that copies arrays into fresh buffers of one sharding.

    `device_put` would alias its source, and a later donation would take both.
    """
    return jax.jit(lambda arrays: jax.tree.map(jnp.copy, arrays), out_shardings=sharding)


def _join(xnp: ModuleType, components: Sequence[Any]) -> Any:
    """Joins values along axis 0, with the functions of `numpy` or `jax.numpy`."""
    join = xnp.concatenate if components[0].shape else xnp.stack
    return join(list(components))


def _on_each(arrays: Sequence[Any], devices: Sequence[Device]) -> list[Any]:
    """Puts one array on each device; all that are on another device move in one call."""
    placed = list(arrays)
    moving = [
        i
        for i, (array, device) in enumerate(zip(arrays, devices, strict=True))
        if not isinstance(array, jax.Array) or array.sharding.device_set != {device}
    ]
    if moving:
        moved = jax.device_put([placed[i] for i in moving], [devices[i] for i in moving])
        for i, array in zip(moving, moved, strict=True):
            placed[i] = array
    return placed


def _reshaped(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Reshapes an array on its device, which need not be the default one."""
    with jax.default_device(next(iter(array.devices()))):
        return array.reshape(shape)


class ProgramLayout:
    """The replicas whose mesh a program that is being traced runs on.

    Replicas of any other mesh become a `vmap` in that program, as virtual replicas do.
    """

    def __init__(self) -> None:
        self.layout: ReplicaLayout | None = None

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Makes `map_replicas` use these replicas."""
        token = _program_layout.set(self)
        try:
            yield
        finally:
            _program_layout.reset(token)


_program_layout: contextvars.ContextVar[ProgramLayout | None] = contextvars.ContextVar(
    "replicax_program_layout", default=None
)


class ReplicaLayout:
    """The devices of the replicas: one each on a mesh, or all of them on one device.

    Args:
      devices: The devices of all replicas; those of one process are consecutive.
      num_virtual: The number of replicas on each device; more than 1 needs a single device.
      peers: The processes that the devices belong to; None if all belong to this one.

    Attributes:
      devices: The device of each replica.
      local_devices: The device of each replica of this process.
      first_local: The number of the first replica of this process.
      peers: The processes that run the replicas; None if this one runs all of them.

    >>> import jax
    >>> import replicax as rx
    >>> rx.ReplicaLayout(jax.devices()[:1], num_virtual=4).num_replicas
    4
    """

    def __init__(
        self, devices: Sequence[Device], num_virtual: int = 1, peers: Peers | None = None
    ) -> None:
        self.is_virtual = num_virtual > 1
        self.num_replicas = len(devices) * num_virtual
        self.devices: tuple[Device, ...] = tuple(devices) * num_virtual
        self.peers = peers
        self.local_devices, self.first_local = self.devices, 0
        if peers is not None:
            own = [i for i, d in enumerate(self.devices) if d.process_index == peers.index]
            self.local_devices = tuple(self.devices[i] for i in own)
            self.first_local = own[0]
        self.is_mesh = len(devices) > 1
        if self.is_mesh:
            self.mesh = Mesh(np.array(devices), (AXIS,))
            self.replicated: Sharding = NamedSharding(self.mesh, PartitionSpec())
            self.per_replica: Sharding = NamedSharding(self.mesh, PartitionSpec(AXIS))
        else:
            self.replicated = self.per_replica = SingleDeviceSharding(devices[0])

    @property
    def num_local(self) -> int:
        """The number of replicas of this process."""
        return len(self.local_devices)

    @property
    def spans_processes(self) -> bool:
        """Whether other processes run some of the replicas."""
        return self.peers is not None

    @functools.cached_property
    def replica_ids(self) -> tuple[jax.Array, ...]:
        """The number of each local replica, as a scalar array on its device."""
        ids: list[jax.Array] = []
        with jax_compat.eagerly():
            for i, device in enumerate(self.local_devices):
                with jax.default_device(device):
                    ids.append(jnp.asarray(self.first_local + i, jnp.int32))
        return tuple(ids)

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, ReplicaLayout)
            and self.devices == other.devices
            and self.is_virtual == other.is_virtual
        )

    def __hash__(self) -> int:
        return hash(self.devices)

    def __repr__(self) -> str:
        names = printing.listing([str(device) for device in dict.fromkeys(self.devices)])
        return f"ReplicaLayout({printing.count(self.num_replicas, 'replica')} on {names})"

    def restricted_to(self, local: Sequence[Device]) -> ReplicaLayout:
        """Returns the layout of some of the local devices, and of the same ones of each peer."""
        chosen = {self.local_devices.index(device) for device in local}
        places: dict[int, int] = {}
        found: list[Device] = []
        for device in self.devices:
            place = places.get(device.process_index, 0)
            places[device.process_index] = place + 1
            if place in chosen:
                found.append(device)
        return ReplicaLayout(found, peers=self.peers)

    def global_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape in which values of `shape` are stored together."""
        if self.num_replicas == 1:
            return shape
        return (self.num_replicas * shape[0], *shape[1:]) if shape else (self.num_replicas,)

    def local_shape(self, shape: tuple[int, ...], is_scalar: bool) -> tuple[int, ...]:
        """Undoes `global_shape`."""
        if self.num_replicas == 1:
            return shape
        return () if is_scalar else (shape[0] // self.num_replicas, *shape[1:])

    def assemble(self, components: Sequence[Any]) -> Any:
        """Joins one array per local replica, all of one shape and dtype, into the stored array.

        In a trace the arrays are those of all replicas.
        """
        first = components[0]
        if any(map(jax_compat.is_traced, components)):
            return first if self.num_replicas == 1 else _join(jnp, components)
        is_on_host = isinstance(first, np.ndarray | np.generic)
        if self.num_replicas == 1:
            return jax.device_put(first, self.devices[0])
        if not self.is_mesh:
            if is_on_host:
                return jax.device_put(_join(np, components), self.devices[0])
            return _join(jnp, jax.device_put(list(components), self.devices[0]))
        if is_on_host and not first.shape:
            components = [c.reshape((1,)) for c in components]
        parts = _on_each(components, self.local_devices)
        if not first.shape and not is_on_host:
            parts = [_reshaped(part, (1,)) for part in parts]
        shape = self.global_shape(first.shape)
        return jax.make_array_from_single_device_arrays(shape, self.per_replica, parts)

    def split(self, array: jax.Array, is_scalar: bool) -> tuple[jax.Array, ...]:
        """Splits the stored array into the parts of the local replicas; undoes `assemble`."""
        count = self.num_replicas
        if count == 1:
            return (placement.uncommitted(array),)
        if array.size == 0:
            # XLA does not shard what is empty.
            empty = jnp.zeros(self.local_shape(array.shape, is_scalar), array.dtype)
            return (empty,) * (count if jax_compat.is_traced(array) else self.num_local)
        # NumPy has no keys of jax.random.
        is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
        if jax_compat.is_traced(array) or (is_key and not self.is_mesh):
            rows = array.reshape((count, *self.local_shape(array.shape, is_scalar)))
            return tuple(rows[i] for i in range(count))
        if self.is_mesh:
            parts = [shard.data for shard in array.addressable_shards]
            if is_scalar:
                parts = [p.reshape(()) for p in parts]
            return tuple(map(placement.uncommitted, parts))
        rows = np.asarray(array).reshape((count, *self.local_shape(array.shape, is_scalar)))
        with jax_compat.any_dtype(array.dtype):
            parts = jax.device_put(list(rows), self.devices[0])
        return tuple(map(placement.uncommitted, parts))

    def component(self, array: jax.Array, replica_id: int, is_scalar: bool) -> jax.Array:
        """Returns the part of a local replica in a stored array; of any replica in a trace."""
        if self.num_replicas == 1:
            return array
        if array.size == 0:
            return self.split(array, is_scalar)[replica_id]
        if self.is_mesh and not jax_compat.is_traced(array):
            part = array.addressable_shards[replica_id].data
            return part.reshape(()) if is_scalar else part
        local = self.local_shape(array.shape, is_scalar)
        return array.reshape((self.num_replicas, *local))[replica_id]

    def with_component(
        self, array: jax.Array, replica_id: int, is_scalar: bool, part: Tree
    ) -> jax.Array:
        """Returns a stored array with the part of one replica replaced; see `component`."""
        if self.num_replicas == 1:
            return part if jax_compat.is_traced(part) else jax.device_put(part, self.devices[0])
        if array.size == 0:
            return array
        if self.is_mesh and not jax_compat.is_traced(array):
            parts = [shard.data for shard in array.addressable_shards]
            part = _on_each([part], [self.local_devices[replica_id]])[0]
            parts[replica_id] = _reshaped(part, (1,)) if is_scalar else part
            return jax.make_array_from_single_device_arrays(array.shape, self.per_replica, parts)
        local = self.local_shape(array.shape, is_scalar)
        rows = array.reshape((self.num_replicas, *local))
        return rows.at[replica_id].set(part).reshape(array.shape)

    def copies(self, array: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the copy of a replicated array that each local replica sees."""
        if self.is_mesh and not jax_compat.is_traced(array):
            return tuple(shard.data for shard in array.addressable_shards)
        return (array,) * self.num_local

    def copy_for(self, array: jax.Array, replica_id: int) -> jax.Array:
        """Returns the copy of a replicated array that one local replica sees."""
        if self.is_mesh and not jax_compat.is_traced(array):
            return array.addressable_shards[replica_id].data
        return array

    def replicate(self, value: ArrayLike) -> jax.Array:
        """Makes a replicated array in fresh buffers, from a value that all processes have."""
        if self.spans_processes:
            # `device_put` would make all processes compare the value, by a collective.
            placed = _on_each([value] * self.num_local, self.local_devices)
            copies = [copier(array.sharding)(array) for array in placed]
            return self.from_copies(copies)
        if isinstance(value, jax.Array) and value.committed:
            # Other values go where the copy is made by themselves, in half the time.
            value = jax.device_put(value, self.replicated)
        return copier(self.replicated)(value)

    def from_copies(self, copies: Sequence[ArrayLike]) -> jax.Array:
        """Joins one equal array per local replica into a replicated array, without a copy."""
        if not self.is_mesh:
            return jax.device_put(copies[0], self.replicated)
        parts = _on_each(copies, self.local_devices)
        return jax.make_array_from_single_device_arrays(parts[0].shape, self.replicated, parts)

    def map_replicas(
        self,
        fn: Callable[..., list[Any]],
        mapped: Sequence[Any],
        shared: Sequence[Any],
        scalars: Sequence[bool],
        num_equal: int = 0,
    ) -> list[Any]:
        """Runs `fn(*mapped, *shared)` once per replica inside the current trace.

        Args:
          fn: Takes local arrays and returns a list of local arrays; may use collectives
            over `AXIS`.
          mapped: Stored arrays of all replicas; each replica gets its own part.
          shared: Arrays that every replica gets whole.
          scalars: Whether each mapped value is a scalar locally.
          num_equal: How many of the first outputs are equal on all replicas.

        Returns:
          The equal outputs as they are, the others as stored arrays of all replicas.
        """
        if self.num_replicas == 1:
            return list(fn(*mapped, *shared))
        claimed = _program_layout.get()
        if self.is_mesh and (claimed is None or claimed.layout in (None, self)):
            return self._map_shards(fn, mapped, shared, scalars, num_equal)
        count = self.num_replicas
        rows = [
            a.reshape((count, *self.local_shape(a.shape, s)))
            for a, s in zip(mapped, scalars, strict=True)
        ]
        in_axes = (0,) * len(rows) + (None,) * len(shared)
        outs = jax.vmap(fn, in_axes=in_axes, axis_name=AXIS, axis_size=count)(*rows, *shared)
        equal = [out[0] for out in outs[:num_equal]]
        return equal + [
            out if out.ndim == 1 else out.reshape((count * out.shape[1], *out.shape[2:]))
            for out in outs[num_equal:]
        ]

    def _map_shards(
        self,
        fn: Callable[..., list[Any]],
        mapped: Sequence[Any],
        shared: Sequence[Any],
        scalars: Sequence[bool],
        num_equal: int,
    ) -> list[Any]:
        def on_shard(*args: Any) -> tuple[list[Any], list[Any]]:
            own = args[: len(mapped)]
            local = [a.reshape(()) if s else a for a, s in zip(own, scalars, strict=True)]
            outs = list(fn(*local, *args[len(mapped) :]))
            rest = [jnp.reshape(o, (1,)) if jnp.ndim(o) == 0 else o for o in outs[num_equal:]]
            return outs[:num_equal], rest

        own, whole = PartitionSpec(AXIS), PartitionSpec()
        specs = (own,) * len(mapped) + (whole,) * len(shared)
        equal, rest = jax_compat.shard_map(on_shard, self.mesh, specs, (whole, own))(
            *mapped, *shared
        )
        return equal + rest
