# SPDX-License-Identifier: Apache-2.0
"""Processes of a Gloo group on this host."""
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time

GRACE_S = 10  # for the others to say why, after a rank has failed


def use_package(dynmo=None):
    """Lets ranks find the package beside the program `dynmo`, else as this process does. Ends this program if they would not."""
    if dynmo:
        os.environ["PYTHONPATH"] = str(pathlib.Path(dynmo).resolve().parents[2] / "python")
    done = subprocess.run([sys.executable, "-c", "import dynmo.torch"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        why = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"
        print(f"FAIL {pathlib.Path(sys.argv[0]).stem}: its ranks cannot import dynmo.torch ({why}), wanted --dynmo PROGRAM of a build folder, "
              "or PYTHONPATH with its folder python")
        sys.exit(2)


def run(command, ranks, limit_s=300):
    """Runs a command as each rank of a group. Returns what the ranks printed that failed; the others are ended then, or at the limit."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                   "WORLD_SIZE": str(ranks)}
    with tempfile.TemporaryDirectory() as folder:
        said = [pathlib.Path(folder, str(rank)) for rank in range(ranks)]
        started = []
        try:
            for rank in range(ranks):
                with said[rank].open("w", encoding="utf-8") as file:
                    started.append(subprocess.Popen(list(map(str, command)), stdout=file, stderr=subprocess.STDOUT,
                                                    env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}))
            _wait(started, time.monotonic() + limit_s)
            codes = [one.poll() for one in started]
        finally:
            for one in started:
                one.kill()
                one.wait()
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in said]
    failed = [text for code, text in zip(codes, texts) if code]
    late = [f"rank {rank} was not done{'' if failed else f' after {limit_s} s'}" for rank, code in enumerate(codes) if code is None]
    return "\n".join([*late, *failed])


def _wait(started, deadline):
    """Until all have ended; not long after one has failed, for which the others may wait."""
    failed = False
    while any(one.poll() is None for one in started) and time.monotonic() < deadline:
        if not failed and any(one.poll() for one in started):
            failed, deadline = True, min(deadline, time.monotonic() + GRACE_S)
        time.sleep(0.05)
