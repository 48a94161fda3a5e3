# SPDX-License-Identifier: Apache-2.0
"""Interprets a rank's actions of one step over public calls of PyTorch."""
from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
import contextlib
from typing import Optional

import torch
from torch import Tensor

from ..errors import BadInputError
from .layers import Context, Split
from .marks import Marks
from .program import Action, Program
from .ranks import Message, Ranks

Place = tuple[int, int]  # stage, micro-batch


class Step:
    """One pass over the micro-batches of a batch. Gradients are added to those that are there."""

    def __init__(
        self,
        split: Split,
        ranks: Ranks,
        program: Program,
        contexts: list[Context],
        marks: Marks,
        scale: Callable[[Tensor], Tensor],
        number: int,
        seed: Optional[int],
        agreed: Callable[[], None],
    ) -> None:
        self._split, self._ranks, self._program, self._contexts = split, ranks, program, contexts
        self._marks, self._scale, self._number, self._seed, self._agreed = marks, scale, number, seed, agreed
        self._receives: dict[tuple[str, int, int], Message] = {}
        self._sends: list[Message] = []
        self._inputs: dict[Place, Tensor] = {}
        self._outputs: dict[Place, Tensor] = {}
        self._stamps: dict[Place, list[tuple[int, float]]] = {}
        self._gradients: dict[Place, Tensor] = {}  # from a stage of this rank to the one before it
        self.losses: dict[int, Tensor] = {}

    def run(self) -> None:
        """Performs the actions in order, and waits for what was sent."""
        perform = {
            "F": self._forward, "B": self._backward, "RECV_F": self._receive, "RECV_B": self._receive,
            "SEND_F": self._send_output, "SEND_B": self._send_gradient,
        }
        for action in self._program.actions:
            perform[action.kind](action)
        with self._marks.waiting():  # for others, which is no work of this rank
            self._agreed()
            for message in self._sends:
                message.wait()
        assert not self._outputs and not self._receives

    # --- Messages. ---

    def _tag(self, kind: str, boundary: int, micro_batch: int) -> int:
        return (boundary * 2 + (kind == "B")) * self._program.micro_batches + micro_batch

    def _receive(self, action: Action) -> None:
        forward = action.kind == "RECV_F"
        context = self._contexts[action.micro_batch]
        self._describe(context)
        buffer = torch.empty(context.shape, dtype=context.dtype)
        other = action.stage - 1 if forward else action.stage + 1
        tag = self._tag(action.kind[-1], min(action.stage, other), action.micro_batch)
        key = (action.kind, action.stage, action.micro_batch)
        self._receives[key] = self._ranks.receive(buffer, self._program.stages[other].rank, tag)

    def _describe(self, context: Context) -> None:
        with self._random(0, 0):
            self._split.describe(context)

    def _arrived(self, kind: str, action: Action) -> Optional[Tensor]:
        message = self._receives.pop((kind, action.stage, action.micro_batch), None)
        if message is None:
            return None
        with self._marks.waiting():
            self._agreed()
            return message.wait()

    def _send(self, action: Action, tensor: Tensor, other: int) -> None:
        tag = self._tag(action.kind[-1], min(action.stage, other), action.micro_batch)
        self._sends.append(self._ranks.send(tensor.contiguous(), self._program.stages[other].rank, tag))

    def _send_output(self, action: Action) -> None:
        place = (action.stage, action.micro_batch)
        output = self._outputs[place]
        self._send(action, output.detach(), action.stage + 1)
        if self._is_frozen(action.stage):
            del self._outputs[place]

    def _send_gradient(self, action: Action) -> None:
        self._send(action, self._gradients.pop((action.stage - 1, action.micro_batch)), action.stage - 1)

    # --- Compute. ---

    def _is_frozen(self, stage: int) -> bool:
        return stage < self._program.frozen_stages

    @contextlib.contextmanager
    def _random(self, layer: int, micro_batch: int) -> Iterator[None]:
        """Random numbers follow from seed, layer, step and micro-batch, not from the cut."""
        if self._seed is None:
            yield
            return
        text = f"{self._seed} {layer} {self._number} {micro_batch}"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little"))
            yield

    def _forward(self, action: Action) -> None:
        place = (action.stage, action.micro_batch)
        stage, context = self._program.stages[action.stage], self._contexts[action.micro_batch]
        hidden: Optional[Tensor] = None
        if action.stage > 0:
            hidden = self._arrived("RECV_F", action)
            if hidden is None:  # the stage before is on this rank
                before = (action.stage - 1, action.micro_batch)
                hidden = self._outputs[before].detach()
                if self._is_frozen(action.stage - 1):
                    del self._outputs[before]
            if not self._is_frozen(action.stage - 1):
                self._inputs[place] = hidden.requires_grad_()
        stamps = self._stamps[place] = []
        last = len(self._split.layers) - 1
        with torch.set_grad_enabled(not self._is_frozen(action.stage)):
            for layer in stage.layers:
                with self._random(layer, action.micro_batch), self._marks.forward(layer):
                    hidden = self._split.run(layer, hidden, context)
                if layer == last:
                    self.losses[action.micro_batch] = hidden.detach()
                    hidden = self._scale(hidden)
                elif layer + 1 in stage.layers and hidden.requires_grad:
                    self._marks.watch(hidden, stamps, layer)
        assert hidden is not None
        if not (stage.first + stage.count - 1 == last and self._is_frozen(action.stage)):
            self._outputs[place] = hidden

    def _backward(self, action: Action) -> None:
        place = (action.stage, action.micro_batch)
        stage = self._program.stages[action.stage]
        gradient = None
        if action.stage + 1 < len(self._program.stages):
            gradient = self._arrived("RECV_B", action)
            if gradient is None:
                gradient = self._gradients.pop(place)
        output, stamps = self._outputs.pop(place), self._stamps.pop(place)
        if not output.requires_grad:
            raise BadInputError("model: no parameter behind the frozen layers is trained, wanted one with requires_grad")
        with torch.autocast("cpu", enabled=False), self._marks.backward(stage.layers[-1], stamps):
            torch.autograd.backward(output, gradient)
        given = self._inputs.pop(place, None)
        if given is not None:
            self._gradients[(action.stage - 1, action.micro_batch)] = (
                given.grad if given.grad is not None else torch.zeros_like(given)
            )
