"""megatron-core's own GPTModel on CPU, as oracle for names, layouts and the function they compute.

megatron-core assumes a GPU in places that bear on nothing compared here: the device of RoPE's frequencies and of a tied
matrix, the random states of dropout (off), and Transformer Engine's gating kernel. They are replaced.
"""

from __future__ import annotations

import contextlib
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VOCAB = 256  # a multiple of 128 * tp: megatron-core pads outside the model
SIZES = dict(num_layers=2, hidden_size=16, num_attention_heads=4, num_query_groups=2, kv_channels=8, ffn_hidden_size=12)


def shape(moe: bool, qk_norm: bool, tied: bool, shared: bool = False, dense: bool = False) -> dict[str, Any]:
    """Our options of the model under test. ``shared``: experts for all tokens, with a gate, and QKV biases. ``dense``:
    a first layer without experts."""
    from megatron.optimus.config.schema import QKNormScope

    options: dict[str, Any] = dict(
        **SIZES,
        vocab_size=VOCAB,
        qk_layernorm=qk_norm,
        qk_layernorm_scope=QKNormScope.HEAD,
        untie_embeddings_and_output_weights=not tied,
    )
    if moe:
        options |= dict(num_experts=4, moe_ffn_hidden_size=12, moe_router_topk=2, moe_router_norm_topk_prob=True)
    if shared:
        options |= dict(moe_shared_expert_intermediate_size=20, moe_shared_expert_gate=True, add_qkv_bias=True)
    if dense:
        options |= dict(moe_layer_freq=[0, 1])
    return options


def build(
    tp: int, pp: int, ep: int, moe: bool, qk_norm: bool, tied: bool, shared: bool = False, dense: bool = False
) -> Any:
    """The stage of this rank, with random weights that are the same on all ranks where they must be."""
    torch.Tensor.cuda = lambda self: self  # type: ignore[assignment,method-assign,misc]
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import random as tp_random
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.destroy_model_parallel()
    tp_random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    moe_utils.te_general_gemm = None
    parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)
    options: dict[str, Any] = dict(
        **SIZES,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        layernorm_epsilon=1e-5,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32,
        expert_model_parallel_size=ep,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        qk_layernorm=qk_norm,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    if moe:
        options |= dict(
            num_moe_experts=4,
            moe_router_topk=2,
            moe_ffn_hidden_size=12,
            moe_router_load_balancing_type="none",
            moe_token_dispatcher_type="allgather",
        )
    if shared:
        options |= dict(moe_shared_expert_intermediate_size=20, moe_shared_expert_gate=True, add_qkv_bias=True)
    spec = get_gpt_layer_local_spec(num_experts=4 if moe else None, qk_layernorm=qk_norm, normalization="RMSNorm")
    config = TransformerConfig(**options)
    if dense:
        config.moe_layer_freq = [0, 1]
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCAB,
        max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=tied,
        position_embedding_type="rope",
        rotary_base=10000,
    )
    return model.eval()


def logits(model: Any, tokens_BS: Tensor) -> Tensor:
    length = tokens_BS.shape[1]
    mask = torch.triu(torch.ones(1, 1, length, length), 1).bool()
    positions = torch.arange(length)[None].expand_as(tokens_BS)
    with torch.no_grad():
        return model(tokens_BS, positions, mask)


def folder_of_rank(folder: Path, tp: int, pp: int, ep: int) -> Path:
    """Megatron-LM's name for this rank's folder."""
    from megatron.core import parallel_state

    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if pp > 1:
        name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    if ep > 1:
        name += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
    return folder / name


def load_our_files(
    rank: int, world: int, cases: list[tuple[str, tuple[Any, ...]]], tokens: Tensor
) -> list[tuple[int, Tensor]]:
    """megatron-core loads each of the folders we wrote; this tensor-parallel rank's columns of the logits."""
    from megatron.core import parallel_state

    answers = []
    for folder, case in cases:
        model = build(*case)
        content = torch.load(folder_of_rank(Path(folder), *case[:3]) / "model_optim_rng.pt", weights_only=False)
        missing, unexpected = model.load_state_dict(content["model"], strict=False)
        assert not unexpected and all(name.endswith("_extra_state") for name in missing), (missing, unexpected)
        answers.append((parallel_state.get_tensor_model_parallel_rank(), logits(model, tokens)))
    return answers


def write_files(rank: int, world: int, cases: list[tuple[str, tuple[Any, ...]]]) -> None:
    """What Megatron-LM's save_checkpoint leaves (``args`` apart), from megatron-core's own modules."""
    from megatron.core import parallel_state

    for folder, case in cases:
        model = build(*case)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # What training keeps alike is alike: replicated parameters, and both ends of a tied matrix.
                replicated = "norm" in name or "router" in name or name.endswith("gate_weight")
                tp_rank = parallel_state.get_tensor_model_parallel_rank()
                ep_rank = parallel_state.get_expert_model_parallel_rank() if ".experts." in name else 0
                stage = (
                    0 if name.startswith(("embedding", "output")) else parallel_state.get_pipeline_model_parallel_rank()
                )
                key = ("embedding" if name.startswith(("embedding", "output")) and case[5] else name, stage, ep_rank)
                seed = zlib.crc32(repr((*key, 0 if replicated else tp_rank)).encode())
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
        if parallel_state.get_data_parallel_rank() > 0 and case[2] == 1:
            continue  # a replica
        own = folder_of_rank(Path(folder) / "iter_0000007", *case[:3])
        own.mkdir(parents=True)
        content = {"checkpoint_version": 3.0, "iteration": 7, "model": model.state_dict()}
        torch.save(content, own / "model_optim_rng.pt")
        (Path(folder) / "latest_checkpointed_iteration.txt").write_text("7")
