# SPDX-License-Identifier: Apache-2.0
"""One rank of torch_first_test.py: batches of the first step that the loop runs, or that every rank refuses in one line."""
import contextlib
import os
import tempfile
import unittest.mock

import torch
import torch.distributed as dist
from torch import nn

import dynmo
import dynmo.torch as dt
import torch_cases
from dynmo.torch import start
from torch_ranks import is_whole, refused, run_rank, train_step

BART = {
    "d_model": 32, "decoder_layers": 4, "num_hidden_layers": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "vocab_size": 96,
    "max_position_embeddings": 64, "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "is_decoder": True,
    "is_encoder_decoder": False, "tie_word_embeddings": False, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
}
OPT = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "ffn_dim": 48, "vocab_size": 96, "max_position_embeddings": 64,
    "word_embed_proj_dim": 32, "dropout": 0.0, "attention_dropout": 0.0, "tie_word_embeddings": False,
}
LLAMA4 = {
    **torch_cases.BASE, "head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 4, "num_experts_per_tok": 1,
    "attention_chunk_size": 4, "no_rope_layers": [1, 1, 1, 0],
}
GPTJ = {**torch_cases.GPT2, "rotary_dim": 4}
ROFORMER = {
    "hidden_size": 32, "embedding_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 96,
    "max_position_embeddings": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "is_decoder": True,
    "tie_word_embeddings": False,
}
XLNET = {"d_model": 32, "n_layer": 4, "n_head": 4, "d_inner": 48, "vocab_size": 96, "dropout": 0.0, "tie_word_embeddings": False}
torch_cases.FAMILIES.update(bart=BART, opt=OPT, llama4_text=LLAMA4, gptj=GPTJ, roformer=ROFORMER, xlnet=XLNET)
SAMPLES, LENGTH = 4, 8


def batch_of(step=0):
    ids = torch.randint(3, 96, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids.clone()}


def causal(window=LENGTH):
    full = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    return (full.tril() & full.triu(1 - window)).expand(SAMPLES, 1, LENGTH, LENGTH).clone()


def make(family="llama", **config):
    model = torch_cases.make_model({"family": family, "config": config})
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def pipeline(model, optimizer, **options):
    return dt.Pipeline(model, optimizer, micro_batches=2, timeout_s=60, **options)


def cut(value, part):
    if isinstance(value, dict):
        return {key: cut(element, part) for key, element in value.items()}
    return value[part] if isinstance(value, torch.Tensor) and value.shape[0] == SAMPLES else value


def as_the_loop(batch, family="llama", steps=2, **config):
    """Losses of two steps."""
    plain, other = make(family, **config)
    model, optimizer = make(family, **config)
    pipe = pipeline(model, optimizer, balance=False)
    for _ in range(steps):
        losses = [plain(**cut(batch, slice(first, first + 2))).loss / 2 for first in (0, 2)]
        for loss in losses:
            loss.backward()
        assert torch.equal(pipe.step(**batch), sum(loss.detach() for loss in losses)), family
        hooks = [hook for part in model.modules() for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values())]
        ours = [hook for hook in hooks if getattr(hook, "func", hook).__module__.startswith("dynmo.")]
        assert not ours, ours  # also not those that look for routers
        torch_cases.update(other)
        torch_cases.update(optimizer)


def refused_batch(text, family="llama", change=None, **more):
    """Nothing is dropped."""
    model, optimizer = make(family)
    if change is not None:
        change(model)
    pipe = pipeline(model, optimizer, balance=False)
    batch = {name: value for name, value in {**batch_of(), **more}.items() if value is not ABSENT}
    refused(text, lambda: pipe.step(**batch))
    assert is_whole(model)
    return pipe


ABSENT = object()


class Peeking(nn.Module):
    """A block that reads what the model's forward was given, and not what it is given itself."""

    def __init__(self, block, told):
        super().__init__()
        self.block, self.told = block, told

    def forward(self, *arguments, **named):
        return self.block(*arguments, **named) * self.told.get("louder", 1.0)


def peek(model):
    told = {}
    model.model.layers[2] = Peeking(model.model.layers[2], told)
    model.register_forward_pre_hook(lambda _, arguments, named: told.update(louder=named.pop("louder", 1.0)) or (arguments, named), with_kwargs=True)
    model.register_forward_hook(lambda *_: told.clear(), always_call=True)


def on_rank_1(model):
    def fail(*_):
        raise KeyError("one rank's own")

    if dist.get_rank() == 1:
        model.model.norm.register_forward_pre_hook(fail)


def batches():
    """What the first batch may have, and what is refused by name."""
    as_the_loop({**batch_of(), "attention_mask": {"full_attention": causal(), "sliding_attention": causal(4)}}, "gemma2")
    positions = torch.arange(LENGTH).flip(0).contiguous()
    as_the_loop({**batch_of(), "position_ids": positions.expand(SAMPLES, LENGTH).clone()})
    as_the_loop({**batch_of(), "position_ids": positions[None]})
    padded = torch.ones(SAMPLES, LENGTH, dtype=torch.long)
    padded[1, 5:] = 0
    as_the_loop({**batch_of(), "attention_mask": padded}, "llama4_text")
    as_the_loop({**batch_of(), "output_router_logits": True}, "mixtral")
    for family in ("bart", "gptj", "roformer", "xlnet"):
        as_the_loop(batch_of(), family)
    refused_batch("takes num_items_in_batch", "bart", num_items_in_batch=28)
    refused_batch("takes num_items_in_batch", "bart", num_items_in_batch=torch.tensor(28))
    refused_batch("no loss, wanted labels", labels=ABSENT)
    refused_batch("batch: names is a list of 4 values", names=["a", "b", "c", "d"])
    refused_batch("batch: mask.0 is a set", mask=[set()])
    refused_batch("batch: inputs_embeds requires grad", input_ids=ABSENT, inputs_embeds=torch.zeros(SAMPLES, LENGTH, 32, requires_grad=True))
    refused_batch("batch: use_cache is on", use_cache=True)
    refused_batch("batch: output_hidden_states is on", output_hidden_states=True)
    refused_batch("because of its louder", change=peek, louder=0.5)
    refused_batch("samples differ in number", attention_mask={"full_attention": causal()[:3]})


def kept_gradients():
    """Steps without zero_grad() between them add up the gradients of the loop, also those of a tie."""
    for options in ({}, {"schedule": "zb-h1"}, {"accumulation": 2}):
        plain, _ = make("qwen3", tie_word_embeddings=True)
        pipe = pipeline(*make("qwen3", tie_word_embeddings=True), balance=False, **options)
        rounds = options.get("accumulation", 1)
        for step in range(3 * rounds):
            for first in (0, 2):
                (plain(**cut(batch_of(step), slice(first, first + 2))).loss / (2 * rounds)).backward()
            (pipe.step if (step + 1) % rounds == 0 else pipe.accumulate)(**batch_of(step))
        tied = plain.model.embed_tokens.weight
        wanted, count = dict(plain.named_parameters()), 0
        for name, parameter in pipe.module.named_parameters():
            if parameter.device.type != "meta":
                torch.testing.assert_close(parameter.grad, wanted.get(name, tied).grad, msg=lambda said, name=name: f"{options}, {name}: {said}")
                count += name not in wanted or wanted[name] is tied
        assert count == sum(pipe.plan.owners[layer] == pipe.rank for layer in (0, -1)), (options, count)


def failures_of_one_rank():
    """Every rank has the line of the one that failed."""
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "file")
        with open(file, "w", encoding="ascii"):
            pass
        run = file if dist.get_rank() == 1 else os.path.join(folder, "run")
        refused("rank 1: ", lambda: pipeline(*make(), run=run))
    real = start._times

    def no_clock(_):
        raise ZeroDivisionError("no clock")

    start._times = no_clock
    refused("rank 0: model: its first measurement ends with ZeroDivisionError: no clock", lambda: pipeline(*make()))
    start._times = real
    model, optimizer = make()
    on_rank_1(model)
    refused("rank 1: model: its split ends with KeyError: \"one rank's own\"", lambda: pipeline(model, optimizer))
    pipe = pipeline(*make(), balance=False)
    on_rank_1(pipe.module)
    refused("rank 1: batch: the model cannot run it, KeyError: \"one rank's own\"", lambda: pipe.step(**batch_of()))


def survivors():
    """Every rank has the line if one has other settings, or cannot open the endpoint."""
    pipe = pipeline(*make(), balance=False)
    rank = dist.get_rank()
    step = lambda _: train_step(pipe, batch_of())  # noqa: E731
    refused("rank 1 has another every of Survivor than rank 0: 2, on rank 0 1", lambda: dt.Survivor(pipe, every=1 + rank).train(step, 2))
    refused("rank 1 has another number of steps than rank 0: 3, on rank 0 2", lambda: dt.Survivor(pipe).train(step, 2 + rank))
    refused("rank 0: endpoint=", lambda: dt.Survivor(pipe, endpoint="none/endpoint").train(step, 2))
    with unittest.mock.patch("socket.create_server", side_effect=OSError("no port")) if rank == 1 else contextlib.nullcontext():
        refused("rank 1: Survivor: its listening ends with OSError: no port", lambda: dt.Survivor(pipe).train(step, 2))
    assert len(dt.Survivor(pipe).train(step, 2)) == 2


def later_steps():
    """Other keys are refused and the next batch runs; what breaks one rank in the middle of a step is told to all."""
    pipe = pipeline(*make(), balance=False)
    model = pipe.module
    refused("state: it has no", lambda: pipe.load_state_dict({}))
    pipe.evaluate(**batch_of(), attention_mask=torch.ones(SAMPLES, LENGTH, dtype=torch.long))  # the whole model is still here
    first = pipe.step(**batch_of())
    elsewhere = [owner != dist.get_rank() for owner in pipe.plan.owners]
    for call in (model.state_dict, *([model.model.layers.state_dict] if any(elsewhere[1:-1]) else [])):  # times decide about the cut
        refused("pipe.save_pretrained()", call)
    pipe.evaluate(**batch_of(), attention_mask=torch.ones(SAMPLES, LENGTH, dtype=torch.long))
    refused("position_ids was not in the first batch", lambda: pipe.step(**batch_of(), position_ids=torch.arange(LENGTH)[None]))
    refused("zb-h1 has I and W apart, with which the first batch was not checked", lambda: pipe.move_to({**pipe.plan.document(), "schedule": "zb-h1"}))
    refused("labels is a number, in the first batch", lambda: pipe.step(input_ids=batch_of()["input_ids"], labels=3))
    refused("output_router_logits was not in the first batch", lambda: pipe.step(**batch_of(), output_router_logits=True))
    refused("3 samples in 2 micro-batches", lambda: pipe.step(**{name: value[:3] for name, value in batch_of().items()}))
    own = batch_of() if dist.get_rank() == 0 else {name: value[:3] for name, value in batch_of().items()}
    pipe.optimizer.zero_grad()
    assert torch.equal(pipe.step(**batch_of()), first)
    on_rank_1(model)
    wanted = KeyError if dist.get_rank() == 1 and pipe.plan.owners[-1] == 1 else dynmo.BadInputError
    try:
        pipe.step(**batch_of())
    except wanted as error:
        assert "one rank's own" in str(error), error
    else:
        raise AssertionError("rank 1 has failed")
    with contextlib.suppress(dynmo.BadInputError):
        pipe.step(**batch_of())
        raise AssertionError("the connections have ended")
    pipe = pipeline(*make(), balance=False)
    pipe.step(**batch_of())
    refused("3 samples in 2" if dist.get_rank() == 1 else "rank 1 has another batch", lambda: pipe.step(**own))


def flags():
    """Losses that change between steps, which ranks with other layers cannot know."""
    pipe = pipeline(*make("mixtral"), balance=False)
    pipe.step(**batch_of(), output_router_logits=False)
    refused("output_router_logits is on, in the first batch, with which the split was checked, off", lambda: pipe.step(**batch_of(), output_router_logits=True))
    pipe.module.config.output_router_logits = True
    pipe.step(**batch_of(), output_router_logits=False)
    refused("config.output_router_logits has been switched on since", lambda: pipe.step(**batch_of()))


def models():
    """Blocks that are left out at random."""
    for family, key in (("opt", "layerdrop"), ("bart", "decoder_layerdrop")):
        refused(f"{key} is 0.3, which leaves out blocks", lambda family=family, key=key: pipeline(*make(family, **{key: 0.3})))


PARTS = {"batches": [batches, kept_gradients], "failures": [failures_of_one_rank, models, survivors, flags, later_steps]}


if __name__ == "__main__":
    run_rank(lambda name: [part() for part in PARTS[name]])
