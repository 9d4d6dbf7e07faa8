"""Python values as attributes and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from intarsia.errors import NetworkError
from intarsia.network.attributes import from_attr, to_attr

KIND = ir.AttributeType


@pytest.mark.parametrize(
    ("value", "kind", "back"),
    [
        (3, KIND.INT, 3),
        (True, KIND.INT, 1),
        (ir.DataType.INT64, KIND.INT, 7),
        (0.5, KIND.FLOAT, 0.5),
        ("text", KIND.STRING, "text"),
        ([1, True], KIND.INTS, [1, 1]),
        ((1, 0.5), KIND.FLOATS, [1.0, 0.5]),
        ([], KIND.INTS, []),
        (["a", "b"], KIND.STRINGS, ["a", "b"]),
    ],
)
def test_there_and_back(value: Any, kind: ir.AttributeType, back: Any) -> None:
    attr = to_attr("name", value)
    assert attr.type == kind and from_attr(attr) == back


def test_tensors_and_graphs() -> None:
    tensor = ir.Tensor(np.asarray([1.0], np.float32))
    assert to_attr("value", tensor).type == KIND.TENSOR and from_attr(to_attr("value", tensor)) is tensor
    assert to_attr("body", ir.Graph([], [], nodes=[])).type == KIND.GRAPH


@pytest.mark.parametrize("value", [object(), {"a": 1}, [object()], [1, "a"], [None], 1j])
def test_what_no_layer_can_hold(value: Any) -> None:
    with pytest.raises(NetworkError, match=r"attribute name=.* has a type that no layer can hold"):
        to_attr("name", value)
