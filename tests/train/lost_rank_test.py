# SPDX-License-Identifier: Apache-2.0
"""Runs that end early: by Ctrl-C, and by a rank that dies.

FAULT_PROGRAM kills a rank at a scripted message.
"""
import contextlib
import os
import signal
import subprocess
import time

from program import DYNMO, held_port
from run_case import RunCase, digests, newest_manifest, rank_processes

FAULT_PROGRAM = os.environ.get("FAULT_PROGRAM", "")
LIMIT = 120  # seconds for anything to happen: bounds a hang, decides nothing


class Interrupt(RunCase):
    def test_ctrl_c_ends_all_ranks_with_130(self):
        run = self.folder / "interrupted"
        process = subprocess.Popen(self.command("-n", "2", run="interrupted", extra=("train.steps=100000",)),
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, cwd=self.folder,
                                   text=True)
        deadline = time.monotonic() + LIMIT
        records = run / "records" / "rank-1.jsonl"
        while not records.exists():
            self.assertLess(time.monotonic(), deadline)
            self.assertIsNone(process.poll())
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LIMIT)
        self.assertEqual(process.returncode, 130)
        self.assertEqual(rank_processes(str(run)), [])


class Restarts(RunCase):
    EXTRA = ("train.steps=60", "checkpoint.every=10", "run.load_trace=0")

    def start(self, run, *words):
        return subprocess.Popen(self.command("-n", "2", *words, run=run, extra=self.EXTRA), cwd=self.folder,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL)

    def kill_one(self, process, run, when):
        """SIGKILL to a rank once `when` holds."""
        deadline = time.monotonic() + LIMIT
        while True:
            self.assertLess(time.monotonic(), deadline)
            self.assertIsNone(process.poll(), "the run has ended before a rank was killed")
            ranks = [pid for pid, _ in rank_processes(str(run)) if pid != process.pid]
            if len(ranks) == 2 and when():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(ranks[1], signal.SIGKILL)
                return ranks
            time.sleep(0.002)

    def test_all_begin_again_from_the_newest_checkpoint(self):
        self.succeed(self.command("-n", "2", run="undisturbed", extra=self.EXTRA))
        run = self.folder / "restarted"
        process = self.start("restarted", "--restarts", "2")
        first = self.kill_one(process, run, lambda: list((run / "checkpoints").glob("step-*[0-9]")))
        records = run / "records" / "rank-1.jsonl"
        before = records.read_text().count("\n")
        self.kill_one(process, run, lambda: not set(first) & {pid for pid, _ in rank_processes(str(run))} and
                      records.read_text().count("\n") > before)
        output, errors = process.communicate(timeout=LIMIT)
        self.assertEqual(process.returncode, 0, errors)
        self.assertEqual(errors.count("was killed by signal 9"), 2, errors)
        for restart in ("restart 1 of 2, from the newest checkpoint", "restart 2 of 2, from the newest checkpoint"):
            self.assertIn(restart, errors)
        self.assertIn("resume   step ", output)
        self.assertEqual(digests(newest_manifest(run)), digests(newest_manifest(self.folder / "undisturbed")))

    def test_read_the_config_once(self):
        """The next experiment is written into the file while this one runs."""
        config = self.folder / "changing.toml"
        config.write_text("[optimizer]\nlearning_rate = 0.002\n")
        run = self.folder / "steady"
        process = self.start("steady", "-c", str(config), "--restarts", "1")

        def changed():
            if not list((run / "checkpoints").glob("step-*[0-9]")):
                return False
            config.write_text("[optimizer]\nlearning_rate = 0.1\n")
            return True

        self.kill_one(process, run, changed)
        _, errors = process.communicate(timeout=LIMIT)
        self.assertEqual(process.returncode, 0, errors)
        self.assertIn("restart 1 of 1, from the newest checkpoint", errors)
        self.assertIn("learning_rate = 0.002", (run / "config.toml").read_text())

    def test_end_also_if_a_parent_ignores_the_ends_of_processes(self):
        start = {"preexec_fn": lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN), "capture_output": True, "text": True, "timeout": LIMIT}
        done = subprocess.run(self.command("-n", "2", run="ignored", extra=("train.steps=2",)), cwd=self.folder, stdin=subprocess.DEVNULL, **start)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_only_so_often_and_from_the_beginning_where_nothing_is_kept(self):
        run = self.folder / "twice"
        self.EXTRA = ("train.steps=100000", "checkpoint.every=0")
        process = self.start("twice", "--restarts=1", "--overwrite")
        first = self.kill_one(process, run, (run / "records" / "rank-1.jsonl").exists)
        self.kill_one(process, run, lambda: not set(first) & {pid for pid, _ in rank_processes(str(run))})
        _, errors = process.communicate(timeout=LIMIT)
        self.assertEqual(process.returncode, 5, errors)
        self.assertEqual(errors.count("dynmo: restart 1 of 1, from the beginning: there is no checkpoint yet"), 1, errors)
        self.assertEqual(rank_processes(str(run)), [])

    def test_wrong_uses(self):
        for words, env, wanted in (
                (("--restarts", "1", "--compare", "static,balanced"), {}, "--restarts with --compare"),
                (("--restarts", "1", "--join", "somewhere"), {}, "--join takes the settings of the run"),
                (("--restarts", "-1"), {}, "--restarts"),
                (("--restarts", "1"), {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
                 "torchrun --max-restarts")):
            with self.subTest(words=words):
                command = self.command(*words, run="wrong") if "--join" not in words else [DYNMO, "train", *words]
                result = self.run_command(command, env=env)
                self.assertEqual(result.returncode, 2, result.stderr)
                self.assertIn(wanted, result.stderr)
                self.assertEqual(len(result.stderr.strip().splitlines()), 1, result.stderr)


class LostRank(RunCase):
    """A rank killed in forward, in backward, in the middle of migrating a layer of 64 MiB or a compressed one, in a pruning event,
    in summing gradients over two replicas, with sources that choose tokens, and in the second of two messages with rows; with and without
    our launcher."""

    RANKS = {"reduction": 4}  # 3 elsewhere

    def start(self, where, victim, run, port):
        """Under our launcher where `port` is None."""
        words = [FAULT_PROGRAM, where, str(victim), str(self.data), str(run)]
        if port is None:
            return [subprocess.Popen([*words, "launch"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                     stdin=subprocess.DEVNULL)]
        processes = []
        ranks = self.RANKS.get(where, 3)
        for rank in range(ranks):
            env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port)}
            processes.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
                                              stdin=subprocess.DEVNULL))
        return processes

    def check(self, where, victim, launcher):
        run = self.folder / f"{where}-{victim}-{launcher}"
        with contextlib.nullcontext() if launcher else held_port() as port:
            processes = self.start(where, victim, run, port)
            try:
                killed = run / "killed"  # written by the victim just before it dies
                deadline = time.monotonic() + LIMIT
                while not killed.exists():
                    self.assertLess(time.monotonic(), deadline, "the victim was never killed")
                    if all(process.poll() is not None for process in processes):
                        self.fail("ended before the kill: " + " ".join(str(p.communicate()) for p in processes))
                    time.sleep(0.005)
                outputs = [process.communicate(timeout=LIMIT) for process in processes]
            finally:
                for process in processes:
                    process.kill()
        for rank, (process, (_, err)) in enumerate(zip(processes, outputs)):
            if not launcher and rank == victim:
                self.assertEqual(process.returncode, -signal.SIGKILL)
                continue
            self.assertEqual(process.returncode, 5, err)
            lines = [line for line in err.splitlines() if "dynmo: " in line]
            self.assertEqual(len(lines), 1, err)
            self.assertIn(f"rank {victim}", lines[0])
        self.assertEqual(rank_processes(str(run)), [])
        if "migration" not in where:
            self.succeed([FAULT_PROGRAM, "verify", "0", str(self.data), str(run)])

    def test_in_forward(self):
        for victim, launcher in ((0, True), (1, False), (1, True)):
            with self.subTest(victim=victim, launcher=launcher):
                self.check("forward", victim, launcher)

    def test_in_backward(self):
        for victim, launcher in ((1, True), (2, False), (2, True)):
            with self.subTest(victim=victim, launcher=launcher):
                self.check("backward", victim, launcher)

    def test_in_the_middle_of_a_migration(self):
        for victim, launcher in ((0, True), (0, False), (1, True), (1, False)):
            with self.subTest(victim=victim, launcher=launcher):
                self.check("migration", victim, launcher)

    def test_in_the_middle_of_migrating_a_compressed_layer(self):
        for victim, launcher in ((0, True), (1, False)):
            with self.subTest(victim=victim, launcher=launcher):
                self.check("pruned-migration", victim, launcher)

    def test_in_a_pruning_event(self):
        for victim, launcher in ((0, False), (1, True), (2, False)):
            with self.subTest(victim=victim, launcher=launcher):
                self.check("event", victim, launcher)

    def test_where_attention_is_sparse(self):
        for where, victim, launcher in (("sparse-forward", 1, True), ("sparse-forward", 0, False), ("sparse-migration", 0, True)):
            with self.subTest(where=where, victim=victim, launcher=launcher):
                self.check(where, victim, launcher)

    def test_where_tokens_choose_experts(self):
        for where, victim, launcher in (("experts-forward", 1, True), ("experts-forward", 0, False), ("experts-migration", 0, True),
                                        ("experts-migration", 1, False)):
            with self.subTest(where=where, victim=victim, launcher=launcher):
                self.check(where, victim, launcher)

    def test_where_blocks_choose_their_tokens(self):
        for where, victim, launcher in (("routed-forward", 1, True), ("routed-forward", 0, False), ("routed-migration", 0, True),
                                        ("routed-migration", 1, False)):
            with self.subTest(where=where, victim=victim, launcher=launcher):
                self.check(where, victim, launcher)

    def test_in_one_replica(self):
        for victim, launcher in ((3, True), (1, False), (2, False)):
            with self.subTest(victim=victim, launcher=launcher):
                self.check("reduction", victim, launcher)

    def test_with_rows_under_way(self):
        for victim, launcher in ((0, True), (1, False), (1, True)):
            with self.subTest(victim=victim, launcher=launcher):
                self.check("rows-forward", victim, launcher)

    def test_in_a_second_message(self):
        for victim, launcher in ((1, False), (1, True)):
            with self.subTest(victim=victim, launcher=launcher):
                self.check("rows-second-message", victim, launcher)

    def test_in_the_middle_of_migrating_a_layer_with_an_exit(self):
        for victim, launcher in ((0, True), (1, False)):
            with self.subTest(victim=victim, launcher=launcher):
                self.check("rows-migration", victim, launcher)
