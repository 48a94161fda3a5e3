# SPDX-License-Identifier: Apache-2.0
"""How long ranks take to go on after a loss, by the state that has to cross a network, of which a bare copy is the baseline.

recovery.py [--megabytes N ...] [--rounds N]   (as root: makes two hosts of network namespaces, and starts ranks on them)

Two replicas of one rank are on the first host, a spare rank is on the second. The first rank is killed, so that the spare one gets all
layers with their moments from the other replica. The bare copy sends as many bytes through one connection into memory that is there.
"""
import argparse
import importlib
import os
import pathlib
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import torch

import dynmo.torch as dt

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "tests" / "support"))
LAYERS, STEPS, LOSS_AT, PORT = 8, 9, 6, 29_777
BYTES_A_WEIGHT = 12  # with two moments


def wait_until(true: Any) -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def train(folder: pathlib.Path, rank: int, megabytes: float) -> None:
    """A rank: prints when it is killed, is ready again, and has done a step."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    width = round((megabytes * 1e6 / LAYERS / BYTES_A_WEIGHT) ** 0.5)
    modules = [(f"layer {number}", torch.nn.Linear(width, width, bias=False)) for number in range(LAYERS)]
    optimizer = torch.optim.AdamW([parameter for _, module in modules for parameter in module.parameters()], lr=1e-3, fused=True)
    joins = rank == 2
    if joins:
        wait_until((folder / "begin").exists)
    pipe = dt.Pipeline(
        layers=modules, optimizer=optimizer, micro_batches=1, loss_fn=torch.nn.functional.mse_loss, hidden=torch.empty_like, replicas=2,
        balance=False, joins=joins,
    )
    survivor = dt.Survivor(
        pipe, endpoint=folder / "endpoint", every=1000, silence_s=60, told=lambda told: print(f"ready {time.monotonic()} {told}", flush=True)
    )

    def train_step(number: int) -> None:
        if number == 1 and rank == 0 and not (folder / "begin").exists():
            (folder / "begin").touch()
            wait_until(survivor._lines.asks)  # type: ignore[union-attr]
        if number == LOSS_AT and rank == 0:
            print(f"killed {time.monotonic()}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        given = torch.randn(1, width, generator=torch.Generator().manual_seed(2 * number + pipe.replica))
        pipe.step(given, given)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {number} {time.monotonic()}", flush=True)

    survivor.train(train_step, STEPS)


def recover(hosts: list[Any], folder: pathlib.Path, megabytes: float, port: int) -> tuple[float, float]:
    """Seconds from the kill until all ranks are ready, and until the next step is done."""
    (folder / "begin").unlink(missing_ok=True)
    started = []
    for rank, host in enumerate((hosts[0], hosts[0], hosts[1])):
        given = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port} if rank < 2 else {}
        place = {"MASTER_ADDR": "10.177.0.1", "GLOO_SOCKET_IFNAME": host.device, "OMP_NUM_THREADS": 1, **given}
        words = host.inside("env", *(f"{name}={value}" for name, value in place.items()), sys.executable, __file__)
        command = [*words, "--rank", str(rank), "--folder", str(folder), "--megabytes", str(megabytes)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    said = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started[1:]] == [0, 0], said
    killed = float(said[0][0].split("killed ")[1].split()[0])
    lines = [line.split() for text, _ in said[1:] for line in text.splitlines()]
    ready = [float(words[1]) for words in lines if words[0] == "ready" and "lost" in words]
    done = [float(words[2]) for words in lines if words[:2] == ["step", str(LOSS_AT)]]
    assert len(ready) == len(done) == 2, said
    return max(ready) - killed, max(done) - killed


def copy(role: str, size: int) -> None:
    """The bare copy, at the host that receives or sends."""
    if role == "receive":
        with socket.create_server(("10.177.0.2", PORT)) as listener:
            room = memoryview(bytearray(b"\1") * size)  # written, so that the system has backed it
            print("listens", flush=True)
            line, _ = listener.accept()
            begin, found = time.monotonic(), 0
            while found < size:
                found += line.recv_into(room[found:])
            print(time.monotonic() - begin, flush=True)
    else:
        sent = memoryview(bytearray(os.urandom(1 << 20)) * ((size >> 20) + 1))[:size]  # before the receiver's clock starts
        with socket.create_connection(("10.177.0.2", PORT)) as line:
            line.sendall(sent)


def copy_s(hosts: list[Any], size: int) -> float:
    """Seconds of a bare copy from the first host to the second."""
    command = [sys.executable, __file__, "--bytes", str(size), "--copy"]
    with subprocess.Popen(hosts[1].inside(*command, "receive"), stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None and receiver.stdout.readline() == "listens\n"
        subprocess.run(hosts[0].inside(*command, "send"), check=True)
        return float(receiver.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--megabytes", type=float, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--rounds", type=int, default=5)
    for name, kind in (("--rank", int), ("--folder", pathlib.Path), ("--copy", str), ("--bytes", int)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        train(options.folder, options.rank, options.megabytes[0])
        return
    if options.copy is not None:
        copy(options.copy, options.bytes)
        return
    two_hosts: Any = importlib.import_module("two_hosts")
    print("| state | bare copy | ready | next step done | 0.25 s + 1.2 x copy |\n| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as place:
        hosts = two_hosts.make_hosts(pathlib.Path(place))
        try:
            for host in hosts:
                host.run("tc", "qdisc", "del", "dev", host.device, "root")  # what the link gives
            for megabytes in options.megabytes:
                bare, ready, done = [], [], []
                for number in range(options.rounds):
                    bare.append(copy_s(hosts, int(megabytes * 1e6)))
                    found = recover(hosts, pathlib.Path(place), megabytes, 29_800 + number)
                    ready.append(found[0])
                    done.append(found[1])
                limit = 0.25 + 1.2 * statistics.median(bare)
                print(f"| {megabytes:g} MB | {shown(bare)} | {shown(ready)} | {shown(done)} | {limit:.2f} s |", flush=True)
        finally:
            two_hosts.remove_hosts(hosts)
    print(f"medians of {options.rounds}, and the longest; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


def shown(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.3f} s, {max(seconds):.3f} s"


if __name__ == "__main__":
    threading.excepthook = lambda arguments: os._exit(1)
    main()
