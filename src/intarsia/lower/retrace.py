"""Tracing a program again with its operators decomposed.

`run_decompositions` sets a rule for each of 500 composite operators at every call and removes it again, which
takes most of the time for a small program (torch 2.13). Its functions are private: if a name is missing,
`run_decompositions` itself is called, and a test compares both.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.export import ExportedProgram

from intarsia.capture.output_objects import kept_open
from intarsia.lower.decompositions import Decomposition, composite_names
from intarsia.plain_tensors import is_traceable_subclass

_composites_of: dict[frozenset[str], frozenset[Any]] = {}  # the last set, by the dispatcher's names


def decomposed(program: ExportedProgram, table: dict[Any, Decomposition]) -> ExportedProgram:
    """`program.run_decompositions(table)`, but faster.

    Most composite operators decompose by their own kernel and need no rule. The others are found once.
    """
    private = _private()
    names = composite_names()
    if private is None or names is None:
        with torch.no_grad(), kept_open(), _without_gradients(program):
            return program.run_decompositions(table)  # type: ignore[no-any-return]
    decompose, composites, whole = private
    if names not in _composites_of:
        _composites_of.clear()
        _composites_of[names] = frozenset(composites())
    composite = _composites_of[names]
    rules: dict[Any, Any] = dict.fromkeys(composite - table.keys(), whole)
    rules |= {op: table[op] for op in composite & table.keys() if not _is_own_kernel(op, table[op])}
    with torch.no_grad(), kept_open(), _without_gradients(program):
        retraced: ExportedProgram = decompose(
            program,
            cia_to_decomp=rules,
            python_decomp_table={op: rule for op, rule in table.items() if op not in composite},
            joint_loss_index=None,
            decompose_custom_triton_ops=False,
        )
    return retraced


@contextmanager
def _without_gradients(program: ExportedProgram) -> Iterator[None]:
    """In the `with` block, weights that are tensor subclasses require no gradients.

    torch 2.13 replaces them by their parts and makes each part require gradients, integers too, which is an
    error. torchao's weights require no gradients, but do after transformers has loaded them.
    """
    weights = program.state_dict.values()
    required = [weight for weight in weights if is_traceable_subclass(weight) and weight.requires_grad]
    for weight in required:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in required:
            weight.requires_grad_()


def _is_own_kernel(operator: Any, rule: Any) -> bool:
    return isinstance(rule, functools.partial) and rule.keywords.get("kernel") is operator


def _private() -> tuple[Any, Any, Any] | None:
    """The functions that `run_decompositions` consists of; None if torch has them no longer."""
    try:
        from torch._export.utils import _collect_all_valid_cia_ops, _special_op_to_preserve_cia
        from torch.export.exported_program import (
            _decompose_exported_program,
            _disable_prexisiting_fake_mode,
        )
    except ImportError:
        return None
    decompose = _disable_prexisiting_fake_mode(_decompose_exported_program)  # type: ignore[no-untyped-call]
    return decompose, _collect_all_valid_cia_ops, _special_op_to_preserve_cia
