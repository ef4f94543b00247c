"""Saves a model over itself until it is killed; every value of one save is its number."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import jax.numpy as jnp

import replicax as rx


class Stamped(rx.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = [rx.Variable(jnp.zeros((256, 256))) for _ in range(8)]

    @rx.function(input_signature=[])
    def stamp(self) -> Any:
        return self.parts[-1][-1, -1]


def main() -> None:
    model = Stamped()
    rx.saved_model.save(model, sys.argv[1])
    print("saving", flush=True)
    for number in itertools.count(1.0):
        for part in model.parts:
            part.assign(jnp.full((256, 256), number))
        rx.saved_model.save(model, sys.argv[1])


main()
