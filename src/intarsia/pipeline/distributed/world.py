"""The ranks of a pipeline: the replicas and ranks that share its stages, and which of them died."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore

from intarsia.errors import InputError, PartitionError, PipelineError
from intarsia.pipeline.distributed.placement import own_part
from intarsia.pipeline.stages.tied import dense_gradient, global_rank, gradients_of_step

_DATA = ("data", "dp", "replicate")
_PIPELINE = ("pipeline", "pp", "stage")
_SHARD = ("shard", "fsdp", "dp_shard")
_TENSOR = ("tensor", "tp")
_BUCKET = 25 * 2**20  # bytes that are sent together, as in DistributedDataParallel


class World:
    """The process groups of one rank: its pipeline, the same stages in other replicas, and all ranks.

    If a dimension of the mesh shards stages, replicas hold shards of them. Each replica steps over its own
    batch, and `fully_shard` gathers parameters and reduces gradients. Along a tensor dimension, ranks compute
    the same batch, each with its part of the weights; `table` has the replicas with this rank's part.
    Messages name ranks by their numbers in torch.distributed.
    """

    pipeline: dist.ProcessGroup | None
    data: dist.ProcessGroup | None  # sums gradients
    same: dist.ProcessGroup | None  # ranks with the same stages, or with other parts of them
    replicas_of_rank: dist.ProcessGroup | None  # ranks with the same part of the same stages
    everyone: dist.ProcessGroup | None
    shard: DeviceMesh | None  # torch shards stages over it, and sums the gradients of replicas
    tensor: DeviceMesh | None  # torch divides modules over it
    rank: int  # in the pipeline
    size: int  # of the pipeline
    me: int  # this rank in torch.distributed

    def __init__(self, group: dist.ProcessGroup | None, mesh: DeviceMesh | None) -> None:
        self.me = dist.get_rank()
        if mesh is None:
            self.pipeline, self.data, self.everyone = group, None, group
            self.same, self.replicas_of_rank, self.shard, self.tensor = None, None, None, None
            ranks = torch.tensor(dist.get_process_group_ranks(group or dist.group.WORLD))
            table = ranks[None]
        else:
            if group is not None:
                raise PartitionError("give group= or mesh=, not both: the mesh has the groups")
            data, shard, tensor, pipeline = _dimensions(mesh)
            self.pipeline = mesh.get_group(pipeline)
            replicas = [name for name in (data, shard) if name is not None]
            self.shard = None if shard is None else mesh[tuple(replicas)]
            self.tensor = None if tensor is None else mesh[tensor]
            self.data = mesh.get_group(data) if data is not None and shard is None else None
            self.replicas_of_rank = _group(mesh, replicas)
            same = replicas if tensor is None else [*replicas, tensor]
            self.same = _group(mesh, same) if tensor is not None else self.replicas_of_rank
            names: Any = mesh.mesh_dim_names
            own = mesh.mesh
            if tensor is not None:
                own = own.select(names.index(tensor), mesh.get_local_rank(tensor))
                names = [name for name in names if name != tensor]
            places = [names.index(name) for name in (*replicas, pipeline)]
            table = own.permute(*places).reshape(-1, dist.get_world_size(self.pipeline))
            ranks = mesh.mesh.flatten()
            whole = ranks.numel() == dist.get_world_size()
            self.everyone = None if whole else dist.new_group(ranks.tolist())
        self.rank, self.size = dist.get_rank(self.pipeline), dist.get_world_size(self.pipeline)
        self.table: list[list[int]] = table.tolist()
        self.replicas: int = len(self.table)
        self.replica: int = next(i for i, row in enumerate(self.table) if self.me in row)
        # All ranks, in the order of a gather.
        self.ranks: list[int] = sorted(ranks.tolist())
        self.heartbeat: Heartbeat = Heartbeat(self.ranks, self.me)

    @property
    def mine(self) -> list[int]:
        """The ranks of this rank's pipeline, in order."""
        return self.table[self.replica]

    def gather(self, mine: Tensor) -> dict[int, Tensor]:
        """The tensors of all ranks of all replicas, by rank."""
        gathered = [torch.empty_like(mine) for _ in self.ranks]
        with self.watched("between steps"):
            dist.all_gather(gathered, mine, group=self.everyone)
        return dict(zip(self.ranks, gathered, strict=True))

    def gather_objects(self, mine: Any) -> dict[int, Any]:
        """The values of all ranks, by rank."""
        gathered: list[Any] = [None] * len(self.ranks)
        with self.watched("between steps"):
            dist.all_gather_object(gathered, mine, group=self.everyone)
        return dict(zip(self.ranks, gathered, strict=True))

    @contextmanager
    def watched(self, when: str) -> Iterator[None]:
        """Raise `PipelineError`, with the ranks that died, for a broken connection."""
        try:
            yield
        except RuntimeError as error:
            if not self.heartbeat.broke(error):
                raise
            raise PipelineError(f"rank {self.me} lost {self.heartbeat.lost()} {when}: {error}") from error

    def begin_equal(self, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors of the first rank with the same stages to the others."""
        if self.same is not None:
            source = dist.get_global_rank(self.same, 0)
            for tensor in tensors:
                dist.broadcast(tensor.detach(), source, group=self.same)

    @contextmanager
    def summing(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """The context of a step, at whose end the gradients of the step are summed over the replicas."""
        trainable = [p for p in parameters if p.requires_grad]
        if self.data is None or not trainable:
            yield
            return
        with gradients_of_step(trainable):
            yield
            # Another replica may use a parameter that this one does not. If none does, it has no gradient.
            missing = [float(p.grad is None) for p in trainable]
            counts = torch.tensor(missing, device=trainable[0].device)
            dist.all_reduce(counts, group=self.data)
            replicas = dist.get_world_size(self.data)
            used = [p for p, count in zip(trainable, counts.tolist(), strict=True) if count < replicas]
            for bucket in _buckets([own_part(dense_gradient(p)) for p in used]):
                flat = torch.cat([g.reshape(-1) for g in bucket])
                dist.all_reduce(flat, group=self.data)
                for grad, part in zip(bucket, torch.split(flat, [g.numel() for g in bucket]), strict=True):
                    grad.copy_(part.view_as(grad))

    def agreed_seed(self, seed: int | None) -> int:
        """The seed of all ranks: `seed`, which must be equal on all, or torch's seed on the first rank."""
        seeds = self.gather_objects((seed, torch.initial_seed()))
        for rank, (other, _) in seeds.items():
            if other != seed:
                raise PartitionError(f"rank {self.me} has seed={seed}, and rank {rank} seed={other}")
        agreed = seeds[self.ranks[0]][1] if seed is None else seed
        return agreed % 2**63  # checkpoints store it as int64

    def sum_over_replicas(self, value: Tensor) -> Tensor:
        """Sum a number over the replicas of this rank, in place."""
        if self.replicas_of_rank is not None:
            dist.all_reduce(value, group=self.replicas_of_rank)
        return value

    def share(self, tensor: Tensor, axis: int = 0) -> Tensor:
        """This replica's part of a batch for all replicas."""
        if tensor.shape[axis] % self.replicas:
            raise InputError(
                f"a batch of {tensor.shape[axis]} samples does not divide among {self.replicas} replicas"
            )
        return tensor.chunk(self.replicas, axis)[self.replica]


@contextmanager
def together(group: dist.ProcessGroup | None, what: str) -> Iterator[None]:
    """If one rank raises in this context, all ranks do. Other ranks would wait for it."""
    refusal: Exception | None = None
    try:
        yield
    except Exception as error:
        refusal = error
    messages: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(messages, None if refusal is None else str(refusal), group=group)
    if refusal is not None:
        raise refusal
    for place, message in enumerate(messages):
        if message is not None:
            raise InputError(f"rank {global_rank(place, group)} {what}: {message}")


def _dimensions(mesh: DeviceMesh) -> tuple[str | None, str | None, str | None, str]:
    """The names of the dimensions that replicate, shard stages, divide modules, and of the pipeline."""
    names = mesh.mesh_dim_names
    if names is None:
        raise PartitionError("the mesh's dimensions have no names; give mesh_dim_names=('data', 'pipeline')")
    kinds = (_DATA, _SHARD, _TENSOR, _PIPELINE)
    chosen = [next((name for name in names if name in kind), None) for kind in kinds]
    data, shard, tensor, pipeline = chosen
    recognized = [name for name in chosen if name is not None]
    if pipeline is None or len(recognized) < 2 or len(recognized) != len(names):
        raise PartitionError(
            f"the mesh has the dimensions {names}; it needs one of {', '.join(_PIPELINE)}, beside it one of"
            f" {', '.join(_DATA)}, one of {', '.join(_SHARD)} or one of {', '.join(_TENSOR)}, and no others"
        )
    if shard is not None and tensor is not None:
        raise PartitionError(
            f"the mesh's dimensions {shard!r} and {tensor!r} both divide stages; use one of them"
        )
    return data, shard, tensor, pipeline


def _group(mesh: DeviceMesh, names: Sequence[str]) -> dist.ProcessGroup | None:
    """The group of ranks that differ from this one only in these dimensions; None without dimensions."""
    if len(names) < 2:
        return mesh.get_group(names[0]) if names else None
    every: Any = mesh.mesh_dim_names
    rest = [i for i, name in enumerate(every) if name not in names]
    rows = mesh.mesh.permute(*rest, *map(every.index, names)).flatten(0, len(rest) - 1).flatten(1).tolist()
    groups: list[dist.ProcessGroup] = [dist.new_group(row) for row in rows]  # every rank creates every group
    return groups[next(i for i, row in enumerate(rows) if dist.get_rank() in row)]


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one dtype and device, in order, in buckets of about `_BUCKET` bytes."""
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


# The detection of dead ranks, by heartbeats in the store of torch.distributed.
#
# A broken connection does not tell which rank died: a rank that raises because of it breaks its own
# connections too. So each rank increments a counter in the store twice a second. The first rank that loses
# a connection watches the counters, and writes the ranks whose counters stopped into the store, for the
# other ranks.


_LOST = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed? ?out|pair is not connected|NCCL", re.IGNORECASE
)
_PERIOD = 0.5
_SILENCE = 4.0  # after a broken connection, a rank without a beat for so many seconds is dead
_PATIENCE = 15.0  # seconds after which the search for a silent rank ends
_VERDICT = "lost"


def _default_store() -> Any:
    """The store of the process group, for which torch has no public name; None if there is none."""
    getter = getattr(distributed_c10d, "_get_default_store", None)
    return None if getter is None else getter()


class Heartbeat:
    """Counts for this rank, and finds ranks that stopped."""

    def __init__(self, ranks: Sequence[int], me: int) -> None:
        self.ranks: list[int] = list(ranks)
        self.me: int = me
        store = _default_store()
        self.store: PrefixStore | None = None if store is None else PrefixStore("intarsia pipeline", store)
        if self.store is not None and len(self.ranks) > 1:
            _beat(store, self.store, me)

    def broke(self, error: BaseException) -> bool:
        """Whether an error reports a broken connection."""
        return _LOST.search(str(error)) is not None

    def lost(self) -> str:
        """The text for the ranks that died; all other ranks if they are unknown."""
        others = " or ".join(f"rank {r}" for r in self.ranks if r != self.me)
        if self.store is None:
            return others
        try:
            verdict = self._verdict()
            self._wait_for_readers(verdict)
            return verdict or others
        except Exception:  # the process that holds the store died
            return "the launcher, which holds torch.distributed's store" if _has_launcher() else "rank 0"

    def _verdict(self) -> str | None:
        assert self.store is not None
        first = {r: self._count(r) for r in self.ranks if r != self.me}
        began = time.monotonic()
        while time.monotonic() - began < _PATIENCE:
            if self.store.check([_VERDICT]):
                return str(self.store.get(_VERDICT).decode())
            time.sleep(_PERIOD)
            silent = [r for r, count in first.items() if self._count(r) == count]
            if time.monotonic() - began > _SILENCE and silent:
                words = " and ".join(f"rank {r}" for r in silent)
                return str(self.store.compare_set(_VERDICT, "", words).decode())
        return None

    def _wait_for_readers(self, verdict: str | None) -> None:
        """On the rank that holds the store, wait until the other ranks have read the verdict.

        Without torchrun, the store ends with rank 0. A rank whose connection breaks later would not find the
        store, and report that rank 0 died.
        """
        assert self.store is not None
        read = self.store.add("read", 1)
        if verdict is None or self.me != 0 or _has_launcher():
            return
        living = len(self.ranks) - len(verdict.split(" and "))
        began = time.monotonic()
        while read < living and time.monotonic() - began < _PATIENCE:
            time.sleep(_PERIOD / 5)
            read = self.store.add("read", 0)

    def _count(self, rank: int) -> int:
        assert self.store is not None
        return int(self.store.add(str(rank), 0))


def _has_launcher() -> bool:
    """Whether torchrun holds the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


_beating: list[Any] = []  # the store in which this process counts


def _beat(store: Any, counts: PrefixStore, rank: int) -> None:
    """Start the counter, on one thread until the process group ends."""
    if any(other is store for other in _beating):
        return
    _beating[:] = [store]

    def run() -> None:
        try:
            while _default_store() is store:
                counts.add(str(rank), 1)
                time.sleep(_PERIOD)
        except Exception:  # the process group ended, or the process that holds the store died
            return

    threading.Thread(target=run, name="intarsia heartbeat", daemon=True).start()
