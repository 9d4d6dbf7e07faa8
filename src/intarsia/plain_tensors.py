"""Tensors taken apart: the plain tensors that a subclass, a sparse or a jagged tensor consists of."""

from __future__ import annotations

import torch
from torch import nn

_PLAIN = (torch.Tensor, nn.Parameter)


def plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with memory of their own that a tensor consists of; a plain tensor is its own only part.

    A subclass says by torch's protocol, `__tensor_flatten__`, what it holds. Nothing is known of the inside
    of one without the protocol, nor of a tensor of another layout: such a tensor has no parts.

    >>> [part.tolist() for part in plain_tensors(torch.eye(2).to_sparse_csr())]
    [[0, 1, 2], [0, 1], [1.0, 1.0]]
    """
    if type(tensor) in _PLAIN and tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_meta):
        return [tensor]
    if is_traceable_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        return [part for name in names for part in plain_tensors(getattr(tensor, name))]
    if tensor.layout is torch.strided:
        return [] if is_opaque(tensor) else [tensor]
    if tensor.layout is torch.sparse_coo:
        whole = tensor.detach().coalesce()  # shares the memory of one that is coalesced already
        return [whole.indices(), whole.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def is_traceable_subclass(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a subclass that can be taken apart by torch's protocol."""
    return hasattr(tensor, "__tensor_flatten__") and hasattr(type(tensor), "__tensor_unflatten__")


def is_opaque(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no memory that can be read, and nothing says what it consists of.

    >>> is_opaque(torch.ones(2)), is_opaque(torch.nn.Parameter(torch.ones(2)))
    (False, False)
    """
    if is_traceable_subclass(tensor) or tensor.layout is not torch.strided:
        return False
    if tensor.is_nested or tensor.is_meta:
        return True
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a wrapper made by `_make_wrapper_subclass` has no memory
        return True
    return False
