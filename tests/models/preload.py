"""What every process of a model needs, imported once in the server that they are forked from."""

from __future__ import annotations

import onnxruntime  # noqa: F401
import openvino  # noqa: F401
import torch
from tests.models import outside
from torch import nn

outside.all_cases()
torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),)).run_decompositions()  # it imports a lot when used
