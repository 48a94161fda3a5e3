# SPDX-License-Identifier: Apache-2.0
"""Processes of a Gloo group on this host."""
import os
import socket
import subprocess


def run(command, ranks):
    """Runs a command as each rank of a group, five minutes at most. Returns what the ranks printed that failed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                   "WORLD_SIZE": str(ranks)}
    started = [subprocess.Popen(list(map(str, command)), env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for rank in range(ranks)]
    try:
        said = [one.communicate(timeout=300)[0] for one in started]
    finally:
        for one in started:
            one.kill()
    return "\n".join(text for one, text in zip(started, said) if one.returncode)
