"""Loops in functions that `tf.function` compiles.

A small step over the source finds `for` loops, as TensorFlow's AutoGraph does, and nothing else:

- A loop that takes data (`for batch in dataset`, or `for _ in tf.range(n)` with `next(iterator)` or
  `strategy.run` in its body, also over Python's `range`) runs on the host. Its body is compiled
  once and called in each round, so an epoch is neither unrolled, nor are its batches on the
  devices together.
- Another loop over `tf.range` becomes a loop of the compiled program.

All other Python code runs while the function is traced.
"""

from __future__ import annotations

import ast
import contextlib
import contextvars
import copy
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.contexts import frames
from replicax.foundation import errors, jax_compat
from replicax.tf import carries, tape_recording, tape_regions
from replicax.tf.arguments import Value
from replicax.tf.dispatch import wrap_tree
from replicax.tf.local_functions import LocalFunctions
from replicax.tf.ops import creation
from replicax.tf.spans import Span
from replicax.tf.tensor import Tensor
from replicax.tf.tensor_array import TensorArray
from replicax.tracing import control_flow
from replicax.tracing.function import Function

# Whether the running function leaves its loops to the host.
_on_host: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "replicax_tf_host_loops", default=False
)
_PREFIX = "__replicax_"
_DATA_CALLS = frozenset({"run", "experimental_run_v2", "experimental_run"})
_PLAIN_LOOPS = frozenset({"range", "zip", "reversed", "sorted", "items", "keys", "values"})


class Converted:
    """A function whose loops were found.

    Attributes:
      function: The function with its loops converted; the original one if it has none.
      has_loops: Whether it has loops that can run on the host.
      takes_data: Whether a loop over `tf.range` takes data: then the function runs on the host.
      iterables: The roots of what other loops iterate over, such as ("self", "train_data").
    """

    def __init__(self, original: Callable[..., Any]) -> None:
        self.function = original
        self.original = original
        self.has_loops = False
        self.takes_data = False
        self.iterables: list[tuple[str, ...]] = []
        tree = _parsed(original)
        if tree is None:
            return
        finder = _LoopFinder(original, tree)
        if finder.loops:
            self.has_loops = True
            self.takes_data = finder.takes_data
            self.iterables = finder.iterables
            self.function = _compiled(original, tree, finder)

    def runs_on_host(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Tells whether a call takes data in a loop."""
        if self.takes_data:
            return True
        return bool(self.iterables) and any(_is_data(value) for value in self._values(args, kwargs))

    def _values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
        function: Any = inspect.unwrap(self.original)
        known: dict[str, Any] = dict(inspect.getclosurevars(function).globals)
        known |= inspect.getclosurevars(function).nonlocals
        try:
            bound = inspect.signature(self.original).bind(*args, **kwargs)
            known |= bound.arguments
        except TypeError:
            # The call reports it.
            return
        if isinstance(self.original, types.MethodType):
            names = list(inspect.signature(self.original.__func__).parameters)
            known[names[0]] = self.original.__self__
        yield from map(functools.partial(_found_in, known), self.iterables)


def _found_in(known: dict[str, Any], path: tuple[str, ...]) -> Any:
    """Returns the value of a path such as ("self", "train_data")."""
    value = known.get(path[0])
    for attribute in path[1:]:
        value = getattr(value, attribute, None)
    return value


class Unconverted(Converted):
    """A function whose loops are left to Python."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self.function = self.original = original
        self.has_loops = self.takes_data = False
        self.iterables = []


def on_host() -> bool:
    """Tells whether the running function leaves its loops to the host."""
    return _on_host.get()


def call_on_host(function: Callable[..., Any], args: Value, kwargs: Value) -> Any:
    """Calls a converted function whose loops run on the host."""
    token = _on_host.set(True)
    try:
        return function(*args, **kwargs)
    finally:
        _on_host.reset(token)


def _is_data(value: Value) -> bool:
    """Tells whether a value is a dataset or an iterator over one."""
    return hasattr(type(value), "element_spec") or hasattr(type(value), "open_feed")


def _parsed(function: Value) -> ast.FunctionDef | None:
    plain: Any = inspect.unwrap(function)
    plain = getattr(plain, "__func__", plain)
    if not isinstance(plain, types.FunctionType):
        return None
    try:
        source = textwrap.dedent(inspect.getsource(plain))
        tree = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError, IndentationError):
        # Typed into a shell, or a lambda in the middle of a line: it has no loop.
        return None
    if not isinstance(tree, ast.FunctionDef):
        return None
    ast.increment_lineno(tree, plain.__code__.co_firstlineno - 1)
    return tree


class _LoopFinder(ast.NodeTransformer):
    """Replaces the outermost loops of a function by calls."""

    def __init__(self, function: Value, tree: ast.FunctionDef) -> None:
        plain: Any = inspect.unwrap(function)
        plain = getattr(plain, "__func__", plain)
        self._names = _outer_names(plain)
        self._locals = frozenset(plain.__code__.co_varnames) | frozenset(plain.__code__.co_cellvars)
        self.loops: list[tuple[ast.FunctionDef, dict[str, Any]]] = []
        self.takes_data = False
        self.iterables: list[tuple[str, ...]] = []
        tree.decorator_list = []
        tree.body = [self.visit(statement) for statement in tree.body]
        ast.fix_missing_locations(tree)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        is_range = self._is_tensor_range(node.iter) or self._counts_rounds(node)
        root = None if is_range else _root(node.iter)
        if not is_range and root is None:
            return self.generic_visit(node)
        takes_data = is_range and _takes_data(node)
        self.takes_data |= takes_data
        if root is not None:
            self.iterables.append(root)
        name = f"{_PREFIX}loop_{len(self.loops)}"
        is_whole = not node.orelse and not _leaves_early(node.body)
        body = copy.deepcopy(node.body) if is_whole else []
        writes = _written(node) & self._locals
        names = _used(node) & self._locals
        facts: dict[str, Any] = {"is_range": is_range, "names": names, "writes": writes}
        facts["needs"] = names & _needed(node)
        self.loops.append((_body_function(name, node, body, writes), facts))
        call = self._call(name, node, writes, is_range) if is_whole else None
        before = len(self.iterables)
        # The host goes on with Python; in a program the rounds are unrolled.
        rounds = self.generic_visit(copy.deepcopy(node))
        assert isinstance(rounds, ast.For)
        rounds.iter = _method(name, "rounds", [_span(name, node.iter, is_range)])
        facts["inner"] = tuple(self.iterables[before:])
        if call is None or not facts["inner"]:
            return call or rounds
        # If a loop in the body goes over data, its own body is what is compiled.
        test = _method(name, "has_data_inside", [ast.parse("locals()", mode="eval").body])
        return ast.copy_location(ast.If(test, [rounds], [call]), node)

    def _is_tensor_range(self, node: ast.expr) -> bool:
        """Tells whether an expression is a call of `tf.range`."""
        if not isinstance(node, ast.Call):
            return False
        called = node.func
        if not isinstance(called, ast.Attribute) or called.attr != "range":
            return False
        module = called.value
        if not isinstance(module, ast.Name):
            return False
        # An import inside the function is not seen here.
        found = self._names.get(module.id)
        return isinstance(found, types.ModuleType) or (found is None and module.id == "tf")

    def _counts_rounds(self, node: ast.For) -> bool:
        """Tells whether Python's `range` only says how often data is taken."""
        called = node.iter
        if not isinstance(called, ast.Call) or not isinstance(called.func, ast.Name):
            return False
        is_range = called.func.id == "range" and "range" not in self._locals | {*self._names}
        names = {n.id for part in node.body for n in ast.walk(part) if isinstance(n, ast.Name)}
        is_unused = isinstance(node.target, ast.Name) and node.target.id not in names
        return is_range and is_unused and _takes_data(node)

    def _call(self, name: str, node: ast.For, writes: frozenset[str], is_range: bool) -> ast.stmt:
        state = f"{_PREFIX}state"
        lines = [f"{state} = {name}({_PREFIX}iterable, locals())"]
        lines += [f"if {n!r} in {state}: {n} = {state}[{n!r}]" for n in sorted(writes)]
        block = ast.parse("if True:\n" + "\n".join(f"    {line}" for line in lines)).body[0]
        assert isinstance(block, ast.If)
        call = block.body[0]
        assert isinstance(call, ast.Assign) and isinstance(call.value, ast.Call)
        call.value.args[0] = _span(name, node.iter, is_range)
        return ast.copy_location(block, node)


def _outer_names(function: types.FunctionType) -> dict[str, Any]:
    """Returns the globals and the closure of a function."""
    found = dict(function.__globals__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        # A cell is empty while the function around is defining it.
        with contextlib.suppress(ValueError):
            found[name] = cell.cell_contents
    return found


def _method(loop: str, name: str, args: list[ast.expr]) -> ast.Call:
    return ast.Call(ast.Attribute(ast.Name(loop, ast.Load()), name, ast.Load()), args, [])


def _span(loop: str, iterable: ast.expr, is_range: bool) -> ast.expr:
    """Lets a loop see the bounds of a range, which the compiled program may compute."""
    if not is_range:
        return iterable
    assert isinstance(iterable, ast.Call)
    call = _method(loop, "span", iterable.args)
    call.keywords = iterable.keywords
    return call


def _root(node: ast.expr) -> tuple[str, ...] | None:
    """Returns the name behind an iterable, such as `data` of `enumerate(data.take(2))`."""
    if isinstance(node, ast.Call):
        called = node.func
        if isinstance(called, ast.Name):
            is_plain = called.id in _PLAIN_LOOPS or not node.args
            return (
                None if is_plain or called.id not in ("enumerate", "iter") else _root(node.args[0])
            )
        if isinstance(called, ast.Attribute) and called.attr not in _PLAIN_LOOPS:
            return _root(called.value)
        return None
    if isinstance(node, ast.Attribute):
        inner = _root(node.value)
        return None if inner is None else (*inner, node.attr)
    return (node.id,) if isinstance(node, ast.Name) else None


def _takes_data(loop: ast.For) -> bool:
    for node in ast.walk(loop):
        if isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name) and called.id == "next":
                return True
            if isinstance(called, ast.Attribute) and called.attr in (*_DATA_CALLS, "get_next"):
                return True
    return False


def _leaves_early(statements: Iterable[ast.stmt]) -> bool:
    """Tells whether a body has a statement that leaves its loop or function."""
    own = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
    leaving = (ast.Return, ast.Yield, ast.YieldFrom, ast.Await, ast.Global, ast.Nonlocal)

    def search(node: ast.AST, is_inner: bool) -> bool:
        if isinstance(node, own):
            return False
        if isinstance(node, leaving):
            return True
        if isinstance(node, ast.Break | ast.Continue):
            return not is_inner
        is_inner = is_inner or isinstance(node, ast.For | ast.While)
        return any(search(child, is_inner) for child in ast.iter_child_nodes(node))

    return any(search(statement, False) for statement in statements)


def _written(loop: ast.For) -> frozenset[str]:
    return frozenset(
        node.id
        for node in ast.walk(loop)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del)
    )


def _used(loop: ast.For) -> frozenset[str]:
    parts = [loop.target, *loop.body]
    return frozenset(n.id for p in parts for n in ast.walk(p) if isinstance(n, ast.Name))


def _needed(loop: ast.For) -> frozenset[str]:
    """Returns the names that a round reads before it sets them."""
    needed: set[str] = set()
    assigned = {n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)}

    def visit(statements: Iterable[ast.stmt]) -> None:
        for statement in statements:
            parts = statement.items if isinstance(statement, ast.With) else [statement]
            names = [n for part in parts for n in ast.walk(part) if isinstance(n, ast.Name)]
            stored = {n.id for n in names if isinstance(n.ctx, ast.Store)}
            read = {n.id for n in names if isinstance(n.ctx, ast.Load)}
            is_augmented = isinstance(statement, ast.AugAssign)
            needed.update((read | stored if is_augmented else read) - assigned)
            if isinstance(statement, ast.Assign | ast.AnnAssign | ast.With):
                assigned.update(stored)
            if isinstance(statement, ast.With):
                visit(statement.body)

    visit(loop.body)
    return frozenset(needed)


def _body_function(
    name: str, loop: ast.For, body: list[ast.stmt], writes: frozenset[str]
) -> ast.FunctionDef:
    """Returns the body of a loop as a function of the item and of local names."""
    used = _used(loop)
    state, item = f"{_PREFIX}state", f"{_PREFIX}item"
    head = [f"def {name}({item}, {state}):"]
    head += [f"    if {n!r} in {state}: {n} = {state}[{n!r}]" for n in sorted(used)]
    head += ["    pass"]
    found = ast.parse("\n".join(head)).body[0]
    assert isinstance(found, ast.FunctionDef)
    target = ast.Assign([copy.deepcopy(loop.target)], ast.Name(item, ast.Load()))
    end = ast.parse(f"def _(): return {{n: v for n, v in locals().items() if n in {set(writes)}}}")
    assert isinstance(end.body[0], ast.FunctionDef)
    found.body = [*found.body, target, *body, *end.body[0].body]
    return ast.copy_location(found, loop)


def _compiled(original: Value, tree: ast.FunctionDef, finder: _LoopFinder) -> Callable[..., Any]:
    """Compiles the converted function, with the closure and the globals of the original one."""
    plain: Any = inspect.unwrap(original)
    instance = getattr(plain, "__self__", None)
    plain = getattr(plain, "__func__", plain)
    local = finder._locals
    free = [*plain.__code__.co_freevars]
    names = [name for loop, _ in finder.loops for name in [loop.name]]
    bodies = [_only_locals(loop, local) for loop, _ in finder.loops]
    parameters = [*free, *(name for name in names)]
    factory = ast.parse(f"def {_PREFIX}factory({', '.join(dict.fromkeys(parameters))}): pass")
    maker = factory.body[0]
    assert isinstance(maker, ast.FunctionDef)
    for body in bodies:
        body.name = f"{body.name}_body"
    maker.body = [*bodies, tree]
    ast.fix_missing_locations(factory)
    code = compile(factory, plain.__code__.co_filename, "exec")
    outer = next(c for c in code.co_consts if isinstance(c, types.CodeType))
    codes = {c.co_name: c for c in outer.co_consts if isinstance(c, types.CodeType)}
    cells: dict[str, types.CellType] = dict(zip(free, plain.__closure__ or (), strict=True))

    def make(name: str, like: Value = None) -> types.FunctionType:
        own = codes[name]
        closure = tuple(cells[free_name] for free_name in own.co_freevars)
        made = types.FunctionType(own, plain.__globals__, name, None, closure)
        if like is not None:
            made.__defaults__, made.__kwdefaults__ = like.__defaults__, like.__kwdefaults__
            functools.update_wrapper(made, like)
            # The source of the original one would be found again.
            made.__dict__.pop("__wrapped__", None)
        return made

    for name in names:
        cells[name] = types.CellType()
    for name, (_, facts) in zip(names, finder.loops, strict=True):
        cells[name].cell_contents = Loop(make(f"{name}_body"), **facts)
    function = make(tree.name, plain)
    return function if instance is None else types.MethodType(function, instance)


def _only_locals(body: ast.FunctionDef, local: frozenset[str]) -> ast.FunctionDef:
    """Drops the lines that take names from the state that are not local in the function."""

    def keeps(statement: ast.stmt) -> bool:
        if not isinstance(statement, ast.If) or not isinstance(statement.test, ast.Compare):
            return True
        name, state = statement.test.left, statement.test.comparators[0]
        is_head = isinstance(state, ast.Name) and state.id == f"{_PREFIX}state"
        return not (is_head and isinstance(name, ast.Constant) and name.value not in local)

    body.body = [statement for statement in body.body if keeps(statement)]
    return body


class Loop:
    """A loop of a converted function.

    Args:
      body: A function of the item and of a dict of local names, which returns the new ones.
      is_range: Whether the loop is over a range.
      names: The local names that it uses.
      writes: Those that it sets.
      needs: Those that it reads before.
      inner: The roots of what loops in its body iterate over.
    """

    def __init__(
        self,
        body: Callable[[Any, dict[str, Any]], dict[str, Any]],
        is_range: bool,
        names: frozenset[str],
        writes: frozenset[str],
        needs: frozenset[str],
        inner: tuple[tuple[str, ...], ...],
    ) -> None:
        self._body = body
        self._needs = needs
        self._inner = inner
        self._is_range = is_range
        self._names = names
        self._writes = writes
        self._functions = LocalFunctions()
        self._compiled = Function(self._traced, name="loop body")
        self._compiled.__dict__["__wrapped__"] = body

    span = staticmethod(Span)

    def _traced(self, item: Value, state: dict[str, Any]) -> dict[str, Any]:
        return wrap_tree(self._body(wrap_tree(item), wrap_values(state)))

    def __call__(self, iterable: Value, local_values: dict[str, Any]) -> dict[str, Any]:
        state = {n: v for n, v in local_values.items() if n in self._names}
        is_data = not isinstance(iterable, Tensor | list | tuple | dict | np.ndarray)
        if on_host() and frames.current().overlay is None and (self._is_range or is_data):
            return self._run_on_host(iterable, state)
        if isinstance(iterable, Span) and jax_compat.is_staging():
            return self._run_compiled(iterable, state)
        for item in iterable:
            state |= self._body(item, state)
        return state

    def has_data_inside(self, local_values: dict[str, Any]) -> bool:
        """Tells whether a loop in the body goes over data on the host."""
        if not on_host() or frames.current().overlay is not None:
            return False
        known = {**getattr(self._body, "__globals__", {}), **local_values}
        return any(_is_data(_found_in(known, path)) for path in self._inner)

    def rounds(self, iterable: Value) -> Iterable[Any]:
        """Returns the items of a loop that Python runs."""
        return iterable

    def _run_on_host(self, iterable: Value, state: dict[str, Any]) -> dict[str, Any]:
        # Numbers that change from round to round would each cause a trace.
        state = {n: _as_array(v) if n in self._writes else v for n, v in state.items()}
        # A name that the first round sets is not an argument of the others: one trace is enough.
        before = self._needs & state.keys()
        state = {n: self._functions.known(v) for n, v in state.items()}
        token = _on_host.set(False)
        try:
            for item in iterable:
                numbered = tape_recording.map_leaves(_as_array, item)
                given = {n: v for n, v in state.items() if n in before}
                state |= self._compiled(raw_tree_of_tensors(numbered), _plain_values(given))
        finally:
            _on_host.reset(token)
        return state

    def _run_compiled(self, span: Span, state: dict[str, Any]) -> dict[str, Any]:
        before = {n: _as_carried(v) for n, v in state.items() if n in self._writes}
        names = [n for n, v in before.items() if _is_carried(v)]
        # What a round leaves in names that the loop does not carry.
        others: dict[str, Any] = {}

        def round_(number: Value, values: list[Any]) -> list[Any]:
            found = self._body(number, state | dict(zip(names, values, strict=True)))
            others.update({n: v for n, v in found.items() if n in before and n not in names})
            return [found.get(name) for name in names]

        first = [before[name] for name in names]
        first = carries.with_rows(first, lambda values: round_(span.number(0), values))

        def run() -> Any:
            def step(i: jax.Array, values: list[Any]) -> list[Any]:
                found = round_(span.number(i), carries.tensors(values))
                return list(map(_carried, names, found, values))

            final = control_flow.fori_loop(0, span.count(), step, list(map(carries.arrays, first)))
            return jax.tree.leaves(final)

        with tape_regions.explaining_loops():
            if tape_recording.recording_tapes():
                known = [v for v in carries.known(first) if isinstance(v, Tensor)]
                final = tape_regions.run(run, known)
            else:
                final = run()
        _require_no_tensors(others, before)
        return state | others | dict(zip(names, carries.like(first, final), strict=True))


def _require_no_tensors(values: dict[str, Any], before: dict[str, Any]) -> None:
    """Raises if a loop makes a tensor of a name that held something else before."""
    for name, value in values.items():
        has_tensor = any(isinstance(leaf, Tensor | jax.Array) for leaf in _leaves(value))
        if has_tensor and value is not before[name]:
            raise errors.InvalidArgumentError(
                f"A compiled loop over tf.range needs a tensor for {name!r} before its first round",
                f"{name} is {before[name]!r} there, and a tensor after a round",
                "Start from a tensor of the final shape and dtype, such as tf.zeros(...).",
            )


def _leaves(value: Value) -> list[Any]:
    found: list[Any] = []
    tape_recording.map_leaves(found.append, value)
    return found


def _as_carried(value: Value) -> Any:
    """Returns tensors for numbers, truth values and variables, which a round may replace."""

    def carried(leaf: Value) -> Any:
        if tape_recording.is_variable(leaf):
            return creation.identity(leaf)
        return Tensor(jnp.asarray(leaf)) if isinstance(leaf, bool) else _as_array(leaf)

    return tape_recording.map_leaves(carried, value)


def wrap_values(state: dict[str, Any]) -> dict[str, Any]:
    """Wraps the arrays among local values as tensors."""
    return {name: wrap_tree(value) for name, value in state.items()}


def raw_tree_of_tensors(tree: Value) -> Any:
    """Returns arrays for tensors; variables stay."""
    return tape_recording.map_leaves(tape_recording.array_of, tree)


def _plain_values(state: dict[str, Any]) -> dict[str, Any]:
    return {name: raw_tree_of_tensors(value) for name, value in state.items()}


def _as_array(value: Value) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number:
        return Tensor(jnp.asarray(value, jnp.int32 if isinstance(value, int) else jnp.float32))
    return value


def _is_carried(value: Value) -> bool:
    if isinstance(value, TensorArray):
        return True
    leaves = _leaves(value)
    return bool(leaves) and all(isinstance(x, Tensor | jax.Array | np.ndarray) for x in leaves)


def _carried(name: str, value: Value, before: Value) -> Any:
    value = carries.arrays(_as_carried(value))
    shapes = [(np.shape(leaf), leaf.dtype) for leaf in jax.tree.leaves(before)]
    found = [(np.shape(leaf), getattr(leaf, "dtype", None)) for leaf in jax.tree.leaves(value)]
    if shapes != found:
        raise errors.InvalidArgumentError(
            f"A compiled loop over tf.range must keep the shape and dtype of {name!r}",
            f"it starts with {shapes} and becomes {found}",
            "Start from a tensor of the final shape and dtype, or use tf.TensorArray for results "
            "of all rounds.",
        )
    return value
