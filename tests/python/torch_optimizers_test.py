# SPDX-License-Identifier: Apache-2.0
"""Optimizers of torch that work element by element run; any other is tried, and runs or is refused by name."""
import unittest

import torch

import dynmo
import dynmo.torch as dt
import torch_cases
from dynmo.torch import optimizers
from support import Case

LLAMA = {"family": "llama", "micro_batches": 2}


class Own(torch.optim.Optimizer):
    """The base of optimizers that others write; `rate` says what a step takes from all parameters together."""

    def __init__(self, parameters, lr=0.01):
        super().__init__(parameters, {"lr": lr})

    def rate(self, group, given):
        return 1.0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            given = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in given:
                parameter.sub_(group["lr"] * self.rate(group, given) * parameter.grad)


class ByMatrix(Own):
    """As LAMB and Shampoo: norms of a whole parameter."""

    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.sub_(group["lr"] * parameter.norm() / parameter.grad.norm() * parameter.grad)


class ByAllNorms(Own):
    """Clips by the norm of all gradients that it sees."""

    def rate(self, group, given):
        return min(1.0, 1.0 / torch.stack([parameter.grad.norm() for parameter in given]).norm().item())


class ByCount(Own):
    def rate(self, group, given):
        return 1.0 / len(given)


class GrowsASetting(Own):
    """As Prodigy: a number in the group grows by what all gradients say, and the first updates do not use it."""

    def rate(self, group, given):
        group["d"] = group.get("d", 0.0) + sum(parameter.grad.sum().item() for parameter in given)
        return 1.0


class SharesState(Own):
    """A sum over all parameters that the group has, in the state of each."""

    def rate(self, group, given):
        for parameter in given:
            self.state[parameter]["seen"] = len(given)
        return 1.0


class WantsAll(Own):
    """Reads every parameter, also those that lie on other ranks."""

    def rate(self, group, given):
        return sum(parameter.detach().sum().item() for parameter in group["params"])


class Noisy(Own):
    """Draws from the global generator, in the order of the parameters."""

    def rate(self, group, given):
        return torch.rand(()).item()


class Slotted(Own):
    """Keeps more than torch's optimizers do."""

    def __init__(self, parameters):
        super().__init__(parameters)
        self.first = self.param_groups[0]["params"][0]
        self.counts = {parameter: 0 for group in self.param_groups for parameter in group["params"]}

    def rate(self, group, given):
        for parameter in given:
            self.counts[parameter] += 1
        return 1.0


class Optimizers(Case):
    def check(self, make):
        model = torch_cases.make_model(LLAMA)
        optimizers.check_optimizer(make(list(model.parameters())), model)

    def test_of_torch(self):
        for kind in optimizers.ELEMENTWISE:
            with self.subTest(kind=kind.__name__):
                self.check(lambda parameters, kind=kind: kind(parameters, lr=0.01))
        self.check(lambda parameters: torch.optim.Adafactor(parameters, lr=0.01))
        self.check(lambda parameters: torch.optim.Muon([parameter for parameter in parameters if parameter.dim() == 2], lr=0.01))

    def test_the_table_is_true(self):
        """Each of the table passes the trial that others have to pass, with groups and every way to loop."""
        for kind in optimizers.ELEMENTWISE:
            for foreach in (False, True):
                model = torch_cases.make_model(LLAMA)
                parameters = list(model.parameters())
                groups = [{"params": parameters[:5], "weight_decay": 0.1}, {"params": parameters[5:]}]
                with self.subTest(kind=kind.__name__, foreach=foreach):
                    self.assertEqual(optimizers._Trial(kind(groups, lr=0.01, foreach=foreach)).difference(), "")

    def test_others_that_update_each_parameter_by_itself(self):
        for kind in (Own, ByMatrix, Slotted):
            with self.subTest(kind=kind.__name__):
                self.check(kind)

    def test_others_that_see_all_parameters(self):
        for kind, text in (
            (ByAllNorms, "the update of a parameter depends"), (ByCount, "the update of a parameter depends"), (GrowsASetting, "its setting d"),
            (SharesState, "its state seen"), (WantsAll, "ended with"), (Noisy, "the update of a parameter depends"),
        ):
            with self.subTest(kind=kind.__name__):
                self.assert_refused(dynmo.BadInputError, f"{kind.__name__} cannot run", self.check, kind)
                self.assert_refused(dynmo.BadInputError, text, self.check, kind)

    def test_a_warm_up_from_nothing_hides_nothing(self):
        model = torch_cases.make_model(LLAMA)
        optimizer = ByAllNorms(model.parameters())
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
        self.assertEqual(optimizer.param_groups[0]["lr"], 0)
        self.assert_refused(dynmo.BadInputError, "ByAllNorms cannot run", dt.Pipeline, model, optimizer, micro_batches=2)

    def test_the_trial_leaves_the_optimizer_as_it_is(self):
        model = torch_cases.make_model(LLAMA)
        optimizer = Slotted(model.parameters())
        before = [parameter.detach().clone() for parameter in model.parameters()]
        random = torch.get_rng_state()
        pipe = dt.Pipeline(model, optimizer, micro_batches=2, balance=False)
        self.assertTrue(all(map(torch.equal, before, model.parameters())))
        self.assertTrue(torch.equal(random, torch.get_rng_state()))
        self.assertEqual((dict(optimizer.state), set(optimizer.counts.values())), ({}, {0}))
        pipe.step(**torch_cases.batch_of(LLAMA, 0))
        optimizer.step()
        self.assertEqual(set(optimizer.counts.values()), {len(before)})


if __name__ == "__main__":
    unittest.main()
