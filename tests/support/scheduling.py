"""Which process of a parallel run gets which tests."""

from __future__ import annotations

import functools
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).parents[2]


class SharedClusters(LoadScopeScheduling):
    """Gives all tests of a module whose fixtures start processes to one process of the run.

    Each of them would start the cluster of the module otherwise. The cases of other tests go one
    by one to whichever process has time; those that only compute stay together, since they
    compile the same programs. (xdist's own groups have no effect with pytest 9.2.)
    """

    def _split_scope(self, nodeid: str) -> str:
        module, _, test = nodeid.partition("::")
        if "multiprocess" not in Path(module).parts:
            return f"{module}::{test.partition('[')[0]}"
        return module if _shares_processes(module) else nodeid


@functools.cache
def _shares_processes(module: str) -> bool:
    return '@pytest.fixture(scope="module")' in (ROOT / module).read_text()
