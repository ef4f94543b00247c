"""Which calls of a program changed: renamed methods, keywords, and paths of saved models."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from replicax.foundation import lazy
from replicax.porting import table
from replicax.porting.findings import Edit, Finding
from replicax.porting.names import Kind, fits, moved_name
from replicax.porting.resolution import Program, dotted

if TYPE_CHECKING:
    import libcst as cst
    from libcst import matchers
else:
    cst = lazy.module("libcst", "replicax[port]")
    matchers = lazy.module("libcst.matchers", "replicax[port]")

_OPTIMIZER = re.compile(r"(optimi[sz]er|^opt$)", re.IGNORECASE)
_MODEL = re.compile(r"(model|generator|discriminator|network|^net$)", re.IGNORECASE)
_MODEL_SUFFIX = ".keras"
# Ends of a path that need no change.
_KEPT_SUFFIXES = (".keras", ".h5", ".hdf5")
_WEIGHTS_SUFFIX = ".weights.h5"


class CallPorter:
    """Ports calls and attributes whose meaning does not depend on values.

    Args:
      program: The program.
      own_methods: Methods that classes of the program define themselves.
    """

    def __init__(self, program: Program, own_methods: set[str]) -> None:
        self._program = program
        self._own_methods = own_methods
        self._paths: list[_Path] = []
        self.findings: list[Finding] = []

    def port_attribute(self, node: cst.Attribute) -> None:
        """Ports `optimizer.lr` and the names of methods."""
        attribute = node.attr.value
        if attribute == "lr" and _OPTIMIZER.search(_last_name(node.value)):
            self._rename(node.attr, "learning_rate", "optimizer.lr")
            return
        if attribute in self._own_methods or self._program.reference(node) is not None:
            return
        renamed = table.METHODS.get(attribute)
        if renamed is not None:
            self._rename(node.attr, renamed, f".{attribute}")
        elif attribute in table.REFUSED_METHODS:
            line, column = self._program.place(node.attr)
            advice = table.REFUSED_METHODS[attribute]
            self.findings.append(Finding(line, column, Kind.REFUSED, f".{attribute}", advice))

    def port_call(self, node: cst.Call) -> None:
        """Ports the keywords of a call, and the path of a saved model."""
        name = self._program.name(node.func)
        if name is not None:
            self._port_keywords(node, moved_name(name))
        elif isinstance(node.func, cst.Attribute):
            self._port_model_keywords(node, node.func.attr.value)
        if not self._port_import_module(node):
            self._port_path(node, name)

    def port_method_definition(self, node: cst.FunctionDef) -> None:
        """Renames a method that a subclass of a Keras metric overrides."""
        renamed = table.METHODS.get(node.name.value)
        if renamed is not None:
            self._rename(node.name, renamed, f".{node.name.value}")

    def port_environment(self, node: cst.Assign) -> None:
        """Ports `os.environ["KERAS_BACKEND"] = "tensorflow"`."""
        target = node.targets[0].target
        if not isinstance(target, cst.Subscript) or not isinstance(node.value, cst.SimpleString):
            return
        if dotted(target.value) not in ("os.environ", "environ"):
            return
        if _text(self._program.source(target).partition("[")[2][:-1]) != "KERAS_BACKEND":
            return
        if _text(node.value.value) == "tensorflow":
            text = node.value.value.replace("tensorflow", "jax")
            self._rename(node.value, text, "KERAS_BACKEND")

    def _port_keywords(self, node: cst.Call, name: str) -> None:
        name = name.removeprefix("compat.v1.")
        known = {old: new for family, old, new in table.KEYWORDS if fits(family, name)}
        self._port_arguments(node, known)
        for family, old, advice in table.REFUSED_KEYWORDS:
            for argument in node.args:
                if _keyword(argument) == old and fits(family, name):
                    line, column = self._program.place(argument)
                    found = Finding(line, column, Kind.REFUSED, f"{old}=", advice)
                    self.findings.append(found)

    def _port_model_keywords(self, node: cst.Call, method: str) -> None:
        known = {old: new for called, old, new in table.MODEL_KEYWORDS if called == method}
        self._port_arguments(node, known)

    def _port_arguments(self, node: cst.Call, known: dict[str, str]) -> None:
        """Renames keywords, and removes those without a new name."""
        is_first = True
        for index, argument in enumerate(node.args):
            keyword = _keyword(argument)
            if keyword not in known:
                is_first = False
                continue
            if known[keyword]:
                assert argument.keyword is not None
                self._rename(argument.keyword, known[keyword], f"{keyword}=")
                is_first = False
                continue
            line, column = self._program.place(argument)
            start, end = self._bounds(argument)
            text = self._program.data[start:end].decode()
            message = f"`{text}` has no effect, and is removed"
            if not is_first:
                # With the comma before it.
                start = self._bounds(node.args[index - 1])[1]
            elif index + 1 < len(node.args):
                end = self._bounds(node.args[index + 1])[0]
            edits = (Edit(start, end, ""),)
            self.findings.append(Finding(line, column, Kind.CHANGES, f"{keyword}=", message, edits))

    def _bounds(self, argument: cst.Arg) -> tuple[int, int]:
        first = argument.keyword or argument.value
        start = self._program.span(first)[0] - (0 if argument.keyword else len(argument.star))
        return start, self._program.span(argument.value)[1]

    def _port_import_module(self, node: cst.Call) -> bool:
        """Ports `importlib.import_module("tensorflow")`."""
        called = self._program.qualified(node.func)
        if called not in ("importlib.import_module", "pytest.importorskip") or not node.args:
            return False
        literal = node.args[0].value
        path = _text(literal.value) if isinstance(literal, cst.SimpleString) else ""
        if path == "tensorflow" or path.startswith("tensorflow."):
            text = self._program.source(literal).replace("tensorflow", "replicax.tf", 1)
            self._rename(literal, text, path)
        return True

    def _port_path(self, node: cst.Call, name: str | None) -> None:
        suffix = self._suffix_of(node, name)
        path = _path_argument(node) if suffix else None
        literal = None if path is None else _last_literal(path)
        if literal is None:
            return
        text = self._program.source(literal)
        value = text if isinstance(literal, cst.FormattedString) else _text(text)
        value = value.rstrip("\"'") if isinstance(literal, cst.FormattedString) else value
        if not value or value.endswith(("/", "}", "\\", *_KEPT_SUFFIXES)):
            return
        quote = len(text) - len(text.rstrip("\"'"))
        head = text[: len(text) - quote].removesuffix(".ckpt")
        new = head + suffix + text[len(text) - quote :]
        self._paths.append(_Path(literal, value, new, _called(node)))

    def port_paths(self) -> None:
        """Gives models that the program saves, and loads by the same name, the suffix of Keras.

        A path without it runs too. So one that the program uses in another way as well, or that
        it only loads, stays as it is.
        """
        strings = matchers.SimpleString() | matchers.FormattedString()
        values = [
            _text(node.value) if isinstance(node, cst.SimpleString) else self._program.source(node)
            for node in matchers.findall(self._program.module, strings)
        ]
        # `latest_checkpoint` finds weights that are saved without the suffix.
        is_searched = "latest_checkpoint" in self._program.text
        for path in self._paths:
            same = [one for one in self._paths if one.value == path.value]
            uses = [value for value in values if value.rstrip("\"'") == path.value]
            is_saved = any("load" not in one.called for one in same)
            if is_searched and _WEIGHTS_SUFFIX in path.new:
                continue
            if is_saved and len(uses) == len(same):
                self._rename(path.literal, path.new, path.called)

    def _suffix_of(self, node: cst.Call, name: str | None) -> str:
        """Returns how the path that a call takes must end; empty if it takes none."""
        if name is not None:
            if name.endswith("models.load_model"):
                return _MODEL_SUFFIX
            if name.endswith("models.save_model"):
                return _MODEL_SUFFIX
            if name.endswith("callbacks.ModelCheckpoint"):
                weights = any(
                    a.keyword and a.keyword.value == "save_weights_only" and _is_true(a.value)
                    for a in node.args
                )
                return _WEIGHTS_SUFFIX if weights else _MODEL_SUFFIX
            return ""
        if not isinstance(node.func, cst.Attribute):
            return ""
        method = node.func.attr.value
        if method in ("save_weights", "load_weights"):
            return _WEIGHTS_SUFFIX
        is_model = method == "save" and _MODEL.search(_last_name(node.func.value))
        return _MODEL_SUFFIX if is_model else ""

    def _rename(self, node: cst.CSTNode, text: str, name: str) -> None:
        line, column = self._program.place(node)
        message = f"`{self._program.source(node)}` becomes `{text}`"
        edit = Edit(*self._program.span(node), text)
        self.findings.append(Finding(line, column, Kind.CHANGES, name, message, (edit,)))


@dataclass(frozen=True)
class _Path:
    """A path without a suffix of Keras 3.

    Attributes:
      literal: The string, or its last part.
      value: What it says.
      new: How it is written with the suffix.
      called: The function that takes it.
    """

    literal: cst.SimpleString | cst.FormattedString
    value: str
    new: str
    called: str


def _keyword(argument: cst.Arg) -> str:
    return argument.keyword.value if argument.keyword else ""


def _path_argument(node: cst.Call) -> cst.BaseExpression | None:
    for argument in node.args:
        if argument.keyword is None and not argument.star:
            position = node.args.index(argument)
            is_second = isinstance(node.func, cst.Attribute) and (
                node.func.attr.value == "save_model"
            )
            if position == (1 if is_second else 0):
                return argument.value
        elif argument.keyword is not None and argument.keyword.value == "filepath":
            return argument.value
    return None


def _last_literal(node: cst.BaseExpression) -> cst.SimpleString | cst.FormattedString | None:
    """Returns the string at the end of a path: `"a"`, `f"{d}/a"`, `d + "a"`, `join(d, "a")`."""
    if isinstance(node, cst.SimpleString):
        return node if isinstance(ast.literal_eval(node.value), str) else None
    if isinstance(node, cst.FormattedString):
        return node if node.parts and isinstance(node.parts[-1], cst.FormattedStringText) else None
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Add | cst.Divide):
        return _last_literal(node.right)
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        method = node.func.attr.value
        if method == "join" and node.args and node.args[-1].keyword is None:
            return _last_literal(node.args[-1].value)
        if method == "format":
            return _last_literal(node.func.value)
    return None


def _called(node: cst.Call) -> str:
    return f"{_last_name(node.func)}()"


def _last_name(node: cst.CSTNode) -> str:
    if isinstance(node, cst.Attribute):
        return node.attr.value
    return node.value if isinstance(node, cst.Name) else ""


def _is_true(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.Name) and node.value == "True"


def _text(literal: str) -> str:
    """Returns the value of a string literal; empty if it is not one."""
    try:
        value = ast.literal_eval(literal.strip())
    except (SyntaxError, ValueError):
        return ""
    return value if isinstance(value, str) else ""
