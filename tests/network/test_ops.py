"""Every row of the table of operators against ONNX's own definition of the operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, defs, helper
from onnx.reference import ReferenceEvaluator

from intarsia.network.ops import COMMUTATIVE, COMPARES, KEEPS_VALUES, MAY_BE_IDENTITY, MOVES_DATA, OPS
from intarsia.network.value import OPSET

Array = np.ndarray[Any, Any]
BOOLS = {"And", "Not", "Or", "Xor"}
INTEGERS = {"BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor"}
FILL = -77.0  # none of the elements below


def results(kind: str, inputs: Sequence[Array | None], outputs: int = 1, **attributes: Any) -> list[Array]:
    """What ONNX's definition of an operator makes of these inputs."""
    names = ["" if array is None else f"i{index}" for index, array in enumerate(inputs)]
    made = [f"o{index}" for index in range(outputs)]
    given = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in zip(names, inputs, strict=True)
        if array is not None
    ]
    outs = [helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None) for name in made]
    graph = helper.make_graph([helper.make_node(kind, names, made, **attributes)], "one", given, outs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
    arrays = {name: array for name, array in zip(names, inputs, strict=True) if array is not None}
    with np.errstate(all="ignore"):
        return [np.asarray(out) for out in ReferenceEvaluator(model).run(None, arrays)]


def ints(*values: int) -> Array:
    return np.array(values, np.int64)


X = np.arange(1, 17, dtype=np.float32).reshape(1, 4, 2, 2)
M = np.arange(1, 10, dtype=np.float32).reshape(3, 3)
MOVES: dict[str, tuple[Sequence[Array | None], dict[str, Any]]] = {
    "Compress": ([M, np.array([True, False, True])], {"axis": 0}),
    "Concat": ([M, M + 20], {"axis": 1}),
    "DepthToSpace": ([X], {"blocksize": 2}),
    "Expand": ([M, ints(2, 3, 3)], {}),
    "Flatten": ([X], {}),
    "Gather": ([M, ints(2, 0)], {"axis": 1}),
    "GatherElements": ([M, np.array([[0, 2, 1]])], {"axis": 0}),
    "GatherND": ([M, np.array([[0, 2], [1, 1]])], {}),
    "Identity": ([M], {}),
    "Pad": ([M, ints(1, 0, 0, 2), np.float32(FILL)], {}),
    "Reshape": ([M, ints(9, 1)], {}),
    "ReverseSequence": ([M, ints(1, 3, 2)], {}),
    "ScatterElements": ([M, np.array([[0, 2, 1]]), M[:1] + 20], {"axis": 0}),
    "ScatterND": ([M, np.array([[1]]), M[:1] + 20], {}),
    "Slice": ([M, ints(0), ints(3), ints(1), ints(2)], {}),
    "SpaceToDepth": ([X], {"blocksize": 2}),
    "Split": ([M, ints(1, 2)], {"axis": 1}),
    "Squeeze": ([X, ints(0)], {}),
    "Tile": ([M, ints(2, 1)], {}),
    "Transpose": ([M], {"perm": [1, 0]}),
    "Trilu": ([M], {}),
    "Unsqueeze": ([M, ints(1)], {}),
    "Where": ([M > 4, M, M + 20], {}),
}
SAME: dict[str, tuple[Sequence[Array | None], dict[str, Any]]] = {
    "Cast": ([M], {"to": TensorProto.FLOAT}),
    "Expand": ([M, ints(3, 3)], {}),
    "Flatten": ([M], {}),
    "Identity": ([M], {}),
    "Reshape": ([M, ints(3, 3)], {}),
    "Transpose": ([M], {"perm": [0, 1]}),
}


def test_every_row_names_an_operator_of_onnx() -> None:
    assert all(defs.has(name, OPSET) for name in OPS)


def test_every_row_that_moves_or_may_change_nothing_is_tried_below() -> None:
    assert set(MOVES) == MOVES_DATA
    assert set(SAME) == MAY_BE_IDENTITY
    assert KEEPS_VALUES < MOVES_DATA


@pytest.mark.parametrize("kind", sorted(MOVES_DATA))
def test_moving_makes_no_new_elements(kind: str) -> None:
    inputs, attributes = MOVES[kind]
    elements = {value for array in inputs if array is not None for value in array.ravel().tolist()}
    for made in results(kind, inputs, 2 if kind == "Split" else 1, **attributes):
        gaps = {0.0} if kind == "Trilu" else {FILL} if kind == "Pad" else set()
        assert set(made.ravel().tolist()) <= elements | gaps
        if OPS[kind].keeps_values:
            assert inputs[0] is not None
            assert set(made.ravel().tolist()) == set(inputs[0].ravel().tolist())


@pytest.mark.parametrize("kind", sorted(MAY_BE_IDENTITY))
def test_it_may_change_nothing(kind: str) -> None:
    inputs, attributes = SAME[kind]
    (made,) = results(kind, inputs, **attributes)
    assert inputs[0] is not None
    np.testing.assert_array_equal(made, inputs[0])


def _elements(kind: str, seed: int) -> Array:
    rng = np.random.default_rng(seed)
    if kind in BOOLS:
        return rng.integers(0, 2, 64).astype(bool)
    if kind in INTEGERS:
        return rng.integers(-9, 9, 64).astype(np.int32)
    if kind == "BitShift":
        return rng.integers(0, 9, 64).astype(np.uint32)
    wide = np.concatenate([rng.normal(0, 1, 30), rng.normal(0, 1e3, 32), [0.0, -0.0]]).astype(np.float32)
    return rng.permutation(wide)


def _attributes(kind: str) -> dict[str, Any]:
    extra: dict[str, dict[str, Any]] = {
        "Cast": {"to": TensorProto.INT32},
        "BitShift": {"direction": "LEFT"},
        "Mod": {"fmod": 1},
    }
    return extra.get(kind, {})


def _operands(kind: str) -> list[Array]:
    if kind == "Where":
        return [_elements("And", 1), _elements(kind, 2), _elements(kind, 3)]
    return [_elements(kind, seed) for seed in range(OPS[kind].operands)]


@pytest.mark.parametrize("kind", sorted(name for name, op in OPS.items() if op.operands))
def test_elements_are_computed_one_by_one(kind: str) -> None:
    inputs, order = _operands(kind), np.random.default_rng(9).permutation(64)
    (made,) = results(kind, inputs, **_attributes(kind))
    (moved,) = results(kind, [array[order] for array in inputs], **_attributes(kind))
    assert made.shape == (64,)
    np.testing.assert_array_equal(moved, made[order])


@pytest.mark.parametrize("kind", sorted(name for name, op in OPS.items() if op.range))
def test_results_lie_in_the_range(kind: str) -> None:
    assert OPS[kind].range is not None
    low, high = OPS[kind].range  # type: ignore[misc]
    special = np.array([np.inf, -np.inf], np.float32)
    x = _elements(kind, 0)
    (made,) = results(kind, [x if kind == "Softmax" else np.concatenate([x, special])])
    made = made[~np.isnan(made.astype(np.float32))].astype(np.float64)
    assert made.size > 8 or kind in ("Acos", "Asin")
    assert low - 1e-6 <= made.min() and made.max() <= high + 1e-6


@pytest.mark.parametrize("kind", sorted(COMPARES))
def test_comparisons_tell_which_element_is_larger(kind: str) -> None:
    one, other = _operands(kind)
    numbers = {"Equal": np.equal, "Greater": np.greater, "GreaterOrEqual": np.greater_equal}
    numbers |= {"Less": np.less, "LessOrEqual": np.less_equal}
    for pair in ([one, other], [one, one]):
        (made,) = results(kind, pair)
        assert made.dtype == np.bool_
        np.testing.assert_array_equal(made, numbers[kind](*pair))


@pytest.mark.parametrize("kind", sorted(COMMUTATIVE))
def test_operands_can_be_exchanged(kind: str) -> None:
    one, other = _operands(kind)
    np.testing.assert_array_equal(results(kind, [one, other])[0], results(kind, [other, one])[0])


@pytest.mark.parametrize("kind", sorted(name for name, op in OPS.items() if op.operands == 2))
def test_operands_of_others_cannot(kind: str) -> None:
    one, other = _operands(kind)
    ways = [results(kind, pair, **_attributes(kind))[0] for pair in ([one, other], [other, one])]
    assert np.array_equal(*ways, equal_nan=ways[0].dtype.kind == "f") == OPS[kind].commutative


@pytest.mark.parametrize("kind", sorted(name for name, op in OPS.items() if op.counts))
def test_places_and_sizes_are_not_negative(kind: str) -> None:
    x = _elements(kind, 0).reshape(8, 8)
    made = results("TopK", [x, ints(3)], 2)[1] if kind == "TopK" else results(kind, [x])[0]
    assert made.dtype == np.int64 and made.min() >= 0


WEIGHED: dict[str, tuple[Array, Array]] = {
    "Conv": (X, np.ones((3, 4, 2, 2), np.float32)),
    "ConvTranspose": (X, np.ones((4, 3, 2, 2), np.float32)),
    "Gemm": (M, M + 1),
    "MatMul": (M, M + 1),
}


@pytest.mark.parametrize("kind", sorted(name for name, op in OPS.items() if op.multiplies_weights))
def test_sums_of_products_grow_with_either_factor(kind: str) -> None:
    x, weight = WEIGHED[kind]
    (made,) = results(kind, [x, weight])
    np.testing.assert_allclose(results(kind, [2 * x, weight])[0], 2 * made)
    np.testing.assert_allclose(results(kind, [x, 2 * weight])[0], 2 * made)


@pytest.mark.parametrize("kind", sorted(name for name, op in OPS.items() if op.normalizes))
def test_norms_lose_a_common_factor(kind: str) -> None:
    ones, zeros = np.ones(4, np.float32), np.zeros(4, np.float32)
    x = np.random.default_rng(0).normal(0, 1, (2, 4, 4)).astype(np.float32)
    inputs = {
        "GroupNormalization": [ones, zeros],
        "InstanceNormalization": [ones, zeros],
        "LayerNormalization": [ones],
        "RMSNormalization": [ones],
    }[kind]
    more = {"num_groups": 2} if kind == "GroupNormalization" else {}
    (made,), (scaled,) = (results(kind, [x * f, *inputs], epsilon=1e-9, **more) for f in (1, np.float32(8)))
    np.testing.assert_allclose(scaled, made, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", sorted(name for name, op in OPS.items() if op.recurrent))
def test_a_step_of_a_sequence_sees_those_before_it(kind: str) -> None:
    gates = {"GRU": 3, "LSTM": 4, "RNN": 1}[kind]
    rng = np.random.default_rng(0)
    x = rng.normal(0, 1, (4, 1, 3)).astype(np.float32)
    weights = [rng.normal(0, 1, (1, gates * 2, size)).astype(np.float32) for size in (3, 2)]
    changed = x.copy()
    changed[1] += 1
    made, other = (results(kind, [steps, *weights], hidden_size=2)[0] for steps in (x, changed))
    same = [bool(np.allclose(a, b)) for a, b in zip(made, other, strict=True)]
    assert same == [True, False, False, False]
