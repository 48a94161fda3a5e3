# SPDX-License-Identifier: Apache-2.0
"""One rank of torch_adviser_test.py: torch's own runtime on stages that the adviser watches, with a clock that the layers move on."""
import itertools
import json
import pathlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, _PipelineScheduleRuntime, get_schedule_class
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import dynmo
import dynmo.torch as dt
from torch_ranks import run_rank

WIDTH, BLOCKS, SAMPLES, LENGTH, WORDS, MICRO_BATCHES = 8, 6, 16, 4, 32, 8
# Forward and backward, in seconds of a clock of our own.
COSTS = {"tok_embeddings": (1, 2), "norm": (1, 1), "lm_head": (9, 17), **{f"layers.{i}": (4 + i % 2, 9 + i) for i in range(BLOCKS)}}


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


clock = Clock()


class Tick(torch.autograd.Function):
    """Passes a tensor on; the clock goes on in both directions."""

    @staticmethod
    def forward(context, hidden, clock, forward_s, backward_s):
        context.clock, context.backward_s = clock, backward_s
        clock.now += forward_s
        return hidden.clone()

    @staticmethod
    def backward(context, gradient):
        context.clock.now += context.backward_s
        return gradient, None, None, None


class Timed(nn.Module):
    def __init__(self, name, inner):
        super().__init__()
        self.inner, self.costs = inner, COSTS[name]

    def forward(self, hidden):
        clock.now += 100 * (not torch.is_grad_enabled())  # of no layer's training
        return Tick.apply(self.inner(hidden), clock, *self.costs)


class Model(nn.Module):
    """As torchtitan's: what a stage lacks is None, or missing from the list."""

    def __init__(self, numbered, recomputes):
        super().__init__()
        torch.manual_seed(3)
        self.recomputes = recomputes
        self.scale = nn.Identity()  # has no parameters: every stage has it
        self.tok_embeddings = Timed("tok_embeddings", nn.Embedding(WORDS, WIDTH))
        blocks = {str(i): Timed(f"layers.{i}", nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())) for i in range(BLOCKS)}
        self.layers = nn.ModuleList(blocks.values()) if numbered else nn.ModuleDict(blocks)
        self.lm_head = Timed("lm_head", nn.Linear(WIDTH, WORDS))  # before norm: the order is that in which layers run
        self.norm = Timed("norm", nn.LayerNorm(WIDTH))

    def forward(self, hidden):
        if self.tok_embeddings is not None:
            hidden = self.tok_embeddings(hidden)
        for block in self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers:
            hidden = hidden if self.scale is None else self.scale(hidden)
            with set_checkpoint_early_stop(False):  # the clock moves on where a block ends
                hidden = checkpoint(block, hidden, use_reentrant=False) if self.recomputes else block(hidden)
        for last in (self.norm, self.lm_head):
            hidden = hidden if last is None else last(hidden)
        return hidden


def part_of(names, numbered, recomputes):
    model = Model(numbered, recomputes)
    kept = {name.partition(".")[2] for name in names if name.startswith("layers.")}
    if numbered:
        model.layers = nn.ModuleList(block for i, block in enumerate(model.layers) if str(i) in kept)
    else:
        for key in set(model.layers) - kept:
            del model.layers[key]
    for name in ("tok_embeddings", "norm", "lm_head"):
        if name not in names:
            setattr(model, name, None)
    return model


def loss_fn(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def batch():
    torch.manual_seed(5)
    return torch.randint(WORDS, (SAMPLES, LENGTH)), torch.randint(WORDS, (SAMPLES, LENGTH))


def torch_schedule(kind, stages, micro_batches, loss_fn, csv=None):
    """Torch's own, or its runtime with the order of a file."""
    if csv is not None:
        schedule = _PipelineScheduleRuntime(stages, micro_batches, loss_fn=loss_fn)
        schedule._load_csv(str(csv), format="compute_only")
        return schedule
    made = get_schedule_class(kind)
    return made(stages if issubclass(made, PipelineScheduleMulti) else stages[0], micro_batches, loss_fn=loss_fn)


def run(cut, kind, *, numbered=False, recomputes=False, watch=True, csv=None):
    """Two steps by torch's runtime: the gradients of this rank's stages, and the advice."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts = {index: part_of(cut[index], numbered, recomputes) for index in range(rank, len(cut), ranks)}
    stages = [PipelineStage(part, index, len(cut), torch.device("cpu")) for index, part in parts.items()]
    adviser = dt.Adviser(stages, kind, micro_batches=MICRO_BATCHES, clock=clock) if watch else None
    def last_loss(output, target):
        return Tick.apply(loss_fn(output, target), clock, 3, 5)
    schedule = torch_schedule(kind, stages, MICRO_BATCHES, adviser.timed_loss(last_loss) if watch else last_loss, csv)
    given, target = batch()
    for _ in range(2):
        for part in parts.values():
            part.zero_grad()
        last = rank == (len(cut) - 1) % ranks
        schedule.step(*((given,) if rank == 0 else ()), **({"target": target} if last else {}))
    advice = adviser.advise() if watch else None
    if watch:
        adviser.close()
        hooks = [hook for part in parts.values() for module in part.modules() for hook in (*module._forward_hooks, *module._forward_pre_hooks)]
        assert not hooks, hooks
    return {index: [parameter.grad for parameter in part.parameters()] for index, part in parts.items()}, advice


NAMES = ["tok_embeddings", *(f"layers.{i}" for i in range(BLOCKS)), "norm", "lm_head"]


def cuts_of(stages):
    for ends in itertools.combinations(range(1, len(NAMES)), stages - 1):
        yield [NAMES[a:b] for a, b in itertools.pairwise((0, *ends, len(NAMES)))]


def step_s(cut, kind, costs):
    """By the plain recurrence of a step, not by anything of the package."""
    ranks, count = dist.get_world_size(), len(cut)
    rows = dynmo.Schedule({"GPipe": "gpipe", "1F1B": "1f1b", "Interleaved1F1B": "interleaved"}[kind], [i % ranks for i in range(count)],
                          MICRO_BATCHES).rows
    done, free, at = {}, [0.0] * ranks, [0] * ranks
    while any(at[rank] < len(rows[rank]) for rank in range(ranks)):
        for rank in range(ranks):
            while at[rank] < len(rows[rank]):
                action = rows[rank][at[rank]]
                kind_of = "F" if "F" in action else "B"
                stage, micro_batch = map(int, action.split(kind_of))
                if kind_of == "F":
                    needs = [("F", stage - 1, micro_batch)] if stage else []
                else:
                    needs = [("F", stage, micro_batch)] + ([("B", stage + 1, micro_batch)] if stage + 1 < count else [])
                if not all(need in done for need in needs):
                    break
                begin = max([free[rank], *(done[need] for need in needs)])
                took = sum(costs[name][kind_of == "B"] for name in cut[stage])
                done[kind_of, stage, micro_batch] = free[rank] = begin + took
                at[rank] += 1
    return max(free)


def check(kind, cut, folder, *, numbered=False, recomputes=False):
    plain, _ = run(cut, kind, numbered=numbered, recomputes=recomputes, watch=False)
    watched, advice = run(cut, kind, numbered=numbered, recomputes=recomputes)
    assert plain.keys() == watched.keys()
    assert all(torch.equal(a, b) for index in plain for a, b in zip(plain[index], watched[index], strict=True)), "hooks change gradients"
    wanted = dict(COSTS)
    if recomputes:  # a backward begins with a second forward
        wanted.update({name: (f, f + b) for name, (f, b) in COSTS.items() if name.startswith("layers.")})
    wanted["lm_head"] = (COSTS["lm_head"][0] + 3, COSTS["lm_head"][1] + 5)
    measured = {layer["name"]: (layer["forward_s"], layer["backward_input_s"] + layer["backward_weight_s"]) for layer in advice.profile["layers"]}
    assert measured == wanted and list(measured) == NAMES, (kind, measured, wanted)
    assert advice.before == cut and sum(advice.after, []) == NAMES
    assert abs(advice.current_step_s - step_s(cut, kind, wanted)) < 1e-6, kind
    assert abs(advice.planned_step_s - step_s(advice.after, kind, wanted)) < 1e-6, kind
    best = min(step_s(other, kind, wanted) for other in cuts_of(dist.get_world_size())) if len(cut) == dist.get_world_size() else None
    assert best is None or abs(advice.planned_step_s - best) < 1e-6, (kind, advice.after, advice.planned_step_s, best)
    assert advice.gain_s > 0 and advice.pays(restart_s=9.5 * advice.gain_s, steps=10)
    assert not advice.pays(restart_s=9.5 * advice.gain_s, steps=9)
    place = pathlib.Path(folder) / f"{kind}-{numbered}-{recomputes}-{dist.get_rank()}"
    advice.write(place)
    keys = json.loads((place / "torchtitan.json").read_text())["parallelism"]
    assert keys["pipeline_parallel_schedule"] == kind and keys["pipeline_parallel_degree"] == dist.get_world_size()
    # The new cut and order by torch's runtime: the gradients of the old one, and nothing more to gain.
    after, again = run(keys["module_fqns_per_model_part"], kind, numbered=numbered, recomputes=recomputes, csv=place / "schedule.csv")
    assert str(again).startswith("keep ") and not again.pays(0, 1000), again
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, (plain, after))
    flat = [[gradient for index in range(99) for rank in told for gradient in rank[which].get(index, ())] for which in (0, 1)]
    assert len(flat[0]) == len(flat[1]) and all(torch.equal(a, b) for a, b in zip(*flat)), kind


def main(folder):
    ranks = dist.get_world_size()
    whole = [NAMES[:4], NAMES[4:]] if ranks == 2 else [NAMES[:3], NAMES[3:5], NAMES[5:]]
    check("1F1B", whole, folder)
    check("1F1B", whole, folder, numbered=True)
    check("GPipe", whole, folder, recomputes=True)
    if MICRO_BATCHES % ranks == 0:
        check("Interleaved1F1B", [NAMES[:1], NAMES[1:3], NAMES[3:4], NAMES[4:]], folder)


if __name__ == "__main__":
    run_rank(main)
