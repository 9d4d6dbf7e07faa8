"""What some processors' kernels lack, as marks."""

from __future__ import annotations

import pytest
import torch

from intarsia.cache.machine import is_arm

_REASON = "OpenVINO rounds to bfloat16 wrongly on ARM, and is given none there"
needs_bfloat16 = pytest.mark.skipif(is_arm(), reason=_REASON)
BFLOAT16 = pytest.param(torch.bfloat16, marks=needs_bfloat16)


def skip_unless_rounded(engine: str, dtype: torch.dtype) -> None:
    """End a test of bfloat16 on an engine that is given none."""
    if engine == "openvino" and dtype == torch.bfloat16 and is_arm():
        pytest.skip(_REASON)
