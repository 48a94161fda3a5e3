# SPDX-License-Identifier: Apache-2.0
"""The same costs in every form give the same plan."""
import copy
import unittest

import dynmo
import numpy
from support import LLAMA, UNEVEN, Case

OPTIONS = {"ranks": 3, "micro_batches": 4, "balancer": "optimal", "schedule": "1f1b"}


class Frame:
    """What dynmo asks of a DataFrame."""

    def __init__(self, columns):
        self._columns = columns
        self.columns = list(columns)

    def __getitem__(self, name):
        return self._columns[name]

    def to_dict(self):
        raise AssertionError("its rows are not what is wanted")


class Config:
    """What dynmo asks of a config of transformers."""

    model_type = "llama"

    def to_dict(self):
        return copy.deepcopy(LLAMA)


class Costs(Case):
    def test_in_any_form_give_the_same_plan(self):
        layers = UNEVEN["layers"]
        columns = {key: [layer[key] for layer in layers] for key in layers[0]}
        arrays = {key: numpy.array(values) for key, values in columns.items()}
        kinds = [(key, "U16" if key == "name" else numpy.array(values).dtype) for key, values in columns.items()]
        forms = {
            "list": layers, "layers alone": {"layers": layers}, "path": self.write("p.json", UNEVEN), "columns": columns,
            "text of a path": str(self.folder / "p.json"), "arrays": arrays, "frame": Frame(arrays),
            "structured array": numpy.array([tuple(layer.values()) for layer in layers], dtype=kinds),
            "numbers of numpy": [{key: value if key == "name" else arrays[key][i] for key, value in layer.items()}
                                 for i, layer in enumerate(layers)],
        }
        wanted = dynmo.plan(UNEVEN, **OPTIONS)
        for name, form in forms.items():
            with self.subTest(name):
                plan = dynmo.plan(form, **OPTIONS)
                self.assertEqual(plan.document, wanted.document)
                self.assertEqual(plan.costs, wanted.costs)

    def test_of_a_config_are_those_that_its_plan_has(self):
        options = {"device": "h100", "sequence": 1024}
        costs = dynmo.model_costs(Config(), **options)
        self.assertEqual(costs, dynmo.plan(LLAMA, 2, balancer="time", **options).costs)
        self.assertEqual(len(costs["layers"]), 2 * LLAMA["num_hidden_layers"] + 2)
        for device in dynmo.devices():
            self.assertGreater(dynmo.model_costs(LLAMA, device=device, sequence=64)["layers"][1]["forward_s"], 0)

    def test_that_cannot_be_costs_are_refused_by_name(self):
        for text, costs in [
            ("type int", 7),
            ("layers", []),
            ("unequal lengths", {"forward_s": [1.0], "backward_input_s": [1.0, 2.0]}),
            ("column forward_s is of type float", {"forward_s": 1.0}),
            ("backward_weight_s", {"forward_s": [1.0], "backward_input_s": [1.0]}),
            ("froward_s", [{**UNEVEN["layers"][0], "froward_s": 1.0}]),
            ("/layers/0", [3]),
            ("format", {"format": "dynmo-profile-9", "layers": UNEVEN["layers"]}),
            ("p.json", self.write("p.json", "{")),
            ("forward_s", {**UNEVEN, "layers": [{**UNEVEN["layers"][0], "forward_s": float("nan")}]}),
        ]:
            with self.subTest(text=text):
                self.assert_refused(dynmo.BadInputError, text, dynmo.plan, costs, **OPTIONS)
        for error, value in [(TypeError, {1, 2}), (TypeError, {3: 4}), (ValueError, 1 << 70)]:
            with self.subTest(value=value), self.assertRaises(error):
                dynmo.plan([{"forward_s": value}], **OPTIONS)
        nested = []
        nested.append(nested)
        with self.assertRaisesRegex(ValueError, "64 levels"):
            dynmo.plan([{"forward_s": nested}], **OPTIONS)


if __name__ == "__main__":
    unittest.main()
