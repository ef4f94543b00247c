"""Clients of cloud services: how they are imported, called, and what their failures become."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from replicax.foundation import errors

# Every question to a service ends after this time.
TIMEOUT_S = 30.0


def require(module: str, resolver: str, extra: str) -> Any:
    """Imports a module of an optional package, or says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise errors.MissingDependencyError(
            f"{resolver} needs the package {module.partition('.')[0]!r}",
            "it is not installed",
            f"Run `pip install replicax[{extra}]`, or pass a client of your own.",
        ) from error


def google_service(api: str, version: str, credentials: Any, **options: Any) -> Any:
    """Connects to an API of Google Cloud.

    Args:
      api: The name of the API, which is also the extra to install.
      version: The version of the API.
      credentials: The credentials, or "default" for those of the environment.
      **options: Passed on to `googleapiclient.discovery.build`.
    """
    resolver = {"compute": "GCEClusterResolver", "tpu": "TPUClusterResolver"}[api]
    extra = {"compute": "gce", "tpu": "tpu"}[api]
    discovery = require("googleapiclient.discovery", resolver, extra)
    if credentials == "default":
        credentials = None
    # The client's own limit on each request is 60 s; the cache on disk needs one more package.
    return ask(
        f"the {api} API of Google Cloud",
        lambda: discovery.build(
            api, version, credentials=credentials, cache_discovery=False, **options
        ),
    )


def ask(service: str, question: Callable[[], Any]) -> Any:
    """Calls a client; whatever it raises becomes an UnavailableError.

    Only the kind of the failure is told: texts of clients can hold addresses with tokens.
    """
    try:
        return question()
    except errors.DistributeError:
        raise
    except Exception as error:
        reason = getattr(error, "reason", None)
        status = getattr(error, "status_code", None) or getattr(error, "status", None)
        details = ", ".join(str(part)[:80] for part in (status, reason) if part)
        raise errors.UnavailableError(
            f"{service[:1].upper()}{service[1:]} must answer",
            f"the call failed with {type(error).__name__}" + (f" ({details})" if details else ""),
            "Check the network, the credentials and the names that were passed.",
        ) from error
