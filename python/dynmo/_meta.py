# SPDX-License-Identifier: Apache-2.0
"""Counts the layers of a model without formulas in the core. transformers builds the model without memory, and runs it.

On the device "meta" tensors have shapes and no data. One forward pass shows what every block multiplies, moves and keeps.
"""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Optional

ELEMENT = 2  # bytes: models are built in bfloat16
_PRODUCTS = ("mm", "addmm", "_grouped_mm", "_scaled_mm")


class Uncountable(Exception):
    """The reason why a model cannot be counted."""


def _text_config(config: dict[str, Any], needed: Optional[str] = None) -> Any:
    """Returns the text model's config of a dict, without its quantization. Its class must have the key `needed`."""
    import transformers

    document = {key: dict(value) if isinstance(value, dict) else value for key, value in config.items()}
    document.pop("quantization_config", None)
    document.pop("auto_map", None)  # so that no other code is run
    for part in document.values():
        if isinstance(part, dict):
            part.pop("quantization_config", None)
            part.pop("auto_map", None)
    classes = document.get("architectures") or []
    auto: Any = transformers.AutoConfig
    built = auto.for_model(**document)
    text = built.get_text_config()
    mapping = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    known = mapping.get(text.model_type)
    nested = text is not built
    if known is None:
        raise Uncountable(f"transformers has no causal language model of type '{text.model_type}'")
    for name in classes:
        if name not in ([known] if isinstance(known, str) else known) and not (nested and name.endswith("ForConditionalGeneration")):
            raise Uncountable(f"architectures has '{name}', wanted {known}: a model with a language-model head")
    if needed and needed not in getattr(type(text), "__dataclass_fields__", {}):
        raise Uncountable(f"{type(text).__name__} knows no {needed}")
    return text


def _build(config: Any) -> Any:
    import torch
    import transformers

    options: dict[str, Any] = {"attn_implementation": "eager", "dtype": torch.bfloat16}
    with torch.device("meta"):
        auto: Any = transformers.AutoModelForCausalLM
        return auto.from_config(config, **options)


def _blocks(model: Any) -> tuple[str, Any]:
    """Returns the list of the blocks, with its name: the longest list that is not inside another."""
    import torch

    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList) and len(module)]
    outer = [(name, module) for name, module in lists if not any(name.startswith(other + ".") for other, _ in lists)]
    if not outer:
        raise Uncountable(f"{type(model).__name__} has no list of blocks")
    return max(outer, key=lambda pair: len(pair[1]))


class _Tally:
    """The work of one part of a model, summed over its operations."""

    def __init__(self) -> None:
        self.products = 0.0
        self.core = 0.0
        self.moved = 0.0
        self.experts = 0.0  # bytes that experts keep
        self.kept: dict[int, int] = {}


def _recorder(model: Any, places: dict[str, int], parts: list[_Tally], own: set[int]) -> Any:
    """Returns a context that counts every operation for the part that runs."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    running: list[int] = [0]

    def bytes_of(values: Any) -> float:
        flat = torch.utils._pytree.tree_leaves(values)
        return float(sum(value.numel() * value.element_size() for value in flat if isinstance(value, torch.Tensor)))

    class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            # The model asks whether a mask omits tokens. It omits none.
            if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype is torch.bool:
                return True
            out = func(*args, **(kwargs or {}))
            part = parts[running[0]]
            packet = func.overloadpacket
            if packet in flop_registry:
                name = str(packet).rsplit(".", 1)[-1]
                flops = float(flop_registry[packet](*args, **(kwargs or {}), out_val=out))
                if name in _PRODUCTS or any(isinstance(value, torch.Tensor) and value.untyped_storage()._cdata in own for value in args):
                    part.products += flops
                else:
                    part.core += flops
            elif not any(value.alias_info and not value.alias_info.is_write for value in func._schema.returns):
                part.moved += bytes_of([args, kwargs]) + bytes_of(out)
            return out

    handles: list[Any] = []
    restored: list[tuple[Any, Any]] = []

    def experts_of(module: Any) -> Any:
        """Replaces a module's forward, to count all experts as one operation. Which rows an expert gets depends on data, but their
        number does not.
        """
        original = module.forward

        def forward(rows: Any, *rest: Any, **named: Any) -> Any:
            chosen = [value for value in [*rest, *named.values()] if isinstance(value, torch.Tensor) and not value.is_floating_point()]
            if not chosen:
                return original(rows, *rest, **named)
            part = parts[running[0]]
            visits = float(chosen[0].numel())
            weights = [parameter for parameter in module.parameters(recurse=False) if parameter.dim() == 3]
            inner = sum(weight[0].numel() // rows.shape[-1] for weight in weights)
            part.products += 2 * visits * sum(weight[0].numel() for weight in weights)
            part.moved += ELEMENT * visits * (inner + 4 * rows.shape[-1])
            part.experts += ELEMENT * visits * (inner + 2 * rows.shape[-1])
            return rows * 1

        return forward

    def enter(place: int) -> Any:
        def hook(*_: Any) -> None:
            running[0] = place

        return hook

    for name, module in model.named_modules():
        if name in places:
            handles.append(module.register_forward_pre_hook(enter(places[name])))
        if any(parameter.dim() == 3 for parameter in module.parameters(recurse=False)):
            restored.append((module, module.forward))
            module.forward = experts_of(module)

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            parts[running[0]].kept[storage._cdata] = storage.nbytes()
            alive.append(tensor)  # so that no other tensor gets its address
        return tensor

    alive: list[Any] = []
    counter = Counter()  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def recording() -> Iterator[None]:
        try:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), counter:
                yield
        finally:
            for handle in handles:
                handle.remove()
            for module, forward in restored:
                module.forward = forward

    return recording()


class _Built:
    """A model without memory, and the layer of each of its parts."""

    def __init__(self, config: dict[str, Any], needed: Optional[str] = None) -> None:
        self.model = _build(_text_config(config, needed))
        self.list_name, blocks = _blocks(self.model)
        self.count = len(blocks)
        base, _, last = self.list_name.rpartition(".")
        siblings = [name for name, _ in self.model.get_submodule(base).named_children()]
        self.behind = {f"{base}.{name}" for name in siblings[siblings.index(last) + 1 :]}
        self.behind |= {name for name, _ in self.model.named_children() if name != base.split(".")[0]}

    def layer_of(self, name: str) -> int:
        """Returns the layer of the module `name`: 0 is the embedding, and the last one the head."""
        if name.startswith(self.list_name + "."):
            return int(name[len(self.list_name) + 1 :].split(".", 1)[0]) + 1
        return self.count + 1 if any(name == other or name.startswith(other + ".") for other in self.behind) else 0

    def places(self) -> dict[str, int]:
        """Returns the modules at whose start a layer begins: the number of that layer by the name of the module."""
        places = {f"{self.list_name}.{block}": block + 1 for block in range(self.count)}
        for name, module in self.model.named_modules():
            if name in self.behind and any(True for _ in module.parameters()):
                places[name] = self.count + 1
        return places

    def layers(self) -> list[dict[str, Any]]:
        names = ["embedding", *(f"blocks.{block}" for block in range(self.count)), "head"]
        layers: list[dict[str, Any]] = [
            {
                "name": name,
                "kind": "block" if name.startswith("blocks.") else name,
                "parameters": 0.0,
                "copied_parameters": 0.0,
                "product_parameters": 0.0,
            }
            for name in names
        ]
        for name, parameter in self.model.named_parameters():
            layer = layers[self.layer_of(name)]
            layer["parameters"] += parameter.numel()
            if parameter.dim() > 1 and layer["kind"] != "embedding":
                layer["product_parameters"] += parameter.numel()
        head = self.model.get_output_embeddings()
        if head is not None and head.weight is self.model.get_input_embeddings().weight:
            layers[-1]["copied_parameters"] = layers[-1]["product_parameters"] = float(head.weight.numel())
        return layers


def built_layers(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns embedding, blocks and head of a config, with their parameters."""
    return _Built(config).layers()


def work_of(config: dict[str, Any], sequence: int, micro_batch_size: int = 1, needed: Optional[str] = None) -> list[dict[str, Any]]:
    """Returns the layers for the core. Raises Uncountable, or the exception of the model's class.

    `needed`: a key that the core cannot plan. Raises Uncountable if the model's class ignores it, because it would build another model.
    """
    import torch

    built = _Built(config, needed)
    layers = built.layers()
    parts = [_Tally() for _ in layers]
    own = {tensor.untyped_storage()._cdata for tensor in [*built.model.parameters(), *built.model.buffers()]}
    tokens = torch.zeros(micro_batch_size, sequence, dtype=torch.long, device="meta")
    built.model.train()
    with _recorder(built.model, built.places(), parts, own):
        built.model(input_ids=tokens, use_cache=False)
    width = built.model.get_input_embeddings().weight.shape[1]
    for layer, part in zip(layers, parts):
        layer["matrix_flops"] = part.products
        layer["core_flops"] = part.core
        layer["moved_bytes"] = part.moved
        layer["activation_bytes"] = part.experts + sum(part.kept.values())
        layer["boundary_bytes"] = 0.0 if layer["kind"] == "head" else float(ELEMENT * micro_batch_size * sequence * width)
    return layers
