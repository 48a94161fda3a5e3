# SPDX-License-Identifier: Apache-2.0
"""torch_survival_rank.py FOLDER: trains each case of cases.json on ranks of which some are killed, and plainly where it says so.

The ranks are forked, since imports take longer than the training; no thread is there yet.
"""
import contextlib
import json
import os
import pathlib
import signal
import sys
import time
import traceback

import torch
import torch._dynamo  # optimizers import it
import torch.distributed.checkpoint
import transformers.models.llama.modeling_llama  # noqa: F401

import dynmo
import dynmo.torch as dt
import torch_cases
from torch_ranks import kill_here, kill_in, make_pipe
from torch_support import free_port
from dynmo.torch import move, ranks, reduction, snapshots, state, step

PLACES = {
    "forward": (step.Step, "_forward"),
    "backward": (step.Step, "_backward"),
    "exchange": (ranks.Ranks, "sum"),
    "snapshot": (move.Mover, "_exchange"),
    "own snapshot": (state, "clone_of"),  # with replicas, where none travels
    "vote": (move.Mover, "vote"),
    "restore": (snapshots.Snapshots, "restore"),
    "sums": (reduction.Reduction, "_sum"),
    "new group": (ranks.Ranks, "reform"),
}


def kill_with(folder, other):
    """Kills another rank, then this one, before the others can go on without the first."""
    os.kill(int((folder / f"pid-{other}").read_text(encoding="utf-8")), signal.SIGKILL)
    kill_here()


def fail():
    raise RuntimeError("one rank's own")


def note(recovery):
    print(f"recovered {time.monotonic()} {','.join(map(str, recovery.lost))}: {recovery}", flush=True)


def wait_until(true):
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def call_newcomer(folder, number, lines):
    """Lets the process that joins in this step ask; the rank that listens goes on once it has done so."""
    begun = folder / f"begin-{number}"
    if lines.is_open and not begun.exists():
        begun.touch()
        wait_until(lines.asks)


def train(case, folder, rank, joins=False):
    """The user's loop, in which nothing of a loss is seen."""
    (folder / f"pid-{rank}").write_text(str(os.getpid()), encoding="utf-8")
    options = {name: case[name] for name in ("schedule", "replicas", "run", "metrics", "steps") if name in case}
    pipe = make_pipe(case, balance=case.get("balance", "run" in case), joins=joins, log=case.get("logs", {}).get(str(rank)), **options)
    model, optimizer = pipe.module, pipe.optimizer
    scheduler = torch_cases.make_scheduler(optimizer)
    survivor = dt.Survivor(pipe, keep=[scheduler], every=case.get("every", 0), silence_s=case.get("silence_s", 60), told=note,
                           endpoint=folder / "endpoint.json" if "joins" in case else None)
    now = [-1]
    kills = [tuple(kill) for kill in case["kills"]]
    for victim, number, place in kills:
        if victim == rank and place in PLACES:
            place = "own snapshot" if place == "snapshot" and pipe.replicas > 1 else place
            kill_in(*PLACES[place], lambda number=number: now[0] >= number)
        if victim == rank and place == "error":
            kill_in(*PLACES["forward"], lambda number=number: now[0] >= number, fail)

    def train_step(number):
        now[0] = number
        if (rank, number, "step") in kills:
            kill_here()
        if number in case.get("joins", ()):
            call_newcomer(folder, number, survivor._lines)
        if (rank, number, "stopped") in kills:
            kill_here(signal.SIGSTOP)
        for other in (other for victim, step, other in kills if (victim, step) == (rank, number) and isinstance(other, int)):
            kill_with(folder, other)
        torch_cases.freeze_or_thaw(case, model, number)
        print(f"step {number} {time.monotonic()}", flush=True)
        losses = [pipe.step(**torch_cases.batches_of(case, number)[pipe.replica]).item()]
        if case.get("clip"):
            losses.insert(0, pipe.clip_grad_norm_(case["clip"]).item())
        torch_cases.update(optimizer, scheduler)
        if case.get("balance"):
            pipe.balance()
        if number == case.get("save_at"):
            pipe.save(folder / "checkpoint")
        return losses

    if case.get("resume"):
        pipe.step(**torch_cases.batches_of(case, 0)[pipe.replica])
        optimizer.zero_grad()
        pipe.load(case["resume"])
        scheduler.last_epoch = pipe.steps
    losses = [loss for steps in (*case.get("calls", ()), case["steps"]) for loss in survivor.train(train_step, steps)]
    pipe.close()
    print(f"step {case['steps']} {time.monotonic()}", flush=True)
    return {**torch_cases.result_of(model, optimizer, sum(losses, [])), "cuts": pipe.plan.cut, "measures": pipe.profile() is not None}


def can_fork():
    """Whether ranks can be forked: what was imported has begun no thread."""
    return len(os.listdir("/proc/self/task")) == 1


def forked(call, output):
    """A child that calls, with what it says in a file."""
    child = os.fork()
    if child != 0:
        return child
    code = 1
    try:
        with open(output, "w", encoding="utf-8") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            try:
                call()
                code = 0
            except dynmo.DynmoError as error:
                print(f"{type(error).__name__}: {error}")
            except Exception:
                traceback.print_exc()
    finally:
        os._exit(code)


def begin_child():
    """A device's memory would be shared if it were opened before."""
    torch.set_num_threads(1)
    if "STRICT_DEVICE" in os.environ:
        import strict_torch

        strict_torch.open_device()


def run(case, folder):
    """Forks the ranks of a case; their codes, and files with what they said and what they have."""
    folder.mkdir(exist_ok=True)
    port = str(free_port())

    def rank_of(rank):
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(case["ranks"]), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        begin_child()
        torch.save(train(case, folder, rank), folder / f"rank-{rank}.pt")

    def plainly():
        begin_child()
        torch.save(torch_cases.result_of(*torch_cases.train_plainly(case)), folder / "plain.pt")

    children = [forked(lambda rank=rank: rank_of(rank), folder / f"rank-{rank}.txt") for rank in range(case["ranks"])]
    def newcomer(rank, number):
        wait_until((folder / f"begin-{number}").exists)
        begin_child()
        torch.save(train(case, folder, rank, joins=True), folder / f"rank-{rank}.pt")

    for rank, number in enumerate(case.get("joins", ()), case["ranks"]):
        children.append(forked(lambda rank=rank, number=number: newcomer(rank, number), folder / f"rank-{rank}.txt"))
    children += [forked(plainly, folder / "plain.txt")] if case.get("plain") else []
    stopped = [victim for victim, _, place in case["kills"] if place == "stopped"]
    codes = {}
    for rank in sorted(range(len(children)), key=lambda rank: rank in stopped):  # the others end without those
        if rank in stopped:
            os.kill(children[rank], signal.SIGCONT)
        codes[rank] = os.waitstatus_to_exitcode(os.waitpid(children[rank], 0)[1])
    return [codes[rank] for rank in range(len(children))]


def main():
    folder = pathlib.Path(sys.argv[1])
    assert can_fork()
    cases = json.loads((folder / "cases.json").read_text(encoding="utf-8"))
    codes = [run(case, folder / case["name"]) for case in cases]
    (folder / "codes.json").write_text(json.dumps(codes), encoding="utf-8")


if __name__ == "__main__":
    main()
