"""One process or many under torchrun: who am I, on which device, and what do we agree on."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from multilinear.layers import PolyBlock


@dataclass(frozen=True)
class Processes:
    """This process among its peers.

    >>> Processes(0, 1, torch.device("cpu")).is_main
    True
    """

    rank: int
    world: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def mean(self, value: Tensor) -> Tensor:
        """The average of `value` over all processes."""
        if self.world > 1:
            value = value.clone()
            dist.all_reduce(value)
            value /= self.world
        return value

    def agree(self, flag: bool) -> bool:
        """True everywhere if it is true in the main process."""
        if self.world == 1:
            return flag
        value = torch.tensor([float(flag)], device=self.device)
        dist.broadcast(value, 0)
        return bool(value.item())


@contextmanager
def join(device: str | None = None) -> Iterator[Processes]:
    """Join the process group that torchrun describes, if there is one, and leave it at the end.

    >>> with join("cpu") as processes: processes.world
    1
    """
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    here = torch.device(f"cuda:{local}" if kind == "cuda" else kind)
    if here.type == "cuda":
        torch.cuda.set_device(here)
    started = world > 1 and not dist.is_initialized()
    if started:
        # addresses of an earlier attempt, whose worker died, must not be found again by the next
        store, rank, world = next(iter(rendezvous("env://")))
        attempt = PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        dist.init_process_group("nccl" if here.type == "cuda" else "gloo", store=attempt, rank=rank, world_size=world)
    try:
        yield Processes(rank, world, here)
    finally:
        if started:
            dist.destroy_process_group()


def spread(model: nn.Module, processes: Processes, fsdp: bool) -> nn.Module:
    """The module to call in training: the model itself, wrapped in DDP, or sharded in place by FSDP2.

    >>> net = nn.Linear(1, 1)
    >>> spread(net, Processes(0, 1, torch.device("cpu")), fsdp=False) is net
    True
    """
    if processes.world == 1:
        return model
    if fsdp:
        from torch.distributed.fsdp import fully_shard

        for module in model.modules():
            if isinstance(module, PolyBlock):
                fully_shard(module)
        fully_shard(model)
        return model
    ids = [processes.device.index] if processes.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=ids)
