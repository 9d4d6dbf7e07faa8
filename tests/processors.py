"""What some processors' kernels lack, as marks."""

from __future__ import annotations

import pytest
import torch

from intarsia.engines.processor import is_arm

needs_bfloat16 = pytest.mark.skipif(
    is_arm(), reason="OpenVINO rounds to bfloat16 wrongly on ARM, and is given none there"
)
BFLOAT16 = pytest.param(torch.bfloat16, marks=needs_bfloat16)
