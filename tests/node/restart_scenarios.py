"""Forty programs that fail, and whether starting them again helps; each is a real Python process.

The first argument of a program is how often it was started before. What a GPU, a switch or a
service would say is raised with the text of the library concerned.
"""

from __future__ import annotations

TORCH = "class OutOfMemoryError(RuntimeError): pass\nclass DistBackendError(RuntimeError): pass\n"
TRANSIENT = {
    "ecc": "raise RuntimeError('CUDA error: uncorrectable ECC error encountered')",
    "nvlink": "raise RuntimeError('CUDA error: uncorrectable NVLink error detected')",
    "gpu-lost": "raise RuntimeError('NVML: GPU is lost')",
    "fabric": "raise RuntimeError('CUDA error: system not yet initialized')",
    "infiniband": (
        "print('n1:1:2 [0] NCCL WARN NET/IB : Got completion from peer 10.0.0.2<4> with status=12 "
        "opcode=0 len=0 vendor err 129: IBV_WC_RETRY_EXC_ERR', file=sys.stderr)\n"
        "raise DistBackendError('NCCL error in: ProcessGroupNCCL.cpp:2, unhandled system error: "
        "IBV_WC_RETRY_EXC_ERR')"
    ),
    "input-output": "raise OSError(errno.EIO, os.strerror(errno.EIO), '/data/shard-7.tar')",
    "stale-handle": "raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), '/data')",
    "fuse-gone": "raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), '/mnt/bucket')",
    "remote-input-output": "raise OSError(errno.EREMOTEIO, os.strerror(errno.EREMOTEIO), '/d')",
    "unavailable": "raise RuntimeError('503 Server Error: Service Unavailable for url: https://h')",
    "rate-limit": "raise RuntimeError('429 Client Error: Too Many Requests for url: https://h/x')",
    "bad-gateway": "raise RuntimeError('502 Server Error: Bad Gateway for url: https://h/x')",
    "slow-down": (
        "raise RuntimeError('An error occurred (SlowDown) when calling the GetObject operation: "
        "Please reduce your request rate.')"
    ),
    "dns": "raise socket.gaierror(socket.EAI_AGAIN, 'Temporary failure in name resolution')",
    "rendezvous": (
        "raise DistBackendError('Timed out after 901 seconds waiting for clients. 3/4 clients "
        "joined.')"
    ),
    "unique-id": (
        "raise DistBackendError('[2] is setting up NCCL communicator and retrieving ncclUniqueId "
        "from [0], but store got error: wait timeout after 600000ms: ncclUniqueId timed out')"
    ),
    "port": (
        "one = socket.create_server(('127.0.0.1', 0))\n"
        "socket.socket().bind(('127.0.0.1', one.getsockname()[1]))"
    ),
    "gloo-peer": (
        "raise RuntimeError('[gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
        "[127.0.0.1]:40863')"
    ),
    "nccl-peer": (
        "raise DistBackendError('NCCL error in: ProcessGroupNCCL.cpp:1, remote process exited or "
        "there was a network error, NCCL version 2.27.3\\nncclRemoteError: A call failed possibly "
        "due to a network error or a remote process exiting prematurely.')"
    ),
    "watchdog-after-peer": (
        "print('[rank0]:[E ProcessGroupNCCL.cpp:1] [Rank 0] NCCL work timeout; last error: remote "
        "process exited or there was a network error', file=sys.stderr, flush=True)\nos.abort()"
    ),
}
"""Each is started again after the first failure."""

STEP = "print('global batch 8, 99 steps\\nstep 56 loss 1.5\\nstep 57 loss 1.25', flush=True)\n"
DETERMINISTIC = {
    "module": "import a_module_that_nobody_has",
    "syntax": "exec(compile('x = = 1', 'model.py', 'exec'))",
    "indentation": "exec(compile('if 1:\\nx = 1', 'model.py', 'exec'))",
    "unknown-option": "argparse.ArgumentParser().parse_args(['--lerning-rate', '1'])",
    "missing-option": (
        "parser = argparse.ArgumentParser()\nparser.add_argument('--data', required=True)\n"
        "parser.parse_args([])"
    ),
    "wrong-choice": (
        "parser = argparse.ArgumentParser()\nparser.add_argument('--optimizer', choices=['sgd'])\n"
        "parser.parse_args(['--optimizer', 'sdg'])"
    ),
    "click-option": "print('Error: No such option: --lr', file=sys.stderr)\nsys.exit(2)",
    "memory-at-once": (
        "raise OutOfMemoryError('CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a "
        "total capacity of 79.10 GiB of which 1.20 GiB is free.')"
    ),
    "cublas-at-once": (
        "raise RuntimeError('CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling "
        "`cublasCreate(handle)`')"
    ),
    "no-file": "open('/no/such/file.pt')",
    "no-permission": "raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), '/results')",
    "checkpoint": (
        "raise RuntimeError('Error(s) in loading state_dict for Net:\\n\\tsize mismatch for "
        "head.weight: copying a param with shape torch.Size([10, 8]) from checkpoint, the shape in "
        "current model is torch.Size([12, 8]).')"
    ),
    "weights-only": (
        "raise RuntimeError('Weights only load failed. This file can still be loaded, to do so you "
        "have two options')"
    ),
    "architecture": (
        "raise RuntimeError('CUDA error: no kernel image is available for execution on the device')"
    ),
    "driver": "raise RuntimeError('The NVIDIA driver on your system is too old (found 11040).')",
    "duplicate": (
        "raise DistBackendError('Duplicate GPU detected : rank 1 and rank 0 both on CUDA device "
        "1b000')"
    ),
    "unused": (
        "raise RuntimeError('Expected to have finished reduction in the prior iteration before "
        "starting a new one.')"
    ),
    "gated": (
        "class GatedRepoError(OSError): pass\n"
        "raise GatedRepoError('403 Client Error. Access to model m is restricted.')"
    ),
    "same-step": STEP + "saved()\nraise ValueError('bad sample ' + str(os.getpid()))",
    "no-progress": "time.sleep(0)\n[][0]",
}
"""None is started again; the last two fail once more first, since their kind is not known."""
TWICE = ("same-step", "no-progress")

UNKNOWN = {
    "killed": "os.kill(os.getpid(), 9)",
    "division": STEP + "1 / 0",
    "memory-later": STEP + "raise OutOfMemoryError('CUDA out of memory. Tried to allocate 2 GiB')",
    "file-later": STEP + "open('/data/shard-8.tar')",
    "module-later": STEP + "import a_module_that_nobody_has",
    "hang": (
        "raise DistBackendError('[Rank 1] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=7, OpType=ALLREDUCE) ran for 600026 milliseconds before timing out.')"
    ),
    "silent": "sys.exit(3)",
}
"""Each is started again once, and stopped when it fails in the same way without a checkpoint."""

BEFORE = f"""\
import argparse, errno, os, socket, sys, time
from pathlib import Path
{TORCH}
def saved():
    folder = os.environ.get("DEPLOYKIT_CHECKPOINT_DIR")
    if folder:
        Path(folder, f"step-{{time.time_ns()}}.pt").touch()
with open(os.environ["STARTS"], "a") as file:
    print(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), file=file)
"""


def program(name: str) -> str:
    """The program of a scenario."""
    return BEFORE + {**TRANSIENT, **DETERMINISTIC, **UNKNOWN}[name] + "\n"
