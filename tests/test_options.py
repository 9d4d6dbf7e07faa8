"""What `compile` takes, every entry point takes; wrong values raise before anything runs."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

import intarsia
from intarsia import Measured
from intarsia.errors import InputError, IntarsiaError
from intarsia.options import CALL_ARGUMENTS, Accuracy, CompileOptions, option_names
from intarsia.partition import PartitionOptions
from intarsia.partition.options import PartitionChoices

X = torch.ones(2, 4)


def test_the_names_are_those_of_compile() -> None:
    arguments = [name for name in inspect.signature(intarsia.compile).parameters if name != "choices"]
    assert {*arguments, *PartitionChoices.__annotations__} == {*option_names(), *CALL_ARGUMENTS}


def test_the_defaults_are_those_of_compile() -> None:
    parameters = inspect.signature(intarsia.compile).parameters
    for name, value in CompileOptions().keywords().items():
        if name != "options":  # None means a PartitionOptions without any wish
            assert parameters[name].default == value


@pytest.mark.parametrize(
    "given",
    [
        {"engines": "pytorch"},
        {"partition": "greedy"},
        {"partition": Measured(budget_s=1)},
        {"tolerance": 0.02, "precision": "bf16", "examples": [(X,)]},
        {"rewrite": False, "verify": False, "cuda_graphs": False, "build_limit_s": 10.0},
        {"options": PartitionOptions(min_block_size=2), "fallback": "eager"},
        {"min_block_size": 2, "torch_executed_ops": ["aten::relu"], "memory_budget": {"openvino": 10}},
    ],
)
def test_explain_takes_what_compile_takes(given: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    assert intarsia.explain(model, (X,), **given).nodes
    assert intarsia.compile(model, (X,), **given)(X).shape == (2, 4)


@pytest.mark.parametrize(
    "wrong",
    [
        {"verify": 1},
        {"fallback": "part"},
        {"build_limit_s": -1},
        {"cuda_graphs": "dynamic"},
        {"tolerance": 2.0},
        {"precision": "bf16"},
        {"tolerance": 0.02, "partition": "greedy"},
        {"partition": "gredy"},
        {"examples": X},
        {"rewrite": 3},
    ],
)
def test_wrong_values_raise_before_the_model_runs(wrong: dict[str, Any]) -> None:
    class Never(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError("it was run")

    for function in (intarsia.compile, intarsia.explain):
        with pytest.raises(IntarsiaError):
            function(Never(), (X,), **wrong)


def test_options_are_changed_by_the_names_of_compile() -> None:
    options = CompileOptions.of(tolerance=0.1, min_block_size=3)
    exact = options.changed(tolerance=None)
    assert exact.accuracy == Accuracy() and exact.limits.min_block_size == 3
    assert CompileOptions.of(**options.keywords()) == options
    assert options.placement.measured is not None and exact.placement.measured is None


def test_what_a_function_presets_is_no_option_of_it() -> None:
    with pytest.raises(InputError, match="fallback is not an option of tune"):
        CompileOptions.checked({"fallback": "parts"}, "tune", preset=["fallback"])
    with pytest.raises(InputError, match="args is not an option of tune"):
        CompileOptions.checked({"args": ()}, "tune")
