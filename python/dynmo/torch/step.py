# SPDX-License-Identifier: Apache-2.0
"""Runs a rank's actions of one step, with public calls of PyTorch."""
from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
import contextlib
from typing import Any, Optional

import torch
from torch import Tensor

from ..errors import BadInputError
from .deferred import Deferring, Queue, add_weight_gradients
from .layers import HIDDEN, LOSS, Context, Spec, Split, Values
from .marks import Marks, Stamps
from .messages import Arriving, post
from .program import Action, Program
from .ranks import Message, Ranks

Place = tuple[int, int]  # stage, micro-batch


def seed_for(seed: int, layer: int, step: int, micro_batch: int) -> int:
    """Returns the seed of a layer's random numbers."""
    text = f"{seed} {layer} {step} {micro_batch}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


class Step:
    """One pass over the micro-batches of a batch. Gradients are added to existing ones."""

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
        self._receives: dict[tuple[str, int, int], Arriving] = {}
        self._sends: list[Message] = []
        self._inputs: dict[Place, Values] = {}  # those that need a gradient
        self._outputs: dict[Place, Values] = {}
        self._stamps: dict[Place, Stamps] = {}
        self._queues: dict[Place, dict[int, Queue]] = {}  # weight gradients to compute in W, by layer
        self._gradients: dict[Place, Values] = {}  # for a stage, from the next one on this rank
        self.losses: dict[int, Tensor] = {}

    def run(self) -> None:
        """Runs the actions in order, and waits for the sends."""
        perform = {
            "F": self._forward, "B": self._backward, "I": self._backward, "W": self._weights, "RECV_F": self._receive, "RECV_B": self._receive,
            "SEND_F": self._send_output, "SEND_B": self._send_gradient,
        }
        for action in self._program.actions:
            perform[action.kind](action)
        with self._marks.waiting():  # waiting for other ranks is not this rank's work
            self._agreed()
            for message in self._sends:
                message.wait()
        assert not self._outputs and not self._receives and not self._queues

    # --- Messages. ---

    def _tag(self, forward: bool, boundary: int, micro_batch: int) -> tuple[int, str]:
        """Returns the tag of a message, and the purpose of its channel. Both ranks of a channel have micro-batches in the same order."""
        place = (boundary * 2 + (not forward)) * self._program.micro_batches + micro_batch
        return place * (self._split.width + 1), f"{'F' if forward else 'B'}{boundary}"

    def _boundary(self, stage: int, micro_batch: int) -> list[Spec]:
        """Returns the tensors between a stage and the next one."""
        context = self._contexts[micro_batch]
        with self._random(0, 0):
            self._split.describe(context)
        return context.boundaries[self._program.stages[stage].layers[-1]]

    def _receive(self, action: Action) -> None:
        key = (action.kind, action.stage, action.micro_batch)
        if action.kind == "RECV_F":
            self._receives[key] = self._arriving(action, self._boundary(action.stage - 1, action.micro_batch), action.stage - 1)
        elif not self._split.limits:
            self._receives[key] = self._arriving(action, self._gradients_behind(action), action.stage + 1)
        # With limits, the receive of gradients is posted once the output's shape is known.

    def _gradients_behind(self, action: Action) -> list[Spec]:
        return [spec for spec in self._boundary(action.stage, action.micro_batch) if spec.has_gradient]

    def _arriving(self, action: Action, specs: list[Spec], other: int) -> Arriving:
        forward = other < action.stage
        tag, purpose = self._tag(forward, min(action.stage, other), action.micro_batch)
        rank, device = self._program.stages[other].rank, self._split.device.device
        return Arriving(self._ranks, specs, rank, tag, purpose, self._split.limits and forward, device)

    def _arrived(self, kind: str, action: Action) -> Optional[Values]:
        arriving = self._receives.pop((kind, action.stage, action.micro_batch), None)
        if arriving is None:
            return None
        with self._marks.waiting():
            self._agreed()
            return arriving.wait()

    def _send(self, action: Action, specs: list[Spec], values: Values, other: int) -> None:
        forward = other > action.stage
        tag, purpose = self._tag(forward, min(action.stage, other), action.micro_batch)
        rank = self._program.stages[other].rank
        self._sends += post(self._ranks, specs, values, rank, tag, purpose, self._split.limits and forward)

    def _send_output(self, action: Action) -> None:
        place = (action.stage, action.micro_batch)
        self._send(action, self._boundary(action.stage, action.micro_batch), self._outputs[place], action.stage + 1)
        if self._is_frozen(action.stage):
            del self._outputs[place]

    def _send_gradient(self, action: Action) -> None:
        gradients = self._gradients.pop((action.stage - 1, action.micro_batch))
        specs = [spec for spec in self._boundary(action.stage - 1, action.micro_batch) if spec.has_gradient]
        self._send(action, specs, gradients, action.stage - 1)

    # --- Compute. ---

    def _is_frozen(self, stage: int) -> bool:
        return stage < self._program.frozen_stages

    @contextlib.contextmanager
    def _random(self, layer: int, micro_batch: int) -> Iterator[None]:
        """Seeds random numbers inside by seed, layer, step and micro-batch, so that the cut does not change them."""
        if self._seed is None:
            yield
            return
        with self._split.device.forked_random():
            torch.manual_seed(seed_for(self._seed, layer, self._number, micro_batch))
            yield

    def _given(self, action: Action) -> Values:
        """Returns the input of a stage, detached from the graph of the stage before."""
        if action.stage == 0:
            return {}
        frozen = self._is_frozen(action.stage - 1)
        values = self._arrived("RECV_F", action)
        if values is None:  # the previous stage is on this rank
            before = (action.stage - 1, action.micro_batch)
            values = {name: value.detach() for name, value in self._outputs[before].items()}
            if frozen:
                del self._outputs[before]
        if not frozen:
            inputs = {name: value.requires_grad_() for name, value in values.items() if value.is_floating_point()}
            self._inputs[(action.stage, action.micro_batch)] = inputs
        elif self._split.forces_gradients and not self._is_frozen(action.stage):
            values[HIDDEN].requires_grad_()
        return values

    def _forward(self, action: Action) -> None:
        place = (action.stage, action.micro_batch)
        stage, context = self._program.stages[action.stage], self._contexts[action.micro_batch]
        values = self._given(action)
        stamps = self._stamps[place] = []
        last = len(self._split.layers) - 1
        with torch.set_grad_enabled(not self._is_frozen(action.stage)):
            for layer in stage.layers:
                with self._random(layer, action.micro_batch), self._marks.forward(layer), self._deferring(place, layer):
                    values = self._split.run(layer, values, context)
                if layer == last:
                    self.losses[action.micro_batch] = values[LOSS].detach()
                    values = {LOSS: self._scale(values[LOSS])}
                elif layer + 1 in stage.layers:
                    self._marks.watch(values, stamps, layer)
        if not (stage.layers[-1] == last and self._is_frozen(action.stage)):
            self._outputs[place] = values

    def _deferring(self, place: Place, layer: int) -> contextlib.AbstractContextManager[Any]:
        if not self._program.apart or self._is_frozen(place[0]):
            return contextlib.nullcontext()
        return Deferring(self._queues.setdefault(place, {}).setdefault(layer, []))

    def _weights(self, action: Action) -> None:
        queues = self._queues.pop((action.stage, action.micro_batch))
        for layer in reversed(self._program.stages[action.stage].layers):
            with self._marks.weights(layer):
                add_weight_gradients(queues[layer])

    def _backward(self, action: Action) -> None:
        place = (action.stage, action.micro_batch)
        stage = self._program.stages[action.stage]
        outputs, stamps = self._outputs.pop(place), self._stamps.pop(place)
        roots = {name: output for name, output in outputs.items() if output.requires_grad}
        gradients: Optional[list[Tensor]] = None
        if action.stage + 1 < len(self._program.stages):
            found = self._gradients_of(action, outputs)
            gradients = [found[name] for name in roots]
        if not roots:
            raise BadInputError("model: no parameter behind the frozen layers is trained, wanted one with requires_grad")
        with torch.autocast(self._split.device.type, enabled=False), self._marks.backward(stage.layers[-1], stamps):
            torch.autograd.backward(list(roots.values()), gradients)
        if action.kind == "B" and place in self._queues:  # an order may mix B with I and W
            self._weights(action)
        given = self._inputs.pop(place, None)
        if given is not None:
            self._gradients[(action.stage - 1, action.micro_batch)] = {
                name: value.grad if value.grad is not None else torch.zeros_like(value) for name, value in given.items()
            }

    def _gradients_of(self, action: Action, outputs: Values) -> Values:
        """Returns the gradients of a stage's outputs, from the next stage."""
        place = (action.stage, action.micro_batch)
        if place in self._gradients:
            return self._gradients.pop(place)
        if self._split.limits:
            specs = [Spec(spec.name, tuple(outputs[spec.name].shape), spec.dtype) for spec in self._gradients_behind(action)]
            self._receives[("RECV_B", *place)] = self._arriving(action, specs, action.stage + 1)
        arrived = self._arrived("RECV_B", action)
        assert arrived is not None
        return arrived
