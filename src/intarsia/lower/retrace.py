"""A program traced again with its operators decomposed, without a look at every operator that there is.

`run_decompositions` gives each of 500 composite operators a rule for every call and takes it away again,
which is most of the time for a small program (torch 2.13). Its parts are private: where a name is missing,
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

_composites_of: dict[frozenset[str], frozenset[Any]] = {}  # the last set, by what the dispatcher knew then


def decomposed(program: ExportedProgram, table: dict[Any, Decomposition]) -> ExportedProgram:
    """`program.run_decompositions(table)`, sooner.

    For each call torch gives all composite operators of all libraries, some five hundred, a rule to follow
    while it traces, and takes it away again, however small the program is. Those whose rule is their own
    kernel, most of them, need none; the others are found once.
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
    known = _composites_of[names]
    rules: dict[Any, Any] = dict.fromkeys(known - table.keys(), whole)
    rules |= {op: table[op] for op in known & table.keys() if not _is_own_kernel(op, table[op])}
    with torch.no_grad(), kept_open(), _without_gradients(program):
        retraced: ExportedProgram = decompose(
            program,
            cia_to_decomp=rules,
            python_decomp_table={op: rule for op, rule in table.items() if op not in known},
            joint_loss_index=None,
            decompose_custom_triton_ops=False,
        )
    return retraced


@contextmanager
def _without_gradients(program: ExportedProgram) -> Iterator[None]:
    """Subclasses of tensors among the weights require no gradients meanwhile.

    torch 2.13 takes them apart and lets each part require gradients as the whole does, integers too, which is
    an error. Weights that torchao quantizes require none, but do after transformers has loaded them.
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
    """What `run_decompositions` itself is made of; None where torch has it no longer."""
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
