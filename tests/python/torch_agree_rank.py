# SPDX-License-Identifier: Apache-2.0
"""One rank of torch_agree_test.py: rank 1 is given something else than the others, and every rank must say so."""
import sys
from unittest import mock

import torch
import torch.distributed as dist

import dynmo
import dynmo.torch as dt
import torch_cases
from dynmo.torch import start
from plans import plan_of
from torch_ranks import is_whole, make_pipe, refused, run_rank

CASE = {"family": "llama", "micro_batches": 4}


def construct(config=None, weights=0, optimizer=None, frozen=False, compiled=False, **options):
    """A pipeline; where it is refused, the line, and the model is whole."""
    model = torch_cases.make_model({**CASE, "config": config or {}, "seed": weights})
    if frozen:
        model.lm_head.requires_grad_(False)
    if compiled:
        model.compile()
    made = torch_cases.make_optimizer({"optimizer": optimizer or "fused"}, model.parameters())
    try:
        dt.Pipeline(model, made, **{"micro_batches": 4, "timeout_s": 60, **options})
    except dynmo.BadInputError as error:
        assert is_whole(model), error
        return str(error)
    return "nothing"


SETTINGS = (
    ({"balance": False}, "rank 1 has another balance than rank 0: False, on rank 0 True"),
    ({"balancer": "time"}, "rank 1 has another balancer than rank 0: time, on rank 0 optimal"),
    ({"schedule": "gpipe"}, "rank 1 has another schedule than rank 0: gpipe, on rank 0 1f1b"),
    ({"steps": 10}, "rank 1 has another steps than rank 0: 10, on rank 0 0"),
    ({"seed": 3}, "rank 1 has another seed than rank 0: 3, on rank 0 None"),
    ({"micro_batches": 8}, "rank 1 has another micro_batches than rank 0: 8, on rank 0 4"),
    ({"micro_batches": 0}, "rank 1 has another micro_batches than rank 0: 0, on rank 0 4"),
    ({"accumulation": 2}, "rank 1 has another accumulation than rank 0: 2, on rank 0 1"),
    ({"plan": plan_of([2, 2, 2])}, "rank 1 has another plan than rank 0"),
    ({"optimizer": "sgd"}, "rank 1 has another optimizer than rank 0: SGD, on rank 0 AdamW"),
    ({"optimizer": "foreach"}, "rank 1 has another foreach of optimizer group 0 than rank 0: True, on rank 0 None"),
    ({"weights": 1}, "rank 1 has another initial value or requires_grad flag in layer embedding"),
    ({"frozen": True}, "rank 1 has another initial value or requires_grad flag in layer head"),
    ({"config": {"attention_dropout": 0.1}}, "rank 1 has another dropout than rank 0: True, on rank 0 False"),
    ({"config": {"num_hidden_layers": 5}}, "rank 1 has another number of parameters in optimizer group 0 than rank 0: 48, on rank 0 39"),
    ({"metrics": ("tensorboard",)}, "rank 1: metrics=('tensorboard',) without run, wanted run=FOLDER"),
    ({"compiled": True}, "rank 1: model: the model is compiled by torch.compile"),
)


def refused_on_all(text, other, **common):
    """Rank 1 is given `other` beside what all have."""
    said = construct(**{**common, **(other if dist.get_rank() == 1 else {})})
    assert said.startswith(text) and "\n" not in said, (text, said)
    assert "wanted" in said, said


def changed_on_one_rank():
    pipe = make_pipe(CASE, timeout_s=60)
    pipe.step(**torch_cases.batch_of(CASE, 0))
    pipe.optimizer.zero_grad()
    if pipe.rank == 1:
        pipe.changed("a mask of its own")
    refused("rank 1 has called changed() otherwise than rank 0, wanted the same on all ranks", pipe.balance, str.__eq__)


def main():
    for other, text in SETTINGS:
        refused_on_all(text, other)
    refused_on_all("rank 1 has another plan than rank 0", {"plan": plan_of([1, 3, 2])}, plan=plan_of([2, 2, 2]))
    refused_on_all("micro_batches=0", {}, micro_batches=0)
    for module, name in ((torch, "torch"), (sys.modules["transformers"], "transformers"), (start, "dynmo")):
        version = "dynmo_version" if name == "dynmo" else "__version__"
        with mock.patch.object(module, version, "9.9" if dist.get_rank() == 1 else getattr(module, version)):
            refused_on_all(f"rank 1 has another version of {name} than rank 0: 9.9, on rank 0 ", {})
    assert construct() == "nothing"  # the group is as it was
    changed_on_one_rank()


if __name__ == "__main__":
    run_rank(main)
