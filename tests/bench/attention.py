"""Time ops.attention beside PyTorch's fused attention on this CPU, forward and backward, in one run.

    python tests/bench/attention.py [--rows 4 --seq-len 512 --heads 4 --head-dim 64]

The two alternate, so that a drift of the machine cancels; the medians and their ratio are printed.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[2]))
from kernels import ops


def fused(q, k, v):
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    args = parser.parse_args()
    shape = (args.rows, args.seq_len, args.heads, args.head_dim)
    dtype = getattr(torch, args.dtype)
    q, k, v = (torch.randn(shape).to(dtype).requires_grad_() for _ in range(3))
    gradient = torch.randn(shape).to(dtype)
    ways = {"fused": torch.compile(fused, dynamic=False), "ours": torch.compile(ops.attention, dynamic=False)}
    seconds = {name: [] for name in ways}
    for repeat in range(args.repeats + 3):
        for name, way in ways.items():
            began = time.perf_counter()
            way(q, k, v).backward(gradient)
            if repeat >= 3:
                seconds[name].append(time.perf_counter() - began)
    for name, times in seconds.items():
        print(f"{name:6s} {1e3 * statistics.median(times):8.2f} ms (best {1e3 * min(times):.2f})")
    print(f"ratio  {statistics.median(seconds['fused']) / statistics.median(seconds['ours']):8.2f} x faster")


if __name__ == "__main__":
    main()
