# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks as processes, and what they are compared with."""
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import unittest

import torch

ALL = os.environ.get("DYNMO_SAMPLES") == "all"  # `make soak`
HERE = pathlib.Path(__file__).resolve().parent


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(**more):
    return {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "TRANSFORMERS_VERBOSITY": "error", **more}


def start_ranks(ranks, script, *words, **options):
    """A process a rank, with the environment that launchers give."""
    port = str(free_port())
    return [
        subprocess.Popen(
            [sys.executable, str(HERE / script), *map(str, words)], cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=environment(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), MASTER_PORT=port), **options,
        )
        for rank in range(ranks)
    ]


class RankCase(unittest.TestCase):
    """Processes are ended with the test."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def start(self, *arguments):
        """The processes of start_ranks(), which end with the test."""
        processes = start_ranks(*arguments)
        self.addCleanup(lambda: [process.kill() for process in processes if process.poll() is None])
        return processes

    def run_ranks(self, ranks, script, *words, torchrun=False, timeout=400):
        """Runs to the end; all must succeed."""
        if torchrun:
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(HERE / script)]
            done = subprocess.run(
                [sys.executable, *launcher, *map(str, words)], cwd=HERE, capture_output=True, text=True, timeout=timeout, env=environment(),
                check=False,
            )
            self.assertEqual(done.returncode, 0, (done.stdout + done.stderr)[-3000:])
            return
        processes = self.start(ranks, script, *words)
        said = [process.communicate(timeout=timeout)[0] for process in processes]
        self.assertEqual([process.returncode for process in processes], [0] * ranks, "\n".join(text[-1500:] for text in said))

    def compare(self, cases, ranks, script="torch_rank.py", **options):
        """Trains cases on ranks and plainly; counts tensors that differ, in each replica."""
        torch.save(cases, self.folder / "cases.pt")
        plain = subprocess.run([sys.executable, HERE / "torch_cases.py", self.folder], cwd=HERE, env=environment(), check=False)
        self.assertEqual(plain.returncode, 0)
        self.run_ranks(ranks, script, self.folder, **options)
        for index, case in enumerate(cases):
            with self.subTest(**case):
                wanted = torch.load(self.folder / f"plain-{index}.pt")
                parts = [torch.load(self.folder / f"rank-{rank}-{index}.pt") for rank in range(ranks)]
                self.assertEqual([part["cuts"] for part in parts], [parts[0]["cuts"]] * ranks)
                size = ranks // case.get("reload", case).get("replicas", 1)
                for first in range(0, ranks, size):
                    self.assert_same(wanted, parts[first : first + size])

    def assert_same(self, wanted, parts):
        for part in parts:
            self.assertEqual(part["losses"], wanted["losses"])
        weights, state = {}, {}
        for part in parts:
            self.assertFalse(weights.keys() & part["weights"].keys(), "two ranks hold a layer")
            weights.update(part["weights"])
            state.update(part["state"])
        self.assertEqual(weights.keys(), wanted["weights"].keys())
        different = [name for name in weights if not torch.equal(weights[name], wanted["weights"][name])]
        for name, values in wanted["state"].items():
            self.assertEqual(state[name].keys(), values.keys(), name)
            different += [f"{name} {key}" for key in values if not torch.equal(torch.as_tensor(state[name][key]), torch.as_tensor(values[key]))]
        self.assertEqual(different, [])
