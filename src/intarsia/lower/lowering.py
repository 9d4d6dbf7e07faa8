"""Lowering an ExportedProgram: decompositions, unlifting, passes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from intarsia.capture.output_objects import kept_open
from intarsia.errors import LoweringError
from intarsia.lower.complex import cancel_views, has_complex
from intarsia.lower.decompositions import (
    Decomposition,
    composite_names,
    composites_of,
    decomposition_table,
    registered_decompositions,
)
from intarsia.lower.fourier import COMPLEX_AND_FOURIER
from intarsia.lower.local import settle
from intarsia.lower.lowered import Lowered, note_replaced
from intarsia.lower.passes import run_passes
from intarsia.lower.purity import alias_of, may_copy, updates_statistics, written_arguments
from intarsia.lower.result_memory import output_layouts, output_views
from intarsia.lower.unlift import unlift
from intarsia.plain_tensors import is_traceable_subclass

aten = torch.ops.aten


def lower(program: ExportedProgram, has_converter: Callable[[Any], bool]) -> Lowered:
    """The program as a functional graph, decomposed where needed and simplified by the passes.

    Decomposing a program traces it again, which takes longer than everything else. A program is not traced
    again if it writes nothing and all its operators have converters. If only a few nodes write to fresh
    memory or have no converter, these are changed alone.
    """
    captured = program
    inline_grad_modes(program.graph_module)
    for module in (program.graph_module, *_bodies(program.graph_module)):
        _show_aliases(module.graph)
        refuse_overlapping_writes(module.graph)
    views, layouts = output_views(program), output_layouts(program)
    table = composites_of(program.graph, has_converter) | decomposition_table(has_converter)
    complex_values = has_complex(program.graph)
    if complex_values:
        table.update({**COMPLEX_AND_FOURIER, **registered_decompositions()})
    _free_views(program.graph)

    def needs_work(node: fx.Node) -> bool:
        return _needs_work(node, table)

    # torch replaces weights of traceable subclasses by their parts when it decomposes the whole program.
    subclasses = any(map(is_traceable_subclass, program.state_dict.values()))
    needed = subclasses or any(map(needs_work, program.graph.nodes))
    if needed and (complex_values or subclasses or not settle(program.graph, table, needs_work)):
        program = decomposed(program, table)
    lowered = unlift(program)
    if complex_values:
        cancel_views(lowered.module.graph)
    for module in (lowered.module, *_bodies(lowered.module)):
        _free_views(module.graph)
        run_passes(module)
    notes = (*lowered.notes, *lowered.module.meta.get("left", ()))
    return replace(lowered, program=captured, views=views, layouts=layouts, notes=notes)


def _bodies(module: fx.GraphModule) -> list[fx.GraphModule]:
    """The graphs inside a graph: bodies of control flow, at any depth."""
    return [inner for inner in module.modules() if isinstance(inner, fx.GraphModule) and inner is not module]


def _show_aliases(graph: fx.Graph) -> None:
    """Replace calls that return their input itself by aliases: their schemas hide it (torch 2.13).

    A write to the result of a dropout in evaluation was taken for one to fresh memory, and was lost.
    """
    writes = any(getattr(getattr(n.target, "_schema", None), "is_mutable", False) for n in graph.nodes)
    for node in graph.nodes:
        if writes and _returns_its_input(node):
            note_replaced(node, [node.target])
            node.target, node.args = aten.alias.default, node.args[:1]


def _returns_its_input(node: fx.Node) -> bool:
    if node.target is aten.dropout.default:
        _, probability, trains = node.args
        return trains is False or probability == 0.0  # type: ignore[return-value]
    if node.target is not aten.type_as.default:
        return False
    one, other = (source.meta["val"] for source in node.args)  # type: ignore[union-attr]
    return (one.dtype, one.device) == (other.dtype, other.device)


def _free_views(graph: fx.Graph) -> None:
    """Replace views by reshapes: a view assumes the strides of the trace, and engines have their own."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in (aten.view.default, aten._unsafe_view.default):
            note_replaced(node, [node.target])
            node.target = aten.reshape.default


def _needs_work(node: fx.Node, table: dict[Any, Any]) -> bool:
    if node.op != "call_function":
        return False
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return True  # export does not decompose bodies
    if not isinstance(target, torch._ops.OpOverload):
        # torch.vmap leaves functions on wrapped tensors in the graph, which tracing again resolves.
        return getattr(target, "__module__", "").startswith("torch._functorch")
    if target is aten.sym_size.int:
        return False  # its rule in torch's table gives the same node
    if target._schema.is_mutable or target in table:
        return True
    return bool(updates_statistics(node))


def inline_grad_modes(module: fx.GraphModule) -> None:
    """Inline the body of every `wrap_with_set_grad_enabled`."""
    wrap = getattr(torch.ops.higher_order, "wrap_with_set_grad_enabled", None)
    for node in list(module.graph.nodes):
        if node.op == "call_function" and wrap is not None and node.target is wrap:
            _inline(module.graph, node, getattr(module, str(node.args[1].target)))
    module.recompile()


def _inline(graph: fx.Graph, node: fx.Node, body: fx.GraphModule) -> None:
    inline_grad_modes(body)
    operands = iter(node.args[2:])
    copied: dict[fx.Node, Any] = {}
    returned: Any = ()
    with graph.inserting_before(node):
        for inner in body.graph.nodes:
            if inner.op == "placeholder":
                copied[inner] = next(operands)
            elif inner.op == "output":
                returned = fx.map_arg(inner.args[0], copied.__getitem__)
            else:
                if inner.op == "get_attr" and not hasattr(graph.owning_module, str(inner.target)):
                    setattr(graph.owning_module, str(inner.target), getattr(body, str(inner.target)))
                copied[inner] = graph.node_copy(inner, copied.__getitem__)
    for user in list(node.users):
        assert user.target is operator.getitem, f"{user} reads all results of {node} at once"
        user.replace_all_uses_with(returned[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)


_EXPANSIONS = (
    "aten::expand",
    "aten::expand_as",
    "aten::broadcast_to",
    "aten::broadcast_tensors",
    "aten::meshgrid",
)


def refuse_overlapping_writes(graph: fx.Graph) -> None:
    """Raise LoweringError if a node changes an expanded tensor, or a view of one, in place."""
    for node in graph.nodes:
        for value in written_arguments(node):
            expanded = _expanded(value)
            if expanded is not None:
                raise LoweringError(
                    f"{node.target} ({node.name}) changes a view of {expanded.name}"
                    f" ({expanded.target}) in place,"
                    " which may contain the same memory several times; clone() it before writing to it"
                )


def _expanded(node: fx.Node) -> fx.Node | None:
    """The operator that expanded a tensor or its base; None if none did."""
    at: fx.Node | None = node
    while at is not None:
        if isinstance(at.target, torch._ops.OpOverload) and at.target._schema.name in _EXPANSIONS:
            return at
        base = alias_of(at)
        if base is not None and may_copy(at) and _strides(at) != _strides(base):
            return None  # the operator copied
        at = base
    return None


def _strides(node: fx.Node) -> list[str]:
    """The strides as text, since comparing symbolic sizes would add guards."""
    value = node.meta.get("val")
    return list(map(str, value.stride())) if isinstance(value, torch.Tensor) else []


# Tracing a program again with its operators decomposed.
#
# `run_decompositions` sets a rule for each of 500 composite operators at every call and removes it again,
# which takes most of the time for a small program (torch 2.13). Its functions are private: if a name is
# missing, `run_decompositions` itself is called, and a test compares both.


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
