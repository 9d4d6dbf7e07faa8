"""Models that were quantized beforehand: the float model, and the quantized one eagerly and compiled.

    python -m bench.quantized [bert vit resnet50] [--by pt2e] [--tolerance 0.1] [--rounds 20]

Needs `pip install torchao`. `--by pt2e` takes its quantizer for x86 (activations of 8 bits by tensor, weights
by channel), shown the example once. `--by torchao` is `quantize_` with int8 dynamic activations by row. Peers
run in turns in one process; errors are against the quantized model run eagerly. With `--tolerance` the model
is compiled within it, too; `--engines` are those that may be used.
"""

from __future__ import annotations

import argparse
import copy
import os
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
from bench.specimens import specimen
from torch.utils import _pytree as pytree

import intarsia
from intarsia.cli.zoo import Specimen
from intarsia.compare import relative_error
from intarsia.timing import PAUSE_S, race


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["bert", "vit", "resnet50"])
    parser.add_argument("--by", choices=sorted(_QUANTIZERS), default="pt2e")
    parser.add_argument("--tolerance", type=float)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--engines", nargs="*")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"INTARSIA_CACHE": folder, "INTARSIA_CACHE_GB": "0"}
        for name in options.models:
            _measure(name, options)


def _measure(name: str, options: argparse.Namespace) -> None:
    thing = specimen(name, full=True)
    args, kwargs = thing.args, thing.kwargs
    quantized = _QUANTIZERS[options.by](thing)
    engines: dict[str, Any] = {"engines": options.engines} if options.engines else {}
    exact = intarsia.compile(quantized, args, kwargs, **engines)
    modules: dict[str, Callable[..., Any]] = {
        "float, eager": thing.model,
        "float, compiled": intarsia.compile(thing.model, args, kwargs, **engines),
        "quantized, eager": quantized,
        "quantized, compiled": exact,
    }
    if options.tolerance:
        short = intarsia.compile(quantized, args, kwargs, tolerance=options.tolerance, **engines)
        by = ", ".join(dict.fromkeys(short.plan.engines))
        modules[f"quantized, tolerance={options.tolerance:g} ({by})"] = short
    with torch.no_grad():
        expected = _tensors(quantized(*args, **kwargs))
        errors = {key: relative_error(_tensors(f(*args, **kwargs)), expected) for key, f in modules.items()}
        calls = {key: lambda f=f: f(*args, **kwargs) for key, f in modules.items()}
        took = race(calls, rounds=options.rounds, budget_s=180.0, warmup=1, pause_s=PAUSE_S)
    print(f"{name}, {options.by}, {torch.get_num_threads()} threads")
    for key, timing in took.items():
        print(
            f"  {key:50} median {timing.median * 1e3:8.1f} ms, best {timing.best * 1e3:8.1f} ms, "
            f"error {errors[key]:.1e}",
            flush=True,
        )
    for line in str(exact.plan).splitlines():
        if "in 8 bits on" in line:
            print(f"  {line}")


def _tensors(value: object) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _by_pt2e(thing: Specimen) -> torch.nn.Module:
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    module = torch.export.export(thing.model, thing.args, thing.kwargs).module()
    prepared = prepare_pt2e(module, quantizer)
    with torch.no_grad():
        prepared(*thing.args, **thing.kwargs)
    model: torch.nn.Module = convert_pt2e(prepared)
    return model


def _by_torchao(thing: Specimen) -> torch.nn.Module:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    model = copy.deepcopy(thing.model)
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    return model


_QUANTIZERS = {"pt2e": _by_pt2e, "torchao": _by_torchao}


if __name__ == "__main__":
    main()
