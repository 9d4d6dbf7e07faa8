"""Products of few rows and columns by slices of their inner axis, summed in the kernel that reads the result.

A product of 128 rows and 768 columns is 24 tiles, too few for a GPU of 132 multiprocessors. cuBLAS then
leaves most of them idle, or slices the inner axis and adds the slices up in a kernel of its own. Slices as
one batched product with float32 results keep the GPU busy, and the compiler adds them up where it reads them
anyway: in the residual sum and norm that follow.

cuBLAS sums its own slices in a kernel of their own. As a batched product with float32 results, the kernel
that reads them sums them. Which is faster depends on the tiles that a GPU has room for, so each shape is
timed.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable

import torch
from torch import fx

from intarsia.engines.graph_rewrites.constants import arguments, attach, constant, only_user, shape_of
from intarsia.engines.graph_rewrites.replayed import ratio, recorded

aten = torch.ops.aten
_VIEWS = (
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.permute.default,
    aten.transpose.int,
)  # fmt: skip
_POINTWISE = (aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor)
_TILE = 64  # rows and columns of the smallest tile worth its overhead
_SLICES = (2, 4)  # of more, the sum would be a kernel of its own again
_SHORTEST = 128  # of a slice
_PAYS = 0.9  # time by slices over time at once, below which the product is sliced: reading slices costs too
_BEYOND_CACHE = 2**27  # bytes of weights that a model reads between two uses of one; caches are smaller

Slices = Callable[[int, int, int, torch.dtype, torch.device], int]


def split_products(module: fx.GraphModule) -> int:
    """Slice the products that are measured faster so; how many there were."""
    return split_by(module, measured_slices)


def split_by(module: fx.GraphModule, slices: Slices) -> int:
    """Slice products into as many parts as a function says for (rows, columns, inner, dtype, device)."""
    found = 0
    for node in list(module.graph.nodes):
        if node.op != "call_function" or node.target not in (aten.linear.default, aten.addmm.default):
            continue
        operands = _operands(module, node)
        if operands is None or not _read_pointwise(node):
            continue
        rows, weight = operands
        count = slices(rows, weight.shape[1], weight.shape[0], weight.dtype, weight.device)
        if count > 1:
            _split(module, node, rows, weight, count)
            found += 1
    return found


def _operands(module: fx.GraphModule, node: fx.Node) -> tuple[int, torch.Tensor] | None:
    """How many rows are multiplied, and the constant that they are multiplied by, inner axis first."""
    given, shape = arguments(node), shape_of(node)
    if shape is None or math.prod(shape) == 0:
        return None
    if node.target is aten.linear.default:
        weight = constant(module, given["weight"])
        return None if weight is None or weight.dim() != 2 else (math.prod(shape[:-1]), weight.t())
    weight, bias = constant(module, given["mat2"]), constant(module, given["self"])
    if weight is None or bias is None or bias.dim() != 1 or not given["beta"] == given["alpha"] == 1:
        return None
    return shape[0], weight


def _read_pointwise(node: fx.Node) -> bool:
    """Whether one sum or scaling alone reads the product, views of it aside."""
    user = only_user(node)
    while user is not None and user.target in _VIEWS:
        user = only_user(user)
    return user is not None and user.target in _POINTWISE


def _split(module: fx.GraphModule, node: fx.Node, rows: int, weight: torch.Tensor, count: int) -> None:
    given, graph = arguments(node), module.graph
    linear = node.target is aten.linear.default
    source, bias = (given["input"], given["bias"]) if linear else (given["mat1"], given["self"])
    inner, columns = weight.shape
    with graph.inserting_before(node):
        # A view: the weight is not copied.
        sliced = attach(module, f"_sliced_{node.name}", weight.view(count, inner // count, columns))
        x = graph.call_function(aten.reshape.default, (source, [rows, count, inner // count]))
        x = graph.call_function(aten.permute.default, (x, [1, 0, 2]))
        parts = graph.call_function(aten.bmm.dtype, (x, sliced, torch.float32))
        total = graph.call_function(aten.sum.dim_IntList, (parts, [0]))
        if bias is not None:
            total = graph.call_function(aten.add.Tensor, (total, bias))  # in float32, as cuBLAS adds it
        total = graph.call_function(aten._to_copy.default, (total,), {"dtype": weight.dtype})
        shape = list(node.meta["val"].shape)
        made = graph.call_function(aten.reshape.default, (total, shape))
    assert math.prod(shape) == rows * columns
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


@functools.lru_cache(maxsize=256)
def measured_slices(rows: int, columns: int, inner: int, dtype: torch.dtype, device: torch.device) -> int:
    """Into how many slices a product is fastest on this GPU; 1 where slicing does not pay."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return 1
    tiles = math.ceil(rows / _TILE) * math.ceil(columns / _TILE)
    if tiles >= torch.cuda.get_device_properties(device).multi_processor_count:
        return 1
    counts = [count for count in _SLICES if inner % (8 * count) == 0 and inner // count >= _SHORTEST]
    try:
        with torch.cuda.device(device):
            whole = _timed(rows, columns, inner, dtype, 1)
            ratios = {count: ratio(_timed(rows, columns, inner, dtype, count), whole) for count in counts}
    except torch.OutOfMemoryError:
        said = f"a product of {rows} x {inner} x {columns} could not be measured for want of memory"
        warnings.warn(f"{said}, and is left whole", stacklevel=2)
        return 1
    return min((count for count in counts if ratios[count] < _PAYS), key=ratios.__getitem__, default=1)


def _timed(rows: int, columns: int, inner: int, dtype: torch.dtype, count: int) -> Callable[[], float]:
    """Times the product with as many weights in turn as no cache holds, as in a model."""
    copies = max(2, _BEYOND_CACHE // (inner * columns * dtype.itemsize))
    x = torch.zeros(rows, inner, dtype=dtype, device="cuda")
    weights = torch.zeros(copies, columns, inner, dtype=dtype, device="cuda").transpose(1, 2)
    bias = torch.zeros(columns, dtype=dtype, device="cuda")
    if count == 1:
        return recorded(lambda: [torch.addmm(bias, x, weight) for weight in weights])
    parts = x.view(rows, count, -1).transpose(0, 1)
    sliced = [weight.view(count, -1, columns) for weight in weights]
    return recorded(lambda: [torch.bmm(parts, weight, out_dtype=torch.float32) for weight in sliced])
