# SPDX-License-Identifier: Apache-2.0
"""What programs of ranks share: the group around main(), pipelines of a case, ends of a process, and what must be refused."""
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

import dynmo
import dynmo.torch as dt


def run_rank(main):
    """Calls main() with the words of the command line, on one thread, in the group of the launcher; a rank that is alone has none."""
    torch.set_num_threads(1)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    main(*sys.argv[1:])
    if dist.is_initialized():
        dist.destroy_process_group()


def make_pipe(case, **options):
    """A pipeline of the case's model and optimizer."""
    import torch_cases  # has transformers, which some programs do without

    model, optimizer = torch_cases.make(case)
    return dt.Pipeline(model, optimizer, **{"micro_batches": case["micro_batches"], **options})


def train_step(pipe, batch):
    loss = pipe.step(**batch)
    pipe.optimizer.step()
    pipe.optimizer.zero_grad()
    return loss


def kill_here(how=signal.SIGKILL):
    print(f"killed {time.monotonic()}", flush=True)
    os.kill(os.getpid(), how)


def kill_in(owner, name, when, end=kill_here):
    """Ends this process in a call of `name`, once `when` says so, or does what else `end` does."""
    real = getattr(owner, name)

    def call(*arguments, **named):
        if when():
            end()
        return real(*arguments, **named)

    setattr(owner, name, call)


def refused(text, call, how=str.__contains__):
    """Returns the one line of the refusal, which has `text`, or begins with it or equals it if `how` says so."""
    try:
        call()
    except dynmo.BadInputError as error:
        line = str(error)
        assert how(line, text) and "\n" not in line, (text, line)
        return line
    raise AssertionError(f"not refused: {text}")


def is_whole(model):
    """Whether no layer has been dropped."""
    return not any(parameter.device.type == "meta" for parameter in model.parameters())
