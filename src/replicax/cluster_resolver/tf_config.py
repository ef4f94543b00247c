"""TFConfigClusterResolver: the cluster of the environment variable TF_CONFIG."""

from __future__ import annotations

import json
from typing import Any

from typing_extensions import override

from replicax.cluster import address
from replicax.cluster.spec import ClusterSpec
from replicax.cluster_resolver.base import ClusterResolver, summary
from replicax.cluster_resolver.failures import decode_error
from replicax.foundation import errors, settings

_USED = ("cluster", "task", "rpc_layer", "session_master", "environment")


class TFConfigClusterResolver(ClusterResolver):
    """Reads the cluster and this task from TF_CONFIG, which is re-read on every call.

    TF_CONFIG is JSON: `{"cluster": {"worker": ["host:2222"]}, "task": {"type": "worker",
    "index": 0}}`. Without it the cluster is empty and the task unknown.

    Args:
      task_type: The job of this task; overrides TF_CONFIG.
      task_id: The index of this task; overrides TF_CONFIG.
      rpc_layer: The scheme that `master` puts before `://`; overrides TF_CONFIG.
      environment: The kind of environment where the task runs; overrides TF_CONFIG.

    Raises:
      InvalidArgumentError: TF_CONFIG is not JSON, or does not describe a cluster.
      ArgumentTypeError: A part of TF_CONFIG has another type.

    >>> TFConfigClusterResolver(task_type="worker", task_id=0).task_type
    'worker'
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        self._task_type = None if task_type is None else str(task_type)
        self._task_id = None if task_id is None else int(task_id)
        self._rpc_layer = rpc_layer
        self._environment = environment

    @override
    def cluster_spec(self) -> ClusterSpec:
        cluster = _section(_read(), "cluster")
        try:
            return ClusterSpec(cluster)
        except errors.DistributeError as error:
            raise type(error)(f"{settings.TF_CONFIG}: {error}") from None

    @override
    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of a task, by default of this task.

        A `session_master` in TF_CONFIG overrides every address. Empty without a cluster, without a
        task, and for the only task of a cluster.
        """
        session_master = _read().get("session_master")
        if session_master is not None:
            return str(session_master)
        spec = self.cluster_spec()
        is_alone = sum(spec.num_tasks(job) for job in spec.jobs) == 1
        if not spec or (is_alone and task_type is None and task_id is None):
            return ""
        job = task_type if task_type is not None else self.task_type
        index = task_id if task_id is not None else self.task_id
        if job is None or index is None:
            return ""
        return address.with_layer(spec.task_address(job, index), rpc_layer or self.rpc_layer)

    @override
    def _default_task_type(self) -> str | None:
        found = _section(_read(), "task").get("type")
        return None if found is None else str(found)

    @override
    def _default_task_id(self) -> int | None:
        found = _section(_read(), "task").get("index")
        return None if found is None else _index(found)

    @override
    def _default_rpc_layer(self) -> str | None:
        found = _read().get("rpc_layer")
        return None if found is None else str(found)

    @property
    @override
    def environment(self) -> str:
        if self._environment is not None:
            return self._environment
        return str(_read().get("environment") or "")

    @override
    def explain(self) -> str:
        if not settings.TF_CONFIG.is_set:
            return summary(self, f"{settings.TF_CONFIG} (environment): not set")
        return summary(self, f"{settings.TF_CONFIG} (environment)", self._notes())

    @override
    def __repr__(self) -> str:
        return f"<{summary(self, type(self).__name__)}>"

    def _notes(self) -> list[str]:
        try:
            config = _read()
            task = _section(config, "task")
        except errors.DistributeError:
            return []
        notes = []
        for name, own, key in (
            ("task_type", self._task_type, "type"),
            ("task_id", self._task_id, "index"),
        ):
            found = task.get(key)
            if own is not None and found is not None and str(found) != str(own):
                notes.append(f"ignored: {key} {found!r} of the task; {name} was set to {own!r}")
        if config.get("session_master") is not None:
            notes.append("session_master is set: every master() returns it")
        if unknown := sorted(set(config) - set(_USED)):
            notes.append(f"ignored: {', '.join(map(repr, unknown))}; not used here")
        return notes


def _read() -> dict[str, Any]:
    text = settings.TF_CONFIG.read()
    if text is None:
        return {}
    failure: errors.InvalidArgumentError | None = None
    config: Any = None
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        failure = decode_error(settings.TF_CONFIG, text, error)
    except RecursionError:
        failure = _not_an_object(settings.TF_CONFIG, "it is nested too deeply")
    if failure is not None:
        # Raised here, because the original error contains the whole variable.
        raise failure
    if not isinstance(config, dict):
        raise _not_an_object(settings.TF_CONFIG, f"it is a {type(config).__name__}")
    return config


def _section(config: dict[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _not_an_object(f"{key!r} in {settings.TF_CONFIG}", f"it is a {type(value).__name__}")
    return value


def _index(value: object) -> int:
    index = settings.as_index(value)
    if index is not None:
        return index
    raise errors.InvalidArgumentError(
        f"The index of the task in {settings.TF_CONFIG} must be a number, 0 or more",
        f"it is {str(value)[:40]!r}",
        'Write {"task": {"type": "worker", "index": 0}}.',
    )


def _not_an_object(what: str, found: str) -> errors.InvalidArgumentError:
    return errors.InvalidArgumentError(
        f"{what} must be a JSON object",
        found,
        'Write {"cluster": {"worker": ["host:2222"]}, "task": {"type": "worker", "index": 0}}.',
    )
