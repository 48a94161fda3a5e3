#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One rank of the peer that compare.py measures `dynmo train` against: the same Llama decoder, trained
by torch.distributed.pipelining over Gloo on the CPU, or by itself on one rank of a CPU or GPU: "eager", "compile"
(torch.compile) or "eager-deterministic" (equal bits each time).

Written as its users would write it for speed: libtorch's own rms_norm, fused attention and
cross_entropy, fused AdamW, one thread a rank, no synchronization but the schedule's own. Started by
compare.py with the usual RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; one JSON argument:

  model: hidden, blocks, heads, kv_heads, intermediate, sequence, vocabulary, rope_theta, std
  data (a .bin of uint16 tokens), micro_batches, micro_batch_size, steps, warmup_steps, learning_rate,
  beta1, beta2, epsilon, weight_decay, precision (fp32 | bf16), schedule, cut (blocks a stage; not for
  those of one rank), seed, device (cpu | cuda: one rank alone)

Rank 0 prints one JSON line: seconds of the timed steps; the rank of the last stage prints the losses.
"""

import json
import math
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import pipelining

SCHEDULES = {
    # name: (class, stages a rank, whether rank r holds stages r and 2P-1-r)
    "gpipe": (pipelining.ScheduleGPipe, 1, False),
    "1f1b": (pipelining.Schedule1F1B, 1, False),
    "interleaved": (pipelining.ScheduleInterleaved1F1B, 2, False),
    "interleaved-zb": (pipelining.ScheduleInterleavedZeroBubble, 2, False),
    "zb-v": (pipelining.ScheduleZBVZeroBubble, 2, True),
}


class RMSNorm(nn.Module):
    def __init__(self, size, epsilon=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)


def rotary(positions, size, theta):
    frequency = theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angle = torch.outer(torch.arange(positions, dtype=torch.float64), frequency)
    return angle.cos().float()[None, None], angle.sin().float()[None, None]


def rotate(x, cosine, sine):
    """Pairs (k, k + K/2) of x [B, H, T, K]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


class Block(nn.Module):
    def __init__(self, m):
        super().__init__()
        self.heads, self.kv_heads = m["heads"], m["kv_heads"]
        self.size = m["hidden"] // m["heads"]
        kv = self.kv_heads * self.size
        self.input_norm = RMSNorm(m["hidden"])
        self.qkv = nn.Linear(m["hidden"], m["hidden"] + 2 * kv, bias=False)
        self.o = nn.Linear(m["hidden"], m["hidden"], bias=False)
        self.mlp_norm = RMSNorm(m["hidden"])
        self.gate_up = nn.Linear(m["hidden"], 2 * m["intermediate"], bias=False)
        self.down = nn.Linear(m["intermediate"], m["hidden"], bias=False)
        self.kv = kv

    def forward(self, x, cosine, sine):
        b, t, d = x.shape
        q, k, v = self.qkv(self.input_norm(x)).split((d, self.kv, self.kv), dim=-1)
        q = rotate(q.view(b, t, self.heads, self.size).transpose(1, 2), cosine, sine)
        k = rotate(k.view(b, t, self.kv_heads, self.size).transpose(1, 2), cosine, sine)
        v = v.view(b, t, self.kv_heads, self.size).transpose(1, 2)
        grouped = self.kv_heads != self.heads
        mixed = F.scaled_dot_product_attention(q, k, v.to(q.dtype), is_causal=True, enable_gqa=grouped)
        x = x + self.o(mixed.transpose(1, 2).reshape(b, t, d))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Stage(nn.Module):
    """Some blocks, with the embedding before the first and norm and head behind the last."""

    def __init__(self, m, blocks, first, last, precision, device="cpu"):
        super().__init__()
        self.embedding = nn.Embedding(m["vocabulary"], m["hidden"]) if first else None
        self.blocks = nn.ModuleList(Block(m) for _ in range(blocks))
        self.norm = RMSNorm(m["hidden"]) if last else None
        self.head = nn.Linear(m["hidden"], m["vocabulary"], bias=False) if last else None
        cosine, sine = rotary(m["sequence"], m["hidden"] // m["heads"], m["rope_theta"])
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)
        self.autocast = precision == "bf16"
        self.device = device
        residual = m["std"] / math.sqrt(2 * m["blocks"])
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=residual if name.endswith(("o.weight", "down.weight")) else m["std"])

    def forward(self, x):
        with torch.autocast(self.device, torch.bfloat16, enabled=self.autocast):
            if self.embedding is not None:
                x = self.embedding(x)
            for block in self.blocks:
                x = block(x, self.cosine, self.sine)
            if self.head is not None:
                x = self.head(self.norm(x))
        return x


class PipelineStage(pipelining.PipelineStage):
    """Without the warm-up messages between neighbour stages, which NCCL wants and Gloo does not: in a V they
    go to the rank itself, which Gloo refuses, so that ZB-V would not run."""

    def _get_init_p2p_neighbors_ops(self):
        return []


def loss_of(scores, targets):
    return F.cross_entropy(scores.float().flatten(0, 1), targets.flatten())


def optimizer_of(stages, c):
    parameters = [p for stage in stages for p in stage.parameters()]
    groups = [
        {"params": [p for p in parameters if p.dim() == 2], "weight_decay": c["weight_decay"]},
        {"params": [p for p in parameters if p.dim() != 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=c["learning_rate"], betas=(c["beta1"], c["beta2"]), eps=c["epsilon"], fused=True,
    )


class Batches:
    """Windows of the shard's tokens, drawn with a seed: all micro-batches of a step in one tensor."""

    def __init__(self, c):
        self.tokens = torch.from_file(c["data"], dtype=torch.int16, size=os.path.getsize(c["data"]) // 2)
        self.rows = c["micro_batches"] * c["micro_batch_size"]
        self.length = c["model"]["sequence"] + 1
        self.generator = torch.Generator().manual_seed(c["seed"])

    def next(self):
        starts = torch.randint(len(self.tokens) - self.length, (self.rows,), generator=self.generator)
        rows = torch.stack([self.tokens[s : s + self.length] for s in starts.tolist()]).long() & 0xFFFF
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


class Pipelined:
    """This rank's stages under one of the schedules."""

    def __init__(self, c):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        kind, a_rank, v_placement = SCHEDULES[c["schedule"]]
        count = a_rank * ranks
        if len(c["cut"]) != count or sum(c["cut"]) != c["model"]["blocks"]:
            sys.exit(f"cut is {c['cut']}, wanted {count} parts of {c['model']['blocks']} blocks in all")
        own = [rank, 2 * ranks - 1 - rank] if v_placement else [rank + i * ranks for i in range(a_rank)]
        self.modules = [Stage(c["model"], c["cut"][s], s == 0, s == count - 1, c["precision"]) for s in own]
        stages = [PipelineStage(m, s, count, torch.device("cpu")) for m, s in zip(self.modules, own)]
        self.schedule = kind(stages if a_rank > 1 else stages[0], c["micro_batches"], loss_fn=loss_of)
        self.has_first, self.has_last = 0 in own, count - 1 in own

    def step(self, tokens, targets):
        losses = []
        self.schedule.step(
            *((tokens,) if self.has_first else ()),
            **({"target": targets, "losses": losses} if self.has_last else {}),
            return_outputs=False,
        )
        return losses

    def wait(self):
        dist.barrier()


class Eager:
    """The whole model on one device, micro-batch by micro-batch."""

    has_last = True

    def __init__(self, c):
        self.device, self.micro_batches = c["device"], c["micro_batches"]
        self.modules = [Stage(c["model"], c["model"]["blocks"], True, True, c["precision"], self.device).to(self.device)]
        self.model = self.modules[0]
        if c["schedule"] == "compile":
            # What a GPU gains by Inductor, a CPU here need not wait for.
            self.model = torch.compile(self.model, backend="inductor" if self.device == "cuda" else "aot_eager")

    def step(self, tokens, targets):
        losses = []
        rows = zip(tokens.to(self.device).chunk(self.micro_batches), targets.to(self.device).chunk(self.micro_batches))
        for inputs, wanted in rows:
            loss = loss_of(self.model(inputs), wanted)
            (loss / self.micro_batches).backward()
            losses.append(loss.detach())
        return losses

    def wait(self):
        if self.device == "cuda":
            torch.cuda.synchronize()


def main():
    c = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(c["seed"] + int(os.environ["RANK"]))
    dist.init_process_group("gloo")
    torch.use_deterministic_algorithms(c["schedule"] == "eager-deterministic")
    work = Pipelined(c) if c["schedule"] in SCHEDULES else Eager(c)
    optimizer = optimizer_of(work.modules, c)
    batches = Batches(c)
    losses = []
    start = 0.0
    for step in range(c["warmup_steps"] + c["steps"]):
        if step == c["warmup_steps"]:
            work.wait()
            start = time.perf_counter()
        step_losses = work.step(*batches.next())
        optimizer.step()
        optimizer.zero_grad()
        if work.has_last:
            losses.append(sum(step_losses) / len(step_losses))
    work.wait()
    seconds = time.perf_counter() - start
    report = {"rank": dist.get_rank(), "seconds": seconds}
    if work.has_last:
        report["losses"] = [loss.item() for loss in losses]
    # One write each, so that the lines of two ranks do not mix.
    os.write(1, (json.dumps(report) + "\n").encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
