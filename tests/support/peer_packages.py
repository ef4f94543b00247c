"""Packages that we never depend on, for slow tests that need the real ones."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest

from benchmarks import peer_environments


def import_peer(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    """Imports "torch" or "tensorflow" from the environment that benchmarks make for it.

    Our own packages come first: only what we lack is taken from there.
    """
    monkeypatch.setattr(sys, "path", [*sys.path, site_packages(name)])
    # TensorFlow sets environment variables when it is imported.
    with mock.patch.dict(os.environ):
        return importlib.import_module(name)


def site_packages(name: str) -> str:
    """Returns where the packages of that environment are; makes it if it is missing."""
    interpreter = peer_environments.python(name, print)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    found = subprocess.run(
        [interpreter, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    return found.stdout.strip()
