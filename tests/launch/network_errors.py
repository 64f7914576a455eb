"""Makes the real errors of torch's network: `python network_errors.py CASE`, or torchrun of it."""

import os
import signal
import socket
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.run as torchrun
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.api import PContext

SHORT = timedelta(seconds=2)


def interface() -> None:
    """One that isn't there, for gloo."""
    os.environ["GLOO_SOCKET_IFNAME"] = "nope0"
    dist.init_process_group("gloo", store=own_store(), rank=0, world_size=1, timeout=SHORT)


def own_store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, is_master=True)


def unknown_name() -> None:
    dist.TCPStore("nosuch.invalid", 29500, is_master=False, timeout=SHORT)


def loopback() -> None:
    """A machine whose name is 127.0.1.1 waits for itself."""
    with socket.socket() as probe:
        probe.bind(("127.0.1.1", 0))
        dist.TCPStore("127.0.1.1", probe.getsockname()[1], is_master=False, timeout=SHORT)


def port() -> None:
    """Taken."""
    store = own_store()
    dist.TCPStore("127.0.0.1", store.port, is_master=True, timeout=SHORT)


def alone() -> None:
    dist.init_process_group("gloo", store=own_store(), rank=0, world_size=2, timeout=SHORT)


def mesh() -> None:
    """FSDP on a mesh without a dimension to shard over, as Accelerate asks for it."""
    dist.init_process_group("gloo", store=own_store(), rank=0, world_size=1)
    print(init_device_mesh("cpu", (1,), mesh_dim_names=("dp_replicate",))["dp_shard_cp"])


def shared_memory() -> None:
    """Where /dev/shm is small."""
    torch.zeros(1 << 22).share_memory_()


def skipped() -> None:
    """Rank 1 takes no part in a collective, and stays."""
    dist.init_process_group("gloo", timeout=SHORT)
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    time.sleep(60)  # torchrun ends it


def left() -> None:
    """Rank 1 ends while rank 0 waits for it."""
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    os._exit(0)


def first() -> None:
    """Rank 0 raises; rank 1 doesn't end when it is asked to."""
    if os.environ["RANK"] == "0":
        time.sleep(2)  # rank 1 ignores the signal by then
        raise ValueError("Could not find the transformer layer class in the model")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(120)


def impatient() -> None:
    """torchrun of `first`: before SIGKILL it waits a second, not 30, which no flag sets."""
    PContext.close.__defaults__ = (None, 1)
    torchrun.main(["--standalone", "--nproc-per-node", "2", __file__, "first"])


if __name__ == "__main__":
    globals()[sys.argv[1]]()
