# SPDX-License-Identifier: Apache-2.0
"""What `dynmo plan` advises at its end, and the ranks that it leaves free."""
import re
import unittest

from plan_command_test import Case, profile


class Advice(Case):
    """A flag that the last lines name is given, and the step is what they say."""

    def advice(self, words):
        words = [part for flag in words.items() for part in flag if part != ""]
        return self.run_plan("costs.json", *words).stdout, self.plan("costs.json", *words)["advice"]

    def test_names_a_flag_whose_change_does_what_it_says(self):
        words = {"--balancer": "optimal", "--schedule": "1f1b", "--ranks": "4", "--micro-batches": "64"}
        for limit, key, times, more in [
            ("balancer", "balancer", [1, 1, 1, 1, 1, 1, 4, 4], {"--balancer": "uniform"}),
            ("layer", "ranks", [1, 1, 1, 9, 1, 1, 1, 1], {}),
            ("cut", "ranks", [3, 3, 3, 3, 3, 3], {"--micro-batches": "400"}),
            ("fill", "schedule", [1] * 16, {"--micro-batches": "4"}),
            ("fill", "micro_batches", [1] * 16, {"--micro-batches": "4", "--schedule": "zb-v"}),
        ]:
            with self.subTest(key=key, limit=limit):
                self.write("costs.json", profile([t * 1e-3 for t in times]))
                text, advice = self.advice({**words, **more})
                self.assertEqual((advice["limit"], advice["remedy"]["key"]), (limit, key), text)
                flag, value = re.search(r"; (--[a-z-]+) (\S+) would take ", text).groups()
                after = self.advice({**words, **more, flag: value})[1]["all"]["step_time_s"]
                for_the_same_tokens = 2 if key == "micro_batches" else 1
                self.assertAlmostEqual(after / for_the_same_tokens / advice["remedy"]["step_time_s"], 1, places=6)

    def test_names_the_link_of_a_cluster(self):
        self.write("costs.json", profile([1e-3] * 8))
        cluster = {"format": "dynmo-cluster-1", "ranks": [{}] * 4, "links": {"inside_node": {"latency_s": 0.004}}}
        self.write("cluster.json", cluster)
        words = {"--balancer": "optimal", "--schedule": "1f1b", "--micro-batches": "8", "--cluster": "cluster.json"}
        text, advice = self.advice(words)
        self.assertIn("Messages bound the step", text)
        value = re.search(r"; --cluster with inside_node.latency_s = (\S+) would take ", text)[1]
        cluster["links"]["inside_node"]["latency_s"] = float(value)
        self.write("cluster.json", cluster)
        after = self.advice(words)[1]["all"]["step_time_s"]
        self.assertAlmostEqual(after / advice["remedy"]["step_time_s"], 1, places=6)
        self.assertLess(after, 0.98 * advice["all"]["step_time_s"])


class Packing(Case):
    def test_releases_ranks_that_gain_nothing(self):
        self.write("heavy.json", profile([1e-3, 1e-3, 1e-3, 1e-3, 40e-3]))
        words = ["heavy.json", "--ranks", 4, "--evaluations", 50]
        packed = self.plan(*words, "--pack")
        spread = self.plan(*words)
        self.assertLess(len(self.used(packed)), 4)
        self.assertLessEqual(packed["step_time_s"], spread["step_time_s"] * (1 + 1e-9))
        self.assertIn("idle ranks", self.run_plan(*words, "--pack").stdout)

    def test_slack_releases_more(self):
        words = ["even.json", "--ranks", 4, "--balancer", "optimal", "--schedule", "1f1b", "--pack"]
        self.assertEqual(len(self.used(self.plan(*words))), 4)
        self.assertEqual(len(self.used(self.plan(*words, "--slack", 10))), 1)


if __name__ == "__main__":
    unittest.main()
