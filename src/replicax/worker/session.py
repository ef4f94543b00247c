"""A worker's side of a job: its strategy, and its connections to the parameter servers."""

from __future__ import annotations

from replicax.foundation import errors
from replicax.protocol import limits, messages
from replicax.protocol.tasks import Task
from replicax.ps.client.variable_client import ParameterClient
from replicax.strategies.parameter_server import ParameterServerStrategy
from replicax.transport import addresses
from replicax.transport.channel import Channel
from replicax.transport.keys import Keys


class ParameterServerSession:
    """A worker's strategy and connections for the closures of one coordinator.

    Args:
      attach: The attach request of the coordinator.
      job: The name of the job.
      epoch: The epoch of the coordinator.
      incarnation: The incarnation of this worker.
      index: The index of this worker.
      keys: The keys that authenticate this task.
    """

    def __init__(
        self,
        attach: messages.Attach,
        job: str,
        epoch: int,
        incarnation: int,
        index: int,
        keys: Keys | None = None,
    ) -> None:
        me = Task("worker", index)
        channels: list[Channel] = []
        for server, url in enumerate(attach.servers):
            place = addresses.resolve(url, None, keys)
            channel = Channel(place, me, keys, incarnation, peer=Task("ps", server))
            channel.job, channel.epoch = job, epoch
            channels.append(channel)
        pulls_ahead = bool(attach.settings.get("pull_ahead"))
        deadline = attach.settings.get("deadline")
        self._client = ParameterClient(
            channels,
            deadline=deadline if isinstance(deadline, int | float) else limits.DEADLINE,
            pulls_ahead=pulls_ahead,
        )
        replicas = attach.settings.get("replicas")
        if replicas is not None and not isinstance(replicas, int):
            raise errors.ProtocolError(
                "The setting 'replicas' must be an int or None",
                f"it is {replicas!r}",
                "Check that all tasks run the same version.",
            )
        self.strategy = ParameterServerStrategy.on_worker(self._client, replicas)
        self.begin = self._client.begin
        self.end = self._client.end
        self.poll = self._client.poll
        self.drain = self._client.drain
        self.pending = self._client.pending
        self.waiting_for = self._client.waiting_for

    def close(self) -> None:
        """Closes all connections; unsent updates are lost."""
        self.strategy.close()
