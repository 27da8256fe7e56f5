"""From the optimizer's parameter groups to families with their buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import nn

from deepspeed_ext.groups import ZeroGroups, expert_group_name, ranks_of
from deepspeed_ext.optimizers.base import ShardOptimizer
from deepspeed_ext.zero.family import SUPPORTED_DTYPES, Family, FamilyKey
from deepspeed_ext.zero.options import ZeroOptions
from deepspeed_ext.zero.partition import ParamSpec, flat_layout, group_by_family


def _key(index: int, param: nn.Parameter, groups: ZeroGroups) -> FamilyKey:
    """Tensor-parallel ranks hold different parts of a parameter marked ``tensor_model_parallel = True`` and the same
    values of any other; pipeline stages repeat those marked ``pipe_tied = True``, all but one of which
    carry ``ds_pipe_replicated = True``, as in DeepSpeed."""
    repeats = groups.tensor is not None and len(ranks_of(groups.tensor)) > 1
    return FamilyKey(
        param_group=index,
        expert_group=expert_group_name(param),
        dtype=param.dtype,
        is_tensor_replica=repeats and not getattr(param, "tensor_model_parallel", False),
        is_pipe_replica=bool(getattr(param, "ds_pipe_replicated", False)),
        is_pipe_tied=bool(getattr(param, "pipe_tied", False)),
    )


def build_families(
    param_groups: Sequence[Sequence[nn.Parameter]],
    rules: Sequence[ShardOptimizer],
    param_names: Mapping[nn.Parameter, str],
    groups: ZeroGroups,
    options: ZeroOptions,
) -> list[Family]:
    """One family per parameter group x expert group x dtype (and, under tensor parallelism, cut or repeated).

    Families are in the order of their first parameters; inside, parameters are in the opposite of ``param_names``'
    order, in which backward is expected to reach them.

    Raises ValueError for a dtype that is not supported or an expert group without a process group.
    """
    positions = {param: index for index, param in enumerate(param_names)}
    specs: list[ParamSpec[FamilyKey]] = []
    by_name: dict[str, nn.Parameter] = {}
    sizes: dict[FamilyKey, int] = {}
    for index, members in enumerate(param_groups):
        for param in sorted(members, key=lambda param: -positions[param]):
            name = param_names[param]
            if param.dtype not in SUPPORTED_DTYPES:
                raise ValueError(f"parameter {name!r} is {param.dtype}; use float32, bfloat16 or float16")
            key = _key(index, param, groups)
            if key.expert_group is not None and key.expert_group not in groups.expert:
                raise ValueError(
                    f"parameter {name!r} is marked as expert of group {key.expert_group!r}, which has no process "
                    f"group; known groups: {sorted(groups.expert)}"
                )
            sizes[key] = len(ranks_of(groups.of(key.expert_group)))
            by_name[name] = param
            specs.append(ParamSpec(name, param.numel(), key))
    families = []
    for key, names in group_by_family(specs, sizes).items():
        params = {name: by_name[name] for name in names}
        rule = rules[key.param_group]
        layout = flat_layout([(name, p.numel()) for name, p in params.items()], sizes[key], options.bucket_numel)
        family = Family(key, params, layout, groups.of(key.expert_group), rule, options)
        family.in_norm = not key.is_pipe_replica and (groups.is_first_tensor_rank or not key.is_tensor_replica)
        families.append(family)
    return families


def norm_groups(groups: ZeroGroups) -> list[dist.ProcessGroup]:
    """The groups over which squares are summed one after the other to reach every rank once."""
    if groups.model is None:
        return [groups.dense]
    if dist.get_world_size(groups.dense) * dist.get_world_size(groups.model) == dist.get_world_size():
        assert dist.group.WORLD is not None
        return [dist.group.WORLD]  # together they are all ranks: one reduction
    return [groups.dense, groups.model]
