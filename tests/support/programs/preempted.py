"""Trains alone until it is preempted: `preempted.py directory num_steps [option=value ...]`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import replicax as rx


def main(directory: str, num_steps: str, *options: str) -> None:
    given = dict(option.split("=") for option in options)
    flag = Path(directory) / "notice"
    saved = Path(directory) / "saved_by_user"
    v = rx.Variable(0)
    config = rx.experimental.TerminationConfig(
        termination_watcher_fn=flag.exists if given.get("watcher") else None,
        grace_period=float(given["grace"]) if "grace" in given else None,
        save_fn=(lambda: saved.write_text(str(int(v)))) if given.get("save_fn") else None,
        exit_fn=(lambda: os._exit(7)) if given.get("exit_fn") else None,
    )
    checkpoint = rx.train.Checkpoint(v=v)
    handler = rx.experimental.PreemptionCheckpointHandler(
        None, checkpoint, Path(directory) / "run", config
    )
    print("start", int(v), handler.total_run_calls, flush=True)
    while handler.total_run_calls < int(num_steps):
        handler.run(v.assign_add, 1)
        time.sleep(0.02)
        print("step", handler.total_run_calls, flush=True)
    print("end", int(v), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
