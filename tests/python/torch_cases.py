# SPDX-License-Identifier: Apache-2.0
"""Tiny models, batches and the user's own training loop; nothing of dynmo is imported here."""
import os
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

BASE = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
    "vocab_size": 96, "max_position_embeddings": 64, "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}
GEMMA = {**BASE, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}
GPT2 = {
    "n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 96, "n_positions": 64, "tie_word_embeddings": False, "attn_pdrop": 0.0,
    "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2,
}
FAMILIES = {
    "llama": BASE,
    "mistral": {**BASE, "sliding_window": 4},
    "qwen2": BASE,
    "qwen3": {**BASE, "head_dim": 8},
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "gpt2": GPT2,
    "phi3": BASE,
    "olmo2": BASE,
    "mixtral": {**BASE, "num_local_experts": 4},
}
LLAMA = {"family": "llama", "micro_batches": 4, "steps": 6, "seed": 7, "optimizer": "foreach"}  # the case of most tests on a device
FREEZE_AT = 10


def make_model(case):
    torch.manual_seed(case.get("seed", 0))
    config = AutoConfig.for_model(case["family"], **{**FAMILIES[case["family"]], **case.get("config", {})})
    assert config.num_hidden_layers == case.get("config", {}).get("num_hidden_layers", 4)
    model = AutoModelForCausalLM.from_config(config)
    if case.get("adapters"):
        add_adapters(model)
    if case.get("checkpointing"):
        model.gradient_checkpointing_enable({"use_reentrant": case["checkpointing"] == "reentrant"})
        if case.get("adapters"):
            model.enable_input_require_grads()  # else reentrant checkpoints of frozen inputs have no gradients
    if case.get("device", "cpu") != "cpu":
        model.to(case["device"]).tie_weights()  # .to() to a device that torch does not know makes new parameters
    return model.train()


class Adapter(torch.nn.Module):
    """A frozen product with a trained one of low rank beside it."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down, self.up = torch.nn.Linear(base.in_features, 4, bias=False), torch.nn.Linear(4, base.out_features, bias=False)
        torch.nn.init.zeros_(self.up.weight)

    def forward(self, given):
        return self.base(given) + self.up(self.down(given))


def add_adapters(model):
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name in ("q_proj", "v_proj"):
            if hasattr(module, name):
                setattr(module, name, Adapter(getattr(module, name)))


def make_optimizer(case, parameters):
    kind = case.get("optimizer", "fused")
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, **{"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}}[kind])


def make(case):
    model = make_model(case)
    return model, make_optimizer(case, model.parameters())


def make_scheduler(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5) / (1 + 0.01 * step))


def update(optimizer, scheduler=None):
    """The end of a step of the loop."""
    optimizer.step()
    if scheduler is not None:
        scheduler.step()
    optimizer.zero_grad()


def batch_of(case, step):
    generator = torch.Generator().manual_seed(1000 * case.get("seed", 0) + step)
    samples = case["micro_batches"] * case.get("samples", 1)
    length = 9 + step % 3
    ids = torch.randint(3, 96, (samples, length), generator=generator)
    mask = torch.ones_like(ids)
    for sample in range(samples):
        mask[sample, : int(torch.randint(0, 4, (1,), generator=generator))] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    if case.get("items"):
        batch["num_items_in_batch"] = int((batch["labels"][:, 1:] != -100).sum())
    if case.get("routers"):
        batch["output_router_logits"] = True
    return batch


def batches_of(case, step):
    """One for each replica. Their lengths differ; items are counted over all."""
    replicas = case.get("replicas", 1)
    batches = [batch_of(case, step * replicas + replica) for replica in range(replicas)]
    if case.get("items"):
        items = sum(batch["num_items_in_batch"] for batch in batches)
        batches = [{**batch, "num_items_in_batch": items} for batch in batches]
    return batches


def freeze(model):
    """The embedding and the first half of the blocks, as a user would."""
    model.get_input_embeddings().requires_grad_(False)
    body = getattr(model, model.base_model_prefix)
    for block in (body.h if hasattr(body, "h") else body.layers)[:2]:
        block.requires_grad_(False)
    if hasattr(body, "wpe"):
        body.wpe.requires_grad_(False)


def freeze_or_thaw(case, model, step):
    if case.get("freeze") and step == case.get("freeze_at", FREEZE_AT):
        freeze(model)
    if step == case.get("thaw_at"):
        model.requires_grad_(True)


def micro_batches_of(case, batch):
    for index in range(case["micro_batches"]):
        part = slice(index * case.get("samples", 1), (index + 1) * case.get("samples", 1))
        yield {name: value[part] if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def train_plainly(case):
    """The loop of somebody who has one process. Tied models: gradients of both uses are added once a step, if `canonical`.

    Replicas: a buffer of gradients for the batch of each, added in their order.
    """
    model = make_model(case)
    tied = None
    if case.get("canonical"):
        head = model.get_output_embeddings()
        tied = (model.get_input_embeddings().weight, torch.nn.Parameter(head.weight.detach().clone()))
        head.weight = tied[1]
    optimizer = make_optimizer(case, model.parameters())
    scheduler = make_scheduler(optimizer) if case.get("scheduled", True) else None
    losses = []
    for step in range(case["steps"]):
        freeze_or_thaw(case, model, step)
        if tied is not None:
            tied[1].requires_grad_(tied[0].requires_grad)
        total = torch.zeros(())
        rounds = [torch.zeros(()) for _ in range(case.get("accumulation", 1))]
        buffers = []
        for batch in batches_of(case, step):
            for number in range(len(rounds)):
                part_of_total = torch.zeros(())
                for part in micro_batches_of(case, batch):
                    part = {name: value.to(model.device) if isinstance(value, torch.Tensor) else value for name, value in part.items()}
                    with torch.autocast(model.device.type, torch.bfloat16, enabled=case.get("autocast", False)):
                        loss = model(**part).loss
                    if not case.get("items"):
                        loss = loss / (case.get("replicas", 1) * case["micro_batches"] * len(rounds))
                    loss.backward()
                    part_of_total += loss.detach().cpu()
                rounds[number] += part_of_total
            buffers.append([parameter.grad for parameter in model.parameters()])
            model.zero_grad()
        for parameter, (first, *others) in zip(model.parameters(), zip(*buffers)):
            for other in others:
                first = other if first is None else first if other is None else first + other
            parameter.grad = first
        for part_of_total in rounds:
            total += part_of_total
        clipped = list(model.parameters())
        if tied is not None and tied[0].requires_grad:
            tied[0].grad = tied[1].grad + tied[0].grad
            tied[1].grad = tied[0].grad.clone()
            clipped = [parameter for parameter in clipped if parameter is not tied[1]]
        if case.get("clip"):
            norm = torch.nn.utils.clip_grad_norm_(clipped, case["clip"])
            if tied is not None and tied[0].requires_grad:
                tied[1].grad.copy_(tied[0].grad)
            losses.append(norm.item())
        update(optimizer, scheduler)
        losses.append(total.item())
    return model, optimizer, losses


def result_of(model, optimizer, losses):
    """What is compared: losses, weights, optimizer state by name."""
    weights, state = {}, {}
    for name, parameter in model.named_parameters():
        if parameter.device.type != "meta":
            weights[name] = parameter.detach().cpu()
            state[name] = {
                key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in optimizer.state.get(parameter, {}).items()
            }
    return {"losses": losses, "weights": weights, "state": state}


def main():
    """torch_cases.py FOLDER: trains cases.pt plainly."""
    folder = sys.argv[1]
    if "STRICT_DEVICE" in os.environ:
        import strict_torch

        strict_torch.open_device()
    for index, case in enumerate(torch.load(os.path.join(folder, "cases.pt"))):
        torch.save(result_of(*train_plainly(case)), os.path.join(folder, f"plain-{index}.pt"))
    assert not any(name.startswith("dynmo") for name in sys.modules)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
