"""Bases of matrix optimizers: states that live with each matrix's owner, and AdamW for what is no matrix.

``OwnerOptimizer`` is the base of SOAP, Shampoo, GaLore and Dion. They write one method, ``direction``, which turns a
batch of whole gradients and their states into updates and new states. The gradient travels to the owner and the update
returns; weight decay and the step itself are taken on the flat shards.

``MatrixAndAdamW`` is the torch optimizer of these, of Muon and of NorMuon.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.optimizers.base import (
    MatrixOptimizer,
    Shard,
    ShardableOptimizer,
    ShardOptimizer,
    StepScalars,
    WholeMatrices,
)
from deepspeed_ext.optimizers.blocks import check_options
from deepspeed_ext.optimizers.elementwise import ShardAdam
from deepspeed_ext.optimizers.kernels import kernels_for


class OwnerOptimizer(MatrixOptimizer):
    """A matrix optimizer without flat states: ``matrix_states`` declares all of them.

    Options of a parameter group: lr, weight_decay (decoupled, at the plain lr), and those that ``direction`` reads.
    """

    @abstractmethod
    def direction(
        self, grads_BMN: Tensor, states: dict[str, Tensor], options: Mapping[str, Any], scalars: StepScalars
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes the updates of matrices of one shape. It must not write into its arguments.

        Args:
            grads_BMN: fp32 gradients, clipped and averaged; zero in a skipped step.
            states: fp32 [B, ...] by name.
            options: the parameter group.
            scalars: of the step; what is done in every n-th step alone goes by ``host_step``.

        Returns:
            The updates [B, M, N], which are subtracted times the learning rate, and the states that change.
        """

    def lr_ratio(self, shape: tuple[int, int]) -> float:
        """Computes the factor on the learning rate for matrices of one shape, 1 by default."""
        return 1.0

    def update_matrices_(
        self, shards: Sequence[Shard], matrices: WholeMatrices, options: Mapping[str, Any], scalars: StepScalars
    ) -> None:
        """See MatrixOptimizer.update_matrices_."""
        kernels = kernels_for(shards[0].master.device.type)
        # Zeros in a skipped step: NaN must not reach a factorisation, which would raise.
        updates = [torch.where(scalars.skip != 0, 0.0, shard.grad.float() * scalars.scale) for shard in shards]
        matrices.transform_with_states(
            updates, lambda grads_BMN, states: self.direction(grads_BMN, states, options, scalars), scalars.skip
        )
        lr, decay = float(options["lr"]), 1 - float(options["lr"]) * float(options["weight_decay"])
        for index, (shard, update) in enumerate(zip(shards, updates, strict=True)):
            for start, stop, shape in matrices.ranges(index):
                part, matrix_lr = slice(start, stop), lr * self.lr_ratio(shape)
                kernels.apply_update(shard.master[part], shard.param[part], update[part], decay, matrix_lr, scalars)


class MatrixAndAdamW(ShardableOptimizer):
    """A matrix optimizer for groups of matrices, AdamW for groups with ``use_muon=False`` (norms, embeddings, head).

    Parameters may have more than two dimensions: leading ones count matrices, see ``base.count_matrices``.

    Attributes:
        rule: updates the matrices.
    """

    needs_groups = True
    rule: type[MatrixOptimizer]

    def __init__(
        self,
        params: Any,
        options: Mapping[str, Any],
        *,
        use_muon: bool,
        betas: tuple[float, float],
        adam_eps: float,
        state_dtype: str,
    ) -> None:
        """Checks what all such optimizers have in common.

        Args:
            params: parameters, or parameter groups.
            options: lr, weight_decay and the options of the rule.
            use_muon: False for a group that AdamW updates.
            betas: of AdamW groups.
            adam_eps: of AdamW groups.
            state_dtype: "fp32", "bf16" or "int8".

        Raises:
            ValueError: an option is out of range, or a group of matrices has a parameter of fewer than two dimensions.
        """
        name = type(self).__name__
        check_options(options["lr"], options["weight_decay"], betas)
        if not all(0 <= beta < 1 for beta in options.get("matrix_betas", ())):
            raise ValueError(f"matrix_betas={options['matrix_betas']} are out of range; use 0 <= value < 1")
        adamw = {"use_muon": use_muon, "betas": betas, "adam_eps": adam_eps, "state_dtype": state_dtype}
        super().__init__(params, {**options, **adamw})
        for group in self.param_groups:
            if not group["use_muon"]:
                continue
            if not self.rule.state_kinds and group["state_dtype"] != "fp32":
                raise ValueError(
                    f"state_dtype={group['state_dtype']}: {name} keeps the states of a matrix with its owner, in fp32 "
                    "only; use fp32 for this group"
                )
            for param in group["params"]:
                if param.dim() < 2:
                    raise ValueError(
                        f"{name} needs matrices, a parameter has shape {tuple(param.shape)}; put it into a group with "
                        "use_muon=False"
                    )

    def shard_optimizer(self, group: Mapping[str, Any]) -> ShardOptimizer:
        """See ShardableOptimizer.shard_optimizer."""
        return self.rule() if group["use_muon"] else ShardAdamOfMatrices()


class ShardAdamOfMatrices(ShardAdam):
    """AdamW on a group of a matrix optimizer, whose ``eps`` is the matrices' and whose ``adam_eps`` is AdamW's."""

    def update_(self, shard: Shard, options: Mapping[str, Any], scalars: StepScalars) -> None:
        """Updates a shard in place, with ``adam_eps`` as its eps."""
        super().update_(shard, {**options, "eps": options["adam_eps"]}, scalars)
