"""What tests/torch_overhead.py puts in the place of torch's own does the same."""

from __future__ import annotations

import pytest
import torch
from torch._C import DispatchKey
from torch.utils._traceback import CapturedTraceback


def test_a_kernel_is_registered_once() -> None:
    operator = torch.ops.aten.sinh.default
    before = dict(operator.py_kernels)
    try:
        register = operator.py_impl(DispatchKey.AutogradCPU)
        assert register(abs) is abs and operator.py_kernels[DispatchKey.AutogradCPU] is abs
        with pytest.raises(RuntimeError, match="override a python impl"):
            operator.py_impl(DispatchKey.AutogradCPU)(abs)
        with pytest.raises(AssertionError, match="register a mode"):
            operator.py_impl(DispatchKey.Python)(abs)
    finally:
        operator.py_kernels.clear()
        operator.py_kernels.update(before)
        operator._dispatch_cache.clear()


def test_stacks_are_read_as_before() -> None:
    found = [CapturedTraceback.extract().summary()[-1] for _ in range(2)]
    assert found[0] == found[1] and found[0].filename == __file__
    assert "CapturedTraceback.extract()" in str(found[0].line)
