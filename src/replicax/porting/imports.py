"""Which lines to write instead of those that import TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from replicax.foundation import lazy
from replicax.porting import table
from replicax.porting.findings import Edit, Finding
from replicax.porting.names import Kind, below_tf, judge
from replicax.porting.resolution import Program, dotted

if TYPE_CHECKING:
    import libcst as cst
else:
    cst = lazy.module("libcst", "replicax[port]")

_HERE = "replicax.tf"


def new_path(name: str) -> str:
    """Returns the module of replicax for a module below `tf`.

    >>> new_path("keras.layers"), new_path("")
    ('replicax.tf.keras.layers', 'replicax.tf')
    """
    return ".".join(filter(None, [_HERE, name]))


def outside(qualified: str) -> str | None:
    """Returns the package around TensorFlow that a module belongs to, if any."""
    package = qualified.partition(".")[0]
    return package if package in table.OUTSIDE else None


class ImportPorter:
    """Finds the imports of TensorFlow in a program.

    Args:
      program: The program.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._is_replicax_imported = False
        self.findings: list[Finding] = []

    def port_import(self, node: cst.Import) -> None:
        """Ports `import tensorflow as tf`, one name after the other."""
        for alias in node.names:
            path = dotted(alias.name) or ""
            place = self._program.place(alias)
            package = outside(path)
            if package is not None:
                self._add(place, Kind.OUTSIDE, package, table.OUTSIDE[package])
                continue
            top = path.partition(".")[0]
            if top == "tf_keras" or (top == "keras" and not self._is_replicax_imported):
                rest = path[len(top) :] if _bound(alias) else ""
                self._port_keras(alias, f"{_HERE}.keras{rest} as {_bound(alias) or top}")
                continue
            name = below_tf(path)
            if name is None:
                continue
            self._is_replicax_imported = True
            self._port_module(alias, path, name)

    def _port_module(self, alias: cst.ImportAlias, path: str, name: str) -> None:
        """Ports `import tensorflow.keras as keras`."""
        judged = judge(name)
        place = self._program.place(alias)
        bound = _bound(alias)
        new = f"{new_path(judged.name)} as {bound}" if bound else f"{_HERE} as tensorflow"
        if path.startswith(_HERE):
            new = self._program.source(alias)
        if judged.kind is Kind.REFUSED:
            edits = self._edits(alias, new)
            found = Finding(*place, Kind.REFUSED, _shown(name), judged.advice, edits)
            self.findings.append(found)
        elif path.startswith(_HERE):
            self._add(place, Kind.RUNS, _shown(name))
        else:
            message = f"`import {self._program.source(alias)}` becomes `import {new}`"
            self._change(place, message, self._edits(alias, new))

    def port_from(self, node: cst.ImportFrom) -> None:
        """Ports `from tensorflow.keras import layers`."""
        if node.module is None or node.relative:
            return
        path = dotted(node.module) or ""
        place = self._program.place(node)
        package = outside(path)
        if package is not None:
            self._add(place, Kind.OUTSIDE, package, table.OUTSIDE[package])
            return
        top = path.partition(".")[0]
        if top == "tf_keras" or (top == "keras" and not self._is_replicax_imported):
            self._port_keras(node.module, f"{_HERE}.keras{path[len(top) :]}")
            return
        module = below_tf(path)
        if module is None:
            return
        self._is_replicax_imported = True
        if isinstance(node.names, cst.ImportStar):
            self._port_star(node, module, path)
            return
        self._port_names(node, module, path, node.names)

    def port_outside(self, node: cst.Attribute | cst.Name) -> None:
        """Says what to write instead of a name of another package, such as `hvd.rank`."""
        qualified = self._program.qualified(node) or ""
        package = outside(qualified)
        last = qualified.rpartition(".")[2]
        advice = table.OUTSIDE_NAMES.get(package or "", {}).get(last)
        if advice is not None:
            shown = self._program.source(node)
            self._add(self._program.place(node), Kind.OUTSIDE, shown, advice)

    def port_call(self, node: cst.Call) -> None:
        """Names the data of Keras for `tfds.load("mnist")`."""
        if self._program.qualified(node.func) != "tensorflow_datasets.load":
            return
        texts = [self._program.source(one.value).strip("'\"") for one in node.args]
        for name in table.KERAS_DATASETS:
            if name in texts:
                advice = (
                    f"Use `tf.keras.datasets.{name}.load_data()` and "
                    "`tf.data.Dataset.from_tensor_slices((images, labels))`"
                )
                place = self._program.place(node)
                self._add(place, Kind.OUTSIDE, self._program.source(node.func), advice)

    def _port_keras(self, node: cst.CSTNode, text: str) -> None:
        """Ports an import of Keras that comes before replicax has chosen the backend."""
        if any(mark in self._program.text for mark in ("tensorflow", "tf_keras", _HERE)):
            word = "import" if isinstance(node, cst.ImportAlias) else "from"
            message = f"`{word} {self._program.source(node)}` becomes `{word} {text}`"
            self._change(self._program.place(node), message, self._edits(node, text))

    def _port_star(self, node: cst.ImportFrom, module: str, path: str) -> None:
        assert node.module is not None
        place = self._program.place(node)
        judged = judge(module)
        target = path if path.startswith(_HERE) else new_path(judged.name)
        edits = self._edits(node.module, target)
        if judged.kind is Kind.REFUSED:
            found = Finding(*place, Kind.REFUSED, _shown(module), judged.advice, edits)
            self.findings.append(found)
        elif edits:
            message = f"`from {path} import *` becomes `from {target} import *`"
            self._change(place, message, edits)
        else:
            self._add(place, Kind.RUNS, _shown(module))

    def _port_names(
        self, node: cst.ImportFrom, module: str, path: str, names: Sequence[cst.ImportAlias]
    ) -> None:
        """Ports `from tensorflow.x import a, b`, whose names may be in different modules now."""
        targets: list[_Target] = []
        kinds: list[Kind] = []
        for alias in names:
            name = ".".join(filter(None, [module, dotted(alias.name) or ""]))
            judged = judge(name)
            kinds.append(judged.kind)
            self._add(self._program.place(alias), judged.kind, _shown(name), judged.advice)
            parent, _, last = new_path(judged.name).rpartition(".")
            targets.append(_Target(alias, parent, last))
        if len({target.module for target in targets}) == 1:
            text, edits = self._edit_in_place(node, targets)
        else:
            text, edits = self._split(node, targets)
        if all(kind is Kind.REFUSED for kind in kinds):
            # The ported line raises the advice; that it changes is not worth a message.
            self.findings[-1] = replace(self.findings[-1], edits=edits)
            return
        if Kind.CHANGES in kinds:
            before = f"from {path} import {', '.join(_source(alias) for alias in names)}"
        else:
            before, text = f"from {path}", f"from {targets[0].module}"
        self._change(self._program.place(node), f"`{before}` becomes `{text}`", edits)

    def _edit_in_place(
        self, node: cst.ImportFrom, targets: list[_Target]
    ) -> tuple[str, tuple[Edit, ...]]:
        assert node.module is not None
        module = targets[0].module
        edits = self._edits(node.module, module)
        for target in targets:
            if dotted(target.alias.name) != target.name:
                edits += self._edits(target.alias, target.text)
        return f"from {module} import {', '.join(target.text for target in targets)}", edits

    def _split(self, node: cst.ImportFrom, targets: list[_Target]) -> tuple[str, tuple[Edit, ...]]:
        """Writes one line for each module that has some of the names."""
        by_module: dict[str, list[str]] = {}
        for target in targets:
            by_module.setdefault(target.module, []).append(target.text)
        lines = [f"from {path} import {', '.join(names)}" for path, names in by_module.items()]
        _, column = self._program.place(node)
        line_start = self._program.data.rfind(b"\n", 0, self._program.span(node)[0]) + 1
        indent = self._program.data[line_start : line_start + column].decode()
        newline = "\r\n" if b"\r\n" in self._program.data else "\n"
        joiner = f"{newline}{indent}" if not indent.strip() else "; "
        return "; ".join(lines), self._edits(node, joiner.join(lines))

    def _edits(self, node: cst.CSTNode, text: str) -> tuple[Edit, ...]:
        if self._program.source(node) == text:
            return ()
        return (Edit(*self._program.span(node), text),)

    def _change(self, place: tuple[int, int], message: str, edits: tuple[Edit, ...]) -> None:
        """Adds a change of the line, which is not about one name."""
        if edits:
            self.findings.append(Finding(*place, Kind.CHANGES, "", message, edits))

    def _add(self, place: tuple[int, int], kind: Kind, name: str, message: str = "") -> None:
        self.findings.append(Finding(*place, kind, name, message))


@dataclass(frozen=True)
class _Target:
    """Where a name that a line imports is now."""

    alias: cst.ImportAlias
    module: str
    name: str

    @property
    def text(self) -> str:
        bound = _bound(self.alias) or dotted(self.alias.name)
        return self.name if bound == self.name else f"{self.name} as {bound}"


def _bound(alias: cst.ImportAlias) -> str | None:
    """Returns the name after `as`."""
    target = alias.asname.name if alias.asname is not None else None
    return target.value if isinstance(target, cst.Name) else None


def _source(alias: cst.ImportAlias) -> str:
    bound = _bound(alias)
    return f"{dotted(alias.name)} as {bound}" if bound else f"{dotted(alias.name)}"


def _shown(name: str) -> str:
    return ".".join(filter(None, ["tf", name]))
