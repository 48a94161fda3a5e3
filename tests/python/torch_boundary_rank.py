# SPDX-License-Identifier: Apache-2.0
"""One rank of torch_boundary_test.py: layers that pass on several tensors, and as many tokens as a layer leaves."""
import torch
import torch.distributed as dist
from torch import nn

import dynmo.torch as dt
from plans import plan_of
from torch_ranks import refused, run_rank

WIDTH, SAMPLES, LENGTH, LAYERS = 8, 4, 12, 5


class Block(nn.Module):
    """Works on the tokens that are left, adds to a sum that all layers share, and drops tokens by their values."""

    def __init__(self, drops):
        super().__init__()
        self.drops = drops
        self.linear, self.route = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, given):
        hidden, kept, scores = given["hidden"], given["kept"], given["scores"]
        scores = scores + self.route(hidden).softmax(-1).mean((1, 2))[:, None]
        hidden = hidden + torch.tanh(self.linear(hidden))
        if self.drops:
            count = 3 + int(hidden.detach().abs().sum() * 1000) % (hidden.shape[1] - 3)
            hidden, kept = hidden[:, :count], kept[:, :count]
        return {"hidden": hidden, "scores": scores, "kept": kept}


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)

    def forward(self, ids):
        return {"hidden": self.embed(ids), "kept": torch.arange(ids.shape[1]).expand(ids.shape), "scores": torch.zeros(ids.shape[0], 1)}


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, given):
        return self.head(given["hidden"]), given["kept"], given["scores"]


def loss_fn(output, target):
    logits, kept, scores = output
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.gather(1, kept).flatten()) + 0.1 * scores.mean()


def make(drops):
    torch.manual_seed(3)
    layers = [("first", First()), *[(f"block{index}", Block(drops and index in (1, 3))) for index in range(LAYERS - 2)], ("last", Last())]
    return layers, torch.optim.AdamW([p for _, layer in layers for p in layer.parameters()], lr=1e-2)


def limits_of(ids):
    return {
        "hidden": torch.empty(*ids.shape, WIDTH), "scores": torch.empty(ids.shape[0], 1), "kept": torch.empty(ids.shape, dtype=torch.int64),
    }


def batch_of(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 50, (2, SAMPLES, LENGTH + step % 3), generator=generator)


PLANS = (([2, 2, 1], "1f1b"), ([1, 1, 3], "gpipe"), ([3, 1, 1], "1f1b"))


def as_the_loop(drops, limits, micro_batches, frozen=0):
    plain, plain_optimizer = make(drops)
    layers, optimizer = make(drops)
    for own in (plain, layers):
        for _, layer in own[:frozen]:
            layer.requires_grad_(False)
    pipe = dt.Pipeline(
        layers=layers, loss_fn=loss_fn, hidden=limits_of, limits=limits, optimizer=optimizer, micro_batches=micro_batches, balance=False,
        plan=plan_of(*PLANS[0], ranks=dist.get_world_size()), timeout_s=60,
    )
    shapes = set()
    for step in range(6):
        ids, target = batch_of(step)
        total = torch.zeros(())
        for given, wanted in zip(ids.chunk(micro_batches), target.chunk(micro_batches)):
            value = given
            for _, layer in plain:
                value = layer(value)
            shapes.add(value[0].shape[1])
            loss = loss_fn(value, wanted) / micro_batches
            loss.backward()
            total = total + loss.detach()
        assert torch.equal(pipe.step(ids, target), total), step
        for one in (plain_optimizer, optimizer):
            one.step()
            one.zero_grad()
        pipe.move_to(plan_of(*PLANS[step % 3], ranks=pipe.ranks))
    assert len(shapes) > 3 or not drops, shapes
    here = [(mine, other) for (_, a), (_, b) in zip(layers, plain) for mine, other in zip(a.parameters(), b.parameters()) if mine.device.type != "meta"]
    assert here and all(torch.equal(*pair) for pair in here)


def refused_batch(text, **options):
    layers, optimizer = make(options.pop("drops", False))
    pipe = dt.Pipeline(layers=layers, optimizer=optimizer, micro_batches=2, balance=False, timeout_s=60, **{"loss_fn": loss_fn, "hidden": limits_of, **options})
    refused(text, lambda: pipe.step(*batch_of(0)))


def main():
    for micro_batches in (1, 4):
        as_the_loop(drops=True, limits=True, micro_batches=micro_batches)
    as_the_loop(drops=True, limits=True, micro_batches=2, frozen=2)
    as_the_loop(drops=False, limits=False, micro_batches=2)
    refused_batch("wanted (2, 12, 8)", drops=True)  # `hidden` says the shapes, not limits
    refused_batch("wanted at most (2, 11, 8)", limits=True, hidden=lambda ids: {**limits_of(ids), "hidden": torch.empty(ids.shape[0], ids.shape[1] - 1, WIDTH)})
    refused_batch("['hidden', 'kept', 'scores'], wanted ['hidden']", hidden=lambda ids: {"hidden": limits_of(ids)["hidden"]})
    refused_batch("gives ['hidden', 'kept', 'scores'], wanted a tensor", hidden=lambda ids: limits_of(ids)["hidden"])
    refused_batch("wanted a tensor of one number", loss_fn=lambda output, _: output[0])


if __name__ == "__main__":
    run_rank(main)
