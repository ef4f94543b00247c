"""Draws docs/architecture.svg, docs/parameter_server_step.svg and docs/sync_group.svg.

The layers are those that import-linter checks (pyproject.toml), the counts those of the tree. A
test compares the committed pictures with what this script draws.
"""

from __future__ import annotations

import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FONT = "font-family='Helvetica, Arial, sans-serif'"

# What each room decides, in a few words.
ROOMS = {
    "cli": "commands",
    "demo": "what `replicax demo` shows",
    "doctor": "checks of a host, with advice",
    "top": "a running job: table, terminal, page",
    "porting": "rewrites TensorFlow programs",
    "starter": "what `replicax new` writes",
    "tf": "TensorFlow's names: tensors, ops, tapes, tf.data, tf.keras",
    "contrib": "tf.contrib.distribute of r1.9",
    "compat": "tf.compat.v1.distribute",
    "data": "rx.data",
    "errors": "rx.errors",
    "experimental": "rx.experimental",
    "metrics": "rx.metrics",
    "models": "models of Flax and Equinox",
    "nn": "rx.nn",
    "optimizers": "rx.optimizers",
    "profiler": "rx.profiler",
    "random": "rx.random",
    "saved_model": "rx.saved_model",
    "summary": "rx.summary",
    "testing": "local clusters, faults",
    "train": "rx.train",
    "launch": "starts and restarts sync groups",
    "process": "task processes: roles, shutdown",
    "worker": "runs closures",
    "coordinator": "schedules closures on workers",
    "group": "processes in lock step: roll call, control channel, monitor",
    "strategies": "how many replicas, on which devices, where variables are",
    "execution": "runs replica code",
    "input": "datasets, distribution",
    "ps": "variables on servers",
    "training": "optimizers, metrics",
    "checkpointing": "saves and restores",
    "exporting": "models to serve",
    "tracing": "Python functions to pure programs",
    "variables": "what is read and written, and where",
    "contexts": "where code runs",
    "collectives": "reduce, gather",
    "values": "per-replica values, layout",
    "bundle": "arrays on disk",
    "observe": "a socket per task",
    "tensorflow_files": "TFRecord, events, tensor bundles",
    "timeline": "traces: spans to Perfetto",
    "cluster_resolver": "finds tasks",
    "cluster": "names, addresses",
    "transport": "connections (streams, TLS)",
    "protocol": "messages, codec",
    "foundation": "errors, options, devices, gate, settings",
}
FACES = "#dbe9f6"
PROCESSES = "#fbe3cc"
STRATEGIES = "#d9ecd3"
ARRAYS = "#d5ecea"
CLUSTER = "#e6dcf1"
GROUND = "#e6e6e6"
COLOURS = {
    "cli": FACES, "demo": FACES, "porting": FACES, "top": FACES, "doctor": FACES, "starter": FACES,
    "tf": FACES, "contrib": FACES, "compat": FACES,
    "launch": PROCESSES, "process": PROCESSES, "worker": PROCESSES, "coordinator": PROCESSES,
    "ps": PROCESSES, "group": PROCESSES,
    "strategies": STRATEGIES, "cluster_resolver": CLUSTER, "cluster": CLUSTER,
    "transport": CLUSTER, "protocol": CLUSTER, "foundation": GROUND, "bundle": GROUND,
    "tensorflow_files": GROUND, "observe": GROUND, "timeline": GROUND,
    "execution": ARRAYS, "input": ARRAYS, "training": ARRAYS, "checkpointing": ARRAYS,
    "exporting": ARRAYS, "tracing": ARRAYS, "variables": ARRAYS, "contexts": ARRAYS,
    "collectives": ARRAYS, "values": ARRAYS,
}  # fmt: skip


def layers() -> list[list[str]]:
    """Returns the rooms of each layer, the highest first."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contract = settings["tool"]["importlinter"]["contracts"][0]
    return [[name.strip().removeprefix("replicax.") for name in line.split("|")]
            for line in contract["layers"]]  # fmt: skip


def num_files(room: str) -> int:
    """Counts the modules of a room that hold code."""
    folder = ROOT / "src" / "replicax" / room
    found = folder.rglob("*.py") if folder.is_dir() else [folder.with_suffix(".py")]
    return sum(path.stat().st_size > 0 for path in found)


def _text(
    x: float, y: float, text: str, size: int = 13, anchor: str = "middle", **style: str
) -> str:
    extra = "".join(f" {key.replace('_', '-')}='{value}'" for key, value in style.items())
    place = f"x='{x:g}' y='{y:g}' font-size='{size}' text-anchor='{anchor}'"
    return f"<text {place} {FONT}{extra}>{escape(text)}</text>"


def _box(x: float, y: float, width: float, height: float, fill: str) -> str:
    place = f"x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}'"
    return f"<rect {place} rx='6' fill='{fill}' stroke='#666' stroke-width='0.8'/>"


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f"<line x1='{x1:g}' y1='{y1:g}' x2='{x2:g}' y2='{y2:g}' {style}/>"


def _svg(width: int, height: int, body: list[str]) -> str:
    size = f"width='{width}' height='{height}'"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' {size}>"
    return "\n".join([head, f"<rect {size} fill='white'/>", *body, "</svg>"]) + "\n"


def draw_rooms() -> str:
    """Draws the layers of src/replicax, each room with its number of files."""
    width, gap, row = 1040, 8, 54
    body, y = [_text(20, 28, "src/replicax: imports and calls go down only", 16, "start")], 44.0
    for names in layers():
        faces = all(name not in COLOURS for name in names)
        height = 40 if faces else row
        each = (width - 40 - gap * (len(names) - 1)) / len(names)
        for index, name in enumerate(names):
            x, middle = 20 + index * (each + gap), 20 + index * (each + gap) + each / 2
            body.append(_box(x, y, each, height, COLOURS.get(name, FACES)))
            if faces:
                body.append(_text(middle, y + 24, name, 11, font_weight="bold"))
                continue
            files = num_files(name)
            body.append(_text(middle, y + 22, f"{name}  ({files})", 13, font_weight="bold"))
            body.append(_text(middle, y + 41, ROOMS[name], 11, fill="#333"))
        y += height + gap
    note = "(n): number of modules. Blue rooms are public namespaces and the command line."
    body.append(_text(20, y + 14, note, 11, "start", fill="#555"))
    return _svg(width, int(y + 30), body)


# One step: (from, to, what travels or happens, where it is written). A row from a column to itself
# is work that the process does.
COLUMNS = ["user program", "coordinator", "worker", "parameter server"]
STEP = [
    (0, 1, "schedule(step, args)", "coordinator/cluster_coordinator.py"),
    (1, 1, "pickle once per worker, variables by id", "coordinator/shipping/"),
    (1, 1, "queue, policy: which worker, when", "coordinator/core.py, scheduling/"),
    (1, 2, "ClosureCall", "coordinator/outbox.py, transport/client_pool.py"),
    (2, 2, "unpickle, trace once, compile", "worker/runner.py, tracing/"),
    (
        2,
        3,
        "Exchange: last step's updates, rows to read",
        "ps/client/, transport/channel.py",
    ),
    (3, 3, "apply each update once", "ps/store/storage.py"),
    (3, 2, "values, rows, acknowledgement", "ps/process/, transport/service.py"),
    (2, 2, "run the program on the device", "tracing/exchange.py"),
    (2, 3, "Exchange: updates of this step", "ps/client/outgoing.py"),
    (3, 2, "acknowledgement, after the mirror has it", "ps/process/mirror_log.py"),
    (2, 1, "Finished: result", "worker/runner.py"),
    (1, 0, "RemoteValue is ready", "coordinator/remote_value.py"),
]


def draw_step() -> str:
    """Draws one parameter-server step as messages between four processes."""
    width, top, row = 1040, 70, 46
    xs = [100, 340, 610, 900]
    fills = [FACES, PROCESSES, PROCESSES, PROCESSES]
    height = top + row * len(STEP) + 30
    arrow = (
        "<defs><marker id='head' markerWidth='9' markerHeight='8' refX='8' refY='4' orient='auto'>"
        "<path d='M0,0 L9,4 L0,8 z' fill='#333'/></marker></defs>"
    )
    body = [arrow]
    for x, name, fill in zip(xs, COLUMNS, fills, strict=True):
        body += [_box(x - 85, 16, 170, 32, fill), _text(x, 37, name, 14, font_weight="bold")]
        body.append(_line(x, 48, x, height - 12, "stroke='#999' stroke-dasharray='4 4'"))
    for index, (start, end, what, where) in enumerate(STEP):
        y = top + row * index + 22
        if start == end:
            body.append(_box(xs[start] - 128, y - 19, 256, 36, "#fff8e8"))
            body += [
                _text(xs[start], y - 4, what, 11),
                _text(xs[start], y + 11, where, 10, fill="#777"),
            ]
            continue
        a, b = xs[start], xs[end]
        body.append(_line(a, y, b, y, "stroke='#333' stroke-width='1.4' marker-end='url(#head)'"))
        middle = (a + b) / 2
        body += [_text(middle, y - 6, what, 11), _text(middle, y + 13, where, 10, fill="#777")]
    return _svg(width, height, body)


def draw_sync_group() -> str:
    """Draws a sync group of three workers, its connections, its supervisor and its files."""
    width, height = 1040, 470
    xs, each = [30, 300, 570], 220
    middles = [x + each / 2 for x in xs]
    arrow = (
        "<defs><marker id='tip' markerWidth='9' markerHeight='8' refX='8' refY='4' orient='auto'>"
        "<path d='M0,0 L9,4 L0,8 z' fill='#555'/></marker></defs>"
    )
    thin = "stroke='#555' stroke-width='1.2' marker-end='url(#tip)'"
    # The supervisor, and what it does.
    body = [arrow, _box(30, 16, 980, 50, PROCESSES)]
    body.append(_text(520, 37, "supervisor: a cluster manager, LocalCluster or run_elastic", 14,
                      font_weight="bold"))  # fmt: skip
    does = "starts every task with its TF_CONFIG, reads exit codes, restarts the whole group"
    body.append(_text(520, 55, does, 11, fill="#333"))
    for middle in (*middles, 905):
        body.append(_line(middle, 66, middle, 96, thin))
    # The workers.
    names = ["worker 0 (chief)", "worker 1", "worker 2"]
    for index, (x, middle, name) in enumerate(zip(xs, middles, names, strict=True)):
        body.append(_box(x, 98, each, 196, FACES))
        body.append(_text(middle, 119, name, 14, font_weight="bold"))
        body.append(_text(middle, 136, "the same program on each", 11, fill="#333"))
        body.append(_box(x + 12, 150, each - 24, 40, CLUSTER))
        text = "hosts the control channel" if index == 0 else "control channel"
        body.append(_text(middle, 174, text, 12))
        for replica in range(2):
            left = x + 12 + replica * 102
            body.append(_box(left, 240, 94, 42, STRATEGIES))
            body.append(_text(left + 47, 258, f"device {replica}", 11, fill="#333"))
            body.append(_text(left + 47, 274, f"replica {2 * index + replica}", 12))
    dashed = "stroke='#8a63b3' stroke-width='2' stroke-dasharray='5 3'"
    body.append(_line(middles[0], 214, middles[2], 214, dashed))
    body += [_line(middle, 190, middle, 214, dashed) for middle in middles]
    thick = "stroke='#4a8f3c' stroke-width='4'"
    body += [_line(238, 261, 312, 261, thick), _line(508, 261, 582, 261, thick)]
    # The evaluator.
    body.append(_box(830, 98, 150, 92, FACES))
    body.append(_text(905, 119, "evaluator", 14, font_weight="bold"))
    for line, text in enumerate(
        ["not in the group:", "a program of its own,", "without collectives"]
    ):
        body.append(_text(905, 140 + 16 * line, text, 11, fill="#333"))
    # The files.
    body.append(_box(30, 340, 980, 44, GROUND))
    body.append(_text(520, 367, "directory of checkpoints that all hosts can reach", 13,
                      font_weight="bold"))  # fmt: skip
    body.append(_line(middles[0] - 40, 294, middles[0] - 40, 338, thin))
    body.append(_text(middles[0] - 48, 320, "writes", 11, "end", fill="#333"))
    for x in (middles[0] + 40, middles[1], middles[2], 905):
        body.append(_line(x, 340, x, 192 if x == 905 else 296, thin))
        body.append(_text(x + 8, 320, "reads", 11, "start", fill="#333"))
    # What the lines mean.
    body += [_line(34, 412, 74, 412, dashed), _line(34, 440, 74, 440, thick)]
    control = (
        "control channel, TLS with certificates: roll call, fingerprints, heartbeats, ends of data"
    )
    body.append(_text(84, 416, control, 12, "start"))
    collectives = "collectives of JAX, by Gloo, NCCL or ICI, without keys: gradients, metrics"
    body.append(_text(84, 444, collectives, 12, "start"))
    return _svg(width, height, body)


PICTURES = {
    "architecture.svg": draw_rooms,
    "parameter_server_step.svg": draw_step,
    "sync_group.svg": draw_sync_group,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (ROOT / "docs" / name).write_text(draw())
