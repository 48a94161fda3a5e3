# SPDX-License-Identifier: Apache-2.0
"""New processes join ranks that train, and some are killed on the way: losses, weights and states are those of the plain loop."""
import json
import os
import pathlib
import resource
import signal
import socket
import threading
import time
import types
import unittest
import unittest.mock

import torch

import dynmo
import dynmo.torch as dt
from drawn import drawn
from dynmo.torch import endpoint, joining, lines, meeting, sockets
from torch_support import RankCase
from torch_survival_test import run

BASE = {"family": "llama", "micro_batches": 4, "ranks": 2, "steps": 8, "clip": 1.0, "every": 2, "kills": []}
WITHIN = ("new group", "restore", "vote")


class Joining(RankCase):
    def test_processes_join_with_the_same_bits(self):
        place, other = drawn(WITHIN, 1, "the place of a loss within a join")[0], drawn(WITHIN, 1, "the place where a newcomer is lost")[0]
        cases = [
            # The second one joins by the rank that leads after the first is lost.
            {**BASE, "name": "a new leader", "plain": True, "schedule": "zb-h1", "joins": [1, 5], "kills": [[0, 3, "step"]], "run": str(self.folder / "files")},
            {**BASE, "name": "replicas", "plain": True, "replicas": 2, "joins": [1, 2], "kills": [[2, 5, "backward"]]},
            # In both a process begins alone, with nothing to balance. The newcomer of the first cannot write its log, and trains without.
            {**BASE, "name": "alone", "ranks": 1, "joins": [1], "balance": True, "logs": {"1": "/dev/null/log"}},
            # Only the first batch says that the loss reads the routers, and a newcomer has not seen it.
            {**BASE, "name": "routers", "plain": True, "family": "mixtral", "optimizer": "sgd", "routers": True, "joins": [1], "steps": 4},
            {**BASE, "name": "a member is lost within", "ranks": 3, "joins": [3], "kills": [[1, 3, place]], "balance": True},
            {**BASE, "name": "the newcomer is lost within", "joins": [3], "kills": [[2, -1, other]]},
        ]
        codes = run(self.folder, cases)
        plain = {name: torch.load(self.folder / name / "plain.pt") for name in ("a new leader", "replicas", "routers")}
        for case, ended in zip(cases, codes):
            with self.subTest(**case):
                victims = [victim for victim, _, _ in case["kills"]]
                count = case["ranks"] + len(case["joins"])
                self.assertEqual(ended[:count], [-signal.SIGKILL if rank in victims else 0 for rank in range(count)], self.said(case))
                wanted = plain[case["name"] if "plain" in case else "a new leader"]
                self.check(case, wanted, [rank for rank in range(count) if rank not in victims])
        self.check_files(cases[0])
        self.assertIn("rank 1: it writes no files: log='/dev/null/log'", self.said(cases[2]))

    def said(self, case):
        return "\n".join(path.read_text(encoding="utf-8") for path in sorted((self.folder / case["name"]).glob("*.txt")))

    def check(self, case, wanted, left):
        parts = [torch.load(self.folder / case["name"] / f"rank-{rank}.pt") for rank in left]
        for rank, part in zip(left, parts):
            if rank >= case["ranks"]:  # it has no losses of the steps before
                joined = 2 * (case["joins"][rank - case["ranks"]] + 1)
                first = len(wanted["losses"]) - len(part["losses"])
                self.assertTrue(first == joined or first < joined and "within" in case["name"], first)  # all may go back to a snapshot
                self.assertEqual(part["losses"], wanted["losses"][first:])
                part["losses"] = wanted["losses"]
        self.assertEqual({part["measures"] for part in parts}, {case.get("balance", "run" in case)})
        names = [name for part in parts for name in part["weights"]]
        self.assertEqual(len(names), len(wanted["weights"]) * case.get("replicas", 1))
        for part in parts:
            some = {name: wanted["weights"][name] for name in part["weights"]}
            self.assert_same({**wanted, "weights": some, "state": {name: wanted["state"][name] for name in some}}, [part])

    def check_files(self, case):
        folder = pathlib.Path(case["run"])
        events = [json.loads(line) for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()]
        kinds = [event["event"] for event in events if event["event"] not in ("decision", "move")]
        self.assertEqual(kinds, ["start", "size", "loss", "recovery", "size", "end"])
        sizes = [(event["ranks_before"], event["ranks"], event["step"]) for event in events if event["event"] == "size"]
        self.assertEqual(sizes, [([0, 1], [0, 1, 2], 2), ([1, 2], [1, 2, 3], 6)])
        for rank, first in ((1, 0), (2, 2), (3, 6)):
            records = (folder / "records" / f"rank-{rank}.jsonl").read_text(encoding="utf-8").splitlines()
            self.assertEqual([json.loads(record)["step"] for record in records], list(range(first, case["steps"])))

    # --- At the endpoint. ---

    def open(self):
        """A rank alone that lets processes in."""
        ranks = types.SimpleNamespace(
            number=0, world=1, members=[0], highest=0, gather=lambda value: [value], attempt=lambda what, call: call()[0], abort=lambda: None
        )
        with unittest.mock.patch.dict(os.environ, MASTER_ADDR="127.0.0.1"):  # a host may have no name
            found = lines.Lines(ranks, 60)
        found.open(endpoint.open_endpoint(self.folder / "endpoint", found.address, lambda asked: joining.refusal({"steps": 8}, asked), {"rows": [[0]]}))
        self.addCleanup(found.close, True)
        return found

    def test_a_process_is_let_in_or_refused_in_a_line(self):
        own = self.open()
        with self.assertRaisesRegex(dynmo.BadInputError, "this process has another steps than the pipeline: 9, wanted 8"):
            endpoint.join(self.folder / "endpoint", {"steps": 9}, 30)
        with self.assertRaisesRegex(dynmo.BadInputError, "another schedule than the pipeline: gpipe, wanted None"):
            endpoint.join(self.folder / "endpoint", {"steps": 8, "schedule": "gpipe"}, 30)
        self.assertEqual((self.folder / "endpoint").stat().st_mode & 0o777, 0o600)
        place = json.loads((self.folder / "endpoint").read_text(encoding="utf-8"))
        for said in (b"GET / HTTP/1.0\r\n\r\n", b'{"token": "wrong", "asked": {}, "address": [], "key": ""}\n', b"[]\n", b'{"token": 1}\n', b"[" * 100000 + b"\n"):
            with socket.create_connection((place["address"], place["port"])) as stranger:
                stranger.sendall(said)
                self.assertEqual(stranger.recv(1), b"")  # closed
        self.assertFalse(own.asks())
        silent = [socket.create_connection((place["address"], place["port"])) for _ in range(2 * lines.MAX_GUESTS)]
        for stranger in silent[: lines.MAX_GUESTS]:
            self.assertEqual(stranger.recv(1), b"")  # made room
        for stranger in silent:
            stranger.close()
        entry = endpoint.join(self.folder / "endpoint", {"steps": 8}, 30)
        self.assertEqual((entry.member, sorted(entry.lines), entry.facts), (1, [0], {"rows": [[0]]}))
        self.assertFalse(own.asks())  # it has not said that it has all lines
        entry.lines[0].sendall(b'{"joins": true}\n')
        with own.changed:
            self.assertTrue(own.changed.wait_for(own.asks, 30))
        entry.lines[0].close()  # it is lost before it was a member, and the next one has its place
        again = endpoint.join(self.folder / "endpoint", {"steps": 8}, 30)
        self.assertEqual(again.member, 2)
        again.lines[0].close()
        self.assertFalse(own.hears_of_loss(0))

    def pair(self, told=lambda value: None):
        """The lines of two ranks, of which the second connects to the first where it is told of it."""
        places, all_told, found = [None, None], threading.Barrier(2), {}

        def ranks_of(number):
            def gather(value):
                places[number] = value
                if number == 0:
                    told(value)
                all_told.wait(30)
                return places

            return types.SimpleNamespace(
                number=number, world=2, members=[0, 1], highest=1, gather=gather, attempt=lambda what, call: call()[0], abort=lambda: None
            )

        starting = [threading.Thread(target=lambda number=number: found.update({number: lines.Lines(ranks_of(number), 60)})) for number in range(2)]
        for each in starting:
            each.start()
        for each in starting:
            each.join(60)
        self.assertEqual(sorted(found), [0, 1])
        return found[0], found[1]

    def test_a_stranger_at_the_start_is_passed_over(self):
        self.addCleanup(setattr, lines, "SEND_S", lines.SEND_S)
        lines.SEND_S = 0.2
        strangers = []
        both = self.pair(lambda value: strangers.append(socket.create_connection(value[:2])))
        self.assertEqual([own.connected for own in both], [[1], [0]])
        for own in both:
            own.close(True)
        strangers[0].close()

    def test_without_free_descriptors_the_endpoint_rests(self):
        first, second = self.pair()
        first.open(endpoint.open_endpoint(self.folder / "endpoint", first.address, lambda asked: "", {"rows": [[0], [1]]}))
        place = json.loads((self.folder / "endpoint").read_text(encoding="utf-8"))
        before, failed, accept = resource.getrlimit(resource.RLIMIT_NOFILE), threading.Semaphore(0), socket.socket.accept

        def counted(listener):
            try:
                return accept(listener)
            except OSError:
                failed.release()
                raise

        with socket.socket() as stranger, unittest.mock.patch.object(socket.socket, "accept", counted):
            lowest = os.dup(2)
            os.close(lowest)
            begin, count = time.monotonic(), 6
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
            try:
                stranger.connect((place["address"], place["port"]))
                for _ in range(count):
                    self.assertTrue(failed.acquire(timeout=60))
                self.assertLessEqual(count - 3, (time.monotonic() - begin) / lines.BEAT_S)  # one in each beat, not all at once
                second.say(form=7)  # the ranks hear each other
                with first.changed:
                    self.assertTrue(first.changed.wait_for(lambda: first.form == {"form": 7}, 60))
                self.assertEqual([first.take_fault(), first.take_fault()], ["Too many open files", ""])
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, before)
            stranger.sendall(b"[]\n")
            self.assertEqual(stranger.recv(1), b"")  # it is served
        entry = endpoint.join(self.folder / "endpoint", {}, 60)
        self.assertEqual((entry.member, sorted(entry.lines)), (2, [0, 1]))
        for line in entry.lines.values():
            line.close()
        for own in (first, second):
            own.close(True)

    def test_a_rank_that_missed_the_end_hears_of_it(self):
        """The last message of all was lost for one of them, which then waits for a group that nobody forms."""
        first, second = self.pair()
        ended = []

        def wait():
            try:
                meeting.meet(second, second.leave(), 0.2)
            except meeting.AllDone:
                ended.append(True)

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        first.close(True)
        waiting.join(20)
        self.assertEqual(ended, [True])
        second.close(True)

    def test_a_rank_that_missed_an_error_of_all_ends_with_its_line(self):
        """It knows only that another rank has left, which was not lost."""
        first, second = self.pair()
        first.close(False, "rank 0: KeyError: 'a'")
        with self.assertRaisesRegex(dynmo.BadInputError, "^rank 0: KeyError: 'a'$"):
            meeting.meet(second, second.leave(), 20)
        second.close(True)

    def test_a_process_knows_afterwards_what_the_ranks_know(self):
        """It has checked no batch itself, may come to lead, which tells MFU, and may say from which checkpoint to start again."""
        facts = {"_seed": 7, "_kinds": {"labels": {"a number"}}, "_checked_apart": True, "_flops_per_token": 1e9, "_saved": "folder"}
        known = types.SimpleNamespace(**facts, _split="of layers")
        new = types.SimpleNamespace(_split="of layers")
        joining.learn(new, joining.facts_of(known))
        self.assertEqual(new, known)

    def test_a_host_without_an_address_says_so(self):
        with unittest.mock.patch.dict(os.environ), unittest.mock.patch("socket.gethostbyname", side_effect=socket.gaierror(-2, "unknown")):
            os.environ.pop("MASTER_ADDR", None)
            with self.assertRaisesRegex(dynmo.BadInputError, "MASTER_ADDR, which is not set: .*unknown.*, wanted the address of rank 0"):
                sockets.own_address()
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="none")
            with self.assertRaisesRegex(dynmo.BadInputError, "MASTER_ADDR, '127.0.0.1': .*'none'.*, wanted the address of rank 0"):
                sockets.own_address()

    def test_a_endpoint_that_is_none(self):
        missing, now = self.folder / "none" / "endpoint", endpoint.FIND_S
        endpoint.FIND_S = 0.1
        self.addCleanup(setattr, endpoint, "FIND_S", now)
        with self.assertRaisesRegex(dynmo.BadInputError, "endpoint=.*none/endpoint: no rank listens .*, wanted the file of a Survivor that trains"):
            endpoint.join(missing, {}, 1)
        with self.assertRaisesRegex(dynmo.BadInputError, "endpoint=.*none/endpoint: it cannot be written .*, wanted a file in a folder"):
            endpoint.open_endpoint(missing, "127.0.0.1", lambda asked: "", {})
        (self.folder / "folder").mkdir()
        with self.assertRaisesRegex(dynmo.BadInputError, "endpoint=.*folder: it cannot be written .*, wanted a file in a folder"):
            endpoint.open_endpoint(self.folder / "folder", "127.0.0.1", lambda asked: "", {})
        self.assertEqual([path.name for path in self.folder.iterdir()], ["folder"])  # nothing half written
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        layers = {"layers": [("a", model[0]), ("b", model[1])], "loss_fn": torch.nn.functional.mse_loss, "hidden": lambda given: given}
        pipe = dt.Pipeline(optimizer=None, micro_batches=1, joins=True, **layers)
        with self.assertRaisesRegex(dynmo.BadInputError, "joins=True and no endpoint, wanted endpoint=FILE"):
            dt.Survivor(pipe)
        for path in ("", "/"):
            with self.assertRaisesRegex(dynmo.BadInputError, f"endpoint='{path}', wanted the path of a file"):
                dt.Survivor(pipe, endpoint=path)


if __name__ == "__main__":
    unittest.main()
