"""A worker of MultiWorkerMirroredStrategy that trains, for tests of faults.

Run as: sync_training.py SCENE ODD NUM_STEPS with TF_CONFIG. It prints what happens, a line of JSON
each. In most scenes the worker with index ODD does something else at step 20.
"""

import json
import os
import signal
import sys
import time
from typing import Any

import numpy as np

import replicax as rx

SCENE, ODD, NUM_STEPS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
INDEX = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
IS_ODD_ONE = INDEX == ODD


def say(event: str, **facts: Any) -> None:
    print(json.dumps({"event": event, "at": time.time(), **facts}), flush=True)


strategy = rx.MultiWorkerMirroredStrategy()
with strategy.scope():
    weights = rx.Variable(np.zeros((8, 4), np.float32), aggregation=rx.VariableAggregation.SUM)
    steps = rx.Variable(0, dtype="int32", aggregation=rx.VariableAggregation.ONLY_FIRST_REPLICA)
say("joined", count=strategy.num_replicas_in_sync)


def replica_step(rows: Any) -> Any:
    weights.assign_add(rows.sum(0)[:, None] * np.ones((1, 4), "f"))
    steps.assign_add(1)
    return rows.sum()


@rx.function
def compiled_step(rows: Any) -> Any:
    return strategy.reduce("SUM", strategy.run(replica_step, args=(rows,)), axis=None)


def eager_step(rows: Any) -> Any:
    return strategy.reduce("SUM", strategy.run(replica_step, args=(rows,)), axis=None)


def train(step: Any) -> None:
    for number in range(NUM_STEPS):
        rows = 2
        if IS_ODD_ONE and number == 20:
            say("fault")
            if SCENE in ("kill", "kill eager"):
                os.kill(os.getpid(), signal.SIGKILL)
            elif SCENE == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif SCENE == "raise":
                raise ValueError("the data is bad")
            elif SCENE == "shape":
                rows = 3
        total = step(np.ones((rows, 8), np.float32))
        if number == 10:
            say("training", total=float(total))


try:
    train(eager_step if "eager" in SCENE else compiled_step)
except Exception as error:
    say("error", kind=type(error).__name__, text=str(error))
    raise
say("end", steps=int(steps.read_value()), sum=float(np.asarray(weights.read_value()).sum()))
