"""The process group of a job that torchrun may restart."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous


def start_process_group(backend: str = "gloo", timeout: timedelta | None = None) -> None:
    """`torch.distributed.init_process_group` that also works after a restart by `torchrun --max-restarts`.

    torchrun has one store for all restarts. gloo would find the addresses of dead processes there and wait
    for them. So each restart uses a prefix of its own in the store.
    """
    store, rank, world = next(iter(rendezvous("env://")))
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        backend, store=PrefixStore(f"restart {restart}", store), rank=rank, world_size=world, timeout=timeout
    )
