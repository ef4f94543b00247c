"""No wait without a bound: in the source, and when processes die or freeze."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest
from parameter_servers import STEADY, Desk, becomes, kept_cluster, mend

import replicax as rx
from replicax.checkpointing import background
from replicax.coordinator.scheduling.timing import Timing
from replicax.foundation import errors
from replicax.protocol import messages
from replicax.protocol.tasks import Task
from replicax.transport import addresses
from replicax.transport.channel import Channel
from replicax.transport.service import Service

# The machine may be busy with other things: so much is added to each bound.
SLACK_S = 8.0
FAST = Timing.fast()

SOURCE = Path(__file__).parents[2] / "src" / "replicax"

# Calls that wait, and at how many positional arguments they have a bound.
BOUND_AT = {"acquire": 1, "get": 1, "join": 1, "result": 1, "wait": 1, "wait_for": 2}
BOUNDS = ("timeout", "blocking", "block")

# Waits without a bound of their own: file, function, call, and what ends the wait.
ALLOWED = {
    (
        "bundle/data_files.py",
        "write_arrays",
        "job.result",
    ): "the disk; see `background`",
    ("bundle/reading.py", "Bundle.read", "job.result"): "the disk, and the user waits for data",
    ("checkpointing/background.py", "BackgroundWork.start", "self.wait"): "logs it each minute",
    ("checkpointing/manager.py", "CheckpointManager.*", "self._lock.acquire"): "does not wait",
    ("checkpointing/manager.py", "CheckpointManager.*", "self._work.wait"): "logs it each minute",
    ("checkpointing/manager.py", "CheckpointManager.close", "self.wait"): "logs it each minute",
    (
        "checkpointing/preemption.py",
        "PreemptionCheckpointHandler._save",
        "self._manager.wait",
    ): "logs it each minute",
    ("cli/serve.py", "serve", "server.join"): "serves until a signal; `shutdown` bounds the rest",
    ("contexts/rendezvous.py", "_Waiting.__init__", "self.may_go.acquire"): "a new lock is free",
    ("contexts/rendezvous.py", "_Waiting.__init__", "self.parked.acquire"): "a new lock is free",
    ("demo/digits.py", "train", "accuracy.result"): "a metric",
    ("demo/recommender.py", "Training._run", "self._coordinator.join"): "its steps have deadlines",
    (
        "foundation/gate.py",
        "_State.__enter__",
        "_lock.acquire",
    ): "as `with` takes it; held while a program is dispatched",
    ("input/agreement.py", "_serve", "exchange.requests.get"): "`_stop` puts False",
    (
        "input/pipelines.py",
        "_Buffer.put",
        "self._room.acquire",
    ): "the reader, or its end, makes room",
    (
        "keras/parameter_servers/trainer.py",
        "Session.*",
        "self.coordinator.join",
    ): "`fit` waits for its steps, whose waits all end",
    ("launch/from_environment.py", "_serve", "server.join"): "as `serve` of the command line",
    (
        "process/shutdown.py",
        "_read_signals",
        "select.select",
    ): "ended by a byte; after a signal it has a bound",
    (
        "ps/client/variable_client.py",
        "ParameterClient.*",
        "job.result",
    ): "the jobs have ended; their requests have deadlines",
    (
        "ps/process/parameter_server.py",
        "ParameterServerTask._handle_slow_requests",
        "self._slow_requests.get",
    ): "`close` puts None",
    (
        "starter/project/train.py",
        "train_on_parameter_servers",
        "coordinator.join",
    ): "a user's program waits for its steps",
    ("starter/project/train.py", "main", "rx.Server(…).join"): "serves until a signal",
    ("tracing/exchange.py", "_Segment.pull", "read_cache.open_scope.get"): "a context variable",
    ("tracing/function.py", "Function._key", "read_cache.open_scope.get"): "a context variable",
    (
        "training/optimizer/probe.py",
        "is_row_wise",
        "pool.submit(…).result",
    ): "a computation of ours",
    (
        "transport/client_pool.py",
        "ClientPool.close",
        "self._thread.join",
    ): "looks 25 times a second; callbacks do not wait",
    (
        "transport/service.py",
        "Service.close",
        "thread.join",
    ): "looks 10 times a second; handlers do not wait",
}


# Waits with a bound that are repeated without an end, and what ends them.
ALLOWED_AGAIN = {
    ("contexts/rendezvous.py", "Rendezvous._park"): "the code of other replicas, or its failure",
    ("contexts/rendezvous.py", "Rendezvous._wait_parked"): "the code of a replica, or its failure",
    (
        "ps/process/parameter_server.py",
        "ParameterServerTask.run_forever",
    ): "serves until it is told to stop",
    ("process/roles.py", "WaitingTask.run_forever"): "serves until it is told to stop",
    ("process/server.py", "Server.join"): "serves until it is told to stop",
}


@dataclasses.dataclass(frozen=True)
class Wait:
    """A call that may wait for ever."""

    function: str
    call: str
    line: int


class Waits:
    """Finds the calls in a module that may wait for ever."""

    def __init__(self, module: ast.Module) -> None:
        self._scopes: list[str] = []
        self.found: list[Wait] = []
        # Functions that wait with a bound, and then again.
        self.idle: list[str] = []
        # Values of contexts have a `get` that does not wait.
        self._quick = {
            ast.unparse(target)
            for node in module.body
            for target in _targets(node)
            if "ContextVar" in ast.unparse(node)
        }
        self._scan(module)

    def _scan(self, node: ast.AST) -> None:
        is_scope = isinstance(node, ast.FunctionDef | ast.ClassDef)
        if is_scope:
            self._scopes.append(node.name)
        for child in ast.iter_child_nodes(node):
            self._scan(child)
        if is_scope:
            self._scopes.pop()
        elif isinstance(node, ast.While):
            self._scan_while(node)
        elif isinstance(node, ast.Call):
            self._scan_call(node)

    def _scan_while(self, node: ast.While) -> None:
        calls = [n for n in ast.walk(node.test) if isinstance(n, ast.Call)]
        waits = any(isinstance(c.func, ast.Attribute) and c.func.attr in BOUND_AT for c in calls)
        if waits and all(isinstance(statement, ast.Pass) for statement in node.body):
            self.idle.append(".".join(self._scopes[:2]))

    def _scan_call(self, node: ast.Call) -> None:
        if not isinstance(node.func, ast.Attribute) or not self._is_endless(node, node.func):
            return
        owner = node.func.value
        # Without the arguments of calls: they may be long.
        name = (
            f"{ast.unparse(owner.func)}(…)" if isinstance(owner, ast.Call) else ast.unparse(owner)
        )
        scope = ".".join(self._scopes[:2])
        self.found.append(Wait(scope, f"{name}.{node.func.attr}", node.lineno))

    def _is_endless(self, node: ast.Call, function: ast.Attribute) -> bool:
        owner = ast.unparse(function.value)
        if ast.unparse(function) == "select.select":
            return len(node.args) < 4 or _may_be_none(node.args[3])
        if function.attr not in BOUND_AT or owner in self._quick:
            return False
        # The result of a metric, by its own class.
        if function.attr == "result" and owner in ("self", "super()"):
            return False
        if any(k.arg not in BOUNDS for k in node.keywords):
            # Of another kind: what waits takes nothing else by name.
            return False
        bounds = [k.value for k in node.keywords]
        bounds += node.args[BOUND_AT[function.attr] - 1 :][:1]
        return not bounds or any(_is_none(bound) for bound in bounds)


def _targets(node: ast.stmt) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AnnAssign) else []


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _may_be_none(node: ast.expr) -> bool:
    # A name may hold anything: `select` takes None as no bound.
    return not isinstance(node, ast.Constant) or node.value is None


def waits_in(text: str) -> list[Wait]:
    return Waits(ast.parse(text)).found


@pytest.fixture(scope="module")
def sources() -> dict[str, Waits]:
    """What was found in each module."""
    paths = sorted(SOURCE.rglob("*.py"))
    return {p.relative_to(SOURCE).as_posix(): Waits(ast.parse(p.read_text())) for p in paths}


@pytest.mark.parametrize(
    "code",
    [
        "event.wait()",
        "event.wait(None)",
        "event.wait(timeout=None)",
        "condition.wait_for(lambda: done)",
        "thread.join()",
        "self._queue.get()",
        "lock.acquire()",
        "pool.submit(f, 1).result()",
        "select.select([a], [], [])",
        "select.select([a], [], [], None)",
    ],
)
def test_endless_waits_are_found(code: str) -> None:
    (wait,) = waits_in(f"class A:\n def f(self):\n  {code}")
    assert (wait.function, wait.line) == ("A.f", 3)


def test_waits_with_a_bound_are_not() -> None:
    assert not waits_in(
        "mode: ContextVar[int] = ContextVar('mode')\n"
        "mode.get(); event.wait(1); thread.join(timeout=5.0); q.get(timeout=x)\n"
        "lock.acquire(False); rows.get(mode='fill')\n"
        "', '.join(names); d.get(key); c.wait_for(done, 3); self.result()\n"
        "lock.acquire(blocking=False); select.select([], [], [], 3.0)"
    )


def reasons_for(file: str, wait: Wait) -> list[tuple[str, str, str]]:
    owner = wait.function.partition(".")[0]
    keys = [(file, function, wait.call) for function in (wait.function, f"{owner}.*")]
    return [key for key in keys if key in ALLOWED]


def test_every_wait_in_the_source_has_a_bound_or_a_reason(sources: dict[str, Waits]) -> None:
    unknown = [
        f"src/replicax/{file}:{wait.line} {wait.function}: {wait.call}"
        for file, waits in sources.items()
        for wait in waits.found
        if not reasons_for(file, wait)
    ]
    assert not unknown, "waits without a bound:\n" + "\n".join(unknown)


def test_every_reason_is_needed(sources: dict[str, Waits]) -> None:
    found = [(file, wait) for file, waits in sources.items() for wait in waits.found]
    used = {key for file, wait in found for key in reasons_for(file, wait)}
    assert used == set(ALLOWED)


def test_every_bound_has_an_action_or_a_reason(sources: dict[str, Waits]) -> None:
    idle = {(file, function) for file, waits in sources.items() for function in waits.idle}
    assert idle == set(ALLOWED_AGAIN)
    loop = "def f():\n while not event.wait(5.0):\n  pass"
    assert Waits(ast.parse(loop)).idle == ["f"]


def test_a_checkpoint_that_takes_long_is_waited_for_and_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "_REPORT_S", 0.01)
    gate, work = threading.Event(), background.BackgroundWork()
    work.start(lambda: (gate.wait(60), None)[1])
    with futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(work.wait)
        becomes(lambda: "for a checkpoint to be written" in caplog.text, "it is told")
        assert not waiting.done()
        gate.set()
        waiting.result(60)


def test_bar20_a_question_ends_when_somebody_finds_that_its_peer_is_lost() -> None:
    place, ps = addresses.resolve("inproc://given-up"), Task("ps", 0)
    is_lost = threading.Event()

    def given_up() -> Exception | None:
        return errors.PSUnavailableError("it was given up") if is_lost.is_set() else None

    def handler(*_: Any) -> None:
        # Never answers; and somebody else notices.
        is_lost.set()

    with Service(place, ps, handler) as service:
        service.start()
        with Channel(place, Task("coordinator", 0), peer=ps) as channel:
            channel.check_failure = given_up
            with pytest.raises(errors.PSUnavailableError, match="given up"):
                channel.request(messages.Ping(0), timeout=60)
            assert channel.num_in_flight() == 0


# With real processes.


@pytest.fixture(scope="module")
def harmed_cluster() -> Iterator[rx.testing.LocalCluster]:
    """Tasks that tests kill and freeze."""
    with kept_cluster(workers=2, ps=2) as cluster:
        yield cluster


@pytest.fixture
def desk(harmed_cluster: rx.testing.LocalCluster, tmp_path: Path) -> Iterator[Desk]:
    # Restarts the tasks that earlier tests ended, so that the next test does not wait for them.
    mend(harmed_cluster)
    desk = Desk(harmed_cluster)
    yield desk
    (tmp_path / "gate").touch()
    desk.leave()


class Job:
    """Variables on both servers, and closures that run until a file is there."""

    def __init__(self, desk: Desk, tmp_path: Path, timing: Timing = STEADY, **options: Any) -> None:
        self.cluster = desk.cluster
        self.strategy = desk.strategy()
        with self.strategy.scope():
            variables = [rx.Variable(float(i), name=f"v{i}") for i in range(2)]
        self.variables = {variable.server: variable for variable in variables}
        self.coordinator = desk.coordinator(self.strategy, timing=timing, **options)
        self._gate, self._begun = tmp_path / "gate", tmp_path / "begun"
        self._begun.mkdir()

    @contextlib.contextmanager
    def frozen(self, job: str, index: int) -> Iterator[None]:
        """Freezes a task, for the others; it has no future then."""
        self.cluster.stop(job, index)
        try:
            yield
        finally:
            self.cluster.kill(job, index)

    def hold(self, count: int = 1) -> list[Any]:
        """Schedules closures that run until the end of the test."""
        gate, begun = self._gate, self._begun

        def wait_for_the_gate(number: int) -> None:
            (begun / str(number)).touch()
            deadline = time.monotonic() + 60
            while not gate.exists() and time.monotonic() < deadline:
                time.sleep(0.01)

        return [self.coordinator.schedule(wait_for_the_gate, args=(i,)) for i in range(count)]

    def until_begun(self, count: int) -> None:
        becomes(lambda: len(list(self._begun.iterdir())) >= count, f"{count} closures run")

    def busy(self) -> list[int]:
        workers = self.coordinator.status().workers
        return [i for i, worker in enumerate(workers) if worker.num_closures]


def again(call: Callable[[], Any]) -> Callable[[], Any]:
    """Calls until it fails, and not for ever."""

    def calling() -> Any:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            call()
            time.sleep(0.01)
        return None

    return calling


def failures(
    calls: dict[str, Callable[[], Any]], harm: Callable[[], object]
) -> dict[str, tuple[BaseException | None, float]]:
    """Calls everything at the same time, then harms; returns the errors, and when they came."""
    found: dict[str, tuple[BaseException | None, float]] = {}

    def run(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
            error = None
        except BaseException as raised:
            error = raised
        found[name] = (error, time.monotonic())

    threads = [threading.Thread(target=run, args=item) for item in calls.items()]
    for thread in threads:
        thread.start()
    try:
        harm()
        harmed_s = time.monotonic()
    finally:
        for thread in threads:
            thread.join(100)
    return {name: (error, when - harmed_s) for name, (error, when) in found.items()}


def test_T94_join_and_fetch_end_when_their_time_is_over(desk: Desk, tmp_path: Path) -> None:
    job = Job(desk, tmp_path)
    (held,) = job.hold()
    job.until_begun(1)
    for call in (job.coordinator.join, held.fetch, held.get):
        begun_s = time.monotonic()
        with pytest.raises(errors.DeadlineExceededError):
            call(timeout=0.2)
        assert 0.2 <= time.monotonic() - begun_s < 0.2 + SLACK_S
    assert not job.coordinator.done()


@pytest.mark.parametrize(
    ("harm", "bound_s"),
    [
        pytest.param("kill", 2.0, id="bar19-killed"),
        pytest.param("stop", FAST.dead_s + 2.0, id="bar20-frozen"),
    ],
)
def test_S191_bar19_bar20_every_call_names_the_lost_server_in_time(
    desk: Desk, tmp_path: Path, harm: str, bound_s: float
) -> None:
    # Only silence takes its time.
    timing = FAST if harm == "stop" else STEADY
    job = Job(desk, tmp_path, timing, queue_limit=2)
    coordinator, variable = job.coordinator, job.variables[1]
    values = job.hold(2)
    job.until_begun(2)
    calls = {
        "schedule": again(job.hold),
        "join": lambda: coordinator.join(timeout=90),
        "done": again(coordinator.done),
        "fetch": lambda: values[0].fetch(90),
        "read": again(variable.numpy),
        "write": again(lambda: variable.assign(1.0)),
    }
    try:
        found = failures(calls, lambda: getattr(job.cluster, harm)("ps", 1))
    finally:
        job.cluster.kill("ps", 1)
    for name, (error, seconds) in found.items():
        assert isinstance(error, errors.DistributeError), f"{name}: {error!r}"
        assert "/job:ps/task:1" in str(error), f"{name}: {error}"
        assert seconds < bound_s + SLACK_S, f"{name} took {seconds:.1f} s"


def test_bar9_an_error_does_not_wait_for_a_worker_that_is_frozen(
    desk: Desk, tmp_path: Path
) -> None:
    job = Job(desk, tmp_path)
    (held,) = job.hold()
    job.until_begun(1)
    (frozen,) = job.busy()

    def fail() -> None:
        raise ValueError("of the user")

    with job.frozen("worker", frozen):
        begun_s = time.monotonic()
        job.coordinator.schedule(fail)
        with pytest.raises(ValueError, match="of the user"):
            job.coordinator.join(timeout=60)
        assert time.monotonic() - begun_s < STEADY.cancel_s + 1.0 + SLACK_S
        with pytest.raises((errors.ClosureAbortedError, errors.CancelledError)):
            held.fetch(timeout=0)
        values = [job.coordinator.schedule(lambda i=i: i) for i in range(3)]
        assert job.coordinator.fetch(values) == [0, 1, 2]


def test_bar6_without_workers_join_raises_in_time(desk: Desk, tmp_path: Path) -> None:
    timing = dataclasses.replace(FAST, no_workers_s=3.0)
    job = Job(desk, tmp_path, timing)
    values = job.hold(4)
    job.until_begun(2)
    for worker in range(2):
        job.cluster.kill("worker", worker)
    begun_s = time.monotonic()
    with pytest.raises(errors.NoWorkersError, match=r"/job:worker/task:0.*/job:worker/task:1"):
        job.coordinator.join(timeout=60)
    assert 2.0 < time.monotonic() - begun_s < 4.0 + SLACK_S
    for value in values:
        with pytest.raises(errors.CancelledError):
            value.fetch(timeout=0)


def test_bar24_a_server_killed_while_a_worker_recovers_is_named_in_time(
    desk: Desk, tmp_path: Path
) -> None:
    job = Job(desk, tmp_path)
    job.hold(4)
    job.until_begun(2)
    job.cluster.kill("worker", 0)
    job.cluster.restart("worker", 0, wait=False)
    found = failures(
        {"join": lambda: job.coordinator.join(timeout=60)}, lambda: job.cluster.kill("ps", 0)
    )
    error, seconds = found["join"]
    assert isinstance(error, errors.PSUnavailableError)
    assert "/job:ps/task:0" in str(error)
    assert seconds < 3.0 + SLACK_S
