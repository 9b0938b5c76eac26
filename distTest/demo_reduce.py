r"""The smallest proof that ranks can talk: each gives its rank + 1, and all must get the sum.

One node:
    torchrun --nproc_per_node=2 distTest/demo_reduce.py

Two nodes, with --node_rank=1 on the second:
    NCCL_SOCKET_IFNAME=enp26s0np0 GLOO_SOCKET_IFNAME=enp26s0np0 \
        torchrun --nnodes=2 --node_rank=0 --nproc_per_node=8 \
        --master_addr=10.11.7.50 --master_port=29600 distTest/demo_reduce.py

Two terminals of one machine, with --node_rank=1 in the second:
    torchrun --nnodes=2 --node_rank=0 --nproc_per_node=1 \
        --master_addr=127.0.0.1 --master_port=29600 distTest/demo_reduce.py
"""

import os
import socket
import sys

import torch
import torch.distributed as dist


def main() -> int:
    """Return 0 if this rank got the right sum, else 1."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sum_ = torch.tensor(rank + 1, device=device)
    dist.all_reduce(sum_)
    got, right = sum_.item(), sum(range(1, ranks + 1))
    who = f"rank {rank} of {ranks} on {socket.gethostname()}, {device}"
    print(f"{who}: got {got}, right is {right}\n", end="", flush=True)
    dist.destroy_process_group()
    return int(got != right)


if __name__ == "__main__":
    sys.exit(main())
