"""Faults of tasks and connections: their times, targets and durations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from simulation.checks import Checks
from simulation.network import Network
from simulation.process import Machine
from simulation.programs import Program, Programs
from simulation.server import ServerMachine
from simulation.worker import WorkerMachine
from simulation.world import World

# The maximum number of faults in one history.
_MOST = 16
# How long a server may be silent, or unreachable for the coordinator, without being lost.
_SAFE_PAUSE_S = 0.9
_SAFE_PARTITION_S = 0.2
# The mean time between two unauthenticated peers.
_UNKNOWN_KEY_S = 3.0


class Incidents:
    """Injects faults as long as the user waits."""

    def __init__(
        self,
        world: World,
        network: Network,
        checks: Checks,
        programs: Programs,
        servers: Sequence[ServerMachine],
        workers: Sequence[WorkerMachine],
    ) -> None:
        self._world, self._network, self._checks = world, network, checks
        self._programs = programs
        self._servers, self._workers = servers, workers
        self._num_left = _MOST
        self._is_over = False
        # Workers that are never resumed or restarted; one worker always remains.
        self._gone: set[Machine] = set()
        self._kinds: dict[str, Callable[[], None]] = {
            "cut": self._cut,
            "partition": self._partition,
            "pause": self._pause,
            "stop": self._stop,
            "crash": self._crash,
            "coordinator_pause": self._pause_coordinator,
            "coordinator_crash": self._crash_coordinator,
            "coordinator_rival": self._replace_coordinator,
            "server_pause": self._pause_server,
            "server_crash": self._crash_server,
        }
        if world.faults.kinds:
            self._plan_next()
            self._plan_unknown_key()

    def end(self) -> None:
        """Ends all faults: resumes stopped processes, and ends partitions."""
        self._is_over = True
        self._network.reunite()
        programs = [*self._programs.replaced, self._programs.current]
        for machine in (*programs, *self._servers, *self._workers):
            if machine.is_paused:
                self._world.note(f"{machine} is resumed")
                machine.resume()

    def _plan_next(self) -> None:
        chance = self._world.random
        when = self._world.now + chance.expovariate(1 / self._world.faults.interval_s)
        self._world.at(when, self._inject)

    def _inject(self) -> None:
        if self._is_over:
            return
        if not self._programs.current.is_working:
            # No work to disturb: later.
            self._world.at(self._world.now + 0.05, self._inject)
            return
        self._kinds[self._world.random.choice(self._world.faults.kinds)]()
        self._num_left -= 1
        if self._num_left:
            self._plan_next()

    @property
    def _coordinator(self) -> Program:
        return self._programs.current

    def _note(self, kind: str, text: str) -> None:
        self._world.landed[kind] += 1
        self._world.note(f"FAULT {text}")

    # Connections.

    def _cut(self) -> None:
        links = list(self._network.links)
        links = [link for link in links if link.is_busy] or links
        if links:
            link = self._world.random.choice(links)
            self._note("cut", f"the connection {link} is cut")
            link.cut()

    def _partition(self) -> None:
        chance = self._world.random
        faults = self._world.faults
        pairs: list[tuple[Machine, Machine]] = [
            (chance.choice(self._workers), chance.choice(self._servers)),
            (self._coordinator, chance.choice(self._workers)),
            (self._coordinator, chance.choice(self._servers)),
        ]
        if faults.is_mirrored:
            pairs.append((self._servers[0], self._servers[1]))
        one, other = chance.choice(pairs)
        longest_s = 3.0
        if other in self._servers:
            if one is self._coordinator and not faults.can_lose_servers:
                longest_s = _SAFE_PARTITION_S
            self._checks.may_lose_servers |= not faults.keeps_variables
        seconds = chance.uniform(0.05, longest_s)
        self._note("partition", f"{one} and {other} are apart for {seconds:.2f} s")
        self._network.separate(one.task, other.task, seconds, is_cut=chance.random() < 0.5)

    # Tasks.

    def _pause(self) -> None:
        seconds = self._world.random.choice((0.3, 1.0, 3.0, 5.0)) * self._world.random.uniform(
            0.5, 1.5
        )
        self._stop_for(self._world.random.choice(self._workers), seconds, "pause")

    def _stop(self) -> None:
        worker = self._removable()
        if worker is not None:
            self._gone.add(worker)
            self._note("stop", f"{worker} is stopped for good")
            worker.process.pause()

    def _crash(self) -> None:
        chance = self._world.random
        worker = chance.choice(self._workers)
        if not worker.is_up or worker in self._gone:
            return
        self._note("crash", f"{worker} crashes")
        worker.kill()
        if chance.random() < 0.1 and self._removable() is not None:
            self._gone.add(worker)
        else:
            worker.restart_after(chance.uniform(0.05, 2.0))

    def _pause_coordinator(self) -> None:
        seconds = self._world.random.uniform(0.1, self._world.random.choice((1.0, 4.0)))
        self._stop_for(self._coordinator, seconds, "coordinator_pause")

    def _crash_coordinator(self) -> None:
        if self._programs.can_be_replaced:
            self._note("coordinator_crash", f"{self._coordinator} crashes")
            self._coordinator.kill()
            self._programs.replace(self._world.random.uniform(0.05, 2.0))

    def _replace_coordinator(self) -> None:
        """Stops the coordinator; it is resumed before or after another one has its job."""
        chance, coordinator = self._world.random, self._coordinator
        # One that does not have the job yet would be the newest when it is resumed.
        has_job = self._programs.current.has_job
        if self._programs.can_be_replaced and has_job and not coordinator.is_paused:
            self._stop_for(coordinator, chance.uniform(0.1, 5.0), "coordinator_rival")
            self._programs.replace(chance.uniform(0.05, 1.0))

    @property
    def _has_two_copies(self) -> bool:
        """Whether one server may be lost: without a mirror, or if all mirrors have all changes.

        A coordinator that creates variables waits for one server at a time: it does not notice that
        the mirror of that one has restarted, and its request times out.
        """
        if not self._world.faults.is_mirrored:
            return True
        return self._programs.current.has_job and all(s.is_in_sync for s in self._servers)

    def _pause_server(self) -> None:
        faults = self._world.faults
        longest_s = 5.0 if faults.can_lose_servers else _SAFE_PAUSE_S
        seconds = self._world.random.uniform(0.05, longest_s)
        self._checks.may_lose_servers |= seconds > _SAFE_PAUSE_S and not faults.keeps_variables
        self._stop_for(self._world.random.choice(self._servers), seconds, "server_pause")

    def _crash_server(self) -> None:
        chance = self._world.random
        server = chance.choice(self._servers)
        faults = self._world.faults
        if not server.is_up:
            return
        is_kept = faults.is_mirrored or server.saved.is_complete
        if not self._has_two_copies or (faults.saved_share and not is_kept):
            return
        self._note("server_crash", f"{server} crashes")
        server.kill()
        if server.disk is not None and self._world.fault_random.random() < 0.5:
            self._note("power_cut", f"power cut at the machine of {server}")
            server.disk.cut_power()
        is_restarted = faults.has_replacements or faults.is_mirrored or chance.random() < 0.9
        self._checks.may_lose_servers |= not is_restarted or not is_kept
        if is_restarted:
            server.restart_after(chance.uniform(0.05, 1.5))

    # Unauthenticated peers.

    def _plan_unknown_key(self) -> None:
        when = self._world.now + self._world.fault_random.expovariate(1 / _UNKNOWN_KEY_S)
        self._world.at(when, self._try_unknown_key)

    def _try_unknown_key(self) -> None:
        """Connects with a certificate of another job, which no task may accept."""
        if self._is_over:
            return
        called = self._world.fault_random.choice([*self._servers, *self._workers])
        if self._network.require_rejected(called.url):
            self._note("unknown_key", f"an unauthenticated peer connects to {called}")
        self._plan_unknown_key()

    def _stop_for(self, machine: Machine, seconds: float, kind: str) -> None:
        if machine.is_paused or not machine.is_up:
            return
        self._note(kind, f"{machine} is stopped for {seconds:.2f} s")
        process = machine.process
        process.pause()

        def resume() -> None:
            if process is machine.process and process.is_paused and machine not in self._gone:
                self._world.note(f"{machine} is resumed")
                machine.resume()

        self._world.at(self._world.now + seconds, resume)

    def _removable(self) -> WorkerMachine | None:
        left = [w for w in self._workers if w not in self._gone]
        return self._world.random.choice(left) if len(left) > 1 else None
