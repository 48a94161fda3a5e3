# SPDX-License-Identifier: Apache-2.0
"""Refuses models, parameters and arguments that cannot work, by name and before any weight is dropped. Also computes digests."""
from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from .._core import digest as content_hash
from .._core import torch_tested
from ..errors import BadInputError

TESTED_TORCH = tuple(torch_tested.split())
TESTED_TRANSFORMERS = ("5.23",)
LAYERDROPS = ("layerdrop", "layer_drop", "layerdrop_prob", "decoder_layerdrop")
MAX_S = 10**6  # clocks of threads, stores and Gloo accept far longer times
MAX_WRAPPERS = 16  # calls around an optimizer's step, such as a scheduler's


def check_count(name: str, value: Any, least: int) -> None:
    """Raises BadInputError unless `value` is a whole number, `least` or more, that fits into 63 bits."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
        raise BadInputError(f"{name}={value!r}, wanted a whole number, {least} or more")


def check_seconds(name: str, seconds: float) -> None:
    if not 1 <= seconds <= MAX_S:  # beats are sent five times a second
        raise BadInputError(f"{name}={seconds}, wanted 1 to {MAX_S} seconds")


def digest(value: Any) -> int:
    """Returns a digest of 48 bits, which a double holds exactly."""
    hasher = hashlib.blake2b(digest_size=6)
    update(hasher, value)
    return int.from_bytes(hasher.digest(), "little")


def content_digest(packed: Tensor) -> Tensor:
    """Returns the XXH3 digest of the bytes, 16 bytes."""
    return torch.frombuffer(bytearray.fromhex(content_hash(packed.numpy())), dtype=torch.uint8)


def update(hasher: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        hasher.update(f"{value.dtype}{tuple(value.shape)}".encode())
        if value.device.type != "meta":
            hasher.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, Mapping):
        hasher.update(f"{len(value)} by name".encode())
        for key in value:
            hasher.update(repr(key).encode())
            update(hasher, value[key])
    elif isinstance(value, (list, tuple)):
        hasher.update(f"{len(value)} in order".encode())
        for element in value:
            update(hasher, element)
    else:
        hasher.update(repr(value).encode())


def check_model(model: nn.Module) -> None:
    """Refuses a model if its layers cannot be moved: wrappers, special parameters, and options of its config."""
    kinds = {kind.__module__ + "." + kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    for kind, what in (
        ("torch.nn.parallel.distributed.DistributedDataParallel", "DistributedDataParallel"),
        ("torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel", "FSDP"),
        ("torch.distributed.fsdp._fully_shard._fully_shard.FSDPModule", "FSDP2 (fully_shard)"),
        ("torch._dynamo.eval_frame.OptimizedModule", "torch.compile"),
    ):
        if kind in kinds:
            raise BadInputError(f"model: it is wrapped by {what}, wanted the plain module; leave {what} out")
    if any(kind.startswith("deepspeed.") for kind in kinds):
        raise BadInputError("model: it is a DeepSpeed engine, wanted the plain module; leave DeepSpeed out")
    for name, module in model.named_modules():
        if getattr(module, "_compiled_call_impl", None) is not None:
            raise BadInputError(f"model: {name or 'the model'} is compiled by torch.compile, wanted it eager; leave compile() out")
        if any(getattr(module, mark, None) is not None for mark in ("_pp_stage", "_tp_size", "_device_mesh")):
            raise BadInputError("model: transformers has split it (pp_size or tp_size), wanted the whole model on every rank")
    if getattr(model, "is_quantized", False):
        raise BadInputError("model: it is quantized, wanted floating-point parameters")
    _check_parameters(model)
    _check_layerdrop(model)
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise BadInputError("model: it is an encoder-decoder, wanted a decoder, or layers=[(name, module), ...]")
    for flag, why in (
        ("output_hidden_states", "the hidden tensors lie on several ranks"),
        ("output_attentions", "the attentions lie on several ranks"),
    ):
        if getattr(config, flag, False):
            raise BadInputError(f"model: config.{flag} is on, but {why}; set it to False")


def _check_layerdrop(model: nn.Module) -> None:
    """Refuses models that leave out blocks at random, because each rank would leave out others."""
    for name, module in model.named_modules():
        for source, where in ((module.__dict__, name), (getattr(getattr(module, "config", None), "__dict__", {}), "config")):
            for key, value in source.items():
                if key in LAYERDROPS and isinstance(value, (int, float)) and value > 0:
                    raise BadInputError(f"model: {where or 'the model'}.{key} is {value}, which leaves out blocks at random, wanted 0")


def _check_parameters(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if type(parameter).__name__ == "DTensor" or type(parameter.data).__name__ == "DTensor":
            raise BadInputError(f"model: parameter {name} is a DTensor (FSDP2 or tensor parallel), wanted plain tensors")
        if type(parameter) is not nn.Parameter or type(parameter.data) is not Tensor:
            kind = type(parameter if type(parameter) is not nn.Parameter else parameter.data).__name__
            raise BadInputError(f"model: parameter {name} is a {kind}, wanted torch.nn.Parameter")
        if not parameter.is_floating_point():
            raise BadInputError(f"model: parameter {name} is {parameter.dtype}, wanted floating point (quantized?)")
        if parameter.device.type == "meta":
            raise BadInputError(f"model: parameter {name} is on meta, wanted weights on every rank at the start")
        if parameter.grad is not None:
            raise BadInputError(f"model: parameter {name} has a gradient, wanted none; call optimizer.zero_grad() first")


def check_free(named: Iterable[tuple[str, Tensor]]) -> str:
    """Returns why a parameter cannot be moved away, or "". swap_tensors requires that it has no other owner."""
    import weakref

    for name, parameter in named:
        if parameter.grad is not None:
            return f"parameter {name} has a gradient, call optimizer.zero_grad() before layers move"
        if weakref.getweakrefs(parameter):
            return f"parameter {name} has weak references (torch.compile makes them), wanted none"
        if _has_other_owner(parameter):
            return f"parameter {name} has live views or a graph, wanted none; delete what was made of it"
    return ""


def _has_other_owner(parameter: Tensor) -> bool:
    """Returns whether swap_tensors would refuse: something besides the parameter and its gradient accumulator holds the tensor."""
    held: Any = parameter
    if held._use_count() == 1:
        return False
    if held._use_count() > 2 or not parameter.requires_grad:
        return True
    node = torch.autograd.graph.get_gradient_edge(parameter).node  # created here unless it was the other owner
    uses = int(held._use_count())
    del node
    return uses != 2


def called_by_scaler() -> bool:
    """Returns whether a GradScaler calls the optimizer, by the call stack. Versions of gradients do not show that a scaler divides them."""
    frame = inspect.currentframe()
    for _ in range(MAX_WRAPPERS):
        if frame is None:
            break
        caller = frame.f_locals.get("self")
        if isinstance(caller, GradScaler) and caller.is_enabled():
            return True
        frame = frame.f_back
    return False
