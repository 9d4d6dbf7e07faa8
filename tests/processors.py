"""What some processors' kernels lack, as marks."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from intarsia.engines.openvino.core import rounds_to_bfloat16

_REASON = "OpenVINO rounds to bfloat16 wrongly on this processor, and is given none here"
ROUNDS = find_spec("openvino") is None or rounds_to_bfloat16()
needs_bfloat16 = pytest.mark.skipif(not ROUNDS, reason=_REASON)
BFLOAT16 = pytest.param(torch.bfloat16, marks=needs_bfloat16)


def skip_unless_rounded(engine: str, dtype: torch.dtype) -> None:
    """End a test of bfloat16 on an engine that is given none."""
    if engine == "openvino" and dtype == torch.bfloat16 and not ROUNDS:
        pytest.skip(_REASON)
