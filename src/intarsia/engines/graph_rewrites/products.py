"""Products with weights in ATen graphs: merged over one input, sliced along the inner axis, by vectors."""

from __future__ import annotations

import functools
import math
import operator
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from intarsia.engines.graph_rewrites.constants import attach, constant, only_user, shape_of
from intarsia.engines.graph_rewrites.replayed import ratio, recorded
from intarsia.lower.purity import arguments

aten = torch.ops.aten


# Where a graph spends its time: products with large weights.


_PRODUCTS = (
    aten.linear.default, aten.matmul.default, aten.mm.default, aten.addmm.default, aten.bmm.default,
    aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.convolution.default,
)  # fmt: skip
_LARGE = 2**14  # elements of a weight; frequencies of positions are fewer


def weight_products(module: fx.GraphModule) -> list[fx.Node]:
    """Products and convolutions with a large constant."""
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    return [node for node in calls if node.target in _PRODUCTS and _large_weights(module, node)]


def has_only_bfloat16_products(module: fx.GraphModule) -> bool:
    """Whether all of them are in bfloat16, and there are some."""
    results = [weight for node in weight_products(module) for weight in _large_weights(module, node)]
    return bool(results) and all(weight.dtype == torch.bfloat16 for weight in results)


def _large_weights(module: fx.GraphModule, node: fx.Node) -> list[torch.Tensor]:
    values = [constant(module, source) for source in node.all_input_nodes]
    return [value for value in values if value is not None and value.numel() >= _LARGE]


# Products of one input with several constant weights, as one product that is split afterwards.
#
# Queries, keys and values are the usual case. Merged before the graph is compiled, the parts reach
# attention as views of one result; merged later, the compiler would copy them into the layout it had
# planned for.


def merge_products(module: fx.GraphModule) -> int:
    """Merge every group of `linear` nodes over one input; how many groups there were."""
    groups = groups_of(module)
    for nodes in groups:
        merge(module, nodes)
    return len(groups)


def groups_of(module: fx.GraphModule) -> list[list[fx.Node]]:
    """The `linear` nodes over one input with constant weights, where there are several."""
    groups: dict[tuple[Any, ...], list[fx.Node]] = {}
    for node in module.graph.nodes:
        if node.op != "call_function" or node.target is not aten.linear.default:
            continue
        operands = arguments(node)
        weight, bias = constant(module, operands["weight"]), constant(module, operands["bias"])
        if weight is None or weight.dim() != 2 or (bias is None) != (operands["bias"] is None):
            continue
        groups.setdefault((operands["input"], bias is None, weight.dtype, weight.device), []).append(node)
    return [nodes for nodes in groups.values() if len(nodes) > 1]


def merge(module: fx.GraphModule, nodes: list[fx.Node]) -> None:
    """Replace several products with one."""
    weights = [getattr(module, arguments(node)["weight"].target) for node in nodes]
    graph, first = module.graph, nodes[0]
    operands = {"weight": weights}
    if arguments(first)["bias"] is not None:
        operands["bias"] = [getattr(module, arguments(node)["bias"].target) for node in nodes]
    with graph.inserting_before(first):
        read = [attach(module, f"_merged_{first.name}_{name}", torch.cat(x)) for name, x in operands.items()]
        product = graph.call_function(aten.linear.default, (arguments(first)["input"], *read))
        described = first.meta["val"]
        product.meta["val"] = described.new_empty((*described.shape[:-1], sum(len(w) for w in weights)))
        sizes = [weight.shape[0] for weight in weights]
        parts = graph.call_function(aten.split_with_sizes.default, (product, sizes, -1))
        picked = [graph.call_function(operator.getitem, (parts, place)) for place in range(len(nodes))]
    for node, part in zip(nodes, picked, strict=True):
        part.meta = dict(node.meta)
        node.replace_all_uses_with(part)
        graph.erase_node(node)


# Products of one row in bfloat16 as products of a matrix with a vector.
#
# On a CPU `linear` hands them to a kernel for matrices; the one for vectors sums in float32 just as well, and
# may read weights faster. Inductor writes such products as loops of its own. Which is faster is measured.
#
# In bfloat16 Inductor's loop reads weights faster than PyTorch's kernels if weights are not frozen (freezing
# keeps them in float32, twice the bytes) and what makes the vector is stored (`realize_reads_threshold=0`).


def vector_products(module: fx.GraphModule) -> int:
    """Make vectors of the rows; how many products there were."""
    graph, nodes = module.graph, one_row_products(module)
    for node in nodes:
        operands, shape = arguments(node), node.meta["val"].shape
        weight, bias = operands["weight"], operands["bias"]
        with graph.inserting_before(node):
            row = graph.call_function(aten.reshape.default, (operands["input"], [-1]))
            if bias is None:
                product = graph.call_function(aten.mv.default, (weight, row))
            else:  # which `linear` adds before it rounds, too
                product = graph.call_function(aten.addmv.default, (bias, weight, row))
            result = graph.call_function(aten.reshape.default, (product, list(shape)))
        result.meta = dict(node.meta)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
    return len(nodes)


def one_row_products(module: fx.GraphModule) -> list[fx.Node]:
    """The products of one row with a weight in bfloat16 on the CPU."""
    return [
        node
        for node in module.graph.nodes
        if node.op == "call_function" and node.target is aten.linear.default and _has_one_row(module, node)
    ]


def has_only_one_row_products(module: fx.GraphModule) -> bool:
    """Whether all products with large weights are such ones, and there are some: the program of a token."""
    products, vectors = weight_products(module), set(one_row_products(module))
    return bool(products) and all(node in vectors for node in products)


def _has_one_row(module: fx.GraphModule, node: fx.Node) -> bool:
    operands, shape = arguments(node), shape_of(node)
    weight = constant(module, operands["weight"])
    bias = None if operands["bias"] is None else operands["bias"].meta["val"]
    if shape is None or weight is None or (bias is not None and bias.dim() > 1):
        return False
    is_plain = weight.ndim == 2 and weight.is_contiguous() and weight.device.type == "cpu"
    return is_plain and weight.dtype == torch.bfloat16 and math.prod(shape[:-1]) == 1


# Products of few rows and columns by slices of their inner axis, summed in the kernel that reads the result.
#
# A product of 128 rows and 768 columns is 24 tiles, too few for a GPU of 132 multiprocessors. cuBLAS then
# leaves most of them idle, or slices the inner axis and adds the slices up in a kernel of its own. Slices
# as one batched product with float32 results keep the GPU busy, and the compiler adds them up where it
# reads them anyway: in the residual sum and norm that follow. Which is faster depends on the tiles that a
# GPU has room for, so each shape is timed.


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
    total = 0
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
            total += 1
    return total


def _operands(module: fx.GraphModule, node: fx.Node) -> tuple[int, torch.Tensor] | None:
    """How many rows are multiplied, and the constant that they are multiplied by, inner axis first."""
    source, shape = arguments(node), shape_of(node)
    if shape is None or math.prod(shape) == 0:
        return None
    if node.target is aten.linear.default:
        weight = constant(module, source["weight"])
        return None if weight is None or weight.dim() != 2 else (math.prod(shape[:-1]), weight.t())
    weight, bias = constant(module, source["mat2"]), constant(module, source["self"])
    if weight is None or bias is None or bias.dim() != 1 or not source["beta"] == source["alpha"] == 1:
        return None
    return shape[0], weight


def _read_pointwise(node: fx.Node) -> bool:
    """Whether one sum or scaling alone reads the product, views of it aside."""
    user = only_user(node)
    while user is not None and user.target in _VIEWS:
        user = only_user(user)
    return user is not None and user.target in _POINTWISE


def _split(module: fx.GraphModule, node: fx.Node, rows: int, weight: torch.Tensor, count: int) -> None:
    operand, graph = arguments(node), module.graph
    linear = node.target is aten.linear.default
    source, bias = (operand["input"], operand["bias"]) if linear else (operand["mat1"], operand["self"])
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
        result = graph.call_function(aten.reshape.default, (total, shape))
    assert math.prod(shape) == rows * columns
    result.meta = dict(node.meta)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


@functools.lru_cache(maxsize=256)
def measured_slices(rows: int, columns: int, inner: int, dtype: torch.dtype, device: torch.device) -> int:
    """Into how many slices a product is fastest on this GPU; 1 where slicing is not faster."""
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
        said = f"a product of {rows} x {inner} x {columns} could not be measured: there is not enough memory"
        warnings.warn(f"{said}, and is not split", stacklevel=2)
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
