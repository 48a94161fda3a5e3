# SPDX-License-Identifier: Apache-2.0
"""DynMo live on one's own PyTorch model (docs/torch.md)."""
from typing import TYPE_CHECKING, Any

from .._core import torch_range as _range

try:
    import torch as _torch  # noqa: F401
except ImportError as _error:
    raise ImportError(f"dynmo.torch: PyTorch is missing, wanted {_range}: pip install torch=={_range.split()[-1]}.*") from _error

from .adviser import Advice, Adviser
from .live import Move
from .move import Moved
from .pipeline import Pipeline
from .record import Recovery
from .reduction import Reduced
from .survival import Survivor

if TYPE_CHECKING:
    from .trainer import PipelineTrainer as PipelineTrainer


def __getattr__(name: str) -> Any:
    """Imports PipelineTrainer only when it is first used, because it needs transformers."""
    if name == "PipelineTrainer":
        from .trainer import PipelineTrainer

        return PipelineTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["Advice", "Adviser", "Move", "Moved", "Pipeline", "Recovery", "Reduced", "Survivor"]
