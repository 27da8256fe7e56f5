from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron.optimus.checkpoint import CheckpointError, load, load_manifest, save, training_slices, weight_slices
from megatron.optimus.checkpoint.state import global_shape, weight_requests
from megatron.optimus.config.schema import ModelConfig
from megatron.optimus.models.decoder import Decoder

_TINY = ModelConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=2,
    vocab_size=32,
    num_experts=4,
    moe_ffn_hidden_size=8,
    moe_router_topk=2,
    moe_router_enable_expert_bias=True,
)


class FakeOptimizer:
    """One rank's shards as deepspeed_ext gives them: here the ``part``-th of ``parts`` ranges of every parameter."""

    def __init__(self, model: nn.Module, part: int = 0, parts: int = 1) -> None:
        self.shards = []
        for name, param in model.named_parameters():
            bounds = [param.numel() * i // parts for i in range(parts + 1)]
            start, stop = bounds[part : part + 2]
            flat = param.detach().reshape(-1)[start:stop].float()
            tensors = {"master": flat.clone(), "exp_avg": flat * 2 + 1, "exp_avg_sq": flat**2}
            self.shards.append(
                SimpleNamespace(name=name, param=param, start=start, stop=stop, tensors=tensors, stored={})
            )

    def state_shards(self):
        return self.shards

    def tensor_states(self, *, all_copies):
        return []

    def matrix_states(self):
        return []


def expert_parallel(model: nn.Module, index: int, size: int) -> nn.Module:
    """Cuts the experts as parallel/expert.py does, interleaved."""
    for layer in model.layers:
        for name, weight in list(layer.moe.experts.named_parameters()):
            ids = tuple(range(index, weight.shape[0], size))
            local = nn.Parameter(weight.detach()[list(ids)].clone())
            local.expert_ids, local.allreduce, local.group_name = ids, False, f"ep_size_{size}"
            setattr(layer.moe.experts, name, local)
    return model


def build(seed: int) -> Decoder:
    torch.manual_seed(seed)
    model = Decoder(_TINY)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_()
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            buffer.normal_()
    return model


def store(root, slices, kind="full", step=1):
    return save(root, step, slices, kind=kind, consumed_samples=0, config={}, metadata={}, retain=1)


def test_global_shape_of_expert_parameters():
    model = expert_parallel(build(0), 1, 2)
    params = dict(model.named_parameters())
    name = "layers.0.moe.experts.gate_up_weight"
    assert tuple(params[name].shape) == (2, 16, 16) and global_shape(params[name]) == (4, 16, 16)
    assert global_shape(params["embedding.weight"]) == (32, 16)


def test_expert_parallel_state_is_saved_whole_and_loaded_into_another_layout(tmp_path):
    """Four shares (EP=2 interleaved, each parameter in two halves) to one process and to EP=4."""
    whole = build(0)
    slices = []
    for ep_index in (0, 1):
        model = expert_parallel(build(0), ep_index, 2)
        for part in (0, 1):
            both = training_slices(model, FakeOptimizer(model, part, 2), buffers=ep_index == part == 0)
            slices += [s for s in both if "experts" in s.name or ep_index == 0]
    path = store(tmp_path, slices)

    fresh = build(1)
    optimizer = FakeOptimizer(fresh)
    load(path, training_slices(fresh, optimizer, buffers=True))
    expected = FakeOptimizer(whole)
    for found, right in zip(optimizer.shards, expected.shards, strict=True):
        for kind in right.tensors:
            assert torch.equal(found.tensors[kind], right.tensors[kind]), (right.name, kind)
    for (name, found), (_, right) in zip(fresh.named_buffers(), whole.named_buffers(), strict=True):
        assert torch.equal(found, right), name

    for index in range(4):
        model = expert_parallel(build(1), index, 4)
        optimizer = FakeOptimizer(model)
        load(path, training_slices(model, optimizer, buffers=True))
        right = dict(whole.named_parameters())
        for shard in optimizer.shards:
            values = right[shard.name].detach()
            values = values[list(shard.param.expert_ids)] if hasattr(shard.param, "expert_ids") else values
            assert torch.equal(shard.tensors["master"], values.reshape(-1)), shard.name


def test_only_persistent_buffers(tmp_path):
    model = build(0)
    model.register_buffer("scratch", torch.zeros(3), persistent=False)
    kinds = {s.name for s in training_slices(model, FakeOptimizer(model), buffers=True) if s.kind == "buffer"}
    assert kinds == {"layers.0.moe.router.expert_bias", "layers.1.moe.router.expert_bias"}
    assert not [s for s in training_slices(model, FakeOptimizer(model), buffers=False) if s.kind == "buffer"]


def load_weights(path, model, optimizer):
    load(path, weight_requests(model, optimizer, load_manifest(path)), cast=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_model_only(tmp_path, dtype):
    """Two shares of EP=2: stored in the parameters' dtype; then into the masters of one process."""
    slices = []
    for index in (0, 1):
        model = expert_parallel(build(0).to(dtype), index, 2)
        own = weight_slices(model, FakeOptimizer(model), buffers=index == 0)
        slices += [s for s in own if "experts" in s.name or index == 0]
    path = store(tmp_path, slices, kind="model")
    whole = build(0).to(dtype)
    assert path.name == "model-00000001"
    assert {e.dtype for e in load_manifest(path).tensors.values() if e.kind == "weight"} == {
        "F32" if dtype == torch.float32 else "BF16"
    }

    other = build(2)
    optimizer = FakeOptimizer(other)
    moments = [shard.tensors["exp_avg"].clone() for shard in optimizer.shards]
    load_weights(path, other, optimizer)
    for shard, moment in zip(optimizer.shards, moments, strict=True):
        assert torch.equal(shard.tensors["master"], dict(whole.named_parameters())[shard.name].float().view(-1))
        assert torch.equal(shard.tensors["exp_avg"], moment)
    for (name, found), (_, right) in zip(other.named_buffers(), whole.named_buffers(), strict=True):
        assert torch.equal(found, right.to(found.dtype)), name
    with pytest.raises(CheckpointError, match=r"\(master\): not in the checkpoint \(this 'model' checkpoint has it as"):
        load(path, training_slices(other, optimizer, buffers=True))


def test_weights_of_a_full_checkpoint(tmp_path):
    model = build(0)
    path = store(tmp_path, training_slices(model, FakeOptimizer(model), buffers=True))
    other = build(1)
    optimizer = FakeOptimizer(other)
    load_weights(path, other, optimizer)
    for shard in optimizer.shards:
        assert torch.equal(shard.tensors["master"], dict(model.named_parameters())[shard.name].view(-1))
