"""Tensors as plain tensors: the parts of a subclass, a sparse or a jagged tensor; and slices of tensors.

Slices fit into a cache. Comparing millions of logits as float64, with a dozen temporaries, took a third of
the time of compiling GPT-2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

# The names of dtypes in safetensors files, which the library keeps private.
SAFETENSORS_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_PLAIN = (torch.Tensor, nn.Parameter)
_PARTS: dict[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("indices", "values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with memory that a tensor consists of; for a plain tensor, itself.

    The parts of a subclass are those of torch's protocol, `__tensor_flatten__`. A subclass without the
    protocol, or a tensor of an unknown layout, has no parts.

    >>> [part.tolist() for part in plain_tensors(torch.eye(2).to_sparse_csr())]
    [[0, 1, 2], [0, 1], [1.0, 1.0]]
    """
    if type(tensor) in _PLAIN and tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_meta):
        return [tensor]
    return [part for _, part in named_parts("", tensor)]


def named_parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The same parts with names: `name` for a plain tensor, such as `name.qdata` for a part of another.

    >>> [name for name, _ in named_parts("mask", torch.eye(2).to_sparse())]
    ['mask.indices', 'mask.values']
    """
    if is_traceable_subclass(tensor):
        attributes, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        for attribute in attributes:
            yield from named_parts(f"{name}.{attribute}", getattr(tensor, attribute))
    elif tensor.layout is torch.strided and tensor.is_nested:
        for place, part in enumerate(tensor.unbind()):
            yield f"{name}.{place}", part
    elif tensor.layout is torch.strided:
        if not is_opaque(tensor):
            yield name, tensor
    elif tensor.layout in _PARTS:
        whole = tensor.detach()
        if tensor.layout is torch.sparse_coo:
            whole = whole.coalesce()  # it shares memory if the tensor is coalesced
        for method in _PARTS[tensor.layout]:
            yield f"{name}.{method}", getattr(whole, method)()


def plain_state(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state dict with every tensor as plain tensors."""
    return {part: plain for name, tensor in state.items() for part, plain in named_parts(name, tensor)}


def is_traceable_subclass(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a subclass with torch's protocol for its parts."""
    return hasattr(tensor, "__tensor_flatten__") and hasattr(type(tensor), "__tensor_unflatten__")


def is_opaque(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no memory that can be read, and no known parts.

    >>> is_opaque(torch.ones(2)), is_opaque(torch.nn.Parameter(torch.ones(2)))
    (False, False)
    """
    if is_traceable_subclass(tensor) or tensor.layout is not torch.strided or tensor.is_nested:
        return False
    if tensor.is_meta:
        return True
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a wrapper made by `_make_wrapper_subclass` has no memory
        return True
    return False


SLICE = 1 << 17  # elements; with fewer, starting a second thread costs more than it saves
_ELSEWHERE = 1 << 24  # on a GPU, where starting a kernel costs more than its memory


def slices_of(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Slices of tensors with equal numbers of elements, flattened.

    >>> [(a.tolist(), b.tolist()) for a, b in slices_of(torch.ones(2, 1), torch.zeros(2))]
    [([1.0, 1.0], [0.0, 0.0])]
    """
    flat = [tensor.detach().resolve_neg().reshape(-1) for tensor in tensors]
    length = SLICE if flat[0].device.type == "cpu" else _ELSEWHERE
    return zip(*(torch.split(tensor, length) for tensor in flat), strict=True)
