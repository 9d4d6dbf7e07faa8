"""Memory of a decoder whose weights have 4 bits: loaded, while it compiles, compiled, and loaded again.

    python bench/packed_memory.py [--size half] [--engines default onnxruntime ...] [--generation] [--cache]

A Llama-like decoder of random integers in groups of 128 is written as a folder of Hugging Face, in the layout
`pack-quantized` of compressed-tensors. Every engine compiles it in a process of its own, which has compiled a
tiny decoder before: what libraries take is there when the figures begin. "default" is the search between all
engines. All figures are resident memory beyond that (/proc/self/smaps_rollup), in MiB and as times the bytes
of all weights in the folder. A page that is mapped several times counts once. "private" leaves out pages of
files, which the system takes back where it needs memory. The benchmark gives no memory back itself, neither
by `malloc_trim` nor otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

# hidden, intermediate, layers, heads, heads of keys, vocabulary
SIZES = {
    "tiny": (256, 512, 2, 4, 2, 256),
    "fifth": (1024, 2816, 14, 16, 4, 4096),  # 0.17 billion weights
    "half": (1536, 5120, 16, 24, 6, 8192),  # 0.5 billion weights
}
_GROUP = 128
_ANSWER = "memory: "


def write_folder(folder: Path, size: str) -> None:
    import torch
    from generate import llama_config, settings_of_packed  # beside this file, which runs as a script
    from safetensors.torch import save_file
    from transformers import LlamaForCausalLM

    config = llama_config(SIZES[size], 512, architectures=["LlamaForCausalLM"])
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    tensors = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            rows, columns = module.weight.shape
            words = torch.randint(-(2**31), 2**31, (rows, columns // 8), dtype=torch.int32)
            scale = torch.rand(rows, columns // _GROUP) * 0.1 / columns**0.5
            tensors |= {f"{name}.weight_packed": words, f"{name}.weight_scale": scale}
        else:
            own = module.named_parameters(recurse=False)
            tensors |= {f"{name}.{key}": torch.rand(weight.shape) for key, weight in own}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    settings = settings_of_packed(4, {"strategy": "group", "group_size": _GROUP})
    (folder / "config.json").write_text(json.dumps(config.to_dict() | {"quantization_config": settings}))


def resident() -> dict[str, int]:
    """Bytes that are in memory now; private ones are no pages of files."""
    fields = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, size = line.split()[:2]
        fields[name.rstrip(":")] = int(size) * 1024
    return {"all": fields["Pss"], "private": fields["Anonymous"]}


@contextlib.contextmanager
def peak() -> Iterator[dict[str, int]]:
    """The most that was in memory within the block, of a sample every 20 ms."""
    most = resident()
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            most.update({key: max(size, most[key]) for key, size in resident().items()})

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    yield most
    done.set()
    watcher.join()


def measure(engine: str, folders: list[str], generation: bool) -> None:
    """The figures of one engine, in this process; the first folder is of the tiny decoder."""
    import torch

    alone = resident()
    import intarsia

    ids = torch.tensor([[1, 5, 9, 7]])
    engines = None if engine == "default" else [engine]

    def load(folder: str) -> Any:
        return intarsia.load_pretrained(folder, dtype=torch.float32)

    def compiled(model: Any) -> Any:
        if generation:
            return intarsia.compile_generation(model, max_length=64, padding=False, engines=engines)
        return intarsia.compile(model, (ids,), {"use_cache": False}, engines=engines)

    with contextlib.suppress(RuntimeError):
        tiny = load(folders[0])
        compiled(tiny)
        del tiny
    gc.collect()
    before = resident()
    figures: dict[str, dict[str, int]] = {}
    model = load(folders[1])
    figures["loaded"] = resident()
    with peak() as figures["peak while compiling"]:
        fast = compiled(model)
    figures["compiled"] = resident()
    run = model if generation else fast
    with torch.no_grad():
        run.generate(ids, max_new_tokens=16, do_sample=False) if generation else run(ids, use_cache=False)
    figures["after a call"] = resident()
    file = Path(folders[1], f"{engine}.intarsia")
    if not generation:
        del model
    del run
    gc.collect()
    figures["without the model"] = resident()
    with peak() as figures["peak while saving"]:
        (intarsia.generation.save if generation else intarsia.save)(fast, file)
    figures["saved"] = resident()
    if generation:
        fast.restore()
    del fast
    gc.collect()
    emptied = resident()
    with peak() as figures["peak while loading the file"]:
        again = intarsia.generation.load(file, model) if generation else intarsia.load(file)
    again.generate(ids, max_new_tokens=16, do_sample=False) if generation else again(ids, use_cache=False)
    figures["the file loaded"] = {key: size - emptied[key] + before[key] for key, size in resident().items()}
    print(f"{_ANSWER}{json.dumps({'file': file.stat().st_size})}")
    libraries = {key: before[key] - alone[key] for key in before}
    beyond = {name: {key: size - before[key] for key, size in row.items()} for name, row in figures.items()}
    print(f"{_ANSWER}{json.dumps({'libraries': libraries, **beyond})}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=list(SIZES), default="half")
    parser.add_argument("--engines", nargs="+", default=["onnxruntime", "openvino"])
    parser.add_argument("--generation", action="store_true", help="programs for prompts and tokens")
    parser.add_argument("--cache", action="store_true", help="store the compile in the build cache")
    parser.add_argument("--write", help=argparse.SUPPRESS)  # the folder to write
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)  # the folders to measure
    wish = parser.parse_args()
    if wish.write:
        write_folder(Path(wish.write), wish.size)
    elif wish.measure:
        measure(wish.engines[0], wish.measure, wish.generation)
    else:
        compare(wish)


def compare(wish: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as top:
        folders = [str(Path(top, size)) for size in ("tiny", wish.size)]
        for folder, size in zip(folders, ("tiny", wish.size), strict=True):
            Path(folder).mkdir()
            subprocess.run([sys.executable, __file__, "--write", folder, "--size", size], check=True)
        weights = Path(folders[1], "model.safetensors").stat().st_size
        machine = f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}"
        print(f"{datetime.date.today()}, {machine}; {wish.size}: weights of {weights / 2**20:.0f} MiB")
        environment = {**os.environ, "INTARSIA_CACHE": str(Path(top, "cache"))}
        environment["INTARSIA_CACHE_GB"] = "10" if wish.cache else "0"
        for engine in wish.engines:
            command = [sys.executable, __file__, "--measure", *folders, "--engines", engine]
            command += ["--generation"] if wish.generation else []
            ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            lines = [line for line in ran.stdout.splitlines() if line.startswith(_ANSWER)]
            print(f"\n{engine}{'MiB':>28}{'times':>9}{'private, MiB':>15}{'times':>9}")
            for line in lines:
                for name, row in json.loads(line.removeprefix(_ANSWER)).items():
                    sizes = [row] if isinstance(row, int) else row.values()
                    shown = "".join(f"{size / 2**20:>12.0f}{size / weights:>9.2f}" for size in sizes)
                    print(f"{name:30}{shown}")


if __name__ == "__main__":
    main()
