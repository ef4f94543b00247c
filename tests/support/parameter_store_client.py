"""A caller of a parameter store, for tests: asks it as a coordinator or as a worker would."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from replicax.protocol import messages
from replicax.protocol.tasks import Role
from replicax.ps.store.service import ParameterStore

COORDINATOR = 1
WORKER = 2


def octets(array: Any) -> memoryview:
    """The bytes of an array, as the transport hands them over."""
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8)).toreadonly()


class Caller:
    """Asks one store; remembers the shapes of parts, and counts closures."""

    def __init__(self, store: ParameterStore | None = None, *, job: str = "job") -> None:
        self.store = store or ParameterStore(task=3)
        self.job = job
        self.epoch = 1
        self.now = 0.0
        self.specs: dict[int, tuple[tuple[int, ...], np.dtype]] = {}
        self.closures = itertools.count()

    def ask(
        self,
        body: messages.Body,
        buffers: Sequence[Any] = (),
        *,
        role: Role = "coordinator",
        incarnation: int = COORDINATOR,
    ) -> tuple[Any, Sequence[Any]]:
        return self.store.handle(
            role, incarnation, body, buffers, job=self.job, epoch=self.epoch, now=self.now
        )

    def attach(self, **settings: Any) -> Caller:
        assert isinstance(self.ask(messages.Attach([], settings))[0], messages.Attached)
        return self

    def create(self, part: int, value: Any, name: str = "v") -> None:
        value = np.asarray(value)
        self.specs[part] = (value.shape, value.dtype)
        spec = messages.CreatePart(part, name, value.shape, value.dtype.name, messages.FromBuffer())
        assert self.ask(spec, [octets(value)]) == (messages.Done(), ())

    def fill(self, part: int, shape: tuple[int, ...], dtype: str = "float32") -> None:
        element = bytes(jnp.dtype(dtype).itemsize)
        self.specs[part] = (shape, jnp.dtype(dtype))
        spec = messages.CreatePart(part, "zeros", shape, dtype, messages.Fill(element))
        assert self.ask(spec) == (messages.Done(), ())

    def push(
        self,
        *changes: messages.Update | messages.Apply,
        buffers: Sequence[Any] = (),
        closure: int | None = None,
        incarnation: int = WORKER,
    ) -> list[messages.PushFailure]:
        closure = next(self.closures) if closure is None else closure
        question = messages.Exchange([messages.Push(closure, list(changes))], [])
        arrays = [octets(b) for b in buffers]
        answer, values = self.ask(question, arrays, role="worker", incarnation=incarnation)
        assert answer.reads == [] and list(values) == []
        return answer.failures

    def update(self, kind: str, part: int, *payload: Any, start: int = 0) -> None:
        assert self.push(messages.Update(0, kind, part, start), buffers=payload) == []

    def read(self, part: int, rows: Any = None) -> np.ndarray:
        shape, dtype = self.specs[part]
        read = messages.Read(part, -1, rows is not None)
        buffers = []
        if rows is not None:
            rows = np.asarray(rows, np.int64)
            buffers, shape = [octets(rows)], (rows.size, *shape[1:])
        answer, values = self.ask(messages.Exchange([], [read]), buffers, role="worker")
        assert answer.failures == [] and not answer.reads[0].is_known
        return np.frombuffer(values[0], np.uint8).view(dtype).reshape(shape)

    def version(self, part: int) -> int:
        answer, _ = self.ask(messages.Exchange([], [messages.Read(part)]))
        return answer.reads[0].version

    def counters(self) -> dict[str, float]:
        return self.ask(messages.Ping(0))[0].counters


def exported(fn: Any, *specs: Any) -> bytearray:
    """A program as the coordinator sends it."""
    return jax.export.export(jax.jit(fn))(*specs).serialize()


def open_rows(*widths: int, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    """The shape of an array whose number of rows is open."""
    text = ", ".join(["n", *map(str, widths)])
    return jax.ShapeDtypeStruct(jax.export.symbolic_shape(text, scope=_SCOPE), dtype)


_SCOPE = jax.export.SymbolicScope()
