# SPDX-License-Identifier: Apache-2.0
"""What cannot work is refused in one line that says what was given, wanted and is to be changed."""
import os
import unittest
import warnings
import weakref
from unittest import mock

import torch
from torch import nn

import dynmo
import dynmo.torch as dt
import torch_cases
from dynmo.torch import checks
from plans import plan_of
from support import Case

LLAMA = {"family": "llama", "micro_batches": 2}


def llama(**config):
    return torch_cases.make_model({**LLAMA, "config": config})


class Shrinks(nn.Module):
    """A block that gives fewer tokens than it takes."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, *arguments, **named):
        return self.block(*arguments, **named)[:, 1:]


class Grows(Shrinks):
    """A block that gives more tokens than it takes."""

    def forward(self, *arguments, **named):
        hidden = self.block(*arguments, **named)
        return torch.cat([hidden, hidden[:, :1]], 1)


class Drops(nn.Module):
    """Dropout by a function, of which no module tells."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, given):
        return nn.functional.dropout(self.linear(given), 0.5, self.training)


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)

    def forward(self, given):
        return self.attention(given, given, given)[0]


class Recurs(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 4, 2, dropout=0.5, batch_first=True)

    def forward(self, given):
        return self.lstm(given)[0]


class Refused(Case):
    def refuse(self, text, *arguments, **options):
        self.assert_refused(dynmo.BadInputError, text, dt.Pipeline, *arguments, **{"micro_batches": 2, **options})

    def pipe(self, **options):
        model = llama()
        return dt.Pipeline(model, torch.optim.AdamW(model.parameters()), **{"micro_batches": 2, **options})

    def test_models_that_something_else_has_split_or_wrapped(self):
        model = llama()
        with mock.patch.dict(os.environ, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}):
            torch.distributed.init_process_group("gloo")
            self.addCleanup(torch.distributed.destroy_process_group)
            self.refuse("DistributedDataParallel", nn.parallel.DistributedDataParallel(model))
            from torch.distributed.fsdp import fully_shard

            sharded = llama()
            fully_shard(sharded, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
            self.refuse("FSDP2", sharded)
            from torch.distributed.fsdp import FullyShardedDataParallel
            from torch.distributed.tensor import DTensor, Replicate

            self.refuse("wrapped by FSDP,", FullyShardedDataParallel(llama(), device_id=torch.device("cpu")))
            split, mesh = llama(), torch.distributed.init_device_mesh("cpu", (1,))
            weight = DTensor.from_local(split.lm_head.weight.detach(), mesh, [Replicate()])
            split.lm_head.weight = nn.Parameter(weight)
            self.refuse("parameter lm_head.weight is a DTensor", split)
        self.refuse("torch.compile", torch.compile(model))
        compiled = llama()
        compiled.compile()
        self.refuse("torch.compile", compiled)
        staged = llama()
        staged._pp_stage = 0
        self.refuse("pp_size", staged)
        for mark, value in (("_tp_size", 2), ("_device_mesh", object())):
            parallel = llama()
            setattr(parallel, mark, value)
            self.refuse("tp_size", parallel)

        class DeepSpeedEngine(nn.Module):
            pass

        DeepSpeedEngine.__module__ = "deepspeed.runtime.engine"
        self.refuse("DeepSpeed", DeepSpeedEngine())

    def test_parameters_that_cannot_move(self):
        with torch.device("meta"):
            self.refuse("model.embed_tokens.weight is on meta", llama())
        model = llama()
        model.lm_head.weight = nn.Parameter(torch.zeros(96, 32, dtype=torch.int8), requires_grad=False)
        self.refuse("lm_head.weight is torch.int8", model)
        model = llama()
        model.is_quantized = True
        self.refuse("it is quantized", model)

        class Own(nn.Parameter):
            pass

        model = llama()
        model.lm_head.weight = Own(torch.zeros(96, 32))
        self.refuse("lm_head.weight is a Own", model)
        model = llama()
        model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
        self.refuse("are one parameter", model)
        model = llama()
        model(**torch_cases.batch_of(LLAMA, 0)).loss.backward()
        self.refuse("has a gradient", model)

    def test_parameters_with_other_owners(self):
        model = llama()
        named = lambda: iter([("head", model.lm_head.weight)])  # noqa: E731
        self.assertEqual(checks.check_free(named()), "")
        watched = weakref.ref(model.lm_head.weight)
        self.assertIn("head has weak references", checks.check_free(named()))
        del watched
        view = model.lm_head.weight.view(-1)
        self.assertIn("head has live views", checks.check_free(named()))
        del view
        self.assertEqual(checks.check_free(named()), "")

    def test_losses_that_span_layers(self):
        for flag in ("output_hidden_states", "output_attentions"):
            self.refuse(flag, llama(**{flag: True}))

    def test_models_that_are_no_decoders(self):
        self.refuse("layers=[(name, module), ...]", nn.Linear(2, 2))
        self.refuse("either a model or layers", None)
        model = llama()
        model.config.is_encoder_decoder = True
        self.refuse("encoder-decoder", model)

    def test_blocks_that_change_the_shape(self):
        model = llama()
        blocks = model.model.layers
        blocks[1], blocks[2] = Shrinks(blocks[1]), Grows(blocks[2])
        self.refuse("block 1 takes (2, 8, 32) in torch.float32 and gives (2, 7, 32)", model)
        model = llama()
        model.model.layers[3] = Shrinks(model.model.layers[3])  # the model's own loss cannot be made of it
        self.refuse("block 3 takes (2, 8, 32) in torch.float32 and gives (2, 7, 32)", model)
        pipe = dt.Pipeline(llama(), micro_batches=2)
        pipe._split._real[1] = Shrinks(pipe._split._real[1])
        self.assert_refused(
            dynmo.BadInputError, "block 1 takes (1, 9, 32) in torch.float32 and gives (1, 8, 32)", pipe.step, **torch_cases.batch_of(LLAMA, 0)
        )

    def test_a_split_that_is_almost_right(self):
        from dynmo.torch import decoder

        def louder(given):
            return {name: value * (1 + 1e-6) for name, value in given.items()} if isinstance(given, dict) else given * (1 + 1e-6)

        for tampered in ("_run_block", "_run_behind"):
            real = getattr(decoder.Decoder, tampered)
            with mock.patch.object(decoder.Decoder, tampered, lambda *a, real=real: louder(real(*a))):
                self.refuse("the whole", llama())

    def test_optimizers(self):
        model = llama()
        self.refuse("LBFGS", model, torch.optim.LBFGS(model.parameters()))
        self.refuse("not one of the model", model, torch.optim.SGD(llama().parameters(), lr=0.1))

    def test_settings_and_plans(self):
        for name, values in {"micro_batches": (0, "2", 2.0, True, 2**63), "accumulation": (0, None), "steps": (-1, 1.5), "seed": (-1, "x")}.items():
            for value in values:
                self.refuse(f"{name}={value!r}, wanted a whole number", llama(), **{name: value})
        self.refuse("schedule: dapple, wanted gpipe, 1f1b, interleaved, zb-h1", llama(), schedule="dapple")
        self.refuse("balancer: fastest, wanted optimal, uniform, ", llama(), balancer="fastest")
        document = plan_of([5])
        self.refuse("cover 5 layers", llama(), plan=document)
        self.refuse("for 2 ranks, here are 1", llama(), plan={**document, "ranks": 2})
        self.refuse("schedule adaptive without order", llama(), plan={**document, "schedule": "adaptive"})
        self.refuse("schedule zb-h1 has an order", llama(), plan={**document, "schedule": "zb-h1", "order": [["0F0"]]})
        self.refuse("wanted a dynmo.Plan", llama(), plan={"stages": [{}]})

    def test_batches(self):
        pipe = self.pipe()
        batch = torch_cases.batch_of({**LLAMA, "micro_batches": 3}, 0)
        refused = lambda text, *pair, **given: self.assert_refused(dynmo.BadInputError, text, pipe.step, *pair, **given)  # noqa: E731
        refused("3 samples in 2 micro-batches", **batch)
        refused("samples differ in number", **{**batch, "labels": batch["labels"][:2]})
        refused("no tensor")
        refused("by name", batch["input_ids"])
        refused("no loss", input_ids=batch["input_ids"][:2])
        for parameter in pipe.module.parameters():
            parameter.requires_grad_(False)
        refused("no parameter is trained", **torch_cases.batch_of(LLAMA, 0))

    def test_accumulation_is_counted(self):
        pipe = self.pipe(accumulation=2)
        batch = torch_cases.batch_of(LLAMA, 0)
        self.assert_refused(dynmo.BadInputError, "0 calls of accumulate()", pipe.step, **batch)
        pipe.accumulate(**batch)
        self.assert_refused(dynmo.BadInputError, "wanted step() now", pipe.accumulate, **batch)
        pipe.step(**batch)

    def test_own_layers(self):
        one, two = nn.Linear(2, 2), nn.Linear(2, 2)
        pair = [("one", one), ("two", two)]
        self.refuse("loss_fn=", layers=pair)
        options = {"loss_fn": nn.functional.mse_loss, "hidden": lambda x: torch.empty(x.shape[0], 2)}
        self.refuse("wanted two or more", layers=[("one", one)], **options)
        self.refuse("one.weight and two.weight are one parameter", layers=[("one", one), ("two", one)], **options)
        pipe = dt.Pipeline(layers=pair, micro_batches=2, **{**options, "hidden": lambda x: torch.empty(x.shape[0], 3)})
        self.assert_refused(dynmo.BadInputError, "layer one gives (1, 2)", pipe.step, torch.zeros(2, 2), torch.zeros(2, 2))
        self.assert_refused(dynmo.BadInputError, "input and target", pipe.step, torch.zeros(2, 2))

    def test_own_layers_that_draw_random_numbers(self):
        given, target = torch.randn(2, 4, 3, 4, generator=torch.Generator().manual_seed(5))

        def pipe(kind, **options):
            torch.manual_seed(3)
            layers = [("one", kind()), ("two", nn.Linear(4, 4))]
            return dt.Pipeline(layers=layers, loss_fn=nn.functional.mse_loss, hidden=torch.empty_like, micro_batches=2, **options)

        text = "but layers draw random numbers, wanted seed=NUMBER, from which they follow"
        self.assert_refused(dynmo.BadInputError, text, pipe(Drops).step, given, target)
        losses = [pipe(Drops, seed=seed).step(given, target).item() for seed in (7, 7, 8)]
        self.assertEqual([loss == losses[0] for loss in losses], [True, True, False])
        for kind in (Attends, Recurs):
            with self.subTest(kind.__name__), self.assertWarnsRegex(UserWarning, "draws random numbers"):
                pipe(kind).step(given, target)

    def test_lists_of_micro_batches(self):
        pipe = self.pipe()
        batch = torch_cases.batch_of(LLAMA, 0)
        for text, parts in (
            ("a list of 0 micro-batches, wanted 2 at most", []), ("a list of 3 micro-batches", [batch] * 3),
            ("micro-batch 1 has another labels", [batch, {**batch, "labels": batch["labels"].float()}]),
            ("micro-batch 1 has another attention_mask", [batch, {key: batch[key] for key in ("input_ids", "labels")}]),
        ):
            self.assert_refused(dynmo.BadInputError, text, pipe.step, parts)

    def test_a_grad_scaler(self):
        for options in ({"fused": True}, {"foreach": True}):  # the first divides by the scale itself
            model = llama()
            optimizer = torch.optim.AdamW(model.parameters(), **options)
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # wraps step()
            pipe = dt.Pipeline(model, optimizer, micro_batches=2)
            before = [parameter.detach().clone() for parameter in model.parameters()]
            scaler = torch.amp.GradScaler("cpu")
            scaler.scale(pipe.step(**torch_cases.batch_of(LLAMA, 0)))
            self.assert_refused(dynmo.BadInputError, "a GradScaler steps it", scaler.step, optimizer)
            self.assertTrue(all(map(torch.equal, before, model.parameters())))
            torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
            self.assertFalse(all(map(torch.equal, before, model.parameters())))

    def test_an_untested_version_is_said_once_and_goes_on(self):
        own = [nn.Linear(2, 2), nn.Linear(2, 2)]
        layers = {"layers": [("one", own[0]), ("two", own[1])], "loss_fn": nn.functional.mse_loss, "hidden": lambda x: x}
        for name, make in (
            ("TRANSFORMERS", self.pipe), ("TORCH", self.pipe), ("TORCH", lambda: dt.Pipeline(micro_batches=2, **layers)),
        ):
            with mock.patch.object(checks, f"TESTED_{name}", ("4.0",)), warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("default")
                for _ in range(2):
                    make()
            told = [str(one.message).split(", here")[0] for one in said]
            # The other one may be untested here, too.
            self.assertEqual([line for line in told if line.endswith(" 4.0")], [f"dynmo.torch is tested with {name.lower()} 4.0"])

    def test_dropout_is_said(self):
        with self.assertWarnsRegex(UserWarning, "draws random numbers"):
            dt.Pipeline(llama(attention_dropout=0.1), micro_batches=2)


class FirstBatch(Case):
    """What one rank checks, which keeps all layers."""

    def test_is_checked_once_and_again_with_other_keys(self):
        model = torch_cases.make_model(LLAMA)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        pipe = dt.Pipeline(model, optimizer, micro_batches=2, balance=False)
        with mock.patch("dynmo.torch.selfcheck.check_batch") as check:
            for step, wanted in enumerate([1, 1, 1]):
                pipe.step(**torch_cases.batch_of(LLAMA, step))
                optimizer.zero_grad()
                self.assertEqual(check.call_count, wanted)
            batch = torch_cases.batch_of(LLAMA, 3)
            del batch["attention_mask"]
            for wanted in (1, 2, 2):
                pipe.step(**batch)
                optimizer.zero_grad()
                self.assertEqual(check.call_count, wanted)
                batch["position_ids"] = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"]).clone()


if __name__ == "__main__":
    unittest.main()
