"""Prints what a process knows about itself, as JSON, and ends as its arguments say."""

import json
import os
import signal
import sys
import threading
import warnings

import jax

print(
    json.dumps(
        {
            "argv": sys.argv,
            "orig_argv": sys.orig_argv,
            "path": sys.path,
            "main": [__name__, __file__, "__main__" in sys.modules],
            "directory": os.getcwd(),
            "env": dict(os.environ),
            "parent": os.getppid(),
            "leads": [os.getpgrp() == os.getpid(), os.getsid(0) == os.getpid()],
            "input": sys.stdin.read(),
            "fds": {f: os.readlink(f"/proc/self/fd/{f}") for f in sys.argv[2:]},
            "signals": [repr(signal.getsignal(n)) for n in sorted(signal.valid_signals())],
            "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            "threads": threading.active_count(),
            "warnings": [repr(w) for w in warnings.filters],
            "unraisable": sys.unraisablehook.__module__,
            "config": {k: repr(v) for k, v in sorted(jax.config.values.items())},
            "devices": len(jax.devices()),
            "platform": jax.default_backend(),
        }
    ),
    flush=True,
)
print("to the other stream", file=sys.stderr)
if sys.argv[1] == "fail":
    raise ValueError("as it should")
if sys.argv[1] == "wait":
    signal.pause()
sys.exit(int(sys.argv[1]))
