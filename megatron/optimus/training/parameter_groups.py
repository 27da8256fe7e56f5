"""Which parameters are updated how: the optimizer's parameter groups, with every option in them.

The update rules themselves are deepspeed_ext's; training/engine.py hands these groups to the optimizer's class.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from megatron.optimus.config.schema import OptimizerConfig, OptimizerName

ParamGroup = dict[str, Any]


def param_groups(model: nn.Module, config: OptimizerConfig) -> list[ParamGroup]:
    """The trainable parameters in the model's order, grouped by what happens to them; no group is empty.

    Weight decay leaves out what the configuration excludes. Muon takes the matrices between embedding and output
    projection (experts one by one, gate and up projection apart); its other parameters get AdamW.
    """
    if config.optimizer is OptimizerName.MUON:
        _mark_stacked(model)
    members: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            key = (_is_hidden_matrix(name, parameter), _is_decayed(name, parameter, config))
            if config.optimizer is not OptimizerName.MUON:
                key = (False, key[1])
            members.setdefault(key, []).append(parameter)
    options = {
        "lr": config.lr,
        "state_dtype": config.optimizer_state_dtype.value,
        **_options(config),
    }
    groups = []
    for (is_matrix, is_decayed), parameters in members.items():
        group = {"params": parameters, **options, "weight_decay": config.weight_decay if is_decayed else 0.0}
        if config.optimizer is OptimizerName.MUON:
            group["use_muon"] = is_matrix
        groups.append(group)
    return groups


def _options(config: OptimizerConfig) -> ParamGroup:
    adam = {"betas": (config.adam_beta1, config.adam_beta2)}
    if config.optimizer is OptimizerName.ADAM:
        return {**adam, "eps": config.adam_eps}
    if config.optimizer is OptimizerName.LION:
        return {"betas": (config.lion_beta1, config.lion_beta2)}
    if config.optimizer is OptimizerName.SGD:
        return {"momentum": config.sgd_momentum, "decoupled_weight_decay": True}
    assert config.optimizer is OptimizerName.MUON, f"say which options {config.optimizer.value} has"
    return {
        **adam,
        "adam_eps": config.adam_eps,
        "momentum": config.muon_momentum,
        "ns_steps": config.muon_num_ns_steps,
        "adjust_lr_fn": config.muon_adjust_lr_fn.value,
    }


def _is_embedding(name: str) -> bool:
    return name.endswith(("embedding.weight", "lm_head.weight"))


def _is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    return parameter.dim() >= 2 and not _is_embedding(name)


def _is_decayed(name: str, parameter: nn.Parameter, config: OptimizerConfig) -> bool:
    if _is_embedding(name):
        return config.weight_decay_embeddings
    if name.endswith("bias"):
        return config.weight_decay_biases
    return parameter.dim() >= 2 or config.weight_decay_norms


def _mark_stacked(model: nn.Module) -> None:
    """Says of tensors that hold two projections that they do."""
    for name, parameter in model.named_parameters():
        if name.endswith("gate_up_weight"):
            parameter.stacked_matrices = 2  # type: ignore[attr-defined]
