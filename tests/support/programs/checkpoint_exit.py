"""Ends while a save in the background is still going on. Argument: directory."""

from __future__ import annotations

import sys

import numpy as np

import replicax as rx

variable = rx.Variable(np.arange(4 << 20, dtype=np.float32))
manager = rx.train.CheckpointManager(rx.train.Checkpoint(v=variable), sys.argv[1])
manager.save(asynchronous=True)
variable.assign(np.zeros(4 << 20, np.float32))
