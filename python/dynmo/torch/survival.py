# SPDX-License-Identifier: Apache-2.0
"""dt.Survivor: if a process of a pipeline ends, the others continue (docs/decisions/033-survivors-of-a-pipeline.md)."""
from __future__ import annotations

import os
import pathlib
import traceback
import warnings
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Optional

from ..errors import BadInputError, RankLostError
from . import checks, joining, meeting, start
from .endpoint import Path, join, open_endpoint
from .lines import Lines
from .pipeline import Pipeline
from .ranks import STORE_S
from .record import Recovery, joined
from .snapshots import LIVE, Holding, Key, Snapshots, choose, rows_of

TRIES = 8  # groups in a row that may fail
HEARD_S = 0.1  # how much later than the group's error the news of a loss may come
NEWS_S = 1.0  # the same after other exceptions, such as those of a checkpoint


class Survivor:
    """Trains a pipeline whose processes may be lost meanwhile. Losses and weights are those of an undisturbed run, bit for bit.

    `keep`: objects with state_dict() and load_state_dict() that change from step to step, such as LR schedulers; not the optimizer.
    `every`: steps from one snapshot to the next; 0: the number with which snapshots cost 1 % of the time.
    `silence_s`: a rank that sends no beat for so many seconds is left out, if more than half of the ranks are left.
    `wait_s`: maximum seconds that ranks wait for each other after a loss, and for a message from then on.
    `told`: called with each Recovery, on every rank that is left.
    `endpoint`: a file in a folder that all ranks share. By it new processes join between two steps. A new process runs the same program
    without a launcher, with Pipeline(joins=True), and begins at the step of the others.
    """

    def __init__(
        self, pipe: Pipeline, *, keep: Sequence[Any] = (), every: int = 0, silence_s: float = 10, wait_s: float = 120,
        told: Optional[Callable[[Recovery], Any]] = None, endpoint: Optional[Path] = None,
    ) -> None:
        if pipe._joins and endpoint is None:
            raise BadInputError("Survivor: a pipeline with joins=True and no endpoint, wanted endpoint=FILE of the ranks that it joins")
        if endpoint is not None and pathlib.Path(endpoint).name == "":
            raise BadInputError(f"endpoint={os.fspath(endpoint)!r}, wanted the path of a file in a folder that all ranks share")
        if every < 0:
            raise BadInputError(f"every={every}, wanted a number of steps, or 0")
        checks.check_seconds("silence_s", silence_s)
        checks.check_seconds("wait_s", wait_s)
        for kept in keep:
            if kept is pipe.optimizer or not hasattr(kept, "load_state_dict"):
                raise BadInputError(f"keep: a {type(kept).__name__}, wanted objects with load_state_dict() other than the optimizer")
        self._pipe, self._silence_s, self._wait_s, self._told = pipe, silence_s, wait_s, told
        self._snapshots = Snapshots(pipe._split, pipe._ranks, pipe._mover, pipe.optimizer, keep, every, lambda: pipe._updates.begun)
        self._rows = pipe._ranks.first_layout  # members of each replica at the start
        self._keep, self._endpoint = keep, endpoint
        self._terms: dict[str, int] = {}  # of the newest train(), which must be equal on all ranks
        self._joins = False  # whether this process has yet to receive the others' state
        self._entered = True  # whether this process has been in a group
        self._lines: Optional[Lines] = None
        self._members: list[int] = []
        self._generation = 0
        self._source = LIVE  # of the newest recovery: a snapshot's generation, or LIVE
        self._measured: Optional[dict[str, Any]] = None  # costs before the newest loss

    @property
    def every(self) -> int:
        """Returns the number of steps from one snapshot to the next."""
        return self._snapshots.every

    @property
    def snapshot_s(self) -> float:
        """Returns the seconds that the newest snapshot took."""
        return self._snapshots.cost_s

    def train(self, train_step: Callable[[int], Any], steps: int) -> list[Any]:
        """Calls `train_step(number)` for each step that is left of `steps`. Returns the results by step.

        `train_step` runs a whole step: it gets the batch of this number, calls pipe.step() once, and updates. After the loss of a rank it
        is called again for the steps since the newest snapshot. All ranks end if one is lost in the first step, or if all copies of a layer
        are lost, or with the line of a rank whose pipe.step() raises an error.
        """
        values: dict[int, Any] = {}
        pipe = self._pipe
        self._terms = {"every of Survivor": self._snapshots.fixed, "number of steps": steps}
        self._snapshots.clear()
        lines = self._lines = self._open_lines()
        pipe._ranks.heard = (lambda: lines.hears_of_loss(HEARD_S)) if lines is not None else None
        pipe._ranks.asks = lines.asks if lines is not None and self._endpoint is not None else None
        if not pipe._whole:  # in the first step all ranks still have all layers
            self._snapshots.note(pipe.plan, pipe.steps)
        done, refused = False, ""
        try:
            if self._joins:
                self._recover()
            else:
                pipe._ranks.attempt("Survivor", self._begin)
            while not self._go(train_step, steps, values) and self._recover():
                pass
            done = True
        except Exception as error:
            refused = pipe._ranks.refusal(error)
            raise
        finally:
            if lines is not None:
                lines.close(done, refused)
            pipe._ranks.heard = pipe._ranks.asks = None
        return [values[number] for number in sorted(values)]

    # --- Inside. ---

    def _open_lines(self) -> Optional[Lines]:
        """Returns connections to all ranks. A process that joins gets connections to the ranks that let it in."""
        ranks = self._pipe._ranks
        self._joins, self._entered = self._pipe._joins, not self._pipe._joins
        if self._joins:
            assert self._endpoint is not None
            entry = join(self._endpoint, joining.settings_of(self._pipe, self._keep, self._terms), self._wait_s)
            ranks.first_layout = self._rows = entry.facts["rows"]
            self._members, self._generation = sorted(entry.lines), -1
            return Lines(ranks, self._silence_s, entry)
        self._rows, self._members, self._generation = ranks.first_layout, list(ranks.members), 0
        return Lines(ranks, self._silence_s) if ranks.world > 1 or self._endpoint is not None else None

    def _begin(self) -> tuple[None, dict[str, int]]:
        self._open_endpoint()
        return None, self._terms

    def _open_endpoint(self) -> None:
        """Lets processes join, if this is the lowest rank."""
        lines = self._lines
        if lines is not None and self._endpoint is not None and self._members[0] == lines.member and not lines.is_open:
            own = joining.settings_of(self._pipe, self._keep, self._terms)
            lines.open(open_endpoint(self._endpoint, lines.address, lambda asked: joining.refusal(own, asked), {"rows": self._rows}))

    def _go(self, train_step: Callable[[int], Any], steps: int, values: dict[int, Any]) -> bool:
        """Runs the steps that are left. Returns False if a rank is lost or joins before they are done."""
        pipe = self._pipe
        try:
            while pipe.steps < steps:
                number = pipe.steps
                values[number] = train_step(number)
                if pipe.steps != number + 1:
                    raise BadInputError(f"train_step: {pipe.steps - number} calls of pipe.step(), wanted one")
                if fault := self._lines.take_fault() if self._lines is not None else "":
                    warnings.warn(f"rank {self._member}: processes that join wait: {fault}; close files, or raise their limit (ulimit -n)")
                self._snapshots.note(pipe.plan, pipe.steps, changes=pipe._asked)
                if pipe._asked and pipe.steps < steps:
                    pipe._ranks.gather(None)  # waits until all ranks have done this step
                    return False
                if self._snapshots.is_due(pipe.steps):
                    self._snapshots.take(self._generation, pipe.plan, pipe.steps)
            pipe._ranks.gather(None)
            return True
        except BadInputError:
            raise
        except Exception as error:
            if self._lines is not None and pipe.steps >= steps and self._lines.done:
                return True  # a rank is done only if all are
            if not self._is_loss(error):
                raise
            _forget(error)
        return False

    def _is_loss(self, error: Exception) -> bool:
        """Returns whether a rank is lost. An error of this rank that the others know is no loss, although they leave because of it."""
        if self._pipe._ranks.refusal(error):
            return False
        if self._lines is None or isinstance(error, RankLostError):
            return self._lines is not None
        return self._lines.hears_of_loss(NEWS_S)

    def _recover(self) -> bool:
        """Continues with the ranks that are left. Returns False if all steps are already done."""
        begin = perf_counter()
        before, reached = self._members, self._pipe.steps
        for number in range(TRIES):
            try:
                end = self._try(STORE_S * 2**number)
            except meeting.AllDone:
                return False
            except BadInputError:
                raise
            except Exception as error:
                if not self._is_loss(error):
                    raise
                _forget(error)
                continue
            if end:
                raise RankLostError(f"rank {self._member}: {end}; start again from {self._checkpoint}")
            break
        else:
            raise RankLostError(f"rank {self._member}: {TRIES} groups did not form; start again from {self._checkpoint}")
        lost = tuple(member for member in before if member not in self._members)
        came = tuple(member for member in self._members if member not in before)
        step = self._pipe.steps
        recovery = Recovery(lost, tuple(self._members), step, max(0, reached - step), perf_counter() - begin, came)
        self._pipe._log.warning("step %5d  %s", reached, recovery)
        self._record(recovery)
        try:
            self._open_endpoint()
        except BadInputError as error:  # training does not need the endpoint
            warnings.warn(f"rank {self._member}: no process can join from here on: {error}")
        if self._told is not None:
            self._told(recovery)
        return True

    def _record(self, recovery: Recovery) -> None:
        """Records a recovery in the run's files. If that fails, training continues without them."""
        record, lines = self._pipe._record, self._lines
        assert lines is not None
        if record is None:
            return
        try:
            why = {member: lines.lost[member] for member in recovery.lost}
            record.go_on(recovery, why, "live layers" if self._source == LIVE else "snapshot", self._pipe.plan)
        except BadInputError as error:
            self._pipe._record = None
            warnings.warn(f"rank {self._member}: it writes no more files of the run: {error}")

    def _try(self, store_s: float) -> str:
        """Forms the next group and brings it back to a snapshot. Returns why that is impossible, or "". `store_s` limits the wait for
        the group's store.
        """
        pipe, lines = self._pipe, self._lines
        assert lines is not None
        pipe._ranks.drop()
        if not self._entered:
            found: "meeting.Meeting | str" = meeting.wait_for_place(lines, self._wait_s)
        else:
            found = meeting.meet(lines, lines.leave(), self._wait_s)
        if isinstance(found, str):
            return found
        self._generation, self._members = found.generation, found.members
        lines.enter(found.generation, found.members)
        self._entered = True
        rows = rows_of(self._rows, found.members)
        if rows is None:
            return f"lost ranks: {joined(tuple(sorted(lines.lost)))}; {len(found.members)} are left for {len(self._rows)} replicas"
        pipe._ranks.store = found.store
        pipe._ranks.reform(found.members.index(lines.member), rows, found.address, found.port, f"dynmo/{found.generation}", self._wait_s, store_s)
        pipe._ranks.members = list(found.members)
        told = pipe._ranks.gather(None if self._joins else self._snapshots.holdings())
        chosen = choose(told, len(pipe.layers))
        if chosen is None:
            return self._missing(told)
        key, holders = chosen
        self._source = key[1]
        self._tell(key, told)
        self._measured = pipe.profile() or self._measured
        plan = start.next_plan(pipe._split, pipe._ranks, pipe.micro_batches, self._snapshots.rewind(key), self._measured)
        if not self._snapshots.restore(key, holders, plan):
            raise RankLostError("bytes of a layer arrived damaged")
        pipe._go_on(plan, key[0])
        pipe._divide()
        if self._joins:
            self._joins = pipe._joins = False
            self._begin_files()
        self._snapshots.restart()
        if self._snapshots.is_due(pipe.steps):
            self._snapshots.take(self._generation, plan, pipe.steps)
        return ""

    def _begin_files(self) -> None:
        """Opens the log and the run's files of a process that has joined. If that fails, it trains without them."""
        try:
            joining.begin_files(self._pipe, self._rows, self._member)
        except BadInputError as error:
            self._pipe._record = None
            warnings.warn(f"rank {self._member}: it writes no files: {error}")

    def _tell(self, key: Key, told: "Sequence[Holding | None]") -> None:
        """Sends processes that join the state that is equal on all others."""
        if all(holding is not None for holding in told):
            return
        first = next(number for number, holding in enumerate(told) if holding is not None)
        own = (self._snapshots.common(key), joining.facts_of(self._pipe)) if self._pipe._ranks.number == first else None
        common, facts = self._pipe._ranks.gather(own)[first]
        if self._joins:
            self._snapshots.adopt(key, common)
            joining.learn(self._pipe, facts)

    def _missing(self, all_told: "Sequence[Holding | None]") -> str:
        """Returns why no snapshot is complete: the lost ranks and the layers that no survivor has."""
        assert self._lines is not None
        told = [holding for holding in all_told if holding is not None]
        lost = joined(tuple(sorted(self._lines.lost)))
        keys = {key for holding in told for key in holding if key[1] != LIVE}
        if not keys:
            return f"lost ranks: {lost}, before the first snapshot"
        newest = max([key for key in keys if all(key in holding for holding in told)] or keys)
        held = {layer for holding in told for layer in holding.get(newest, [])}
        names = [name for index, name in enumerate(self._pipe.layers) if index not in held]
        return f"lost ranks: {lost}, and with them all copies of layer {', '.join(names)}"

    @property
    def _member(self) -> int:
        assert self._lines is not None
        return self._lines.member

    @property
    def _checkpoint(self) -> str:
        return "the newest checkpoint" if self._pipe._saved is None else f"the checkpoint {self._pipe._saved}"


def _forget(error: Optional[BaseException]) -> None:
    """Frees what the frames of an error hold: requests of the old group, and graphs that hold parameters."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
