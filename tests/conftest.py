"""Settings of every test run, and what is skipped on a machine that lacks an engine."""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

# Random tests draw the same examples every time; HYPOTHESIS_PROFILE=explore draws others.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("explore", derandomize=False, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

# Thousands of small models are compiled here, and the placement must not depend on how busy the machine is.
os.environ.setdefault("INTARSIA_MEASURE", "0")
# Tests put faults into engines, so no program that an earlier test built may be reused.
os.environ.setdefault("INTARSIA_CACHE_GB", "0")

# A worker holds millions of objects of torch and sympy; collecting garbage among them took 10 % of the time.
gc.set_threshold(100_000, 20, 100)
# tests/children/sitecustomize.py sets the same thresholds in the processes that tests start.
CHILDREN = str(Path(__file__).with_name("children"))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), CHILDREN]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that need OpenVINO where it is not installed, for example on a machine with a GPU."""
    if find_spec("openvino") is not None:
        return
    for item in items:
        if item.get_closest_marker("openvino") is not None or _has_openvino_parameter(item):
            item.add_marker(pytest.mark.skip(reason="OpenVINO is not installed"))


def pytest_collection_finish() -> None:
    """Keep the collector from searching the imported modules again: they stay until the end."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the clock by seconds. Nothing else does, so the speed of the machine decides nothing."""
    passed: list[float] = []
    monkeypatch.setattr(time, "perf_counter", lambda: math.fsum(passed))
    return passed.append


def _has_openvino_parameter(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    return callspec is not None and any(map(_names_openvino, callspec.params.values()))


def _names_openvino(parameter: object) -> bool:
    """Whether a parameter is OpenVINO's name, one of its engines, or a list that holds one."""
    if isinstance(parameter, list | tuple):
        return any(map(_names_openvino, parameter))
    if isinstance(parameter, str):
        return parameter == "openvino"
    return getattr(parameter, "family", None) == "openvino"
