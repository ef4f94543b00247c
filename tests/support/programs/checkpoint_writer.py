"""Saves one checkpoint after the other until it is killed: step N holds the number N everywhere.

Arguments: directory, MiB per checkpoint, first number.
"""

from __future__ import annotations

import sys

import numpy as np

import replicax as rx

directory, mebibytes, first = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
count = int(mebibytes * (1 << 20)) // 4 // 4
variables = [rx.Variable(np.zeros(count, np.float32)) for _ in range(4)]
checkpoint = rx.train.Checkpoint(variables=variables, note="")
manager = rx.train.CheckpointManager(checkpoint, directory, max_to_keep=2)
print("ready", flush=True)
for number in range(first, first + 100_000):
    for variable in variables:
        variable.assign(np.full(count, number, np.float32))
    checkpoint.note = str(number)
    manager.save(checkpoint_number=number, asynchronous=number % 2 == 1)
    print(number, flush=True)
