"""Every example in a docstring of the package runs and prints what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from importlib.util import find_spec

import pytest

import intarsia

_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# Kernels for GPUs need Triton, which torch's CPU builds lack; tests/gpu runs them.
_LACKING = () if find_spec("triton") else ("intarsia.engines.triton_kernels.",)
_MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(intarsia.__path__, "intarsia.")
    if not module.name.startswith(_LACKING)
)


def _examples(name: str) -> list[doctest.DocTest]:
    module = importlib.import_module(name)
    return [test for test in doctest.DocTestFinder().find(module, name) if test.examples]


@pytest.mark.parametrize("name", _MODULES)
def test_examples(name: str) -> None:
    for test in _examples(name):
        said: list[str] = []
        failed, _ = doctest.DocTestRunner(optionflags=_FLAGS).run(test, out=said.append)
        assert not failed, "".join(said)


# Names are imported when asked for: `vars` would show those that some other test has asked for.
PUBLIC = {name: getattr(intarsia, name) for name in dir(intarsia) if not name.startswith("_")}


def test_public_names_have_docstrings() -> None:
    silent = [
        name
        for name, value in PUBLIC.items()
        if getattr(value, "__module__", "").startswith("intarsia")
        if not (getattr(value, "__doc__", None) or "").strip()
    ]
    assert silent == []


def test_public_names_show_an_example() -> None:
    without = [
        name
        for name, value in PUBLIC.items()
        if getattr(value, "__module__", "").startswith("intarsia")
        if ">>>" not in (getattr(value, "__doc__", None) or "")
    ]
    assert without == []
