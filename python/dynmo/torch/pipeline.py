# SPDX-License-Identifier: Apache-2.0
"""dt.Pipeline: the user's own model and optimizer, run as a pipeline whose layers can move."""
from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional, Union

import torch
from torch import Tensor, nn

from .. import Plan as CorePlan
from ..errors import BadInputError, RankLostError
from . import batches, checks, saving, selfcheck, start
from .gradients import Clip, add_ties, mirror_ties, part_ties
from .exchange import AGREED, OF_REPLICAS, Told, alike, begin_agreement, digest_of_flags, exchange, total_of
from .layers import Context, Split, frozen_prefix
from .live import Balancer, Move, check_balancer
from .log import close_log, describe_group, open_log
from .marks import Marks
from .move import Moved, Mover, release_others
from .program import APART, Plan, Program, make_program, read_plan
from .ranks import TIMEOUT_S, Ranks, Replicas, describe_replicas
from .record import Outputs, Record
from .reduction import Reduced, Reduction
from .sequence import Between, Sequential
from .step import Step
from .updates import Updates

PlanLike = Union[CorePlan, Mapping[str, Any]]


class Pipeline:
    """Runs a model over the ranks of torch.distributed; with one rank it is the plain loop.

    Every rank builds the same model and optimizer and reads the same batches. The calling thread does all the work.

    `replicas=D`: D pipelines of consecutive ranks, or the rows of a DeviceMesh of two dimensions. Each replica reads batches of its own:
    a DistributedSampler takes `num_replicas=pipe.replicas, rank=pipe.replica`. Losses, weights and optimizer state are, bit for bit, those
    of one process that sums the gradients of each replica's micro-batches in a buffer of its own and adds these buffers in the order of
    the replicas, as `pipeline.replicas` of `dynmo train` does. A loss is divided by all micro-batches of a step: `loss` is the mean over
    the replicas, or with `num_items_in_batch`, which counts the items of all replicas, the sum.

    Args:
        model: One of transformers' causal language models. Its layers are its blocks, with what is before and after them.
        optimizer: An optimizer of the model's parameters. Its state moves with the layers.
        micro_batches: Number of parts into which a batch is cut, by samples.
        layers, loss_fn, hidden: Instead of a model: named modules in order, `loss_fn(output, target)`, and `hidden(input)`. It returns
            an empty tensor, or a dictionary of them, like what passes between two layers.
        limits: Whether shapes of `hidden` are limits, so that layers may give smaller tensors.
        accumulation: Number of batches of an optimizer step.
        replicas: See above.
        plan: The first plan. Without one the planner makes it, for times that rank 0 measures.
        schedule: One of `dynmo.schedule_kinds()`, for the first plan.
        balance, balancer: Whether to measure layers and plan again, and by which of `dynmo.balancers()`.
        steps: All steps of the run, so that a move pays before its end; 0: unknown.
        run: A folder for the files of a run.
        metrics: "tensorboard" and "prometheus", in that folder.
        metrics_port: Port of rank 0 for Prometheus; 0: none.
        peak_flops: FLOP/s of a rank's device, for MFU; 0: unknown.
        log, log_level: A folder for a log of each rank, from debug, info, warning or error on.
        seed: Seed of dropout. Without one it is PyTorch's seed of rank 0. Layers that draw random numbers by functions want one.
        timeout_s: Longest wait for a message, in seconds.
        lane: "device": tensors of a device go from device to device, else refused; "host": through host memory; "auto": if they can.
        joins: Whether this process, without a launcher, joins ranks that train, by `Survivor(endpoint=FILE)`.

    Raises:
        BadInputError: On all ranks, with one line, if an argument is wrong, or ranks differ.
    """

    def __init__(
        self,
        model: Optional[nn.Module] = None,
        optimizer: Optional[torch.optim.Optimizer] = None,
        *,
        micro_batches: int,
        layers: Optional[Sequence[tuple[str, nn.Module]]] = None,
        loss_fn: Optional[Callable[[Any, Any], Tensor]] = None,
        hidden: Optional[Callable[[Any], Between]] = None,
        limits: bool = False,
        accumulation: int = 1,
        replicas: Replicas = 1,
        plan: Optional[PlanLike] = None,
        schedule: str = "1f1b",
        balance: bool = True,
        balancer: str = "optimal",
        steps: int = 0,
        run: Optional[saving.Path] = None,
        metrics: Sequence[str] = (),
        metrics_port: int = 0,
        peak_flops: float = 0.0,
        log: Optional[saving.Path] = None,
        log_level: str = "info",
        seed: Optional[int] = None,
        timeout_s: float = TIMEOUT_S,
        lane: str = "auto",
        joins: bool = False,
        _ranks: Optional[Ranks] = None,
    ) -> None:
        self.optimizer = optimizer
        self._ranks = Ranks(timeout_s) if _ranks is None else _ranks
        self._joins = joins
        if joins and self._ranks.world > 1:
            raise BadInputError(f"joins=True in a group of {self._ranks.world} ranks, wanted a process of its own, without a launcher")
        self._settings = self._ranks.attempt("Pipeline: its settings", lambda: 2 * ({
            **start.versions(), "micro_batches": micro_batches, "accumulation": accumulation, "schedule": schedule, "balance": balance,
            "balancer": balancer, "steps": steps, "seed": seed, "limits": limits, "lane": lane, "plan": start.describe_plan(plan),
            "replicas": describe_replicas(replicas), **start.describe_optimizer(optimizer), "run": run is not None,
        },))
        self._ranks.divide(1 if joins else replicas)
        self._outputs = self._ranks.attempt("Pipeline: its files", lambda: (Outputs(run, metrics, metrics_port, peak_flops), {}))
        checks.check_count("micro_batches", micro_batches, 1)
        checks.check_count("accumulation", accumulation, 1)
        checks.check_count("steps", steps, 0)
        checks.check_count("seed", 0 if seed is None else seed, 0)
        self._split, draws = start.agreed_split(self._ranks, lambda: start.split_of(model, layers, loss_fn, hidden, limits, optimizer))
        self.micro_batches, self._accumulation = micro_batches, accumulation
        self._seed = start.seed_of(draws, seed, self._ranks)
        self.plan = start.first_plan(self._split, self._ranks, micro_batches, "1f1b" if joins else schedule, None if joins else plan, lane)
        self.marks = Marks(len(self._split.layers), self._split.device.clock)
        self._clip = Clip(self._split, self._ranks)
        self._mover = Mover(self._split, self._ranks, optimizer)
        self._reduction = Reduction(self._split, self._ranks)
        self.reduced = Reduced()  # of the newest step
        self._programs: dict[Any, Program] = {}
        self._rounds, self._schedule_s = 0, 0.0  # in this step
        self._counts = {"micro_batches": micro_batches, "accumulation": accumulation, "steps": steps}
        self._balancing = {**self._counts, "balancer": balancer}
        self._balances = balance
        check_balancer(balancer)
        self._updates = Updates(self._split, self._ranks, optimizer)
        self._begin_balancing()
        self._log_at = log, log_level
        self._log = self._ranks.attempt(f"log={log}", lambda: (open_log(None if joins else log, log_level, self._ranks, self.plan), {}))
        self._record: Optional[Record] = None
        if run is not None and not joins:
            self._record = self._ranks.attempt(f"run={run}", lambda: (Record(self._outputs, self._ranks, self._counts, self._log), {}))
        self._tokens, self._loss, self._predicted_s, self._flops_per_token = 0, 0.0, 0.0, 0.0  # the first two in this step
        self.steps = 0
        self.losses: list[float] = []
        start.untie_optimizer(self._split, optimizer)
        # The first batch is checked with the whole model, so all ranks keep all layers until then.
        self._whole, self._checked_alone, self._checked_apart = True, False, False  # the last one also with I and W apart
        self._asked = False  # whether the first rank asked for a change of the ranks at the end of the newest step
        self._saved: Optional[saving.Path] = None  # the newest checkpoint
        self._searches = balance and balancer == "search"
        self._kinds: dict[str, set[str]] = {}  # kinds of values that were checked, by path

    @property
    def rank(self) -> int:
        return self._ranks.rank

    @property
    def ranks(self) -> int:
        """Returns the number of ranks of a replica. `rank` is below it."""
        return self._ranks.size

    @property
    def replica(self) -> int:
        return self._ranks.replica

    @property
    def replicas(self) -> int:
        return self._ranks.replicas

    @property
    def module(self) -> nn.Module:
        """Returns the user's model. The parameters of other ranks' layers are on meta."""
        return self._split.module

    @property
    def layers(self) -> list[str]:
        return [layer.name for layer in self._split.layers]

    # --- Training. ---

    def step(self, *pair: Any, **batch: Any) -> Tensor:
        """Runs forward and backward of all micro-batches. Returns the batch's loss, on every rank.

        A list of dictionaries instead of **batch gives the micro-batches, which may differ in size. Without replicas and accumulation the
        list may have fewer than `micro_batches`.
        """
        if self._rounds != self._accumulation - 1:
            raise BadInputError(
                f"step: {self._rounds} calls of accumulate() before it, wanted {self._accumulation - 1} (accumulation={self._accumulation})"
            )
        if self._balancer is not None:
            self._balancer.times.begin_step()
            self._predicted_s = self.predicted_step_s() if self._record is not None else 0.0
        loss = self._round(batches.of_call(pair, batch, isinstance(self._split, Sequential)))
        if self.replicas > 1:
            self.reduced = self._reduction(self.plan.owners)
        add_ties(self._split, self._ranks, self.plan.owners)
        self._rounds = 0
        self.steps += 1
        self._updates.note()
        return loss

    def accumulate(self, *pair: Any, **batch: Any) -> Tensor:
        """Like `step`, for all but the last batch of an optimizer's step (accumulation=N). Gradients add up."""
        if self._rounds >= self._accumulation - 1:
            raise BadInputError(f"accumulate: call {self._rounds + 1} in a step of accumulation={self._accumulation}, wanted step() now")
        loss = self._round(batches.of_call(pair, batch, isinstance(self._split, Sequential)))
        self._rounds += 1
        return loss

    def evaluate(self, *pair: Any, **batch: Any) -> Tensor:
        """Returns the batch's loss in eval mode, without gradients, on every rank."""
        modes = [(module, module.training) for module in self.module.modules()]
        self.module.eval()
        try:
            return self._pass(batches.of_call(pair, batch, isinstance(self._split, Sequential)), len(self._split.layers), Marks(len(self._split.layers), self._split.device.clock))
        finally:
            for module, mode in modes:
                module.training = mode

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Clips the gradients of all the model's parameters, with the same bits as torch.nn.utils.clip_grad_norm_. Returns their norm."""
        total = self._clip(self.plan.owners, float(max_norm), float(norm_type), error_if_nonfinite)
        self._clip.scale(self._owned(), total, float(max_norm))
        self._updates.note()
        return total

    # --- Balancing. ---

    def balance(self) -> Optional[Move]:
        """Asks the controller, and moves layers if that pays. Call it between two steps, after zero_grad()."""
        if self._balancer is None:
            return None
        mirror_ties(self._split)
        self._ranks.agree_on_work(digest_of_flags(self._split), self._balancer.work_changed)
        decision = self._balancer.decide(self.plan, self.steps)
        if decision is None:
            return None
        self._log.log(logging.INFO if decision["migrate"] else logging.DEBUG, "step %5d  decision: %s", self.steps, decision["reason"])
        if self._record is not None:
            self._record.decision(self.steps, self._balancer.decisions)
        if not decision["migrate"]:
            return None
        plan = read_plan(decision["plan"], self.ranks, len(self._split.layers))
        before = self.plan.cut
        moved = self._move(plan)
        self._balancer.moved(moved)
        if not moved.done:
            return None
        if self._record is not None:
            self._record.moved(self.steps, len(moved.layers), moved.bytes, moved.seconds, plan)
        return Move(
            before, plan.cut, decision["current_step_s"], decision["planned_step_s"], moved.bytes, moved.seconds, decision["reason"]
        )

    def close(self) -> None:
        """Closes the files of run="folder" and log="folder". The pipeline can continue without them."""
        if self._record is not None:
            self._record.close(self.steps, self.profile())
            self._record = None
        close_log(self._log, self.steps)

    def profile(self) -> Optional[dict[str, Any]]:
        """Returns the layers' measured costs, for `dynmo.plan`. Returns None before the first step, or with balance=False."""
        return self._balancer.profile() if self._balancer is not None else None

    def predicted_step_s(self) -> float:
        """Returns the predicted seconds of the next step, by replay of the plan. Returns 0 before the first step, or with balance=False."""
        return self._balancer.predicted_step_s(self.plan, self.steps) if self._balancer is not None else 0.0

    def changed(self, why: str) -> None:
        """Tells the controller that the work of layers has changed in a way that no requires_grad flag shows. Call it on every rank."""
        if self._balancer is not None:
            self._balancer.changed(why)

    def move_to(self, plan: PlanLike) -> Moved:
        """Moves the layers to another plan. Call it between two steps. `balance` does so by itself."""
        read = read_plan(start.document_of(plan), self.ranks, len(self._split.layers))
        if read.schedule in APART and not self._whole and not self._checked_apart:
            raise BadInputError(
                f"plan: schedule {read.schedule} has I and W apart, with which the first batch was not checked, wanted "
                f"Pipeline(schedule={read.schedule!r}) or one of {', '.join(APART)}"
            )
        return self._move(read)

    # --- In and out. ---

    def save_pretrained(self, folder: saving.Path, **options: Any) -> None:
        """Writes the same as the model's save_pretrained, with the weights of all ranks. All ranks call it."""
        self.write_weights(saving.pretrained_writer(self.module, folder, options))

    def write_weights(self, write: Callable[[dict[str, Tensor]], None]) -> None:
        """Calls `write` on rank 0 with the state dict of the whole model. All ranks call it."""
        saving.write_weights(self._split, self._ranks, self.plan.owners, write)

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's weights and optimizer state by name, for torch.distributed.checkpoint."""
        return saving.state_dict(self._split, self._ranks, self.plan.owners, self.optimizer, self.steps)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads this rank's part of a state. Call it between two steps."""
        self.steps = saving.load_state_dict(self._split, self._ranks, self.plan.owners, self.optimizer, state)
        if self._record is not None:
            self._record.go_back(self.steps)

    def save(self, folder: saving.Path) -> None:
        """Writes a checkpoint with torch.distributed.checkpoint. All ranks call it."""
        saving.save(folder, self.state_dict(), self._ranks, self._split.device)
        self._log.info("step %5d  checkpoint in '%s'", self.steps, folder)
        self._saved = folder

    def load(self, folder: saving.Path) -> None:
        """Reads a checkpoint that any number of ranks has written. All ranks call it."""
        self.load_state_dict(saving.load(folder, self._split, self._ranks, self.plan.owners, self.optimizer))

    # --- Inside. ---

    def _go_on(self, plan: Plan, steps: int) -> None:
        """Continues before step `steps` on the ranks that are left, which hold the layers of `plan`."""
        self._log.info("step %5d  %s", steps, describe_group(self._ranks, plan))
        self.plan, self.steps, self._rounds = plan, steps, 0
        self._programs.clear()
        self._updates.forget()
        self.marks.reset()
        self._begin_balancing()

    def _begin_balancing(self) -> None:
        """Makes the controller of this group of ranks. One rank has a controller only for the files of a run."""
        balances = self._balances and (self._ranks.size > 1 or self._outputs.run is not None)
        self._balancer = Balancer(self._split, self._ranks.size, self._balancing) if balances else None
        self._updates.times = self._balancer.times if self._balancer is not None else None

    def _round(self, batch: batches.Batch) -> Tensor:
        mirror_ties(self._split)
        if self._rounds == 0:
            self.marks.reset()
        return self._pass(batch, frozen_prefix(self._split.layers), self.marks)

    def _pass(self, batch: batches.Batch, frozen: int, marks: Marks) -> Tensor:
        try:
            return self._run(batch, frozen, marks)
        except RankLostError as error:
            self._log.warning("step %5d  %s", self.steps, error)
            raise
        except Exception as error:
            self._log.error("step %5d  %s: %s", self.steps, type(error).__name__, error)
            self._ranks.tell(error)
            raise

    def _run(self, batch: batches.Batch, frozen: int, marks: Marks) -> Tensor:
        training = marks is self.marks
        host, device = batches.on_host(batch), self._split.device
        if self._whole and not (self._checked_alone and batches.are_known(batches.first_of(batch), self._kinds)):
            self._check_first(batch, host, frozen, training)
        micro_batches, agreed = self._micro_batches(batch, host, frozen, training)
        if training:
            self._tokens = batches.count_tokens(batch) + (self._tokens if self._rounds else 0)
            if self._record is not None:
                self._record.begin(self.steps, self.plan)
        whole = batches.ITEMS in micro_batches[0]  # each loss is a sum over the micro-batch, already divided
        divisor = 1 if whole else self.replicas * len(micro_batches) * (self._accumulation if training else 1)
        program = self._program(frozen, len(micro_batches))
        hosts = micro_batches if device.is_host else self._cut(host)
        contexts = [self._split.begin(here, self.steps, there) for here, there in zip(micro_batches, hosts)]
        number = (self.steps * self.replicas + self.replica) * self._accumulation + self._rounds
        step = Step(
            self._split, self._ranks, program, contexts, marks, lambda loss: loss / divisor if divisor != 1 else loss,
            number, self._used_seed(), agreed,
        )
        if training and self._rounds == 0:
            part_ties(self._split)
        begun = device.clock.stamp()
        step.run()
        ended = device.clock.stamp()
        losses = dict(zip(step.losses, device.read(list(step.losses.values()))))
        marks.settle()
        self._schedule_s = device.clock.seconds(begun, ended) + (self._schedule_s if self._rounds else 0.0)
        device.clock.free([begun, ended])
        self.losses = self._exchange(losses, frozen, training, contexts, whole)
        return total_of(self.losses, divisor, self.replicas, next(self.module.parameters()).dtype)

    def _used_seed(self) -> Optional[int]:
        return self._seed if self.module.training else None

    # --- The batch. ---

    def _check_first(self, batch: batches.Batch, host: batches.Batch, frozen: int, training: bool) -> None:
        """Checks a batch on the whole model, which every rank still has, against its layers. Then drops the layers of other ranks."""

        def check() -> tuple[None, dict[str, Any]]:
            self._check_trained(frozen, training)
            self._parts(batch)
            facts = dict(zip(AGREED, alike(self._split, host, frozen)))
            sample = batches.on_device(batches.sample_of(host, self.micro_batches), self._split.device.device)
            if training or not batches.are_known(batches.first_of(batch), self._kinds):
                selfcheck.check_batch(self._split, sample, self._used_seed(), self._runs_apart())
            if self._outputs.peak_flops and not self._flops_per_token:
                self._flops_per_token = selfcheck.flops_of(self._split, sample, self._used_seed()) / batches.count_tokens(sample)
            return None, facts

        self._ranks.attempt("the first step", check, OF_REPLICAS)
        for path, kind in batches.kinds_of(batches.first_of(batch)).items():
            self._kinds.setdefault(path, set()).add(kind)
        if self._balancer is not None:
            self._balancer.not_timed()
        self._checked_alone = self._checked_alone or training and self._ranks.world == 1
        if training and self._ranks.world > 1:
            self._checked_apart = self._runs_apart()
            release_others(self._split.layers, self.plan.owners, self.rank, self.optimizer)
            self._divide()

    def _divide(self) -> None:
        """Notes that layers are on other ranks from now on."""
        if self._whole:
            self._whole = False
            saving.refuse_reading(self.module)

    def _runs_apart(self) -> bool:
        """Returns whether I and W are two actions, or may be after a decision."""
        return self.plan.schedule in APART or self._searches

    def _check_trained(self, frozen: int, training: bool) -> None:
        if training and frozen == len(self._split.layers):
            raise BadInputError("model: no parameter is trained, wanted one with requires_grad")

    def _micro_batches(
        self, batch: batches.Batch, host: batches.Batch, frozen: int, training: bool
    ) -> tuple[list[dict[str, Any]], Callable[[], None]]:
        """Returns the micro-batches, and the call that completes the agreement. If this rank refuses the batch, all ranks raise the same
        error.
        """
        try:
            self._check_trained(frozen, training)
            if training and self.replicas > 1 and self._rounds == 0:
                self._updates.check_taken()
            if not self._whole:
                batches.check_kinds(batches.first_of(batch), self._kinds)
            return self._parts(batch), begin_agreement(self._ranks, alike(self._split, host, frozen))
        except BadInputError as error:
            with contextlib.suppress(BadInputError):
                begin_agreement(self._ranks, alike(self._split, host, frozen), str(error))()
            raise self._ranks.agreed(str(error)) from error

    def _parts(self, batch: batches.Batch) -> list[dict[str, Any]]:
        """Returns the micro-batches on the model's device."""
        device = self._split.device.device
        batches.check_places(batch, device)
        return self._cut(batches.on_device(batch, device))

    def _cut(self, batch: batches.Batch) -> list[dict[str, Any]]:
        return batches.micro_batches_of(batch, self.micro_batches, fewer=self.replicas == self._accumulation == 1)

    def _exchange(self, losses: dict[int, float], frozen: int, training: bool, contexts: list[Context], summed: bool) -> list[float]:
        """Exchanges losses, and at the end of a step the layers' times unless it had fewer micro-batches. Returns the losses of all
        micro-batches.
        """
        last = training and self._rounds == self._accumulation - 1
        balancer = self._balancer if last and len(contexts) == self.micro_batches else None
        own = Told(losses)
        if balancer is not None:
            balancer.times.add_schedule(self._schedule_s)
            balancer.times.settle()
            if self.rank < self.ranks:
                own = balancer.own_part(self.plan, self.rank, self.marks, losses, self._schedule_s, contexts[0])
        own.tokens = self._tokens if last else 0
        own.asked = self._ranks.number == 0 and self._ranks.asks is not None and self._ranks.asks()
        told = exchange(self._ranks, len(contexts), len(self._split.layers), own, whole=balancer is not None)
        self._asked = told.asked
        if balancer is not None:
            balancer.observe(told, self.plan, frozen)
        if training:
            loss = sum(told.losses.values()) / (1 if summed else len(told.losses) * self._accumulation)
            self._loss = loss + (self._loss if self._rounds else 0.0)
        if last:
            if self._record is not None:
                facts = {"loss": self._loss, "predicted_s": self._predicted_s, "reduction_s": self.reduced.seconds}
                self._record.step(self.steps, self.plan, frozen, facts, told, balancer, self._flops_per_token)
            self._log.debug("step %5d  losses %s, the schedule took %.6f s", self.steps, told.losses, self._schedule_s)
        return list(told.losses.values())

    def _program(self, frozen: int, micro_batches: int) -> Program:
        key = (self.plan, frozen, micro_batches)
        if key not in self._programs:
            if len(self._programs) > 8:
                self._programs.clear()
            self._programs[key] = make_program(self.plan, self.rank, micro_batches, frozen)
        return self._programs[key]

    def _owned(self) -> list[nn.Parameter]:
        owned = (layer for layer, owner in zip(self._split.layers, self.plan.owners) if owner == self.rank)
        return [parameter for layer in owned for parameter in layer.parameters.values()]

    def _move(self, plan: Plan) -> Moved:
        moved = self._mover.move(self.plan, plan, keep=self._whole)
        self._log.info("step %5d  move: %s -> %s, %s", self.steps, self.plan.cut, plan.cut, moved)
        if moved.done:
            self.plan = plan
        return moved
