"""DeepSpeed ZeRO 0-3 with CPU offload, set up from an ordinary DeepSpeed file.

Weights stay fp32 inside DeepSpeed and the precision's autocast runs in the module's forward, as on every other backend; fp16 adds
DeepSpeed's own dynamic loss scaler. The optimizer is always torch's (no compiled op is built or imported).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmkit.config import TrainConfig
from mmkit.sharding import moments
from mmkit.sharding.backend import MOMENTS, Entry, Factory, Rules
from mmkit.sharding.deepspeed_file import SCALER, filled_settings, read_file
from mmkit.sharding.processes import Processes
from mmkit.sharding.single import Filler, SingleBackend, check_shapes, host, move_buffers, persistent_buffers

log = logging.getLogger(__name__)
FIRST_SCALE = 2.0 ** SCALER["initial_scale_power"]  # as torch's GradScaler, so that both kinds start alike


class DeepSpeedBackend(Processes, SingleBackend):
    """One process a device under a DeepSpeed engine; in stage 0 the engine only reduces gradients and torch updates."""

    name = "deepspeed"

    def _connect(self) -> None:
        super()._connect()
        if self.device.index is not None:
            os.environ["LOCAL_RANK"] = str(self.device.index)  # its engine takes it for the device's number
        os.environ.setdefault("DS_ACCELERATOR", self.hardware.engine)
        os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")
        import deepspeed
        from deepspeed.utils import logger

        logger.setLevel(logging.WARNING)
        deepspeed.init_distributed(dist_backend=None, auto_mpi_discovery=False)
        self._library = deepspeed

    # ------------------------------------------------------------ prepare

    def prepare(
        self,
        module: nn.Module,
        factory: Factory | None,
        *,
        train: TrainConfig,
        rules: Rules = (),
        blocks: Sequence[str] = (),
        accumulation: int = 1,
        prefix: str = "model.",
        weights: Callable[[str], Tensor] | None = None,
    ) -> nn.Module:
        """See `Backend.prepare`; ConfigError where the user's file and the run disagree."""
        settings = filled_settings(read_file(self.config.deepspeed_config), self.config, train, accumulation, self.world)
        self.stage = settings["zero_optimization"]["stage"]
        self._adopt(module, train, blocks, prefix)
        self._fill_meta(module, weights, settings)
        if factory is None and self.stage < 3:
            self.module = module
            return module
        optimizer = factory(self.trained()) if factory else None
        self.engine, *_ = self._library.initialize(model=module, optimizer=optimizer, config=settings, dist_init_required=False)
        self.module = self.engine
        self.optimizer = self.engine.optimizer if factory else None
        if factory:
            log.info("DeepSpeed ZeRO-%d with torch %s (no compiled ops)", self.stage, type(optimizer).__name__)
            self._begin_scaling()
            self._begin_moments()
        return self.module

    def _fill_meta(self, module: nn.Module, weights: Callable[[str], Tensor] | None, settings: dict) -> None:
        """Weights from ``weights``; under ZeRO-3 each part is cut before the next is read."""
        if self.stage < 3:
            self._place(module, weights)
            return
        filler = Filler(self.device, weights, self.prefix)
        for path, part in module.named_modules():
            if filler.fill_part(path, part):
                own = nn.Module()  # its children are still without values
                own._parameters = part._parameters
                self._library.zero.Init(module=own, config_dict_or_path=settings, dtype=torch.float32)
        move_buffers(module, self.device)

    def _begin_scaling(self) -> None:
        self._loss_scaler = None
        if self.precision != "fp16":
            return
        if self.stage == 0:
            self.scaler = torch.amp.GradScaler(self.device.type)
            return
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

        self._loss_scaler = DynamicLossScaler(
            FIRST_SCALE, scale_window=SCALER["loss_scale_window"], min_scale=float(SCALER["min_loss_scale"]),
            delayed_shift=SCALER["hysteresis"], consecutive_hysteresis=False, raise_error_at_min_scale=False,
        )  # fmt: skip
        self.optimizer.override_loss_scale(self._loss_scaler.cur_scale)

    def _begin_moments(self) -> None:
        """Zero moments now: DeepSpeed links them to parameters in the first step only, too late for a resume."""
        if self.stage == 0:
            return
        states = self.optimizer.optimizer.state
        for flat in self._flat_parameters():
            if not states[flat]:
                states[flat].update({"step": torch.tensor(0.0), **{moment: torch.zeros_like(flat) for moment in MOMENTS}})
        if self.stage < 3:
            self.optimizer._lazy_init_hp_params_optimizer_state()

    def _flat_parameters(self) -> list[Tensor]:
        return self.optimizer.fp32_partitioned_groups_flat if self.stage == 3 else self.optimizer.single_partition_of_fp32_groups

    # ------------------------------------------------------------ a step

    def backward(self, loss: Tensor, last: bool) -> None:
        """See `Backend.backward`; the window's end is set by hand, so a left-over window may be shorter."""
        if last:
            self._check_unchanged()
        self.engine.set_gradient_accumulation_boundary(last)
        loss = loss * self.averages
        self.engine.backward(self.scaler.scale(loss) if self.scaler else loss, scale_wrt_gas=False)

    def update(self, max_norm: float | None) -> Tensor:
        """See `Backend.update`."""
        if self.stage == 0:
            return super().update(max_norm)
        self.optimizer.clip_grad = max_norm or 0.0
        self.engine.step()
        skipped = bool(self.optimizer.overflow)
        if self._loss_scaler:  # after the step, for DeepSpeed would unscale by the scale of the next one
            self._loss_scaler.update_scale(skipped)
            self.optimizer.override_loss_scale(self._loss_scaler.cur_scale)
        if self.reached is None and not skipped:
            local = [bool(self._local_moment(p).count_nonzero()) for p in self.trained().values()]
            self.reached = dict(zip(self.trained(), self._any_each(local), strict=True))
        self._count_skipped(skipped)
        norm = self.engine.get_global_grad_norm()
        return torch.as_tensor(norm, dtype=torch.float32, device=self.device).detach().reshape(())

    def _local_moment(self, p: nn.Parameter) -> Tensor:
        """This process's part of the first moment, which after one step is non-zero where the gradient was."""
        if self.stage == 3:
            return self._library.utils.safe_get_local_optimizer_state(p, MOMENTS[0])
        mapping = p._hp_mapping
        return torch.zeros(0) if mapping is None else mapping.get_optim_state_fragment(MOMENTS[0])

    # ------------------------------------------------------------ state

    def export_state(self, owner: Callable[[int], int] | None = None) -> Iterator[tuple[str, Entry | None]]:
        """See `Backend.export_state`."""
        if self.stage == 0:
            yield from super().export_state(owner)
            return
        utils = self._library.utils
        for index, (name, p) in enumerate(self.trained().items()):
            whole = {"param": utils.safe_get_full_fp32_param(p)}
            whole |= {moment: utils.safe_get_full_optimizer_state(p, moment) for moment in MOMENTS}
            keep = self._keeps(owner, index)
            shape = p.ds_shape if self.stage == 3 else p.shape
            yield name, {key: host(tensor.reshape(shape), torch.float32) for key, tensor in whole.items()} if keep else None

    @torch.no_grad()
    def import_state(self, get: Callable[[str], Entry], step: int) -> None:
        """See `Backend.import_state`."""
        if self.stage == 0:
            super().import_state(get, step)
            return
        utils = self._library.utils
        for name, p in self.trained().items():
            entry = get(name)
            with self._library.zero.GatheredParameters([p], modifier_rank=0, enabled=self.stage == 3):
                check_shapes(name, entry, p)
                p.copy_(entry["param"].to(p.device))
            if self.stage == 3:
                self._set_own_part(p, entry)
                continue
            utils.safe_set_full_fp32_param(p, entry["param"].float().contiguous())
            for moment in MOMENTS:
                utils.safe_set_full_optimizer_state(p, entry[moment].float().contiguous(), moment)
        for state in self.optimizer.optimizer.state.values():
            state["step"] = torch.full_like(state["step"], float(step))

    def _set_own_part(self, p: Tensor, entry: Entry) -> None:
        """This rank's part of weight and moments under ZeRO-3, the last ones padded as DeepSpeed pads them.

        DeepSpeed's calls that take the whole tensor cut it without that padding and fail where its size does not divide by the ranks.
        """
        length, utils = p.ds_tensor.numel(), self._library.utils
        parts = {}
        for key in ("param", *MOMENTS):
            whole = entry[key].float().flatten()
            padded = torch.cat([whole, whole.new_zeros(length * self.world - whole.numel())])
            parts[key] = padded[length * self.rank : length * (self.rank + 1)].to(p.device)
        utils.safe_set_local_fp32_param(p, parts["param"])
        for moment in MOMENTS:
            utils.safe_set_local_optimizer_state(p, parts[moment], moment)

    def full_parameters(self, owner: Callable[[int], int] | None = None) -> Iterator[tuple[str, Tensor | None]]:
        """See `Backend.full_parameters`."""
        for name, tensor in super().full_parameters(owner) if getattr(self, "stage", 0) < 3 else self._gathered(owner):
            yield name, tensor

    def _gathered(self, owner: Callable[[int], int] | None) -> Iterator[tuple[str, Tensor | None]]:
        for index, (name, tensor) in enumerate((self.parameters() | persistent_buffers(self.plain, self.prefix)).items()):
            cut = [tensor] if hasattr(tensor, "ds_id") else []
            with self._library.zero.GatheredParameters(cut):
                whole = host(tensor) if self._keeps(owner, index) else None
            yield name, whole

    def extra_state(self) -> dict[str, Any]:
        """See `Backend.extra_state`."""
        if self.stage == 0:
            return super().extra_state()
        state = {"optimizer_step": moments.count(self.optimizer.optimizer), "n_skipped": int(self.n_skipped)}
        if scaler := self._loss_scaler:
            state["scaler"] = {"scale": scaler.cur_scale, "good_steps": scaler.cur_iter - scaler.last_overflow_iter - 1}
        return state

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """See `Backend.load_extra_state`."""
        super().load_extra_state(state)
        if self._loss_scaler and "scaler" in state:
            self._loss_scaler.cur_scale = state["scaler"]["scale"]
            self._loss_scaler.last_overflow_iter = -1
            self._loss_scaler.cur_iter = state["scaler"]["good_steps"]
            self.optimizer.override_loss_scale(self._loss_scaler.cur_scale)

    def clear(self, keep_programs: bool = False) -> None:
        """See `Backend.clear`."""
        if engine := getattr(self, "engine", None):
            engine.destroy()
            self.engine = None
        super().clear(keep_programs)

