"""Counts on parameter servers, and continues from the count of its job.

Run as: counting.py CLUSTER NUMBER, where CLUSTER is JSON. It adds NUMBER to the count: only the
program that has taken over the job can read the count.
"""

import json
import sys
import time

import replicax as rx

resolver = rx.cluster_resolver.SimpleClusterResolver(
    rx.train.ClusterSpec(json.loads(sys.argv[1])), task_type="chief", task_id=0
)
strategy = rx.ParameterServerStrategy(resolver, job="counting")
with strategy.scope():
    done = rx.Variable(0, dtype="int32", name="done")
    same = rx.Variable(0, dtype="int32", name="same")
start = int(done.read_value())
print("resumed" if strategy.is_resumed else "new", start, int(same.read_value()), flush=True)


def count() -> None:
    done.assign_add(1)
    same.assign_add(1)
    time.sleep(0.01)


with rx.coordinator.ClusterCoordinator(strategy) as coordinator:
    for _ in range(int(sys.argv[2])):
        coordinator.schedule(count)
    while coordinator.status().num_finished < 20:
        time.sleep(0.01)
    print("counting", flush=True)
    coordinator.join(timeout=60)
print("ended", int(done.read_value()), int(same.read_value()), flush=True)
sys.stdin.readline()
strategy.close()
