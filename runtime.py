"""What differs between machines: device, process group, dtype, compiler, peak speed, and a record of it all."""

import os
import platform
import resource
import shutil
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist

from config import ConfigError, RuntimeConfig

RECORDED = ("NEURON_", "XLA_", "TORCH_", "TORCHINDUCTOR_", "NKI_", "CUDA_VISIBLE", "OMP_", "MKL_", "KMP_", "PYTORCH_")
PACKAGES = ("torch", "numpy", "tiktoken", "tokenizers", "datasets", "pyarrow", "torch-neuronx", "neuronx-cc", "nki")


@dataclass
class Runtime:
    device: torch.device
    dtype: torch.dtype  # of activations
    backend: str  # for torch.compile, "" where nothing is compiled
    rank: int
    world: int
    local_rank: int


def ranks():
    """(rank, world, local rank) that torchrun gave this process; (0, 1, 0) without it."""
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"} <= os.environ.keys():
        return 0, 1, 0
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])


def start(cfg: RuntimeConfig) -> Runtime:
    """Choose the device, set threads, join the process group. Raises ConfigError where the device is missing.

    Neuron: docs of the Neuron SDK, frameworks/torch/pytorch-native-overview (device "neuron", PyTorch 2.10 and
    later) and frameworks/torch/torch-neuronx (device "xla", up to PyTorch 2.9).
    """
    rank, world, local_rank = ranks()
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    found = devices()
    kind = cfg.device if cfg.device != "auto" else next(iter(found))
    if kind not in found:
        raise ConfigError(f'runtime.device = "{kind}": no such device here, found {", ".join(found)}; use "auto"')
    if local_world > found[kind]:
        raise ConfigError(f"{local_world} ranks on {found[kind]} {kind} device(s): start one rank for each device")
    if world > 1:  # on Neuron the process group comes before the first use of the device
        if kind == "xla":
            import torch_xla.distributed.xla_backend  # noqa: F401  registers the backend

            dist.init_process_group("xla", init_method="xla://")
        else:
            dist.init_process_group({"cpu": "gloo", "cuda": "nccl", "neuron": "neuron"}[kind])
        if dist.get_world_size() != world:
            raise ConfigError(f"the process group has {dist.get_world_size()} ranks, torchrun started {world}")
    if kind == "xla":
        import torch_xla

        device = torch_xla.device()
    else:
        device = torch.device(kind) if kind == "cpu" else torch.device(kind, local_rank)
    if kind == "cuda":
        torch.cuda.set_device(device)
    if kind == "neuron":
        torch.neuron.set_device(local_rank)
    if kind == "cpu":
        torch.set_num_threads(cfg.threads or max(1, cpu_count() // local_world))
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "auto": fast_dtype(kind)}[cfg.dtype]
    return Runtime(device, dtype, compile_backend(cfg.compile, kind), rank, world, local_rank)


def devices():
    """{kind: how many} of the devices of this machine, the preferred kind first; a CPU takes any number of ranks."""
    found = {}
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.device_count()
    if hasattr(torch, "neuron") and (count := torch.neuron.device_count()):  # registered by torch-neuronx
        found["neuron"] = count
    if find_spec("torch_xla") and find_spec("torch_neuronx"):
        os.environ.setdefault("PJRT_DEVICE", "NEURON")
    if os.environ.get("PJRT_DEVICE") == "NEURON" and find_spec("torch_xla"):  # without it, XLA runs on the CPU
        found["xla"] = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return found | {"cpu": sys.maxsize}


def cpu_count():
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def fast_dtype(kind):
    """bfloat16 where the device multiplies it faster than float32, else float32."""
    if kind != "cpu":
        return torch.bfloat16 if kind != "cuda" or torch.cuda.is_bf16_supported() else torch.float32
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return torch.bfloat16 if "avx512_bf16" in flags or "amx_bf16" in flags else torch.float32


def compile_backend(choice, kind):
    """torch.compile's backend, or "". "auto" compiles where inductor finds a compiler and Python's headers."""
    if choice == "off" or kind == "xla":  # XLA compiles what it traces, by itself
        return ""
    if kind == "neuron":
        return "neuron"
    compiler = any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++"))
    headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    if kind == "cpu" and not (compiler and headers):
        if choice == "on":
            missing = "Python's headers (python3-dev)" if compiler else "C++ compiler (g++, clang++)"
            raise ConfigError(f'runtime.compile = "on": no {missing} found; install it or use "off"')
        return ""
    return "inductor"


def synchronize(device):
    """Wait until the device has done all it was given; on XLA also the end of the traced step."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "neuron":
        torch.neuron.synchronize()
    elif device.type == "xla":
        import torch_xla

        torch_xla.sync(wait=True)


def cut_graph(device):
    """On XLA, run what was traced so far, else it piles up in one graph; elsewhere nothing. Waits for nothing."""
    if torch.device(device).type == "xla":
        import torch_xla

        torch_xla.sync()


def agree(numbers, world):
    """The largest of each of these numbers over all ranks, the same on every rank. One collective, on the hosts."""
    if world == 1:
        return list(numbers)
    t = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(t, op=dist.ReduceOp.MAX, group=control_group())
    return t.tolist()


@cache
def control_group():
    """A gloo group for what the hosts decide together, so that no device is waited for. Patient: ranks wait in it
    while rank 0 downloads and tokenises."""
    return dist.new_group(backend="gloo", timeout=timedelta(days=1))


def rank0_first(world, rank, f):
    """Call f on rank 0, then on the others, which find what it cached. An error of rank 0 is raised everywhere."""
    if rank == 0:
        try:
            result = f()
        except BaseException:
            agree((1,), world)
            raise
        agree((0,), world)
        return result
    if agree((0,), world)[0]:
        sys.exit(2)  # rank 0 says why
    return f()


def peak_flops(device, dtype, seconds=0.3):
    """Multiply-adds x 2 a second of a large matrix product, the best of what fits into `seconds` and of three at
    least: the measured peak that MFU is stated against. Ranks on one CPU measure at once: each gets its share."""
    n = 1024 if device.type == "cpu" else 4096
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    times = []
    while sum(times) < seconds or len(times) < 4:
        synchronize(device)
        began = time.perf_counter()
        product = a @ b  # kept: XLA computes only what somebody holds
        synchronize(device)
        times.append(time.perf_counter() - began)
        del product
    return 2 * n**3 / min(times[1:])


def peak_memory(device):
    """Largest memory in use so far, bytes: of a CUDA device, else of this process on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def environment(runtime: Runtime):
    """All that may explain a difference between two runs: commit, versions, variables, machine. JSON-able."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    root = Path(__file__).parent

    def git(*args):
        try:
            return (
                subprocess.run(("git", "-C", str(root), *args), capture_output=True, timeout=10, check=True)
                .stdout.decode(errors="replace")
                .strip()
            )
        except (OSError, subprocess.SubprocessError):
            return None

    commit, changes = git("rev-parse", "HEAD"), git("status", "--porcelain")
    return {
        "git_commit": commit,
        "git_dirty": None if changes is None else bool(changes),
        "git_diff": git("diff", "HEAD") if changes else "",
        "argv": sys.argv,
        "python": platform.python_version(),
        "packages": versions,
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(RECORDED)},
        "machine": {
            "platform": platform.platform(),
            "host": platform.node(),
            "cpu": cpu_name(),
            "cores": cpu_count(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        },
        "device": torch.cuda.get_device_name(runtime.device) if runtime.device.type == "cuda" else str(runtime.device),
        "dtype": str(runtime.dtype).removeprefix("torch."),
        "compile": runtime.backend or "off",
        "ranks": runtime.world,
        "threads": torch.get_num_threads(),
    }


def cpu_name():
    """Model name of the CPU where the system tells it."""
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
