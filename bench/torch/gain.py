# SPDX-License-Identifier: Apache-2.0
"""What balancing gains, and costs, when half of a model freezes: two pipelines of one process group in rounds
that each of them begins in turn.

gain.py [--rounds N] [--steps N]   (starts its two ranks by itself)
"""
import argparse
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

import dynmo.torch as dt

LLAMA: dict[str, Any] = {
    "hidden_size": 192, "num_hidden_layers": 12, "num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 512,
    "vocab_size": 512, "max_position_embeddings": 256, "tie_word_embeddings": False,
}
MICRO_BATCHES, SAMPLES, TOKENS, FROZEN_BLOCKS = 8, 2, 64, 6
Figures = dict[str, float]


class Side:
    """A model with its pipeline, static or balanced."""

    def __init__(self, balanced: bool) -> None:
        torch.manual_seed(0)
        models: Any = AutoModelForCausalLM
        self.model = models.from_config(AutoConfig.for_model("llama", **LLAMA))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.pipe = dt.Pipeline(self.model, self.optimizer, micro_batches=MICRO_BATCHES, plan=even_plan(), steps=10_000)
        self.balanced, self.moves, self.balance_cpu_s = balanced, [], []  # type: ignore[var-annotated]

    def freeze(self) -> None:
        self.model.get_input_embeddings().requires_grad_(False)
        for block in self.model.model.layers[:FROZEN_BLOCKS]:
            block.requires_grad_(False)

    def step(self, ids: torch.Tensor) -> None:
        self.pipe.step(input_ids=ids, labels=ids)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.balanced:
            start = time.thread_time()
            move = self.pipe.balance()
            if move:
                self.moves.append(str(move))
            else:
                self.balance_cpu_s.append(time.thread_time() - start)

    def round(self, steps: int, tokens: torch.Generator) -> Figures:
        dist.barrier()
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(steps):
            self.step(torch.randint(0, LLAMA["vocab_size"], (MICRO_BATCHES * SAMPLES, TOKENS), generator=tokens))
        dist.barrier()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        slowest = torch.tensor([cpu])
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return {"cpu_s": slowest.item() / steps, "step_s": wall / steps, "tokens_per_s": steps * MICRO_BATCHES * SAMPLES * TOKENS / wall}


def even_plan() -> dict[str, Any]:
    stages = [{"stage": rank, "rank": rank, "first_layer": 7 * rank, "layers": 7} for rank in range(2)]
    return {"format": "dynmo-plan-1", "ranks": 2, "schedule": "1f1b", "stages": stages}


def compare(rounds: int, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tokens = torch.Generator().manual_seed(1)
    static, balanced = Side(False), Side(True)
    for side in (static, balanced):
        side.round(steps, tokens)
        side.freeze()
        side.round(2 * steps, tokens)  # it moves here
    found: list[tuple[Figures, Figures]] = []
    for number in range(rounds):
        order = (static, balanced) if number % 2 == 0 else (balanced, static)
        figures = {side: side.round(steps, tokens) for side in order}
        found.append((figures[static], figures[balanced]))
    backwards = sum(balanced.pipe.marks.backwards[: FROZEN_BLOCKS + 1]) + sum(static.pipe.marks.backwards[: FROZEN_BLOCKS + 1])
    if dist.get_rank() == 0:
        report(found, static, balanced, backwards)
    dist.destroy_process_group()


def report(found: list[tuple[Figures, Figures]], static: Side, balanced: Side, backwards: int) -> None:
    def ratio(name: str, inverse: bool) -> str:
        values = [(one[name] / two[name]) if inverse else (two[name] / one[name]) for one, two in found]
        return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f}, {len(values)} rounds)"

    print(f"cut                         {static.pipe.plan.cut} static, {balanced.pipe.plan.cut} balanced")
    for move in balanced.moves:
        print(f"move                        {move}")
    print(f"CPU of the slowest rank     {ratio('cpu_s', True)} x less")
    print(f"tokens/s                    {ratio('tokens_per_s', False)} x more")
    for name, side, index in (("static", static, 0), ("balanced", balanced, 1)):
        predicted = side.pipe.predicted_step_s()
        measured = statistics.median(pair[index]["step_s"] for pair in found)
        print(f"step, {name:9}             predicted {predicted * 1e3:.1f} ms, measured {measured * 1e3:.1f} ms ({predicted / measured - 1:+.1%})")
    print(f"backwards of frozen layers  {backwards}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    if "RANK" in os.environ:
        compare(options.rounds, options.steps)
        return
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    sys.exit(subprocess.run([*launcher, *sys.argv], check=False).returncode)


if __name__ == "__main__":
    main()
