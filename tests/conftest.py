"""Random tests draw the same examples every time; HYPOTHESIS_PROFILE=explore draws others."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from tests.longest import LONGEST
from tests.slow import is_slow

settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("explore", derandomize=False, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

# Thousands of small models are compiled here, and who runs what must not hang on how busy the machine is.
os.environ.setdefault("INTARSIA_MEASURE", "0")
# Tests put faults into engines: nothing that an earlier test built may be taken in their place.
os.environ.setdefault("INTARSIA_CACHE_GB", "0")

# A worker holds millions of objects of torch and sympy; to look through them all was a tenth of the time.
gc.set_threshold(100_000, 20, 100)
# So it is in the processes that tests start.
CHILDREN = str(Path(__file__).with_name("children"))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), CHILDREN]))

WITHOUT_OPENVINO = bool(os.environ.get("INTARSIA_WITHOUT_OPENVINO"))
OLD_EXPORT = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)


@pytest.hookimpl(tryfirst=True)  # marks are chosen by `-m` afterwards
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the slow ones; files of `LONGEST` come first (with xdist's `--no-loadscope-reorder`)."""
    for item in items:
        if is_slow(item.nodeid):
            item.add_marker("slow")
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.nodeid.split("::")[0], len(place)))


def pytest_collection_finish() -> None:
    """What was imported stays: the collector need not look through it again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Skip what the machine cannot have: OpenVINO (said by INTARSIA_WITHOUT_OPENVINO=1), a newer torch."""
    try:
        return (yield)
    except Exception as error:
        text = str(error)
        if WITHOUT_OPENVINO and re.search(r"openvino is not installed|No module named 'openvino'", text):
            pytest.skip("OpenVINO is not installed on this machine")
        if OLD_EXPORT and "Constraints violated" in text:
            pytest.skip("this torch's export does not take all sizes of this model")
        raise
