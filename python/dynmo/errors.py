# SPDX-License-Identifier: Apache-2.0
"""Exceptions, each with one line: what was given, what was wanted and what to change."""


class DynmoError(Exception):
    """The base class of DynMo's exceptions."""


class BadInputError(DynmoError, ValueError):
    """An argument, file or setting that the caller can correct."""


class InfeasibleError(DynmoError):
    """No plan fits the memory or the ranks."""


class RankLostError(DynmoError):
    """A process of the pipeline has ended, and the others cannot continue."""
