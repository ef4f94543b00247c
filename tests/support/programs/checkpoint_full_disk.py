"""Saves on a file system of a few megabytes until it is full; prints what happened.

Run in a mount namespace of its own: `unshare -rm python checkpoint_full_disk.py DIR MB`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np

import replicax as rx

directory, megabytes = sys.argv[1:]
command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", directory]
subprocess.run(command, check=True, timeout=60)

small = rx.Variable(np.arange(1000.0, dtype=np.float32), name="small")
large = rx.Variable(np.ones(8_000_000, np.float32), name="large")
with rx.train.CheckpointManager(rx.train.Checkpoint(small=small), directory) as manager:
    first = manager.save()
raised = []
checkpoint = rx.train.Checkpoint(small=small, large=large)
with rx.train.CheckpointManager(checkpoint, directory) as manager:
    for asynchronous in (False, True):
        try:
            manager.save(asynchronous=asynchronous)
            manager.wait()
        except rx.errors.CheckpointError as error:
            raised.append(str(error))
    small.assign(np.zeros(1000, np.float32))
    restored = manager.restore_latest()
print(
    json.dumps(
        {
            "raised": raised,
            "left": sorted(n for n in os.listdir(directory) if not n.startswith(".")),
            "first": os.path.basename(str(first)),
            "is_whole": bool((small.numpy() == np.arange(1000.0)).all()),
            "report": restored.report(),
        }
    )
)
