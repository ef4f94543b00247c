"""Clients of cloud services: imports them, calls them and translates their errors."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

from replicax.foundation import errors

T = TypeVar("T")

# The timeout of every request to a service.
TIMEOUT_S = 30.0


def require(module: str, resolver: str, extra: str) -> Any:
    """Imports a module of an optional package; the error explains how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise errors.MissingDependencyError(
            f"{resolver} needs the package {module.partition('.')[0]!r}",
            "it is not installed",
            f"Run `pip install replicax[{extra}]`, or pass a client of your own.",
        ) from error


def google_service(api: str, version: str, credentials: object, **options: object) -> Any:
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
    return call(
        f"the {api} API of Google Cloud",
        lambda: discovery.build(
            api, version, credentials=credentials, cache_discovery=False, **options
        ),
    )


def call(service: str, request: Callable[[], T]) -> T:
    """Calls a client; translates its errors to UnavailableError.

    The text contains only the type of the error: texts of clients can contain URLs with tokens.
    """
    try:
        return request()
    except errors.DistributeError:
        raise
    except Exception as error:
        reason = getattr(error, "reason", None)
        status = getattr(error, "status_code", None) or getattr(error, "status", None)
        details = ", ".join(str(part)[:80] for part in (status, reason) if part)
        raise errors.UnavailableError(
            f"{service[:1].upper()}{service[1:]} must be reachable",
            f"the call failed with {type(error).__name__}" + (f" ({details})" if details else ""),
            "Check the network, the credentials and the names that were passed.",
        ) from error
