"""`intarsia.tune` on programs nobody edits: a diffusers pipeline, a transformers pipeline, a FastAPI service.

    python bench/tune.py [--only diffusers transformers fastapi] [--small] [--rounds 5]

Random weights. The whole call of each is timed as it was and tuned, in turns; answers are compared before,
while tuned, and after `restore()`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import intarsia

Program = tuple[Any, Callable[[], Any]]  # what holds the modules, and the call


@contextmanager
def diffusers_pipeline(small: bool) -> Iterator[Program]:
    """Denoising by a UNet with attention, eight steps."""
    import diffusers

    width = 16 if small else 64
    unet = diffusers.UNet2DModel(
        sample_size=16 if small else 32,
        layers_per_block=1 if small else 2,
        block_out_channels=(width, 2 * width, 4 * width),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    ).eval()
    pipe = diffusers.DDPMPipeline(unet=unet, scheduler=diffusers.DDPMScheduler(num_train_timesteps=64))
    pipe.set_progress_bar_config(disable=True)

    def draw() -> Any:
        seed = torch.Generator().manual_seed(0)
        return pipe(batch_size=1, num_inference_steps=8, output_type="np", generator=seed).images

    yield pipe, draw


@contextmanager
def transformers_pipeline(small: bool) -> Iterator[Program]:
    """Text generation by a Llama-like decoder, sixteen tokens."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    width = 64 if small else 512
    config = transformers.LlamaConfig(
        vocab_size=500,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=2 if small else 6,
        num_attention_heads=8,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(500)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0")
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    prompt = " ".join(f"w{i}" for i in range(3, 35))
    asked = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}
    yield pipe, lambda: pipe(prompt, **asked)[0]["generated_text"]


@contextmanager
def fastapi_service(small: bool) -> Iterator[Program]:
    """Sentences of three lengths through an encoder, by HTTP requests in one process."""
    import fastapi
    import transformers
    from fastapi.testclient import TestClient

    width = 64 if small else 384
    config = transformers.BertConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=2 if small else 6,
        num_attention_heads=8,
        vocab_size=500,
    )
    model = transformers.BertForSequenceClassification(config).eval()
    app = fastapi.FastAPI()

    @app.get("/{length}")
    def answer(length: int) -> list[float]:
        with torch.inference_mode():
            ids = torch.arange(length)[None] % 500
            return [float(score) for score in model(input_ids=ids).logits[0]]

    with TestClient(app) as client:
        yield app, lambda: [client.get(f"/{length}").json() for length in (16, 48, 32)]


PROGRAMS = {
    "diffusers": diffusers_pipeline,
    "transformers": transformers_pipeline,
    "fastapi": fastapi_service,
}


def is_equal(found: Any, expected: Any) -> bool:
    if isinstance(expected, str):
        return bool(found == expected)
    return bool(np.allclose(found, expected, rtol=1e-3, atol=1e-3))


def row(name: str, small: bool, rounds: int) -> list[str]:
    torch.manual_seed(0)
    with PROGRAMS[name](small) as (target, call):
        before = call()
        tuned = intarsia.tune(target, call, rounds=rounds)
        print(f"{name}: {tuned}", flush=True)
        kept, equal = list(tuned.placed), is_equal(call(), before)
        times = [tuned.before, tuned.after]
        tuned.restore()
        restored = is_equal(call(), before)
    took = ["-" if timing is None else f"{timing.median * 1e3:.1f}" for timing in times]
    said = [f"{tuned.speedup:.2f}", str(len(kept)), *("yes" if one else "no" for one in (equal, restored))]
    return [name, *took, *said]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=list(PROGRAMS), default=list(PROGRAMS))
    parser.add_argument("--small", action="store_true", help="models of a second")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    table = Table(title=f"intarsia.tune, {torch.get_num_threads()} threads")
    columns = ("program", "before, ms", "after, ms", "times faster", "modules", "equal", "restored")
    for column in columns:
        table.add_column(column, justify="left" if column == "program" else "right")
    for name in asked.only:
        table.add_row(*row(name, asked.small, asked.rounds))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
