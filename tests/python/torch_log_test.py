# SPDX-License-Identifier: Apache-2.0
"""The log of a rank of dt.Pipeline, its metrics with MFU and memory, and their endpoint."""
import datetime
import json
import os
import re
import resource
import unittest
import warnings

import torch

import dynmo
import torch_cases
import torch_log_rank
from dynmo.torch import log, selfcheck
from torch_ranks import make_pipe, train_step
from torch_support import RankCase, free_port

LINE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) (debug|info|warning|error) rank (\d+): (.*)")
CASE = torch_log_rank.CASE
STEPS = CASE["steps"]


def lines_of(path):
    """(level, rank, text) of the lines, each of which has the format."""
    found, before = [], ""
    for line in path.read_text().splitlines():
        match = LINE.fullmatch(line)
        assert match, line
        datetime.datetime.fromisoformat(match[1].replace("Z", "+00:00"))
        assert before <= match[1], line
        before = match[1]
        found.append((match[2], int(match[3]), match[4]))
    return found


def pipeline(**options):
    return make_pipe(CASE, **options)


def products(length):
    """FLOPs of a forward pass of the model of CASE, for each token of samples of this length."""
    h, kv, f, vocabulary, blocks = 32, 16, 48, 96, 4
    return blocks * (2 * h * (h + 2 * kv) + 2 * h * h + 6 * h * f + 4 * length * h) + 2 * h * vocabulary


class Log(RankCase):
    def test_each_rank_has_a_file(self):
        self.run_ranks(2, "torch_log_rank.py", self.folder, 0)
        for rank in range(2):
            lines = lines_of(self.folder / "log" / f"rank-{rank}.log")
            self.assertEqual({number for _, number, _ in lines}, {rank})
            self.assertRegex(lines[0][2], rf"^begins   dynmo.torch \S+ as process \d+ on \S+; rank {rank} of 2; plan \d\|\d, generation \d+; ranks 0 on ")
            self.assertEqual((lines[-1][0], lines[-1][2]), ("info", f"step {STEPS:5}  closed"))
            debug = [text for level, _, text in lines if level == "debug" and " losses {0: " in text]
            self.assertEqual([int(text.split()[1]) for text in debug], list(range(STEPS)))

    def test_levels_and_appending(self):
        for level, count in (("debug", 2), ("info", 2), ("warning", 0), ("info", 4)):
            pipeline(log=self.folder / level, log_level=level).close()
            path = self.folder / level / "rank-0.log"
            self.assertEqual(len(lines_of(path)), count, level)

    def test_a_line_has_no_control_characters(self):
        logger = log.open_log(self.folder, "info", pipeline()._ranks, pipeline().plan)
        logger.warning("two\nlines\x1b of %s", "text")
        log.close_log(logger, 3)
        self.assertEqual([line[2] for line in lines_of(self.folder / "rank-0.log")][1:], ["two lines  of text", "step     3  closed"])

    def test_a_refusal_is_logged(self):
        pipe = pipeline(log=self.folder)
        batch = torch_cases.batch_of(CASE, 0)
        with self.assertRaises(dynmo.BadInputError):
            pipe.step(**{**batch, "labels": batch["labels"][:1]})
        level, _, text = lines_of(self.folder / "rank-0.log")[-1]
        self.assertEqual(level, "error")
        self.assertRegex(text, r"^step     0  BadInputError: ")

    def test_a_full_disk_is_told_once_and_training_goes_on(self):
        (self.folder / "rank-0.log").symlink_to("/dev/full")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pipe = pipeline(log=self.folder, log_level="debug")
            self.train(pipe)
            pipe.close()
        told = [str(each.message) for each in caught if "the log" in str(each.message)]
        self.assertEqual(told, [f"cannot write the log '{self.folder}/rank-0.log': No space left on device; training goes on"])
        self.assertEqual(pipe.steps, 2)

    def test_a_line_that_does_not_fit_leaves_no_part(self):
        pipe = pipeline(log=self.folder)
        path = self.folder / "rank-0.log"
        whole = path.read_bytes()
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        self.addCleanup(resource.setrlimit, resource.RLIMIT_FSIZE, before)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 10, before[1]))
        with self.assertWarnsRegex(RuntimeWarning, "cannot write the log .*: No space left on device; training goes on"):
            pipe._log.info("a line of more than ten characters")
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        self.assertEqual(path.read_bytes(), whole)
        pipe._log.info("a line that fits")
        self.assertEqual(lines_of(path)[-1][2], "a line that fits")
        pipe.close()

    def test_a_closed_descriptor_stops_nothing(self):
        pipe = pipeline(log=self.folder)
        handler = pipe._log.handlers[0]
        os.close(handler._file)
        handler._file = 10**6  # which is no descriptor, as the closed one would be until a file gets its number
        with self.assertWarnsRegex(RuntimeWarning, "cannot write the log .*: Bad file descriptor; training goes on"):
            pipe._log.info("lost")
        pipe.step(**torch_cases.batch_of(CASE, 0))
        self.assertEqual(pipe.steps, 1)
        handler._file = -1

    def train(self, pipe, steps=2):
        for step in range(steps):
            train_step(pipe, torch_cases.batch_of(CASE, step))

    def test_files_that_cannot_be_written_at_the_end_are_told(self):
        run = self.folder / "run"
        run.mkdir()
        (run / "load-trace.jsonl").symlink_to("/dev/full")
        (run / "profile.json").mkdir()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pipe = pipeline(run=run, log=self.folder)
            self.train(pipe)
            pipe.close()
        for name in ("load-trace.jsonl", "profile.json"):
            said = [str(each.message) for each in caught if name in str(each.message)]
            self.assertEqual(len(said), 1, name)
            self.assertRegex(said[0], "training goes on$")
            self.assertIn(("warning", 0, said[0]), lines_of(self.folder / "rank-0.log"))
        self.assertEqual(lines_of(self.folder / "rank-0.log")[-1][2], "step     2  closed")

    def test_files_of_an_earlier_run_go_on_behind_its_checkpoint(self):
        run, saved = self.folder / "run", self.folder / "saved"
        pipe = pipeline(run=run, seed=1)
        with self.assertRaisesRegex(dynmo.BadInputError, "in use by another run"):
            pipeline(run=run)
        self.train(pipe, 2)
        pipe.save(saved)
        self.train(pipe, 2)
        records = run / "records" / "rank-0.jsonl"
        pipe.load(saved)
        self.train(pipe, 1)
        pipe.close()
        steps = [json.loads(line)["step"] for line in records.read_text().splitlines()]
        self.assertEqual(steps, [0, 1, 2])
        before = records.read_bytes()
        fresh = pipeline(run=run)
        with self.assertRaisesRegex(dynmo.BadInputError, "holds an earlier run"):
            self.train(fresh, 1)
        fresh.close()
        self.assertEqual(records.read_bytes(), before)
        on = pipeline(run=run)
        on.load(saved)
        self.train(on, 2)
        on.close()
        lines = [json.loads(line) for line in records.read_text().splitlines()]
        self.assertEqual([line["step"] for line in lines], [0, 1, 2, 3])
        self.assertEqual(records.read_bytes().splitlines()[:2], before.splitlines()[:2])
        kinds = [(event["event"], event["step"]) for event in map(json.loads, (run / "events.jsonl").read_text().splitlines())]
        self.assertEqual([each for each in kinds if each[0] in ("start", "end")], [("start", 0), ("end", 3), ("start", 2), ("end", 4)])

    def test_a_record_has_the_loss_and_the_tokens_of_all_batches_of_its_step(self):
        for items in (None, 21):
            with self.subTest(items=items):
                run = self.folder / f"run-{items}"
                pipe, wanted = pipeline(run=run, accumulation=3), []
                for step in range(2):
                    batches = [torch_cases.batch_of(CASE, 3 * step + number) for number in range(3)]
                    batches = [batch if items is None else {**batch, "num_items_in_batch": items} for batch in batches]
                    loss = pipe.accumulate(**batches[0]) + pipe.accumulate(**batches[1])
                    pipe.evaluate(**batches[0])  # is no part of the step
                    wanted.append(((loss + pipe.step(**batches[2])).item(), sum(batch["input_ids"].numel() for batch in batches)))
                    torch_cases.update(pipe.optimizer)
                pipe.close()
                records = [json.loads(line) for line in (run / "records" / "rank-0.jsonl").read_text().splitlines()]
                for record, (loss, tokens) in zip(records, wanted, strict=True):
                    self.assertAlmostEqual(record["loss"], loss, places=5)  # another order of sums
                    self.assertEqual(record["tokens"], tokens)

    def test_a_loss_that_is_no_number_is_recorded(self):
        run = self.folder / "run"
        pipe = pipeline(run=run)
        self.train(pipe, 1)
        with torch.no_grad():
            next(pipe.module.parameters()).fill_(torch.nan)
        self.train(pipe, 1)
        pipe.close()
        records = [json.loads(line) for line in (run / "records" / "rank-0.jsonl").read_text().splitlines()]
        self.assertIsNotNone(records[0]["loss"])
        self.assertIsNone(records[1]["loss"])
        self.assertIsNone(json.loads((run / "summary.json").read_text())["runs"][0]["loss_last"])

    def test_options_that_are_refused(self):
        (self.folder / "file").write_text("")
        (self.folder / "pipe").mkdir()
        os.mkfifo(self.folder / "pipe" / "rank-0.log")
        for options, said in (
            ({"log": self.folder / "file" / "log"}, "file/log': Not a directory, wanted a folder to which this user may write"),
            ({"log": self.folder / "pipe"}, "pipe': No such device or address, wanted a folder to which this user may write"),
            ({"timeout_s": 0}, "timeout_s=0, wanted 1 to 1000000 seconds"),
            ({"timeout_s": 1e300}, "timeout_s=1e+300, wanted 1 to 1000000 seconds"),
            ({"log": self.folder, "log_level": "all"}, "log_level='all', wanted debug, info, warning, error"),
            ({"run": ""}, "run='', wanted the path of a folder"),  # it would be the one where the program was started
            ({"run": "a\0b"}, "run='a\\x00b', wanted the path of a folder"),  # its files would lie in 'a'
            ({"metrics": "prometheus", "run": self.folder / "d"}, "metrics='prometheus', wanted a list of names: ['prometheus']"),
            ({"metrics_port": 9100}, "metrics_port=9100 without run, wanted run=FOLDER"),
            ({"peak_flops": 1e12, "run": self.folder / "a"}, "peak_flops=1000000000000.0 without metrics"),
            ({"metrics_port": 70000, "run": self.folder / "b"}, "metrics_port=70000, wanted 1 to 65535"),
            ({"metrics": ["prometheus"], "peak_flops": -1.0, "run": self.folder / "c"}, "peak_flops=-1, wanted 0 to 1e18"),
        ):
            with self.assertRaises(dynmo.BadInputError) as caught:
                pipeline(**options)
            self.assertIn(said, str(caught.exception))
            self.assertNotIn("\n", str(caught.exception))


class Metrics(RankCase):
    def test_flops_are_those_of_the_closed_form(self):
        split = selfcheck.split_decoder(torch_cases.make_model(CASE))
        for length in (5, 8):
            ids = torch.arange(2 * length).view(2, length) + 3
            found = selfcheck.flops_of(split, {"input_ids": ids, "labels": ids}, None)
            self.assertEqual(found, 2 * length * products(length))

    def test_have_mfu_memory_and_an_endpoint(self):
        port = free_port()
        self.run_ranks(2, "torch_log_rank.py", self.folder, port)
        text = (self.folder / "served.txt").read_text()
        found = {name: float(value) for name, value in re.findall(r"^(dynmo_\w+)\{[^}]*\} (\S+)$", text, re.MULTILINE)}
        tokens = json.loads((self.folder / "tokens.json").read_text())
        self.assertEqual(found["dynmo_tokens"], tokens)
        self.assertEqual(found["dynmo_ranks"], 2)
        self.assertGreater(found["dynmo_memory_bytes"], 50 << 20)
        # The first batch has samples of nine tokens, which give the products of a token.
        self.assertAlmostEqual(found["dynmo_tflops_per_rank"] * 1e12 * 2 * found["dynmo_end_to_end_seconds"] / (3 * tokens * products(9)), 1, places=6)
        self.assertAlmostEqual(found["dynmo_mfu_percent"], found["dynmo_tflops_per_rank"] * 1e12 / torch_log_rank.PEAK * 100, places=6)
        for rank in range(2):
            own = (self.folder / "run" / "metrics" / f"rank-{rank}.prom").read_text()
            self.assertRegex(own, rf'(?m)^dynmo_memory_bytes{{run="[^"]*",rank="{rank}"}} [0-9.e+]+$')


if __name__ == "__main__":
    torch.set_num_threads(1)
    unittest.main()
