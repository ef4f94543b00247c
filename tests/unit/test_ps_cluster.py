"""How the coordinator's view of a cluster recovers servers."""

from __future__ import annotations

import pytest

from replicax.foundation import errors
from replicax.ps.client.cluster import Cluster
from replicax.transport import addresses


def test_bar20_recovering_a_server_ends_when_the_coordinator_has_given_it_up() -> None:
    """Found by the simulation: an update of the user waited as long as if it had not."""
    gone = addresses.resolve("inproc://given-up-by-the-coordinator")
    cluster = Cluster([gone], [], {}, return_timeout=5.0)
    cluster._saved = [True]
    cluster.follow(lambda _: errors.PSUnavailableError("it was given up"))
    lost = errors.PSUnavailableError("it was lost")
    lost.task_index = 0  # type: ignore[attr-defined]
    try:
        with pytest.raises(errors.PSUnavailableError, match=r"^it was given up$"):
            cluster.recover(lost)
    finally:
        cluster.close()
