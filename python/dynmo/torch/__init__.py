# SPDX-License-Identifier: Apache-2.0
"""DynMo live on one's own PyTorch model (docs/torch.md)."""
try:
    import torch as _torch  # noqa: F401
except ImportError as _error:
    raise ImportError("dynmo.torch: PyTorch is missing, wanted 2.11 or newer: pip install torch") from _error

from .adviser import Advice, Adviser
from .live import Move
from .move import Moved
from .pipeline import Pipeline
from .reduction import Reduced

__all__ = ["Advice", "Adviser", "Move", "Moved", "Pipeline", "Reduced"]
