# SPDX-License-Identifier: Apache-2.0
"""torch_channels_rank.py FOLDER: ranks whose tensors go from device to device, forked from here. TASKS says how many and what they do.

STRICT_CHANNELS is "own" where each process has a device of its own, "one" where all share one.
"""
import datetime
import json
import os
import pathlib
import sys
import types
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint  # noqa: F401

import dynmo
import dynmo.torch as dt
import strict_channels
import strict_torch
import torch_boundary_rank
import torch_cases
import torch_rank
from dynmo.torch import channels, lanes, program, ranks
from plans import plan_of
from torch_device_rank import LLAMA, checkpoints, counted_step
from torch_ranks import make_pipe, refused, train_step
from torch_support import free_port
from torch_survival_rank import can_fork, forked, run

COMMON = {"device": "strict", "micro_batches": 4, "steps": 7, "clip": 1.0}  # layers move before steps 0, 3 and 6
OF_THREE = [{**COMMON, "family": "llama", "seed": 5, "freeze": True, "freeze_at": 3, "thaw_at": 6, "optimizer": "foreach"}]
SHORT = {**COMMON, "steps": 4}
OF_TWO = [
    {**SHORT, "family": "llama", "seed": 6, "apart": True},
    {**SHORT, "family": "llama", "seed": 7, "autocast": True, "accumulation": 2},
    {**SHORT, "family": "gpt2", "seed": 8, "config": {"tie_word_embeddings": True}, "canonical": True},
    {**SHORT, "family": "mixtral", "seed": 10, "config": {"output_router_logits": True}},  # several tensors a boundary
]
OF_REPLICAS = [{**SHORT, "family": "llama", "seed": 9, "replicas": 2}]
BY_CHANNELS = {"three": OF_THREE, "two": OF_TWO, "replicas": OF_REPLICAS}
CASES = {**BY_CHANNELS, "through host memory": OF_THREE}
LOSSES = [
    {"family": "llama", "device": "strict", "micro_batches": 4, "ranks": 3, "steps": 7, "clip": 1.0, "name": "lost", "plain": True, "every": 2,
     "kills": [[1, 2, "backward"], [2, 5, "exchange"]]},
    {"family": "llama", "device": "strict", "micro_batches": 4, "ranks": 2, "steps": 7, "clip": 1.0, "name": "joined", "every": 2, "joins": [2],
     "kills": [[0, 5, "forward"]]},
    {"family": "llama", "device": "strict", "micro_batches": 4, "ranks": 4, "replicas": 2, "steps": 5, "name": "replicas lost", "plain": True,
     "kills": [[3, 2, "sums"]]},
]


def trains(folder, name):
    """No tensor of the device passes through Gloo, unless it must."""
    passed = []
    real = lanes.to_host

    def to_host(tensors):
        passed.extend(tensor for tensor in tensors if tensor.device.type != "cpu")
        return real(tensors)

    with mock.patch.object(lanes, "to_host", to_host):
        for index, case in enumerate(CASES[name]):
            torch.save(torch_rank.train(case), folder / f"{name}-{os.environ['RANK']}-{index}.pt")
    assert bool(passed) == (name == "through host memory") == (not strict_channels.opened), (len(passed), strict_channels.opened)


def finds_its_own(folder):
    """A plan that returns opens nothing; a step waits once, and once more for a norm."""
    pipe = make_pipe({**LLAMA, "device": "strict"}, plan=plan_of([3, 3]), balance=False, log=folder / "log", lane="device")
    counts = []
    for number in range(6):
        assert pipe.move_to(plan_of([3, 3] if number % 2 == 0 else [2, 4])).done
        assert pipe.evaluate(**torch_cases.batch_of(LLAMA, 0)).item() > 0
        pipe._programs.clear()
        sent, found = counted_step(pipe, clips=number % 2 == 1)
        assert sent == 4
        if number > 0:  # the first step checks the split
            assert found == {"synchronize stream": 1 + number % 2}, (number, found)
        counts.append(len(strict_channels.opened))
    assert counts == [2, 3, 4, 4, 4, 4], counts  # F and B of the one boundary, then both ways of moves
    assert "; tensors go from device to device by strict_channels" in (folder / "log" / f"rank-{pipe.rank}.log").read_text(encoding="utf-8")


def shares_a_device(folder):
    why = "2 ranks share 1 device"
    exactly = {"how": str.__eq__}
    line = f"lane='device': {why}, wanted a device for each rank with a backend such as NCCL, or lane='auto'"
    refused(line, lambda: make_pipe({**LLAMA, "device": "strict"}, lane="device"), **exactly)
    refused("lane='nccl', wanted auto, device, host", lambda: make_pipe({**LLAMA, "device": "strict"}, lane="nccl"), **exactly)
    refused("lane='device': the model is on the CPU, wanted", lambda: make_pipe(LLAMA, lane="device"))
    refused("rank 1 has another lane than rank 0: host, on rank 0 auto", lambda: make_pipe(LLAMA, lane="host" if own_rank() else "auto"))
    pipe = make_pipe({**LLAMA, "device": "strict"}, balance=False, log=folder / "log of host")
    assert train_step(pipe, torch_cases.batch_of(LLAMA, 0)).item() > 0
    assert f"; tensors pass through host memory: {why}\n" in (folder / "log of host" / f"rank-{pipe.rank}.log").read_text(encoding="utf-8")
    store = dist.PrefixStore("by hand", dist.distributed_c10d._get_default_store())
    connect = channels._connect_by(strict_channels.NAME)
    try:
        connect(store, own_rank(), torch.device("strict", 0), dist.default_pg_timeout)
    except RuntimeError as error:
        assert "two ranks on a device" in str(error)
    else:
        raise AssertionError("two ranks on a device")
    checks_nccl()
    checks_order()
    assert channels.reason_for_host([("a", "nccl"), ("b", "")], torch.device("cuda", 0)) == "rank 1 has no backend of torch.distributed for cuda"
    assert "does not say which one it is" in channels.reason_for_host([("a", "nccl"), ("", "nccl")], torch.device("cuda", 0))
    assert channels.reason_for_host([("a", "nccl"), ("b", "nccl")], torch.device("cuda", 0)) == ""


class Nccl:
    """PyTorch's class, which here can be made by no rank."""

    Options = types.SimpleNamespace

    def __init__(self, *given):
        self.given, self.read = given, {name: os.environ.get(name) for name in channels.OF_NCCL}

    def eager_connect_single_device(self, device):
        self.device = device


def checks_nccl():
    """Groups are connected when they are made. PyTorch's watchdog is off for them, and for no other group."""
    first, second = channels.OF_NCCL
    place, limit = torch.device("cuda", 1), datetime.timedelta(seconds=7)
    with mock.patch.object(dist, "ProcessGroupNCCL", Nccl), mock.patch.dict(os.environ, {first: "3"}):
        group = channels._connect_by("nccl")("store", 1, place, limit)
        assert os.environ[first] == "3" and second not in os.environ
    assert group.given == ("store", 1, 2, types.SimpleNamespace(_timeout=limit)) and group.device == place
    assert group.read == {first: "0", second: "0"}


def checks_order():
    """All that a plan needs, in one order; boundaries within a rank need nothing."""
    plan = program.read_plan(plan_of([2, 1, 2, 1], "interleaved", 2, [0, 1, 1, 0]), 2, 6)
    ties = [types.SimpleNamespace(layers=(0, 2)), types.SimpleNamespace(layers=(0, 5))]
    found = channels.describe(channels.channels_of(plan, ties, [[0, 1], [3, 2]]))
    assert found == ("F0 0>1, B0 1>0, F2 1>0, B2 0>1, tie 0>1, tie 1>0, F0 3>2, B0 2>3, F2 2>3, B2 3>2, tie 3>2, tie 2>3, "
                     "sum 0>3, sum 3>0, sum 1>2, sum 2>1"), found


class First(torch_boundary_rank.First):
    """Gives all its tensors on the device of its input but one."""

    def forward(self, ids):
        kept = torch.arange(ids.shape[1]).expand(ids.shape)
        return {"hidden": self.embed(ids), "kept": kept, "scores": torch.zeros(ids.shape[0], 1, device=ids.device)}


class Last(torch_boundary_rank.Last):
    def forward(self, given):
        return self.head(given["hidden"]), given["kept"].to(given["hidden"].device), given["scores"]


def drops_tokens(folder):
    """Layers that give smaller tensors: shapes pass by Gloo, ahead of what they describe. Both ways have the same bits."""
    losses = {}
    for lane in ("host", "device"):
        layers = torch_boundary_rank.make(drops=True)[0]
        torch.manual_seed(4)
        layers = [("first", First()), *layers[1:-1], ("last", Last())]
        for _, layer in layers:
            layer.to("strict")
        optimizer = torch.optim.SGD([p for _, layer in layers for p in layer.parameters()], lr=0.1)
        pipe = dt.Pipeline(layers=layers, loss_fn=torch_boundary_rank.loss_fn, hidden=torch_boundary_rank.limits_of, limits=True, optimizer=optimizer,
                           micro_batches=2, balance=False, plan=plan_of([2, 3]), lane=lane)
        losses[lane] = [pipe_step(pipe, *torch_boundary_rank.batch_of(step)) for step in range(4)]
        assert bool(strict_channels.opened) == (lane == "device")
    assert losses["host"] == losses["device"] and len(set(losses["host"])) == 4, losses


def pipe_step(pipe, ids, target):
    loss = pipe.step(ids, target).item()
    pipe.optimizer.step()
    pipe.optimizer.zero_grad()
    return loss


def own_rank():
    return int(os.environ["RANK"])


def reads_early(folder):
    """A receive that is read before its wait is found, by the operator that reads."""
    pipe = make_pipe({**LLAMA, "device": "strict"}, plan=plan_of([3, 3]), balance=False, lane="device", timeout_s=20)
    train_step(pipe, torch_cases.batch_of(LLAMA, 0))
    with mock.patch.object(channels._Posted, "wait", lambda self: None), mock.patch.object(ranks, "TOLD_S", 0.1):
        try:
            pipe.step(**torch_cases.batch_of(LLAMA, 1))
        except (RuntimeError, dynmo.DynmoError) as error:
            found = str(error)
    assert "memory that receive of stream" in found and "nothing orders the two" in found, found


def opens_in_another_order(folder):
    """Refused at once: the ranks would wait for each other."""
    real = channels.channels_of

    def other(*given):
        return real(*given)[:: -1 if own_rank() == 1 else 1]

    with mock.patch("dynmo.torch.start.channels_of", other):
        line = refused("rank 1 has another order of channels than rank 0: B0 1>0, F0 0>1, on rank 0 F0 0>1, B0 1>0, wanted the same on all ranks",
                       lambda: make_pipe({**LLAMA, "device": "strict"}, plan=plan_of([3, 3]), lane="device"), how=str.__eq__)
    (folder / f"order-{own_rank()}").write_text(line, encoding="utf-8")
    with mock.patch("dynmo.torch.start.channels_of", other), mock.patch.object(ranks.Ranks, "agree", lambda *_, **__: None):
        with mock.patch.object(channels, "OPEN_S", 1.0):  # each waits for the other's first
            try:
                make_pipe({**LLAMA, "device": "strict"}, plan=plan_of([3, 3]), lane="device")
            except dynmo.RankLostError as error:
                assert "no channel " in str(error) and "by strict_channels" in str(error), error
            else:
                raise AssertionError("two orders")


def sends_in_another_order(folder):
    """Messages of a channel are taken in the order in which they were sent."""
    pipe = make_pipe({**LLAMA, "device": "strict"}, plan=plan_of([3, 3]), balance=False, lane="device", timeout_s=20)
    place = torch.device("strict", 0)
    first, second = torch.zeros(3, device=place), torch.ones(4, device=place)
    if own_rank() == 0:
        for tensor in (first, second):
            pipe._ranks.send(tensor, 1, 0, purpose="F0").wait()
        try:
            pipe._ranks.gather(None)
        except dynmo.RankLostError:
            pass  # the other rank has ended the connections
    else:
        found = [pipe._ranks.receive(tensor, 0, 0, purpose="F0") for tensor in (second, first)]
        try:
            found[0].wait()
        except dynmo.RankLostError as error:
            assert "another order" in str(error), error
        else:
            raise AssertionError("another order")


def damages_bytes(folder):
    """A layer whose bytes are others on arrival is not taken in; the old plan goes on."""
    pipe = make_pipe({**LLAMA, "device": "strict"}, plan=plan_of([3, 3]), balance=False, lane="device")
    train_step(pipe, torch_cases.batch_of(LLAMA, 0))
    sent = ranks.Ranks.send

    def send(self, tensor, *rest):
        if tensor.device.type == "strict":
            tensor = tensor.clone()
            tensor[7] ^= 1
        return sent(self, tensor, *rest)

    with mock.patch.object(ranks.Ranks, "send", send):
        assert not pipe.move_to(plan_of([2, 4])).done
    assert pipe.plan.cut == "3|3"
    assert pipe.move_to(plan_of([2, 4])).done
    assert train_step(pipe, torch_cases.batch_of(LLAMA, 1)).item() > 0
    fails_on_the_host_too(pipe._ranks)


def fails_on_the_host_too(group):
    """A rank whose channels have failed makes no sum on the host: it would wait for ranks that have noticed."""
    group._lane.fail("a channel has failed")
    try:
        group.sum(torch.zeros(1))
    except dynmo.RankLostError:
        return
    raise AssertionError("a sum of ranks whose channels have failed")


def is_stuck(folder):
    """A rank that lives and sends nothing ends the wait after timeout_s."""
    pipe = make_pipe({**LLAMA, "device": "strict"}, plan=plan_of([3, 3]), balance=False, lane="device", timeout_s=1)
    place = torch.device("strict", 0)
    if own_rank() == 1:
        try:
            pipe._ranks.receive(torch.zeros(3, device=place), 0, 0, purpose="F0").wait()
        except dynmo.RankLostError as error:
            assert "nothing has arrived on the device for 1 s" in str(error), error
        else:
            raise AssertionError("it has arrived")
        (folder / "stuck").touch()
        for wait in (pipe._ranks.settle, lambda: pipe._ranks.sum(torch.zeros(1))):  # nothing that came later is believed
            try:
                wait()
            except dynmo.RankLostError:
                continue
            raise AssertionError("an aborted channel")
    else:
        while not (folder / "stuck").exists():
            torch.zeros(1)


def loses_without_survivor(folder):
    """Without a Survivor, too, a wait for a lost rank ends, with its number."""
    pipe = make_pipe({**LLAMA, "device": "strict"}, plan=plan_of([3, 3]), balance=False, lane="device")
    train_step(pipe, torch_cases.batch_of(LLAMA, 0))
    if own_rank() == 0:
        with mock.patch("dynmo.torch.step.post", lambda *_: os._exit(9)):
            pipe.step(**torch_cases.batch_of(LLAMA, 1))
    try:
        pipe.step(**torch_cases.batch_of(LLAMA, 1))
    except dynmo.RankLostError as error:
        assert "rank 1: rank 0 is lost (" in str(error), error
        os._exit(0)  # torch.distributed's store is lost
    raise AssertionError("rank 0 is lost")


def saves_and_loads(folder):
    (folder / "checkpoints").mkdir(exist_ok=True)
    checkpoints(folder / "checkpoints")


TASKS = {  # ranks, whether each has a device of its own, what they do
    "three": (3, True, trains), "two": (2, True, trains), "replicas": (4, True, trains), "through host memory": (3, False, trains),
    "finds its own": (2, True, finds_its_own), "shares a device": (2, False, shares_a_device), "reads early": (2, True, reads_early),
    "opens in another order": (2, True, opens_in_another_order), "sends in another order": (2, True, sends_in_another_order),
    "damages bytes": (2, True, damages_bytes), "is stuck": (2, True, is_stuck), "loses": (2, True, loses_without_survivor),
    "checkpoints": (2, True, saves_and_loads), "drops tokens": (2, True, drops_tokens),
}

TOGETHER = (
    ("three",), ("two", "reads early"), ("replicas", "is stuck"),
    ("through host memory", "opens in another order", "sends in another order"), ("finds its own", "shares a device", "drops tokens"),
    ("damages bytes", "loses", "checkpoints"),
)


def begin(ranks_of_task, rank, own, port):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks_of_task), MASTER_ADDR="127.0.0.1", MASTER_PORT=port, STRICT_CHANNELS="own" if own else "one")
    torch.set_num_threads(1)
    strict_torch.open_device()
    dist.init_process_group("gloo")


def start(folder, name):
    """The processes of a task."""
    count, own, call = TASKS[name]
    port = str(free_port())

    def rank_of(rank):
        begin(count, rank, own, port)
        call(folder, *([name] if call is trains else []))
        ranks._close_all()  # a child ends without the interpreter's end

    return [forked(lambda rank=rank: rank_of(rank), folder / f"{name}-{rank}.txt") for rank in range(count)]


def plainly(folder):
    """On the device and on the CPU."""
    torch.set_num_threads(1)
    strict_torch.open_device()
    for name in BY_CHANNELS:
        for index, case in enumerate(CASES[name]):
            torch.save(torch_cases.result_of(*torch_cases.train_plainly(case)), folder / f"plain-{name}-{index}.pt")
            torch.save(torch_cases.train_plainly({**case, "device": "cpu"})[2], folder / f"cpu-{name}-{index}.pt")
    model, _, losses = torch_cases.train_plainly({**LLAMA, "scheduled": False})
    torch.save({"losses": losses, "weights": model.state_dict()}, folder / "cpu-checkpoints.pt")


def codes_of(children):
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def main(folder, *names):
    """Runs what is named, or all: a few tasks at once, since most of their time is waiting."""
    folder = pathlib.Path(folder)
    assert can_fork()
    codes = {}
    plain = [] if names else [forked(lambda: plainly(folder), folder / "plain-0.txt")]
    for together in TOGETHER:
        children = {name: start(folder, name) for name in together if not names or name in names}
        codes.update({name: codes_of(own) for name, own in children.items()})
    os.environ["STRICT_CHANNELS"] = "own"
    for case in LOSSES:
        if not names or case["name"] in names:
            codes[case["name"]] = run(case, folder / case["name"])
    codes["plain"] = codes_of(plain)
    of_tasks = {name: (count, CASES.get(name, [])) for name, (count, _, _) in TASKS.items()}
    torch.save({"tasks": of_tasks, "losses": LOSSES}, folder / "cases.pt")
    (folder / "codes.json").write_text(json.dumps(codes), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
