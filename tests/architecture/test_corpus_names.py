"""The names that 233 real programs use: each resolves, or says what to write instead.

`tests/support/corpus_names.csv` has, for each name, the number of programs that use it and its
tier: 0 to 3 are names that a program under a strategy of TensorFlow 2 uses, 4 are the rest
(TensorFlow 1, private modules, protocol buffers).
"""

from __future__ import annotations

import csv
import importlib
import inspect
import operator
from pathlib import Path
from typing import NamedTuple

import pytest

import replicax.tf as tf
from replicax.tf import not_offered
from replicax.tf.not_offered import NotOfferedError, NotOfferedImportError

FILE = Path(__file__).parent.parent / "support" / "corpus_names.csv"
TIERS = ("0", "1", "2", "3")


class Name(NamedTuple):
    """A name of TensorFlow, such as "tf.data.Dataset.range"."""

    name: str
    programs: int
    tier: str


def read() -> list[Name]:
    with FILE.open(encoding="utf-8", newline="") as file:
        return [Name(r["name"], int(r["programs"]), r["tier"]) for r in csv.DictReader(file)]


NAMES = read()
ASKED = [name for name in NAMES if name.tier in TIERS]


def fate(name: str) -> str:
    """Returns "resolves", "advice", or what is wrong."""
    path = name.split(".")[1:]
    if path[-1] == "*":
        return star_import(".".join(path[:-1]))
    found = tf
    for i, part in enumerate(path):
        try:
            found = getattr(found, part)
        except NotOfferedError:
            below = ".".join(path[: i + 1])
            has_advice = not_offered.advice(below) or not_offered.advice(".".join(path))
            return "advice" if has_advice else f"no advice for tf.{below}"
        except (AttributeError, ImportError) as error:
            return f"no advice: {error}"
    return "resolves"


def star_import(path: str) -> str:
    """Returns whether all names of a namespace can be imported."""
    module = importlib.import_module(f"replicax.tf.{path}")
    missing = [name for name in module.__all__ if not hasattr(module, name)]
    return f"no {missing}" if missing or not module.__all__ else "resolves"


@pytest.fixture(scope="module")
def fates() -> dict[str, str]:
    return {name.name: fate(name.name) for name in NAMES}


def test_every_name_of_a_program_under_a_strategy_resolves_or_has_advice(
    fates: dict[str, str],
) -> None:
    wrong = {n.name: fates[n.name] for n in ASKED if fates[n.name] not in ("resolves", "advice")}
    assert not wrong


def test_most_names_resolve(fates: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """Prints the share of names, and of uses by programs, that run as they are."""
    lines = []
    shares = {}
    for tier in (*TIERS, "0-3"):
        asked = [n for n in ASKED if tier in (n.tier, "0-3")]
        resolved = [n for n in asked if fates[n.name] == "resolves"]
        uses = sum(n.programs for n in resolved) / sum(n.programs for n in asked)
        shares[tier] = len(resolved) / len(asked), uses
        lines.append(
            f"tier {tier}: {len(resolved)} of {len(asked)} names resolve "
            f"({shares[tier][0]:.1%}), {uses:.1%} of their uses by programs"
        )
    with capsys.disabled():
        print("\n" + "\n".join(lines))
    assert shares["0"][0] >= 0.98
    assert shares["1"][0] >= 0.98
    assert shares["0-3"][0] >= 0.90
    assert shares["0-3"][1] >= 0.955


def test_advice_is_only_given_for_names_that_are_not_offered(fates: dict[str, str]) -> None:
    """A name that resolves must not be in the table: `replicax port` would refuse it."""
    resolved = [n.name.removeprefix("tf.") for n in NAMES if fates[n.name] == "resolves"]
    both = [name for name in resolved if name in not_offered.ADVICE]
    # The advice for a namespace is for names that it does not have.
    found = [name for name in both if not inspect.ismodule(operator.attrgetter(name)(tf))]
    assert not found


def test_advice_names_things_that_exist() -> None:
    """An advice of one name, such as "Use `tf.math.log`", must resolve."""
    for name, text in not_offered.ADVICE.items():
        named = text.removeprefix("Use `tf.").rstrip("`")
        if text == f"Use `tf.{named}`" and named.replace(".", "").replace("_", "").isalnum():
            assert fate(f"tf.{named}") == "resolves", f"{name}: {text}"


def test_modules_that_are_not_offered_refuse_their_import_with_advice() -> None:
    with pytest.raises(NotOfferedImportError, match="Keras model"):
        importlib.import_module("replicax.tf.estimator")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("replicax.tf.no_such_module")
