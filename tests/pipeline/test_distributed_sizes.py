"""Batches of any size under every schedule, and what a loss is a mean over."""

from __future__ import annotations

import functools

import pytest
import torch
from rank_launch import assert_passed, launch
from torch import nn
from torch.nn import functional as F

from intarsia.errors import PartitionError
from intarsia.pipeline.distributed.loss import MicrobatchLoss, token_count


@pytest.mark.full
def test_shorter_batches_under_every_schedule():
    assert_passed(launch("rank_sizes.shorter", "rank_sizes.named"), "shorter DualPipeV ok", "named ok")


@pytest.mark.parametrize("loss", [F.mse_loss, nn.L1Loss(), nn.BCEWithLogitsLoss()])
def test_means_over_elements_are_known(loss):
    assert token_count(loss, torch.zeros(3, 4)) == 12.0


def test_other_losses_are_not_known():
    assert token_count(nn.MSELoss(reduction="sum"), torch.zeros(3, 4)) is None
    assert token_count(lambda output, target: output.sum(), torch.zeros(3, 4)) is None


@pytest.mark.parametrize(
    ("loss", "reduction"),
    [
        (nn.MSELoss(reduction="sum"), "sum"),
        (functools.partial(F.cross_entropy, reduction="sum"), "sum"),
        (nn.KLDivLoss(reduction="batchmean"), "mean"),
        (F.cross_entropy, "mean"),
    ],
)
def test_a_loss_states_whether_it_is_a_sum(loss, reduction):
    assert MicrobatchLoss(loss, None, None, True).reduction == reduction
    assert MicrobatchLoss(loss, None, "mean", True).reduction == "mean"


def test_a_sum_needs_no_weights():
    with pytest.raises(PartitionError, match="loss_weight has no effect with reduction='sum'"):
        MicrobatchLoss(nn.MSELoss(reduction="sum"), "equal", None, True)
