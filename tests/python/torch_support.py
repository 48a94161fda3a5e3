# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks as processes, and what they are compared with."""
import atexit
import functools
import gc
import os
import pathlib
import runpy
import socket
import subprocess
import sys
import tempfile
import traceback
import unittest
import weakref

import torch

ALL = os.environ.get("DYNMO_SAMPLES") == "all"  # `make soak`
HERE = pathlib.Path(__file__).resolve().parent


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(**more):
    return {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "TRANSFORMERS_VERBOSITY": "error", **more}


def become(script, words, variables):
    """Runs a script in this process, a fork of the test, to the end of the process.

    Imports take most of a rank's time, and a fork has them already. It has no thread, and nothing else of the test: descriptors are closed,
    and what the test does at its end is forgotten.
    """
    os.closerange(3, 4096)
    gc.enable()  # which subprocess disables for the time of a fork
    atexit._clear()
    weakref.finalize._registry.clear()
    os.environ.clear()
    os.environ.update(variables)
    sys.argv, sys.path[0] = [str(script), *words], str(HERE)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
    code = 1
    try:
        runpy.run_path(str(script), run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@functools.cache
def import_for_ranks():
    """Imports what ranks import, and what the first model and optimizer import; no thread is started."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import torch_cases

    torch_cases.make({"family": "llama", "seed": 0})


def start(script, *words, variables, **options):
    """A process that runs a script with the words and environment variables."""
    import_for_ranks()
    variables = environment(**variables)
    sys.stdout.flush()
    sys.stderr.flush()
    return subprocess.Popen([sys.executable, script], cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            restore_signals=False,  # Python ignores SIGPIPE, and a fork is Python from the start
                            preexec_fn=functools.partial(become, HERE / script, list(map(str, words)), variables), **options)


def start_ranks(ranks, script, *words, **options):
    """A process a rank, with the environment that launchers give."""
    port = str(free_port())
    return [
        start(script, *words, variables={"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "MASTER_PORT": port}, **options)
        for rank in range(ranks)
    ]


class RankCase(unittest.TestCase):
    """Processes are ended with the test."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder, self.trained = pathlib.Path(folder.name), {}

    def start(self, *arguments):
        """The processes of start_ranks(), which end with the test."""
        processes = start_ranks(*arguments)
        self.addCleanup(lambda: [process.kill() for process in processes if process.poll() is None])
        return processes

    def run_ranks(self, ranks, script, *words):
        """Runs to the end; all must succeed."""
        processes = self.start(ranks, script, *words)
        said = [process.communicate(timeout=400)[0] for process in processes]
        self.assertEqual([process.returncode for process in processes], [0] * ranks, "\n".join(text[-1500:] for text in said))

    def train_plainly(self, cases):
        """What torch_cases.result_of() has of each case; in a process, since a fork of one that has computed gradients cannot do so.

        A test trains each of its cases once.
        """
        left = [case for case in cases if repr(case) not in self.trained]
        folder = pathlib.Path(tempfile.mkdtemp(dir=self.folder))
        torch.save(left, folder / "cases.pt")
        plain = start("torch_cases.py", folder, variables={})
        said, _ = plain.communicate(timeout=400)
        self.assertEqual(plain.returncode, 0, said[-3000:])
        self.trained.update({repr(case): torch.load(folder / f"plain-{index}.pt") for index, case in enumerate(left)})
        return [self.trained[repr(case)] for case in cases]

    def compare(self, cases, ranks, script="torch_rank.py", **options):
        """Trains cases on ranks and plainly; counts tensors that differ, in each replica."""
        torch.save(cases, self.folder / "cases.pt")
        plain = self.train_plainly(cases)
        self.run_ranks(ranks, script, self.folder, **options)
        for index, (case, wanted) in enumerate(zip(cases, plain, strict=True)):
            with self.subTest(**case):
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
