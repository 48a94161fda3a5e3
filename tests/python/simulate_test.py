# SPDX-License-Identifier: Apache-2.0
"""dynmo.simulate gives the answer of `dynmo simulate`, field by field and line by line."""
import json
import tomllib
import unittest

import dynmo
from support import ROOT, Case

FREEZING = ROOT / "examples" / "scenarios" / "freezing.toml"
SHORT = {"training.steps": 60}
POLICIES = ["uniform", "time", "static:time"]


class Simulate(Case):
    def setUp(self):
        super().setUp()
        self.words = [FREEZING, "--set", "training.steps=60", "--compare", ",".join(POLICIES)]

    def test_is_that_of_the_program(self):
        simulation = dynmo.simulate(FREEZING, SHORT, compare=POLICIES)
        self.assertEqual(simulation.document, json.loads(self.program("simulate", *self.words, "--json")))
        self.assertEqual(str(simulation) + simulation.decisions, self.program("simulate", *self.words, "--decisions"))
        self.assertLessEqual({"uniform", "time"}, set(simulation.runs))
        self.assertEqual(simulation._repr_html_().count("<tr>"), 1 + len(simulation.document["runs"]))

    def test_of_a_dict_is_that_of_the_file(self):
        tables = tomllib.loads(FREEZING.read_text())
        wanted = dynmo.simulate(FREEZING, SHORT, compare=POLICIES)
        self.assertEqual(dynmo.simulate(tables, SHORT, compare=POLICIES).document, wanted.document)
        self.assertEqual(dynmo.simulate(tomllib.loads(wanted.scenario)).document, wanted.document)

    def test_of_a_dict_with_events_is_that_of_the_file(self):
        text = FREEZING.read_text() + "\n[[event]]\nstep = 20\nleave = [6, 7]\n[[event]]\nstep = 40\njoin = [6]\n"
        path = self.write("events.toml", text)
        options = {"settings": SHORT, "compare": ["time"]}
        found = dynmo.simulate(tomllib.loads(text), **options)
        self.assertEqual(found.document, dynmo.simulate(path, **options).document)
        self.assertLess(found.runs["time"]["ranks"], 8)

    def test_trace_is_that_of_the_program(self):
        simulation = dynmo.simulate(FREEZING, SHORT, compare=POLICIES, trace_steps=3)
        self.program("simulate", *self.words, "--trace", "t.json")
        self.assertEqual(simulation.trace.encode(), (self.folder / "t.json").read_bytes())

    def test_bad_input_is_one_line_that_names_it(self):
        for text, scenario, options in [
            ("no-such.toml", "no-such.toml", {}),
            ("steps", FREEZING, {"settings": {"training.steps": 0}}),
            ("stepz", FREEZING, {"settings": {"training.stepz": 1}}),
            ("stepz", {"training": {"stepz": 1}}, {}),
            ("best", FREEZING, {"settings": SHORT, "compare": ["best"]}),
        ]:
            with self.subTest(text=text):
                self.assert_refused(dynmo.BadInputError, text, dynmo.simulate, scenario, **options)


if __name__ == "__main__":
    unittest.main()
