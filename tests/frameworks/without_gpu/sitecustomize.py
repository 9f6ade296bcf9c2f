"""Stand-ins for CUDA, for scripts that know nothing else: GPU N is the CPU, and NCCL is gloo.

On PYTHONPATH it changes what PyTorch does in the ranks; the script is untouched.
"""

import os


def _on_cpu():
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    start = dist.init_process_group
    wrap = DistributedDataParallel.__init__
    move, move_module = torch.Tensor.to, torch.nn.Module.to

    def wrapped(self, module, device_ids=None, **options):
        wrap(self, module, **options)

    def here(move):
        return lambda self, *where, **how: (
            self if where and isinstance(where[0], int) else move(self, *where, **how)
        )

    torch.cuda.set_device = lambda device: None
    dist.init_process_group = lambda backend=None, **options: start("gloo", **options)
    DistributedDataParallel.__init__ = wrapped
    torch.Tensor.to, torch.nn.Module.to = here(move), here(move_module)


if "LOCAL_RANK" in os.environ:
    _on_cpu()
