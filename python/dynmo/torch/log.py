# SPDX-License-Identifier: Apache-2.0
"""The log of a rank, FOLDER/rank-N.log. Lines have time, level, rank and text, like `run.log` of `dynmo train`."""
from __future__ import annotations

import logging
import os
import socket
import time
import warnings
from typing import Optional, Union

from .. import __version__
from ..errors import BadInputError
from .program import Plan
from .ranks import Ranks

Path = Union[str, "os.PathLike[str]"]
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
CONTROL = {code: " " for code in (*range(32), 127)}


class _Format(logging.Formatter):
    def __init__(self, rank: int) -> None:
        self.converter = time.gmtime
        super().__init__(f"%(asctime)s.%(msecs)03dZ %(levelname)s rank {rank}: %(message)s", "%Y-%m-%dT%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        record.levelname = record.levelname.lower()
        return super().format(record).translate(CONTROL)


class _Appending(logging.Handler):
    """Appends whole lines to a file. A line that does not fit is not written in part. Warns once if the disk is full. Training goes on."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path, self._told = path, False
        # Non-blocking, because opening a pipe would wait for a reader, which may never come.
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        os.set_blocking(self._file, True)

    def emit(self, record: logging.LogRecord) -> None:
        line = (self.format(record) + "\n").encode("utf-8", "replace")
        try:
            size = os.fstat(self._file).st_size
            if os.write(self._file, line) < len(line):
                os.ftruncate(self._file, size)
                raise OSError("No space left on device")
        except OSError as error:
            if not self._told:
                self._told = True
                warnings.warn(f"cannot write the log '{self._path}': {error.strerror or error}; training goes on", RuntimeWarning)

    def close(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)
        super().close()


def describe_group(ranks: Ranks, plan: Plan) -> str:
    """Describes a group that begins, for the log. Omits the hosts after a loss, because ranks then have other numbers."""
    places = ", ".join(f"{rank} on {host} (process {pid})" for rank, (host, pid, _) in enumerate(ranks.places))
    replicas = f", replica {ranks.replica} of {ranks.replicas}" if ranks.replicas > 1 else ""
    whole = f"; ranks {places}" if len(ranks.places) == ranks.world else ""
    way = f"; {ranks.way}" if ranks.way else ""
    return f"rank {ranks.rank} of {ranks.size}{replicas}; plan {plan.cut}, generation {plan.generation}{whole}{way}"


def open_log(folder: Optional[Path], level: str, ranks: Ranks, plan: Plan, member: Optional[int] = None) -> logging.Logger:
    """Returns a logger of its own. Without a folder it writes nothing. `member` is the number of a rank that has joined; others keep
    that of the start.
    """
    if level not in LEVELS:
        raise BadInputError(f"log_level={level!r}, wanted {', '.join(LEVELS)}")
    logger = logging.Logger("dynmo.torch", LEVELS[level])
    if folder is None:
        logger.addHandler(logging.NullHandler())
        return logger
    number = ranks.number if member is None else member
    path = os.path.join(os.fspath(folder), f"rank-{number}.log")
    try:
        os.makedirs(folder, exist_ok=True)
        handler = _Appending(path)
    except OSError as error:
        raise BadInputError(f"log={os.fspath(folder)!r}: {error.strerror}, wanted a folder to which this user may write") from error
    handler.setFormatter(_Format(number))
    logger.addHandler(handler)
    logger.info("begins   dynmo.torch %s as process %d on %s; %s", __version__, os.getpid(), socket.gethostname(), describe_group(ranks, plan))
    return logger


def close_log(logger: logging.Logger, step: int) -> None:
    logger.info("step %5d  closed", step)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
