"""What torch demands of values, asked inside the network: an engine refuses an index out of range.

Engines check that indices lie inside (ONNX Runtime by itself, OpenVINO by a guard) and leave a call in which
one does not to PyTorch, which raises its own error or has an answer of its own. Other demands are put as
indices.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from intarsia.convert.aten.sizes import Size, int64
from intarsia.errors import ConversionError
from intarsia.network import Tensor
from intarsia.network import functional as F
from intarsia.network.ops import COUNTS

D = ir.DataType


def from_the_front(index: Tensor, extent: Size) -> Tensor:
    """Indices of a dimension that must not be negative, where engines would count those from the end."""
    known = index.constant
    if known is not None:
        if known.size and known.min() < 0:
            raise ConversionError(f"the index {int(known.min())}, which torch refuses, is not handled")
        return F.constant(known.astype(np.int64))
    index = F.cast(index, D.INT64)
    parent = index.get_parent()
    if parent is not None and parent.kind in COUNTS:
        return index
    return F.where(F.less(index, 0), int64(extent), index)


def zero_unless(condition: Tensor) -> Tensor:
    """The number 0, int64 and 0-d; a call in which the condition holds anywhere is left to PyTorch."""
    held = F.cast(condition, D.INT32)
    if held.ndim:
        held = F.reduce_max(held, list(range(held.ndim)), keepdims=False)
    # There is no element 1 of one element.
    return F.gather(F.constant(np.zeros(1, np.int64)), F.cast(held, D.INT64), 0)


def left_where(x: Tensor, condition: Tensor) -> Tensor:
    """`x` itself; a call in which the condition holds anywhere is left to PyTorch."""
    return F.sub(x, F.cast(zero_unless(condition), x.dtype))  # less 0, which also keeps -0.0
