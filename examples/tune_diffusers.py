"""Speed up a diffusers pipeline without editing it: `tune` finds the slow modules and compiles them.

    python examples/tune_diffusers.py

Needs `pip install 'intarsia[all]' diffusers`. The weights are random, so nothing is downloaded; with
`DDPMPipeline.from_pretrained(...)` the rest stays as it is.
"""

from __future__ import annotations

import diffusers
import torch

import intarsia

torch.manual_seed(0)
unet = diffusers.UNet2DModel(
    sample_size=16, layers_per_block=1, block_out_channels=(16, 32), norm_num_groups=8,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
).eval()  # fmt: skip
pipe = diffusers.DDPMPipeline(unet=unet, scheduler=diffusers.DDPMScheduler(num_train_timesteps=64))
pipe.set_progress_bar_config(disable=True)


def draw():
    seed = torch.Generator().manual_seed(0)
    return pipe(batch_size=1, num_inference_steps=4, output_type="np", generator=seed).images


before = draw()
tuned = intarsia.tune(pipe, draw, only_if_faster=False)  # False: this UNet is too small to gain
print(tuned)  # which modules run compiled, and the time of the whole call before and after
after = draw()
assert abs(before - after).max() < 1e-3
tuned.restore()
