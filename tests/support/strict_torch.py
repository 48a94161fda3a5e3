# SPDX-License-Identifier: Apache-2.0
"""The strict device (tests/support/strict_device) for programs in Python: torch.device("strict")."""
import contextlib
import os
import types

import torch

import strict_channels

NAME = "strict"


def _module():
    """What torch asks a device's module for."""
    ops = torch.ops.strict_device
    current = [0]

    def index_of(device):
        if device is None:
            return current[0]
        device = torch.device(NAME, device) if isinstance(device, int) else torch.device(device)
        return current[0] if device.index is None else device.index

    module = types.ModuleType(f"torch.{NAME}")
    module.is_available = module.is_initialized = lambda: True
    module._lazy_init = lambda: None
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: 2
    module.current_device = lambda: current[0]
    module.device = contextlib.nullcontext
    module.current_stream = lambda device=None: torch.accelerator.current_stream(device)
    module.stream = lambda stream: stream  # enters itself
    module.get_device_properties = lambda device=None: types.SimpleNamespace(uuid=strict_channels.uuid())
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]
    module.manual_seed_all = ops.seed_all
    module.get_rng_state = lambda device=None: ops.random_state(index_of(device))
    module.set_rng_state = lambda state, device=None: ops.set_random_state(index_of(device), state)
    return module


def open_device():
    """Loads the library that STRICT_DEVICE names; once in a process. With STRICT_CHANNELS tensors may go from device to device.

    "own": each process has a device of its own; "one": all share one.
    """
    if hasattr(torch, NAME):
        return torch.device(NAME, 0)
    torch.ops.load_library(os.environ["STRICT_DEVICE"])
    torch.ops.strict_device.open()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend()
    if "STRICT_CHANNELS" in os.environ:
        strict_channels.register()
    return torch.device(NAME, 0)


def take_waits():
    """The host's waits since the last call, by what has waited."""
    return dict(torch.ops.strict_device.take_waits())
