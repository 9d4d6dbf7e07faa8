"""Unmodified programs of others: a diffusers pipeline, a transformers pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import intarsia
from intarsia import generation, tuning
from intarsia.errors import InputError

pytestmark = pytest.mark.slow

ANYHOW: dict[str, Any] = {"only_if_faster": False, "rounds": 1, "least_share": 0.0}


def stable_diffusion() -> Any:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    torch.manual_seed(0)
    unet = diffusers.UNet2DConditionModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(16, 32),
        cross_attention_dim=16,
        attention_head_dim=8,
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )
    vae = diffusers.AutoencoderKL(
        block_out_channels=(16, 32),
        norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        sample_size=16,
    )
    config = transformers.CLIPTextConfig(
        vocab_size=100, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    pipe = diffusers.StableDiffusionPipeline(
        vae=vae.eval(),
        text_encoder=transformers.CLIPTextModel(config).eval(),
        tokenizer=None,
        unet=unet.eval(),
        scheduler=diffusers.DDIMScheduler(steps_offset=1, clip_sample=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_a_small_diffusers_pipeline() -> None:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    unet = diffusers.UNet2DModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(8,),
        norm_num_groups=4,
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
        add_attention=False,
    )
    pipe = diffusers.DDPMPipeline(unet=unet.eval(), scheduler=diffusers.DDPMScheduler(num_train_timesteps=8))
    pipe.set_progress_bar_config(disable=True)

    def draw() -> Any:
        seed = torch.Generator().manual_seed(0)
        return pipe(batch_size=1, num_inference_steps=2, output_type="np", generator=seed).images

    before = draw()
    with intarsia.tune(pipe, draw, **ANYHOW) as tuned:
        assert list(tuned.placed) == ["unet"] and tuned.placed["unet"].refused is None
        np.testing.assert_allclose(draw(), before, atol=1e-4)
    assert np.array_equal(draw(), before)


@pytest.mark.full
def test_a_diffusers_pipeline() -> None:
    pipe = stable_diffusion()
    words = torch.randn(1, 7, 16)

    def draw() -> Any:
        return pipe(
            prompt_embeds=words,
            negative_prompt_embeds=torch.zeros_like(words),
            num_inference_steps=2,
            height=16,
            width=16,
            output_type="np",
            generator=torch.Generator().manual_seed(0),
        ).images

    before = draw()
    tuned = intarsia.tune(pipe, draw, **ANYHOW)
    assert "unet" in tuned.placed and tuned.placed["unet"].refused is None
    np.testing.assert_allclose(draw(), before, atol=1e-4)
    assert pipe.unet.config.sample_size == 8  # whatever else the pipeline asks of its modules
    tuned.restore()
    assert np.array_equal(draw(), before)


def text_generation() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=64,
        intermediate_size=512,
        num_hidden_layers=1,
        num_attention_heads=2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    words = {"<pad>": 0, **{f"w{i}": i for i in range(1, 50)}}
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", padding_side="left"
    )
    return transformers.pipeline("text-generation", model=model, tokenizer=fast)


def test_a_transformers_pipeline(tmp_path: Path) -> None:
    """The model generates, so it is compiled as one that does, and the pipeline keeps its own sampling."""
    pipe = text_generation()

    def write() -> list[str]:
        asked = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
        return [
            str(pipe(prompt, **asked)[0]["generated_text"]) for prompt in ("w3 w4 w5", "w7 w8 w9 w10 w11")
        ]

    before = write()
    tuned = intarsia.tune(pipe, write, **ANYHOW)
    assert list(tuned.placed) == ["model"] and "2 programs" in str(tuned)
    runs = dict(tuned.placed["model"].runs)
    assert write() == before
    assert tuned.placed["model"].runs == {
        "prompt": runs["prompt"] + 2,
        "token": runs["token"] + 10,
        "own": runs["own"],
    }
    tuned.enable(False)
    assert write() == before
    tuned.enable()
    tuning.save(tuned, tmp_path / "pipe.tuned")
    tuned.restore()
    with tuning.load(tmp_path / "pipe.tuned", pipe) as loaded:
        assert write() == before
        # One prompt and three tokens are of the comparison when it was loaded.
        assert loaded.placed["model"].runs == {"prompt": 3, "token": 13, "own": 0}
    assert write() == before and "forward" not in pipe.model.__dict__


def test_prompts_of_several_lengths_in_one_call() -> None:
    """Padded on the left, as pipelines do."""
    pipe = text_generation()
    prompts = ["w3 w4 w5", "w7 w8 w9 w10 w11"]

    def write() -> list[str]:
        made = pipe(prompts, batch_size=2, max_new_tokens=4, min_new_tokens=4, do_sample=False)
        return [str(one[0]["generated_text"]) for one in made]

    before = write()
    with intarsia.tune(pipe, write, **ANYHOW) as tuned:
        (placed,) = tuned.placed.values()
        assert write() == before and placed.refused is None and list(placed.by_rows) == [2]


def test_a_model_that_cannot_generate_compiled_is_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise InputError("its cache is of another kind\nand more")

    monkeypatch.setattr(generation, "compile_generation", refuse)
    pipe = text_generation()
    asked = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    with intarsia.tune(pipe, lambda: pipe("w3 w4 w5", **asked), **ANYHOW) as tuned:
        assert tuned.left["model"] == "its cache is of another kind"
        assert any("mlp" in path for path in tuned.placed), str(tuned)


def test_a_fastapi_service() -> None:
    fastapi = pytest.importorskip("fastapi", reason="fastapi is not installed")
    from fastapi.testclient import TestClient

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)).eval()
    app = fastapi.FastAPI()

    @app.get("/{size}")
    def answer(size: int) -> list[int]:
        with torch.inference_mode():
            x = torch.linspace(-1, 1, size * 32).reshape(size, 32)
            return [int(row) for row in model(x).argmax(-1)]

    with TestClient(app) as client:

        def ask() -> list[Any]:
            return [client.get(f"/{size}").json() for size in (2, 5, 3)]

        before = ask()
        with intarsia.tune(app, ask, **ANYHOW, min_block_size=1) as tuned:
            (placed,) = tuned.placed.values()
            assert ask() == before and placed.refused is None and len(placed.programs) == 1
        assert ask() == before and "forward" not in model.__dict__
