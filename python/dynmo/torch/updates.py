# SPDX-License-Identifier: Apache-2.0
"""Watches the user's optimizer. Gradients must be those of the newest step, because torch's clip_grad_norm_ sees only a rank's part."""
from __future__ import annotations

import weakref
from typing import Any, Optional

import torch
from torch import nn

from ..errors import BadInputError
from . import checks
from .layers import Split
from .live import Times
from .ranks import Ranks


class Updates:
    """The optimizer's updates. Used by the pipeline's thread, and by hooks of its optimizer."""

    def __init__(self, split: Split, ranks: Ranks, optimizer: Optional[torch.optim.Optimizer]) -> None:
        self._split, self._ranks = split, ranks
        self._versions: dict[str, int] = {}
        self.times: Optional[Times] = None  # None if updates are not timed
        self.begun = 0
        if optimizer is not None:
            self._watch(optimizer)

    def note(self) -> None:
        """Stores the versions of the gradients before the optimizer's next step."""
        self._versions = {
            name: parameter.grad._version
            for layer in self._split.layers
            for name, parameter in layer.parameters.items()
            if parameter.grad is not None
        }

    def forget(self) -> None:
        self._versions = {}

    def kept(self, name: str, parameter: nn.Parameter) -> bool:
        """Returns whether the gradient exists and has not changed since note()."""
        return parameter.grad is not None and self._versions.get(name) == parameter.grad._version

    def check_taken(self) -> None:
        """Raises BadInputError if gradients of the previous step are left, because they would be summed again."""
        for layer in self._split.layers:
            for name, parameter in layer.parameters.items():
                if self.kept(name, parameter):
                    raise BadInputError(
                        f"the gradient of {name} is still there from the step before, wanted zero_grad() between two steps; for more batches "
                        "a step use accumulation=N"
                    )

    def _watch(self, optimizer: torch.optim.Optimizer) -> None:
        own = weakref.ref(self)

        def before(*_: Any) -> None:
            updates = own()
            if updates is not None:
                updates._before()

        def after(*_: Any) -> None:
            updates = own()
            if updates is not None and updates.times is not None:
                updates.times.end_update()

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    def _before(self) -> None:
        self.begun += 1
        if self.times is not None:
            self.times.begin_update()
        if checks.called_by_scaler():
            raise BadInputError("optimizer: a GradScaler steps it, but step() scales no loss, wanted none; train in bfloat16 or float32")
        if self._ranks.size == 1:
            return
        for layer in self._split.layers:
            for name, parameter in layer.parameters.items():
                if parameter.grad is not None and self._versions.get(name, parameter.grad._version) != parameter.grad._version:
                    raise BadInputError(
                        f"the gradient of {name} has changed since step(): torch's clip_grad_norm_ sees this rank's part of the "
                        "model only; call pipe.clip_grad_norm_() instead"
                    )
