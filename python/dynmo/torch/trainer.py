# SPDX-License-Identifier: Apache-2.0
"""dt.PipelineTrainer: transformers' Trainer, whose model runs as a pipeline.

The Trainer assumes one process: it neither wraps the model nor divides the data, so every rank reads the same batches. The batches
of a step's gradient accumulation are its micro-batches.
"""
from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import BadInputError
from .batches import ITEMS
from .device import CPU, to_device
from .live import Move
from .pipeline import Pipeline
from .ranks import TIMEOUT_S, Ranks
from .start import copy_ties, tied_optimizer

try:
    from transformers import Trainer
    from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
except ImportError as _error:
    raise ImportError("dynmo.torch.PipelineTrainer: transformers is missing, wanted 5: pip install 'transformers[torch]'") from _error

FOLDER = "pipeline"  # in a checkpoint's folder
OPTIONS = ("plan", "schedule", "balance", "balancer", "run", "metrics", "metrics_port", "peak_flops", "log", "log_level", "seed", "timeout_s", "lane")
FIXED = ("interleaved", "adaptive")  # schedules for a fixed number of micro-batches
OF_A_RANK = ("local_rank", "report_to", "run_name", "disable_tqdm", "log_level", "log_level_replica")  # may differ between ranks
PARTS = "a rank has a part of the model"
REFUSED = {
    "fsdp": "the pipeline divides the model; leave it out",
    "deepspeed": "the pipeline divides the model; leave it out",
    "parallelism_config": "the pipeline divides the model; leave it out",
    "torch_compile": "layers of compiled models cannot move; leave it out",
    "auto_find_batch_size": "one rank may have too little memory where another has enough; set per_device_train_batch_size",
    "neftune_noise_alpha": "its noise depends on the order in which ranks draw; leave it out",
    "label_smoothing_factor": "its loss is made outside of the model; leave it out",
    "load_best_model_at_end": f"{PARTS}; read state.best_model_checkpoint with from_pretrained after the run",
    "fp16_full_eval": f"{PARTS}, whose type cannot change; leave it out",
    "bf16_full_eval": f"{PARTS}, whose type cannot change; use bf16",
    "save_on_each_node": "rank 0 alone has all weights when they are saved; leave it out",
    "enable_jit_checkpoint": "a signal reaches ranks in different steps; use save_steps",
    "debug": f"{PARTS}; leave it out",
}


def _is_here(model: Any) -> bool:
    """Returns whether this rank has all layers of the model."""
    return all(parameter.device.type != "meta" for parameter in model.parameters())


class _Whole(nn.Module):
    """The wrapped model for the Trainer. It can run only while this rank has all layers."""

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self.module, self._autocast = trainer.model, trainer.accelerator.autocast

    def forward(self, *arguments: Any, **named: Any) -> Any:
        if not _is_here(self.module):
            raise BadInputError(f"model: {PARTS}, wanted trainer.pipe.evaluate(**batch)")
        with self._autocast():
            return self.module(*arguments, **named)


class PipelineTrainer(Trainer):
    """A Trainer for scripts under torchrun, with the losses, weights and logs of one process, bit for bit.

    `gradient_accumulation_steps` is the number of micro-batches. `pipeline` has options of Pipeline: plan, schedule, balance, balancer,
    run, metrics, metrics_port, peak_flops, log, log_level, seed, timeout_s, lane. `pipe` is the Pipeline, from the first call of train()
    on. `moves` are the moves that it made. A checkpoint has weights as the Trainer writes them, and in its folder `pipeline` the state for
    any number of ranks. If one rank alone raises an error in train(), evaluate() or predict(), the others raise BadInputError with its line.
    """

    def __init__(self, *arguments: Any, pipeline: Optional[Mapping[str, Any]] = None, **named: Any) -> None:
        self.pipe: Optional[Pipeline] = None
        self.moves: list[Move] = []
        self._ranks: Optional[Ranks] = None  # those of `pipe`, or of the one that train() is about to make
        self._options = dict(pipeline or {})
        self._losses: list[Tensor] = []  # of micro-batches that training_step() has yet to return
        self._samples: list[Any] = []
        self._tells = True  # whether a call tells its error; False inside of another one
        self._piped = False  # whether a batch for the pipeline is being prepared
        if unknown := sorted(self._options.keys() - set(OPTIONS)):
            raise BadInputError(f"pipeline: {unknown[0]}, wanted {', '.join(OPTIONS)}")
        super().__init__(*arguments, **named)

    def create_accelerator_and_postprocess(self) -> None:
        from accelerate.utils import DistributedType  # if it is missing, TrainingArguments have raised before

        for name, why in REFUSED.items():
            if value := getattr(self.args, name, None):
                raise BadInputError(f"TrainingArguments: {name}={value!r}, but {why}")
        if self.args.mixed_precision not in ("no", "bf16"):
            raise BadInputError(f"TrainingArguments: {self.args.mixed_precision}, which needs a GradScaler or more, wanted bf16=True or neither")
        state: Any = self.args.distributed_state
        state.distributed_type, state.num_processes = DistributedType.NO, 1
        if state.backend is None:  # accelerate has none for this device, and takes each process as the first
            state.process_index = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
            state.local_process_index = int(os.environ.get("LOCAL_RANK", state.process_index))
        if self.args.n_gpu > 1:  # several visible devices, over which DataParallel would divide a batch
            self.args._n_gpu = 1
        super().create_accelerator_and_postprocess()
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise BadInputError("Trainer: accelerate is configured for FSDP or DeepSpeed, wanted neither; start the script by torchrun")
        self.accelerator.dataloader_config.dispatch_batches = False
        self.accelerator.device_placement = False  # batches stay in host memory, where ranks compare them

    def _validate_args(self) -> None:
        super()._validate_args()
        for name in ("compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics"):
            if getattr(self, name) is not None:
                raise BadInputError(f"Trainer: {name} wants the logits, which lie on the last rank; leave it out, the loss is the model's")
        if type(self).compute_loss is not Trainer.compute_loss or self.loss_is_scaled_for_ga is not None:
            raise BadInputError(f"Trainer: {type(self).__name__} has a compute_loss of its own, wanted the model's; put the loss into its forward")

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if not _is_here(model):
            raise BadInputError(f"model: {PARTS} since an earlier Trainer ran it, wanted a new one, such as what save_model() wrote")
        super()._move_model_to_device(model, device)

    def hyperparameter_search(self, *arguments: Any, **named: Any) -> Any:
        raise BadInputError("Trainer: hyperparameter_search chooses on one rank, wanted a run of the script for each trial")

    # --- Training. ---

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Tells the other ranks if this one alone raises an error inside, such as one of its data or of a callback. They would wait for it.

        Before the first train() ranks have no group, so that none can be told. They evaluate without messages, and train() waits for all.
        """
        told, self._tells = self._tells, False
        try:
            yield
        except Exception as error:
            if told and self._ranks is not None:
                self._ranks.tell_if_alone(error)
            raise
        finally:
            self._tells = told

    def train(self, *arguments: Any, **named: Any) -> Any:
        if self._wants_pipe() or self.model_init is not None:  # ranks have a group before one of them reads its files
            self._ranks = Ranks(self._options.get("timeout_s", TIMEOUT_S))
        with self._telling():
            return super().train(*arguments, **named)

    def _wants_pipe(self) -> bool:
        """Returns whether the next step needs a new pipeline."""
        return self.pipe is None or self.pipe.module is not self.model

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        if training:
            self._compare()
            if self._wants_pipe():
                self.pipe = self._make_pipe()
        return _Whole(self)

    def _compare(self) -> None:
        """Raises BadInputError on all ranks if they begin train() with unlike arguments or steps."""
        arguments: Any = self.args
        told = {f"TrainingArguments.{name}": repr(value) for name, value in arguments.to_dict().items() if name not in OF_A_RANK}
        assert self._ranks is not None
        self._ranks.agree({**told, "step to begin with": self.state.global_step, "number of steps": self.state.max_steps})

    def _make_pipe(self) -> Pipeline:
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        steps, micro_batches = self.state.max_steps, self.args.gradient_accumulation_steps
        pipe = Pipeline(self.model, optimizer, micro_batches=micro_batches, steps=steps, _ranks=self._ranks, **self._options)
        if self._options.get("balancer") == "search" or pipe.plan.schedule in FIXED:
            raise BadInputError(
                f"pipeline: balancer search and the schedules {', '.join(FIXED)} want {micro_batches} micro-batches in all steps, but "
                "evaluation and the end of the data have fewer, wanted 1f1b, gpipe, zb-h1 or zb-v"
            )
        return pipe

    def _get_dataloader(self, *arguments: Any, **named: Any) -> Any:
        state: Any = self.args.distributed_state
        rank, state.process_index = state.process_index, 0  # seeds of data loading depend on it
        try:
            return super()._get_dataloader(*arguments, **named)
        finally:
            state.process_index = rank

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        if self.pipe is not None and self.pipe.losses and (move := self.pipe.balance()):
            self.moves.append(move)
            logging.getLogger(__name__).info("step %d: %s", self.state.global_step, move)
        self._losses.clear()
        self._tr_loss = self._tr_loss.to(CPU)  # the Trainer tests it each step, which would wait for a device
        self._samples, items = super().get_batch_samples(epoch_iterator, num_batches, CPU)
        return self._samples, items

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Runs the whole step when the Trainer begins the first micro-batch. Returns the loss of one micro-batch in each call."""
        if not self._losses:
            from accelerate.utils.memory import clear_device_cache

            model.train()
            parts = [self._part(sample, num_items_in_batch) for sample in self._samples]
            assert self.pipe is not None
            with self.accelerator.autocast():
                total = self.pipe.step(parts)
            divisor = 1 if ITEMS in parts[0] else len(parts)
            if (every := self.args.torch_empty_cache_steps) and self.state.global_step % every == 0:
                clear_device_cache()
            self._losses = [torch.tensor(loss, dtype=total.dtype) / divisor for loss in self.pipe.losses]
        return self._losses.pop(0)

    def _prepare_input(self, data: Any) -> Any:
        if self._piped and isinstance(data, Tensor) and data.device == CPU:
            return data  # the pipeline copies it without a wait
        return super()._prepare_input(data)

    def _part(self, inputs: Any, items: Any) -> dict[str, Any]:
        self._piped = True
        try:
            part = dict(self._prepare_inputs(inputs))
        finally:
            self._piped = False
        return {**part, ITEMS: items} if self.model_accepts_loss_kwargs and items is not None else part

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        return self._norm(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self._norm(float("inf")) if grad_norm is None else grad_norm

    def _norm(self, limit: float) -> Tensor:
        assert self.pipe is not None
        return self.pipe.clip_grad_norm_(limit)

    def _finalize_training(self, *arguments: Any) -> Any:
        base: Any = super()._finalize_training
        result = base(*arguments)
        if self.pipe is not None:
            self.pipe.close()
        return result

    # --- Evaluation. ---

    def evaluate(self, *arguments: Any, **named: Any) -> dict[str, float]:
        with self._telling():
            return super().evaluate(*arguments, **named)

    def predict(self, *arguments: Any, **named: Any) -> Any:
        with self._telling():
            return super().predict(*arguments, **named)

    def prediction_step(self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        if self.pipe is None or _is_here(self.model):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if not prediction_loss_only:
            raise self.pipe._ranks.agreed("Trainer: predict() wants the logits, which lie on the last rank, wanted prediction_loss_only=True")
        with self.accelerator.autocast():
            loss = self.pipe.evaluate([self._part(inputs, self._get_num_items_in_batch([inputs], CPU))])
        return to_device(loss, self.args.device), None, None

    # --- Checkpoints. ---

    def _save(self, output_dir: Optional[str] = None, state_dict: Any = None) -> None:
        base = super()._save
        if self.pipe is None:
            base(output_dir, state_dict)
        else:
            self.pipe.write_weights(lambda weights: base(output_dir, weights))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.pipe is not None
        self.pipe.save(os.path.join(output_dir, FOLDER))
        scheduler: Any = self.lr_scheduler
        self._write("the scheduler", lambda: torch.save(scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME)))

    def _save_rng_state(self, output_dir: str) -> None:
        base = super()._save_rng_state
        self._write("the state of random numbers", lambda: base(output_dir))  # equal on all ranks

    def _write(self, what: str, write: Callable[[], None]) -> None:
        """Calls `write` on the rank that saves. If it fails, all ranks raise the same error."""

        def written() -> tuple[None, dict[str, Any]]:
            if self.args.should_save:
                write()
            return None, {}

        assert self.pipe is not None
        self.pipe._ranks.attempt(f"writing {what}", written)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if _is_here(self.model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            if self.pipe is not None:  # of an earlier train() on one rank
                copy_ties(self.pipe._split)
        elif not os.path.isdir(os.path.join(resume_from_checkpoint, FOLDER)):
            raise BadInputError(f"{resume_from_checkpoint}: no folder {FOLDER}, and {PARTS}, wanted a checkpoint of PipelineTrainer, or a new process")

    def _load_optimizer_and_scheduler(self, checkpoint: Optional[str]) -> None:
        if checkpoint is None or self.pipe is None:
            return
        found = [name for name in (FOLDER, OPTIMIZER_NAME, SCHEDULER_NAME) if os.path.exists(os.path.join(checkpoint, name))]
        self.pipe._ranks.agree({"list of files in the checkpoint": found})  # without a file a rank would go on with a new state
        if not os.path.isdir(os.path.join(checkpoint, FOLDER)):  # written by the Trainer itself
            optimizer: Any = self.optimizer
            with tied_optimizer(self.pipe._split, getattr(optimizer, "optimizer", optimizer)):
                super()._load_optimizer_and_scheduler(checkpoint)
        else:
            self.pipe.load(os.path.join(checkpoint, FOLDER))
            scheduler: Any = self.lr_scheduler
            scheduler.load_state_dict(torch.load(os.path.join(checkpoint, SCHEDULER_NAME), weights_only=True))
        self.pipe.steps = self.state.global_step
