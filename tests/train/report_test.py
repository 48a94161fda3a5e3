# SPDX-License-Identifier: Apache-2.0
"""`dynmo report`: what a run said, again."""
import json
import re

from program import DYNMO
from run_case import RunCase, settings


class Report(RunCase):
    def test_says_again_what_the_run_said_with_layers_and_traffic(self):
        result = self.succeed(self.command("-n", "2", "--steps", "24", run="told", extra=[
            "pipeline.cut=[4,4]", "balance.enabled=false", "train.validation_every=12", "train.validation_steps=1",
            "checkpoint.every=12"]))
        run = self.folder / "told"
        report = self.succeed([DYNMO, "report", str(run)])
        said = result.stdout[result.stdout.index("\nrun  ") + 1:]
        self.assertTrue(report.stdout.startswith(said), said + "\n---\n" + report.stdout)
        self.assertRegex(said, r"predicted  step time: median error [0-9.]+ %, worst [0-9.]+ %, over 2[0-9] steps")
        self.assertIn("2 checkpoints", said)
        for layer in ("embed", "blocks.2.mlp", "head", "all"):
            self.assertIn(layer, report.stdout)

        # 24 steps and 2 validations of 4 micro-batches over one boundary of 2 x 16 x 32 floats.
        summary = json.loads((run / "summary.json").read_text())
        traffic = {(row["from"], row["to"], row["purpose"]): (row["messages"], row["bytes"])
                   for row in summary["runs"][0]["traffic"]}
        boundary = 2 * 16 * 32 * 4
        self.assertEqual(traffic[0, 1, "activation"], ((24 + 2) * 4, (24 + 2) * 4 * boundary))
        self.assertEqual(traffic[1, 0, "gradient"], (24 * 4, 24 * 4 * boundary))
        self.assertEqual({key[2] for key in traffic}, {"activation", "gradient", "control"})
        sent = sum(json.loads(line)["sent_bytes"] for line in (run / "records/rank-1.jsonl").read_text().splitlines())
        of_rank_1 = sum(row[1] for key, row in traffic.items() if key[0] == 1)
        self.assertLessEqual(sent, of_rank_1)
        self.assertGreater(sent, 24 * 4 * boundary)

        # The same in intervals, as predicted: validations run forward, too.
        (interval,) = [json.loads(line) for line in (run / "traffic.jsonl").read_text().splitlines()]
        self.assertEqual((interval["first_step"], interval["steps"]), (0, 24))
        known = [row for row in interval["measured"] if row["purpose"] != "control"]
        self.assertEqual(known, interval["predicted"])
        self.assertEqual({(row["from"], row["to"], row["purpose"]): (row["messages"], row["bytes"]) for row in known},
                         {key: value for key, value in traffic.items() if key[2] != "control"})
        shown = self.succeed([DYNMO, "report", str(run), "--traffic"])
        self.assertRegex(shown.stdout, r"^activation 416.0 KiB as predicted, gradient 384.0 KiB as predicted, control ")
        for ending, begins in [("svg", "<svg "), ("csv", "generation,first_step,"), ("json", "[\n")]:
            out = self.folder / f"told.{ending}"
            result = self.run_command([DYNMO, "report", str(run), "--traffic", str(out)])
            self.assertEqual((result.returncode, result.stdout), (0, ""), result.stderr)
            self.assertTrue(out.read_text().startswith(begins))
        wrong = self.run_command([DYNMO, "report", str(run), "--traffic", str(self.folder / "told.png")])
        self.assertEqual(wrong.returncode, 2)
        self.assertIn("wanted a file that ends with .svg, .csv or .json", wrong.stderr)

        # The trace ties every send to its receive; validation and checkpoint are in it.
        events = json.loads((run / "trace.json").read_text())["traceEvents"]
        slices = [event for event in events if event["ph"] == "X"]
        self.assertLessEqual({"validation", "checkpoint"}, {event["name"] for event in slices})
        flows = {}
        for event in events:
            if event["ph"] in "stf":
                flows.setdefault(event["id"], []).append(event)
        sends = [event for event in slices if "SEND" in event["name"]]
        self.assertEqual(len(sends), 4 * 2 * 4)  # steps x directions x micro-batches
        self.assertEqual(len(flows), len(sends))

        def at(event):
            return [s["name"] for s in slices if s["tid"] == event["tid"] and s["ts"] <= event["ts"] < s["ts"] + s["dur"]]

        for flow in flows.values():
            self.assertEqual([event["ph"] for event in flow], ["s", "t", "t", "f"])
            (send,), (receive,) = at(flow[1]), at(flow[2])
            stage, kind, micro_batch = re.fullmatch(r"(\d+)SEND_([FB])(\d+)", send).groups()
            self.assertEqual(receive, f"{int(stage) + (1 if kind == 'F' else -1)}RECV_{kind}{micro_batch}")

        # What the layers cost over the run, as a simulation and emulated ranks read it.
        trace = run / "load-trace.jsonl"
        self.assertEqual([json.loads(line)["step"] for line in trace.read_text().splitlines()[1:]], [0, 10, 20])
        emulated = self.succeed([DYNMO, "train", "--out", str(self.folder / "again"), "-n", "2", "--steps", "4", *settings(
            ["run.device=emulated", f"emulated.trace={trace}", "train.validation_every=0", "pipeline.pin=false"])])
        self.assertIn("EMULATED", emulated.stdout)

        # Resumed when nothing is left to do, a run keeps what it said at its end.
        nothing = self.succeed([DYNMO, "train", "--config", str(run / "config.toml"), "--resume", "-n", "2"])
        self.assertIn("all 24 steps of the run are done", nothing.stdout)
        self.assertEqual(json.loads((run / "summary.json").read_text()), summary)

    def test_of_what_is_no_run(self):
        self.assert_error(self.run_command([DYNMO, "report", "nowhere"]), 2, "nowhere", "summary.json")
