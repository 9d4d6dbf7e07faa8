"""Who takes part: the ranks of this pipeline, and the replicas of it on a mesh of (data, pipeline)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from intarsia.errors import InputError, PartitionError, PipelineError
from intarsia.pipeline.distributed.liveness import Heartbeat

_DATA = ("data", "dp", "replicate")
_PIPELINE = ("pipeline", "pp", "stage")
_SHARD = ("shard", "fsdp", "dp_shard")
_BUCKET = 25 * 2**20  # bytes that travel together, as in DistributedDataParallel


class World:
    """The groups of one rank: its pipeline, the same stages in other replicas, and everyone.

    Where a dimension of the mesh shards stages, replicas share them: each steps over a batch of its own, and
    `fully_shard` brings parameters and gradients together. Ranks go by their numbers in torch.distributed,
    in every message.
    """

    pipeline: dist.ProcessGroup | None
    data: dist.ProcessGroup | None
    same: dist.ProcessGroup | None
    everyone: dist.ProcessGroup | None
    shard: DeviceMesh | None  # over which torch shards stages; with replicas it sums their gradients too
    rank: int
    size: int
    me: int  # among the ranks of torch.distributed

    def __init__(self, group: dist.ProcessGroup | None, mesh: DeviceMesh | None) -> None:
        if mesh is None:
            self.pipeline, self.data, self.everyone = group, None, group
            self.same, self.shard = None, None
            table = torch.tensor([dist.get_process_group_ranks(group or dist.group.WORLD)])
        else:
            if group is not None:
                raise PartitionError("give group= or mesh=, not both: the mesh has the groups")
            names = mesh.mesh_dim_names
            data, shard, pipeline = _axes(mesh)
            assert names is not None and pipeline is not None
            self.pipeline = mesh.get_group(names[pipeline])
            others = [axis for axis in (data, shard) if axis is not None]
            table = mesh.mesh.permute(*others, pipeline).reshape(-1, mesh.mesh.shape[pipeline])
            self.shard = None if shard is None else mesh[tuple(names[axis] for axis in others)]
            self.data = mesh.get_group(names[data]) if data is not None and shard is None else None
            columns = [dist.new_group(c) for c in table.T.tolist()] if len(others) == 2 else []
            self.same = columns[dist.get_rank(self.pipeline)] if columns else mesh.get_group(names[others[0]])
            whole = table.numel() == dist.get_world_size()
            self.everyone = None if whole else dist.new_group(table.flatten().tolist())
        self.rank, self.size = dist.get_rank(self.pipeline), dist.get_world_size(self.pipeline)
        self.table: list[list[int]] = table.tolist()
        self.replicas: int = len(self.table)
        self.me = dist.get_rank()
        self.replica: int = next(i for i, row in enumerate(self.table) if self.me in row)
        # Everyone, in the order of a gather.
        self.ranks: list[int] = sorted(r for row in self.table for r in row)
        self.heartbeat: Heartbeat = Heartbeat(self.ranks, self.me)

    @property
    def mine(self) -> list[int]:
        """The ranks of this rank's pipeline, by their place in it."""
        return self.table[self.replica]

    def gather(self, mine: Tensor) -> dict[int, Tensor]:
        """A tensor of every rank of every replica, by rank."""
        gathered = [torch.empty_like(mine) for _ in self.ranks]
        with self.watched("between steps"):
            dist.all_gather(gathered, mine, group=self.everyone)
        return dict(zip(self.ranks, gathered, strict=True))

    def gather_objects(self, mine: Any) -> dict[int, Any]:
        """A value of every rank, by rank."""
        gathered: list[Any] = [None] * len(self.ranks)
        with self.watched("between steps"):
            dist.all_gather_object(gathered, mine, group=self.everyone)
        return dict(zip(self.ranks, gathered, strict=True))

    @contextmanager
    def watched(self, when: str) -> Iterator[None]:
        """Turn a connection that broke into a `PipelineError` that names the rank at its other end."""
        try:
            yield
        except RuntimeError as error:
            if not self.heartbeat.broke(error):
                raise
            raise PipelineError(f"rank {self.me} lost {self.heartbeat.lost()} {when}: {error}") from error

    def begin_equal(self, tensors: Sequence[Tensor]) -> None:
        """Let every replica begin with the first one's parameters and buffers."""
        if self.same is not None:
            source = dist.get_global_rank(self.same, 0)
            for tensor in tensors:
                dist.broadcast(tensor.detach(), source, group=self.same)

    @contextmanager
    def summing(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """A step: on its way out, the gradients it made are summed over the replicas.

        What was accumulated before the step is already a sum, so it is set aside meanwhile.
        """
        if self.data is None:
            yield
            return
        learning = [p for p in parameters if p.requires_grad]
        before = [p.grad for p in learning]
        for parameter in learning:
            parameter.grad = None
        yield
        for parameter in learning:  # a parameter that one replica did not use may be used by another
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for bucket in _buckets([p.grad for p in learning if p.grad is not None]):
            flat = torch.cat([g.reshape(-1) for g in bucket])
            dist.all_reduce(flat, group=self.data)
            done = 0
            for grad in bucket:
                grad.copy_(flat[done : done + grad.numel()].view_as(grad))
                done += grad.numel()
        for parameter, earlier in zip(learning, before, strict=True):
            if earlier is not None and parameter.grad is not None:
                parameter.grad = earlier.add_(parameter.grad)

    def agreed_seed(self, seed: int | None) -> int:
        """The seed of all ranks: the one that was given, or the first rank's of torch."""
        seeds = self.gather_objects((seed, torch.initial_seed()))
        for rank, (other, _) in seeds.items():
            if other != seed:
                raise PartitionError(f"rank {self.me} has seed={seed}, and rank {rank} seed={other}")
        agreed = seeds[self.ranks[0]][1] if seed is None else seed
        return agreed % 2**63  # as checkpoints hold it

    def sum_over_replicas(self, value: Tensor) -> Tensor:
        """A number summed over the same rank of every replica."""
        if self.same is not None:
            dist.all_reduce(value, group=self.same)
        return value

    def share(self, tensor: Tensor, axis: int = 0) -> Tensor:
        """This replica's part of a batch that all replicas together step over."""
        if tensor.shape[axis] % self.replicas:
            raise InputError(
                f"a batch of {tensor.shape[axis]} samples does not divide among {self.replicas} replicas"
            )
        return tensor.chunk(self.replicas, axis)[self.replica]


def _axes(mesh: DeviceMesh) -> tuple[int | None, int | None, int | None]:
    """Which dimension of the mesh replicates, which shards stages, and which is the pipeline."""
    names = mesh.mesh_dim_names
    if names is None:
        raise PartitionError("the mesh's dimensions have no names; give mesh_dim_names=('data', 'pipeline')")
    kinds = (_DATA, _SHARD, _PIPELINE)
    data, shard, pipeline = (next((i for i, n in enumerate(names) if n in kind), None) for kind in kinds)
    known = [axis for axis in (data, shard, pipeline) if axis is not None]
    if pipeline is None or len(known) < 2 or len(known) != len(names):
        raise PartitionError(
            f"the mesh's dimensions are called {names}; one must be of {', '.join(_PIPELINE)}, beside one of"
            f" {', '.join(_DATA)}, one of {', '.join(_SHARD)}, or both, and no others: tensor parallel plans"
            " need the model's own nn.Linear modules, which stages cut by the graph do not call"
        )
    return data, shard, pipeline


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one dtype, in order, some megabytes at a time."""
    by_kind: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same in by_kind.values():
        bucket: list[Tensor] = []
        for tensor in same:
            bucket.append(tensor)
            if sum(t.nbytes for t in bucket) >= _BUCKET:
                yield bucket
                bucket = []
        if bucket:
            yield bucket
