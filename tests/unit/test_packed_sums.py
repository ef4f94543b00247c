"""Sums of many arrays over the replicas of several processes: which travel together, and how."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from replicax.collectives import in_replica
from replicax.foundation.options import ReduceOp
from replicax.values.layout import AXIS

MB = 1 << 20


def on_mesh(num_replicas: int, fn: Callable[..., Any], *stacked: Any) -> Any:
    """Runs `fn` on each replica's rows; returns the results of all replicas, stacked."""
    mesh = Mesh(np.array(jax.devices()[:num_replicas]), (AXIS,))

    def on_replica(*rows: Any) -> Any:
        return jax.tree.map(lambda x: x[None], fn(*(row[0] for row in rows)))

    own = PartitionSpec(AXIS)
    mapped = jax.shard_map(on_replica, mesh=mesh, in_specs=own, out_specs=own, check_vma=False)
    return jax.tree.map(np.asarray, jax.jit(mapped)(*stacked))


def random_rows(num_replicas: int, *shape: int) -> Any:
    rows = np.random.default_rng(0).standard_normal((num_replicas, *shape))
    return np.asarray(rows * 4.0 ** np.arange(num_replicas).reshape(-1, *[1] * len(shape)), "f4")


@pytest.mark.parametrize("num_replicas", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("size", [1, 7, 300_000])
def test_every_replica_gets_the_same_bits(num_replicas: int, size: int) -> None:
    rows = random_rows(num_replicas, size)
    total = on_mesh(num_replicas, in_replica.across_processes(num_replicas), rows)
    for other in total[1:]:
        np.testing.assert_array_equal(total[0], other)
    np.testing.assert_allclose(total[0], rows.astype("f8").sum(0), rtol=1e-4, atol=1e-1)


# With these XLA would compute the own summand again in the addition, with one multiply-add; but
# only if it optimizes as for users, so they run in a process without the flags of the tests.
PRODUCTS: dict[str, Callable[[Any, Any], Any]] = {
    "product": lambda a, b: a * b,
    "multiple": lambda a, b: 0.1 * a,
    "fraction": lambda a, b: a * b / 3,
    "sum of products": lambda a, b: a * b + 0.3 * a,
}


def sums_of_products(num_replicas: int, num_arrays: int, product: str) -> Any:
    def fn(values: Any, factors: Any) -> Any:
        leaves = [PRODUCTS[product](values[i], factors[i]) for i in range(num_arrays)]
        return in_replica.all_reduce(
            ReduceOp.SUM,
            leaves,
            num_replicas,
            array_sum=in_replica.across_processes(num_replicas),
            packing=in_replica.ACROSS_PROCESSES,
        )

    rows = random_rows(num_replicas, 2, num_arrays, 64, 64)
    return on_mesh(num_replicas, fn, rows[:, 0], rows[:, 1])


def products_with_different_bits() -> list[Any]:
    cases = itertools.product((2, 3, 4, 8), (1, 2), PRODUCTS)
    return [
        case
        for case in cases
        if any((total != total[:1]).any() for total in sums_of_products(*case))
    ]


@pytest.mark.slow
def test_what_a_replica_adds_has_the_bits_of_what_it_sends() -> None:
    code = (
        "import replicax as rx; rx.set_virtual_cpu_devices(8); import test_packed_sums as t; "
        "print(t.products_with_different_bits())"
    )
    here = Path(__file__).parent
    search = os.pathsep.join(map(str, (here, here.parent.parent / "src")))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "XLA_FLAGS": "", "PYTHONPATH": search},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_a_large_array_is_sent_without_a_copy() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), (AXIS,))
    own = PartitionSpec(AXIS)
    sum_of_two = in_replica.across_processes(2)
    mapped = jax.shard_map(
        lambda a, b: sum_of_two(a @ b), mesh=mesh, in_specs=own, out_specs=own, check_vma=False
    )
    text = jax.jit(mapped).lower(jnp.ones((32, 16)), jnp.ones((32, 32))).compile().as_text() or ""
    assert " collective-permute(" in text
    assert " conditional(" in text
    assert " copy(" not in text


@pytest.mark.parametrize("num_replicas", [2, 3, 4])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int32", "int8", "uint8", "complex64"])
def test_types_are_kept(num_replicas: int, dtype: str) -> None:
    rows = jnp.asarray(np.arange(3 * num_replicas).reshape(num_replicas, 3), dtype)
    total = on_mesh(num_replicas, in_replica.across_processes(num_replicas), rows)
    assert total.dtype == rows.dtype
    np.testing.assert_array_equal(total[-1].astype("c8"), np.asarray(rows, "c8").sum(0))


def test_empty_arrays_and_scalars_are_summed() -> None:
    def fn(scalar: Any) -> Any:
        leaves = [jnp.zeros((0, 3)), scalar, scalar > 0, jnp.full((2, 2), scalar)]
        reduce = in_replica.across_processes(2)
        return in_replica.all_reduce(
            ReduceOp.MEAN, leaves, 2, array_sum=reduce, packing=in_replica.ACROSS_PROCESSES
        )

    empty, scalar, truth, square = on_mesh(2, fn, np.array([1.0, 4.0], "f4"))
    assert empty.shape == (2, 0, 3)
    np.testing.assert_array_equal(scalar, [2.5, 2.5])
    np.testing.assert_array_equal(truth, [1.0, 1.0])
    np.testing.assert_array_equal(square, np.full((2, 2, 2), 2.5))


def arrays_of(*sizes_in_bytes: int, dtype: Any = "float32") -> dict[int, Any]:
    width = jnp.dtype(dtype).itemsize
    return {i: jnp.zeros(size // width, dtype) for i, size in enumerate(sizes_in_bytes)}


def packs_of(arrays: dict[int, Any], packing: in_replica.Packing) -> list[list[int]]:
    return in_replica._packs(arrays, packing, None)


def test_packs_across_processes_are_filled_from_the_last_array_on() -> None:
    arrays = arrays_of(1024, 2 * MB, 1 * MB, 4, 8)
    assert packs_of(arrays, in_replica.ACROSS_PROCESSES) == [[1], [4, 3, 2, 0]]
    arrays = arrays_of(*[MB] * 10)
    assert packs_of(arrays, in_replica.ACROSS_PROCESSES) == [[9, 8, 7, 6, 5, 4, 3, 2], [1, 0]]


def test_arrays_of_one_pack_have_one_type() -> None:
    arrays = {0: jnp.zeros(4), 1: jnp.zeros(4, jnp.bfloat16), 2: jnp.zeros(4)}
    assert packs_of(arrays, in_replica.ACROSS_PROCESSES) == [[2, 0], [1]]


def test_packs_within_a_process_keep_their_limits() -> None:
    arrays = arrays_of(*[4] * 130, 64 << 10)
    packs = packs_of(arrays, in_replica.WITHIN_A_PROCESS)
    assert packs == [list(range(128)), [130], [128, 129]]


def test_bytes_per_pack_limits_packs_across_processes() -> None:
    packing = in_replica.ACROSS_PROCESSES.with_room(100)
    assert packs_of(arrays_of(40, 40, 40, 400), packing) == [[3], [2, 1], [0]]
    assert in_replica.ACROSS_PROCESSES.with_room(0) is in_replica.ACROSS_PROCESSES


def updated(packing: in_replica.Packing) -> Any:
    """Returns the compiled update of 40 variables by their summed gradients, and its inputs."""
    rows = [random_rows(2, 3 + i % 2, 5) for i in range(40)]

    def fn(*local: Any) -> Any:
        reduce = in_replica.across_processes(2)
        summed = in_replica.all_reduce(
            ReduceOp.SUM, list(local), 2, array_sum=reduce, packing=packing
        )
        return [value - 0.5 * total for value, total in zip(local, summed, strict=True)]

    return on_mesh(2, fn, *rows)


def test_slices_at_unknown_offsets_equal_those_at_known_ones() -> None:
    across = in_replica.ACROSS_PROCESSES
    known = in_replica.Packing(across.largest, across.room, is_last_first=True)
    jax.tree.map(np.testing.assert_array_equal, updated(across), updated(known))


def test_a_pack_is_taken_apart_by_few_kernels() -> None:
    # Without unknown offsets XLA compiles a kernel for each of the 40 arrays.
    def kernels(packing: in_replica.Packing) -> int:
        mesh = Mesh(np.array(jax.devices()[:2]), (AXIS,))

        def fn(*local: Any) -> Any:
            summed = in_replica.all_reduce(
                ReduceOp.SUM,
                list(local),
                2,
                array_sum=in_replica.across_processes(2),
                packing=packing,
            )
            return [value - 0.5 * total for value, total in zip(local, summed, strict=True)]

        whole = PartitionSpec()
        mapped = jax.shard_map(fn, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
        compiled = jax.jit(mapped).lower(*[jnp.ones((3, 5))] * 40).compile()
        # A slice whose offset is a part of the code, and of the kernel.
        return sum(" slice(" in line for line in (compiled.as_text() or "").splitlines())

    across = in_replica.ACROSS_PROCESSES
    assert kernels(across) == 0
    assert kernels(in_replica.Packing(across.largest, across.room)) >= 40
