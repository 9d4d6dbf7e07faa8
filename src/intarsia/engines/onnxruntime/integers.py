"""Products of 8-bit integers: whether ONNX Runtime's kernels are exact on this processor.

Its kernels for uint8 by int8 are by far its fastest (128 x 768 by 768 x 768 with AMX: 0.08 ms; int8 by int8
takes 2.4 ms, uint8 by uint8 1.0 ms; 1.31.1). Without dot products of 8 bits (VNNI), those for x86 add pairs
of products in 16 bits, which saturate.
"""

from __future__ import annotations

import functools

import numpy as np

_ROWS, _COLUMNS = 8, 64


@functools.cache
def inexactness() -> str | None:
    """Why products of integers are refused; None if the largest there are come out right."""
    import onnxruntime as ort
    from onnx import TensorProto, helper

    x = np.full((_ROWS, _COLUMNS), 255, np.uint8)
    weight = np.full((_COLUMNS, _ROWS), 127, np.int8)
    weight[:, ::2] = -128
    node = helper.make_node("MatMulInteger", ["x", "weight"], ["sums"])
    held = helper.make_tensor("weight", TensorProto.INT8, weight.shape, weight.tobytes(), raw=True)
    ports = [
        helper.make_tensor_value_info("x", TensorProto.UINT8, [None, _COLUMNS]),
        helper.make_tensor_value_info("sums", TensorProto.INT32, [None, _ROWS]),
    ]
    graph = helper.make_graph([node], "sums", ports[:1], ports[1:], [held])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    for rows in (x, x[:1]):  # a single row has a kernel of its own
        (sums,) = session.run(None, {"x": rows})
        expected = rows.astype(np.int32) @ weight.astype(np.int32)
        if not np.array_equal(sums, expected):
            wrong = int(np.argmax(sums[0] != expected[0]))
            return (
                f"its products of 8-bit integers saturate on this processor: {_COLUMNS} * 255 * "
                f"{weight[0, wrong]} gives {sums[0, wrong]}"
            )
    return None
