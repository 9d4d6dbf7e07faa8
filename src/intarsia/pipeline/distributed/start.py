"""The process group of a job that may be restarted."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous


def start_process_group(backend: str = "gloo", timeout: timedelta | None = None) -> None:
    """`torch.distributed.init_process_group`, correct also after `torchrun --max-restarts` has restarted.

    torchrun keeps one store through all restarts, and gloo finds the addresses of the processes that died in
    it and waits for them. Here every life of the job has names of its own in the store.
    """
    store, rank, world = next(iter(rendezvous("env://")))
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        backend, store=PrefixStore(f"life {life}", store), rank=rank, world_size=world, timeout=timeout
    )
