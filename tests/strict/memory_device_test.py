# SPDX-License-Identifier: Apache-2.0
"""Plans on a device keep to its memory: DYNMO_STRICT_MEMORY says how much each strict device has."""
import json
import re

from elastic_case import ElasticCase
from program import DYNMO

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20}


class MemoryOfADevice(ElasticCase):
    SETTINGS = ("run.device=strict", "train.steps=3", "train.validation_every=0", "model.hidden=32", "model.blocks=4", "model.heads=2",
                "model.kv_heads=2", "model.intermediate=48", "model.sequence=64", "batch.micro_batches=8", "batch.micro_batch_size=4",
                "checkpoint.every=0")

    def train(self, run, memory, *extra, ranks=4, words=()):
        return self.run_command(self.command("-n", str(ranks), *words, run=run, extra=(*self.SETTINGS, *extra)),
                                env={"DYNMO_STRICT_MEMORY": str(memory)})

    def room(self, output):
        found = re.search(r"memory   plans fill at most (\S+ \S+) of a rank", output)
        self.assertIsNotNone(found, output)
        return found[1]

    def test_ranks_share_it(self):
        """Of two devices, one for each of two ranks, or for two."""
        for ranks, room in (2, "184 MiB"), (4, "92 MiB"):
            done = self.succeeded(self.train(f"shared-{ranks}", 200 << 20, ranks=ranks))
            self.assertIn(self.room(done.stdout), (room, room.replace(" MiB", ".0 MiB")))

    def test_records_tell_the_most_that_was_allocated(self):
        self.succeeded(self.train("told", 200 << 20, ranks=2))
        for rank in range(2):
            lines = (self.folder / f"told/records/rank-{rank}.jsonl").read_text().splitlines()
            told = [json.loads(line)["device_memory_bytes"] for line in lines]
            self.assertEqual(told, sorted(told))
            self.assertGreater(told[0], 100_000)
        report = self.run_command([DYNMO, "report", str(self.folder / "told")])
        self.assertRegex(report.stdout, r"device mem +\d+\.\d [KM]iB")
        self.succeed(self.command("-n", "2", run="cpu", extra=(*self.SETTINGS, "run.device=cpu")))
        for name in "records/rank-0.jsonl", "summary.json":
            self.assertNotIn("device_memory", (self.folder / "cpu" / name).read_text())

    def test_too_little_is_refused_before_the_first_step(self):
        done = self.train("little", 1 << 20)
        self.assertEqual(done.returncode, 3, done.stdout + done.stderr)
        self.assertRegex(done.stderr, r"no cut of 10 layers over 4 ranks fits their memory: rank \d has 482310 bytes")
        self.assertFalse(list((self.folder / "little").glob("records/*")))

    def test_what_does_not_fit_is_computed_again(self):
        cut = "pipeline.cut=[3,3,2,2]"  # whatever is measured
        tables = [self.train(f"dry-{choice}", 200 << 20, f"pipeline.recompute={choice}", cut, words=("--dry-run",))
                  for choice in ("none", "whole")]
        self.assertEqual([table.returncode for table in tables], [0, 0], tables)
        most, least = (max(float(line.split()[-2]) * UNITS[line.split()[-1]] for line in table.stdout.splitlines() if re.match(r" +\d  ", line))
                       for table in tables)
        self.assertLess(least, most)
        # Two ranks share each device, of which plans fill 92 %.
        memory = int((most + least) / 0.92)
        done = self.succeeded(self.train("again", memory, "pipeline.recompute=auto", cut))
        self.assertRegex(done.stdout, r"memory   \d+ of \d+ layers run forward again")
        given = self.succeeded(self.train("given", memory, "pipeline.memory=1GiB"))
        self.assertNotIn("plans fill at most", given.stdout)
