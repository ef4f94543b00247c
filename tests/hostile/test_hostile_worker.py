"""A worker that was taken over: it speaks the protocol, and lies in all that it says."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hostile_partners import WatchedTask
from parameter_servers import STEADY
from transport_partners import WORKER

import replicax as rx
from replicax.cluster_resolver import SimpleClusterResolver
from replicax.protocol import messages
from replicax.protocol.messages import RemoteError, Result
from replicax.protocol.trees import Array, Dict, Integer, Items, NamedTuple
from replicax.transport import addresses
from replicax.transport.service import Service

Lie = Callable[[int], tuple[messages.Finished, list[bytes]]]


class Bomb:
    """What makes a directory when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._mark),)


class Liar:
    """A worker in this process, of the attacker: it runs nothing, and answers as it likes."""

    def __init__(self, address: str) -> None:
        self.lie: Lie | None = None
        self.figures: dict[str, Any] = {}
        self.ran: list[int] = []
        self.service = Service(addresses.resolve(address), WORKER, self._handle)
        self.service.start()

    def _handle(self, session: Any, envelope: Any, buffers: Any) -> Any:
        body = envelope.body
        if isinstance(body, messages.Ping):
            return messages.Pong(len(self.ran), self.figures), ()
        if isinstance(body, messages.Run):
            for closure in body.closures:
                self.ran.append(closure.closure)
                if self.lie is not None:
                    said, arrays = self.lie(closure.closure)
                    self.service.send(session, said, arrays)
            return None
        if isinstance(body, messages.CreateResource):
            error = RemoteError("input", "os.system", "id", "")
            return messages.ResourceCreated(body.resource, error), ()
        return messages.Done(), ()


# Hooks stay for ever; this one looks only while a test wants it to.
_looked_up: list[Any] = []
_is_watching = threading.Event()


def _watch(event: str, args: tuple[Any, ...]) -> None:
    if not _is_watching.is_set():
        return
    # Modules of ours may be imported only now.
    is_code = event == "exec" and args[0].co_name != "<module>"
    if is_code or event in ("pickle.find_class", "os.system", "os.mkdir", "subprocess.Popen"):
        _looked_up.append((event, args))


@pytest.fixture(scope="module")
def hook() -> None:
    sys.addaudithook(_watch)


@pytest.fixture
def executed(hook: None) -> Iterator[list[Any]]:
    """What was looked up by pickle, or made or run, by threads of this process."""
    _looked_up.clear()
    _is_watching.set()
    yield _looked_up
    _is_watching.clear()


class Scene:
    """A coordinator, a good parameter server, and the liar."""

    def __init__(self, server: WatchedTask, directory: Path) -> None:
        directory.chmod(0o700)
        address = f"ipc://{directory}/w"
        self.liar = Liar(address)
        spec = {"worker": [address], "ps": [server.address], "chief": [f"ipc://{directory}/c"]}
        resolver = SimpleClusterResolver(rx.train.ClusterSpec(spec), task_type="chief", task_id=0)
        self.strategy = rx.ParameterServerStrategy(resolver)
        self.coordinator = rx.coordinator.ClusterCoordinator(self.strategy, timing=STEADY)

    def close(self) -> None:
        self.coordinator.close()
        self.strategy.close()
        self.liar.service.close()

    def asked(self, lie: Lie) -> Any:
        """What the program sees of a closure that the liar answers."""
        self.liar.lie = lie
        return self.coordinator.schedule(print)


@pytest.fixture(scope="module")
def scene(watched_ipc_ps: WatchedTask, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    scene = Scene(watched_ipc_ps, tmp_path_factory.mktemp("scene"))
    # All connections are there before descriptors of a test are counted.
    scene.asked(_result(1, [])).fetch(60)
    yield scene
    scene.close()


_NO_VALUE = object()


def _result(node: Any, buffers: list[bytes], num_buffers: int | None = None) -> Lie:
    count = len(buffers) if num_buffers is None else num_buffers
    tree = None if node is _NO_VALUE else msgspec.msgpack.encode(node)
    return lambda closure: (messages.Finished([Result(closure, tree, None, count)]), buffers)


def _error(*fields: Any) -> Lie:
    return lambda closure: (
        messages.Finished([Result(closure, None, RemoteError(*fields), 0)]),
        [],
    )


def test_bar43_a_pickle_as_a_result_is_bytes(
    scene: Scene, tmp_path: Path, executed: list[Any]
) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "mark"))
    for node, buffers in (
        (Array("bytes", (len(bomb),)), [bomb]),
        (Array("uint8", (len(bomb),)), [bomb]),
        (bomb.decode("latin-1"), []),
    ):
        value = scene.asked(_result(node, buffers)).fetch(60)
        assert len(value) == len(bomb)
    assert not (tmp_path / "mark").exists()
    assert executed == []


_BAD_NODES: list[tuple[str, Any, list[bytes], int | None]] = [
    ("unknown kind", Items("pickle", ["cos\nsystem\n(S'id'\ntR."]), [], None),
    ("unknown tag", ["Pickle", "cos\nsystem\n(S'id'\ntR."], [], None),
    ("object array", Array("object", (1,)), [bytes(8)], None),
    ("structured", Array("i4,O", (1,)), [bytes(12)], None),
    ("datetime", Array("M8[ns]", (1,)), [bytes(8)], None),
    ("too few bytes", Array("float32", (9,)), [bytes(8)], None),
    ("huge", Array("float32", (1 << 40, 1 << 40)), [b""], None),
    ("huge and empty", Array("float32", (0, (1 << 64) - 1)), [b""], None),
    ("negative", Array("float32", (-1, -4)), [bytes(16)], None),
    ("many dimensions", Array("uint8", (1,) * 99), [b"x"], None),
    ("no buffers", Array("float32", (2,)), [], None),
    ("more buffers", None, [b"x"], None),
    ("counted wrong", None, [], 7),
    ("counted backwards", None, [], -7),
    ("no value", _NO_VALUE, [], None),
    ("a name that is code", NamedTuple("x: __import__('os').system('id')", (), []), [], None),
    ("fields that are code", NamedTuple("T", ("a=print(1)",), [None]), [], None),
    ("a variable that does not exist", Items("variable", ["os", "system"]), [], None),
    ("a variable without sense", Items("variable", [Dict(["a"], [1])]), [], None),
    ("a variable without a number", Items("variable", ["variable"]), [], None),
    ("a variable of a list", Items("variable", ["variable", Items("list", []), 0]), [], None),
    ("slices of nothing", Items("slices", [None] * 3), [], None),
    ("replicas of nothing", Items("per_replica", []), [], None),
    ("an int that is code", Integer("__import__('os')"), [], None),
    ("an endless int", Integer("9" * 5_000), [], None),
    ("keys that are lists", Dict([Items("list", [])], [None]), [], None),
]


@pytest.mark.parametrize("case", _BAD_NODES, ids=lambda case: case[0])
def test_bar43_what_is_no_result_is_a_typed_error(
    scene: Scene, executed: list[Any], case: Any
) -> None:
    _, node, buffers, count = case
    with pytest.raises(rx.errors.DistributeError) as caught:
        scene.asked(_result(node, buffers, count)).fetch(60)
    assert isinstance(caught.value, rx.errors.ProtocolError | rx.errors.NotFoundError)
    assert executed == []


@pytest.mark.parametrize(
    "kind",
    ["os.system", "builtins.eval", "SystemExit", "KeyboardInterrupt", "ExceptionGroup", "eval"]
    + ["__import__", "errors.message", "message", "annotations", "UnicodeDecodeError", "", "\0"],
)
def test_bar43_errors_are_texts_of_known_classes(
    scene: Scene, tmp_path: Path, executed: list[Any], kind: str
) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "mark"), protocol=0).decode("latin-1")
    scene.asked(_error("closure", kind, bomb, bomb))
    with pytest.raises(Exception) as caught:  # noqa: PT011
        scene.coordinator.join(timeout=60)
    assert type(caught.value) in (rx.errors.ClosureError, UnicodeError)
    assert not (tmp_path / "mark").exists()
    assert executed == []


def test_bar43_figures_and_replies_to_nothing_do_nothing(scene: Scene, executed: list[Any]) -> None:
    """Numbers of any size, results of closures that it was never given, and sudden words."""
    scene.liar.figures = {
        "open": float("nan"),
        "attached": -1e308,
        "__class__": 1,
        "progress": 1 << 63,
        "x" * 10_000: float("inf"),
    }
    node = msgspec.msgpack.encode(None)

    def lie(closure: int) -> Any:
        forged = [Result(c, node, None, 0) for c in (-1, 0, closure + 1, 1 << 62, closure)]
        return messages.Finished(forged), []

    assert scene.asked(lie).fetch(60) is None
    assert str(scene.coordinator.status())
    assert scene.asked(_result(5, [])).fetch(60) == 5
    assert executed == []


def test_bar43_a_liar_is_no_harm_to_the_variables_of_others(
    scene: Scene, executed: list[Any]
) -> None:
    """It can only name variables that there are, and gets no code to run anywhere."""
    with scene.strategy.scope():
        variable = rx.Variable(np.zeros(3, np.float32))
    with pytest.raises(rx.errors.DistributeError):
        scene.asked(_result(Items("variable", ["unknown"]), [])).fetch(60)
    assert np.asarray(variable.read_value()).tolist() == [0, 0, 0]
