"""The options of a run in typed sections, with Megatron's names where Megatron has the option.

A field is a flag: ``num_layers`` is ``--num-layers`` on the command line and ``model: {num_layers: ...}`` in a file.
Field names are unique over all sections, so a flag needs no prefix. ``metadata["help"]`` is the flag's help text.
Checks within a section are in its ``__post_init__``, those across sections in checks.py; the enums are in choices.py.
Comparisons are written so that NaN fails them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from megatron.optimus.config.choices import (
    ContextCommunication,
    Device,
    DistributedBackend,
    ExpertPlacement,
    Float8,
    KernelLibrary,
    LoadBalancing,
    LRBatchRule,
    LRDecayStyle,
    MuonLRAdjustment,
    Normalization,
    OnLossSpike,
    OnNan,
    OptimizerName,
    OptimizerStateDtype,
    Packing,
    Parametrization,
    PipelineSchedule,
    Precision,
    QKNormScope,
    Recompute,
    RotaryScaling,
    ScoreFunction,
    ShampooGraft,
    SplitBy,
    TokenDispatcherType,
    TokenizerType,
    WSDDecayStyle,
)
from megatron.optimus.config.duration import check_duration, check_schedule
from megatron.optimus.config.layer_pattern import check_layer_pattern, layers_of_pattern, shown
from megatron.optimus.config.optimizer_options import check_ema, check_optimizer_options
from megatron.optimus.config.values import (
    MODEL_CONVERTERS,
    MODEL_FAMILIES,
    ConfigError,  # noqa: F401  # everyone imports it from here
    at_least,
    check_modules,
    divisors,
    one_of,
    option,
    parse_named_prefixes,
    parse_split,
    positive,
    require,
)


@dataclass(kw_only=True)
class ModelConfig:
    """Shape of the decoder. Defaults are those of the Mula models that do not depend on size."""

    model_family: str = option("decoder", "model family: a module of models/families")
    num_layers: int = option(16, "number of transformer layers")
    hidden_size: int = option(2048, "model width D")
    num_attention_heads: int = option(16, "attention heads of the queries")
    num_query_groups: int | None = option(None, "attention heads of keys and values; default: num_attention_heads")
    kv_channels: int | None = option(None, "width of one head; default: hidden_size / num_attention_heads")
    ffn_hidden_size: int = option(8192, "inner width of the dense MLP (layers without experts)")
    vocab_size: int = option(50304, "rows of the embedding table; token ids must be below it")
    max_position_embeddings: int = option(4096, "longest sequence; written to the exported model")
    normalization: Normalization = option(
        Normalization.RMSNORM, "norm before attention, before the MLP and after the last layer"
    )
    norm_epsilon: float = option(1e-5, "added to the variance in every norm")
    qk_layernorm: bool = option(True, "RMSNorm of queries and keys, before RoPE")
    qk_layernorm_scope: QKNormScope = option(
        QKNormScope.FULL, "full: norm over all heads together; head: over each head"
    )
    clip_qkv: float | None = option(None, "clamp queries, keys and values to [-x, x]")
    add_qkv_bias: bool = option(False, "add biases to the projections of queries, keys and values (Qwen2)")
    rotary_base: float = option(10000.0, "RoPE theta")
    rotary_scaling: RotaryScaling = option(
        RotaryScaling.NONE, "scaling of RoPE frequencies beyond the trained positions"
    )
    rotary_scaling_factor: float = option(8.0, "context extension factor of rotary_scaling")
    rotary_low_freq_factor: float = option(
        1.0, "llama3: frequencies with fewer rotations over the original positions are divided"
    )
    rotary_high_freq_factor: float = option(4.0, "llama3: frequencies with more rotations are kept")
    rotary_original_positions: int = option(8192, "llama3: original positions, before scaling")
    untie_embeddings_and_output_weights: bool = option(True, "use separate weights for the output projection")
    output_z_loss_coeff: float = option(
        0.0, "weight of the z-loss of the output logits (PaLM: 1e-4); it is part of gradients, not of the reported loss"
    )
    init_method_std: float = option(0.02, "standard deviation of the normal initialisation")
    parametrization: Parametrization = option(
        Parametrization.STANDARD,
        "mup, completep: initial values, rates, decay and epsilon of each tensor follow the growth of the model since "
        "a base model, whose best rate then stays the best; completep: with the depth too",
    )
    base_hidden_size: int | None = option(None, "mup, completep: hidden_size of the base model")
    base_num_layers: int | None = option(None, "completep: num_layers of the base model")
    base_ffn_hidden_size: int | None = option(
        None, "mup, completep: ffn_hidden_size of the base model; default: in proportion to hidden_size"
    )
    base_moe_ffn_hidden_size: int | None = option(
        None, "mup, completep: moe_ffn_hidden_size of the base model; default: in proportion to hidden_size"
    )
    num_experts: int = option(0, "routed experts per layer; 0: dense model")
    moe_layer_freq: list[int] = option(
        [1], "layers with experts: N for every N-th layer from the first, or a 0 or 1 for each, such as '[0]*3+[1]*13'"
    )
    moe_ffn_hidden_size: int = option(1024, "inner width F of one expert")
    moe_shared_expert_intermediate_size: int = option(
        0, "total inner width of the shared experts, which process every token; 0: no shared experts"
    )
    moe_shared_expert_gate: bool = option(False, "scale the output of the shared experts by a sigmoid gate")
    moe_router_topk: int = option(8, "experts per token (top-k)")
    moe_router_score_function: ScoreFunction = option(ScoreFunction.SOFTMAX, "scores from router logits, in fp32")
    moe_router_norm_topk_prob: bool = option(False, "normalise the top-k scores to sum to one (OLMoE, Mula: no)")
    moe_router_load_balancing_type: LoadBalancing = option(LoadBalancing.AUX_LOSS, "load-balancing loss")
    moe_aux_loss_coeff: float = option(0.01, "weight of the load-balancing loss (mean over layers)")
    moe_z_loss_coeff: float = option(0.0, "weight of the router z-loss (mean over layers)")
    moe_router_enable_expert_bias: bool = option(
        False, "aux-loss-free load balancing: a bias per expert added to the scores for selection"
    )
    moe_router_bias_update_rate: float = option(1e-3, "update of the expert bias after each optimizer step")
    moe_router_force_load_balancing: bool = option(
        False, "benchmarks only: distribute tokens evenly instead of by the router"
    )

    def __post_init__(self) -> None:
        check_modules("model_family", [self.model_family], MODEL_FAMILIES)
        at_least(self, 1, "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")
        at_least(self, 1, "ffn_hidden_size", "vocab_size", "max_position_embeddings")
        at_least(self, 1, "moe_ffn_hidden_size", "moe_router_topk")
        at_least(self, 0, "num_experts", "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate")
        at_least(self, 0, "output_z_loss_coeff", "moe_shared_expert_intermediate_size")
        at_least(self, 1, "rotary_scaling_factor", "rotary_original_positions")
        positive(self, "norm_epsilon", "clip_qkv", "rotary_base", "init_method_std", "rotary_low_freq_factor")
        require(
            self.rotary_high_freq_factor > self.rotary_low_freq_factor,
            f"rotary_high_freq_factor={self.rotary_high_freq_factor} must be above "
            f"rotary_low_freq_factor={self.rotary_low_freq_factor}",
        )
        heads, groups = self.num_attention_heads, self.num_kv_heads
        require(
            self.kv_channels is not None or self.hidden_size % heads == 0,
            f"num_attention_heads={heads} must divide hidden_size={self.hidden_size}; "
            f"use {one_of(divisors(self.hidden_size))}, or set kv_channels",
        )
        require(
            heads % groups == 0,
            f"num_query_groups={groups} must divide num_attention_heads={heads}; use {one_of(divisors(heads))}",
        )
        require(
            self.head_dim % 2 == 0,
            f"head width {self.head_dim} (kv_channels, or hidden_size={self.hidden_size} / num_attention_heads={heads})"
            f" must be even for RoPE; set kv_channels={self.head_dim + 1} or change num_attention_heads",
        )
        require(
            not self.is_moe or self.moe_router_topk <= self.num_experts,
            f"moe_router_topk={self.moe_router_topk} exceeds num_experts={self.num_experts}; "
            f"use at most {self.num_experts}",
        )
        shared = self.moe_shared_expert_intermediate_size
        require(
            self.is_moe or not shared,
            f"moe_shared_expert_intermediate_size={shared} with num_experts=0: use 0, or set num_experts",
        )
        check_layer_pattern(self.moe_layer_freq, self.num_layers)
        require(
            self.is_moe or self.moe_layer_freq == [1],
            f"moe_layer_freq={shown(self.moe_layer_freq)} with num_experts=0: leave it out, or set num_experts",
        )
        self._check_parametrization()
        gate_has_experts = shared > 0 or not self.moe_shared_expert_gate
        require(gate_has_experts, "moe_shared_expert_gate=True: set moe_shared_expert_intermediate_size, or use False")

    def _check_parametrization(self) -> None:
        at_least(self, 1, "base_hidden_size", "base_num_layers", "base_ffn_hidden_size", "base_moe_ffn_hidden_size")
        chosen = self.parametrization
        is_standard, has_depth = chosen is Parametrization.STANDARD, chosen is Parametrization.COMPLETEP
        for name, is_needed, is_read in (
            ("base_hidden_size", not is_standard, not is_standard),
            ("base_num_layers", has_depth, has_depth),
            ("base_ffn_hidden_size", False, not is_standard),
            ("base_moe_ffn_hidden_size", False, not is_standard and self.is_moe),
        ):
            value, size = getattr(self, name), getattr(self, name.removeprefix("base_"))
            require(
                value is not None or not is_needed,
                f"parametrization={chosen.value} needs {name}, the {name.removeprefix('base_')} of the model whose "
                f"rate is known; {size} is this model's",
            )
            require(
                value is None or is_read,
                f"{name}={value} is not read with parametrization={chosen.value} and num_experts={self.num_experts}; "
                "leave it out",
            )
        require(
            is_standard or self.untie_embeddings_and_output_weights or self.normalization is Normalization.RMSNORM,
            f"parametrization={chosen.value} with a tied head needs a final norm with a scale; use "
            "normalization=rmsnorm, or untie_embeddings_and_output_weights=True",
        )

    @property
    def is_moe(self) -> bool:
        """Whether any layer has experts."""
        return self.num_experts > 0

    @property
    def moe_layers(self) -> Sequence[int]:
        """Indices of the layers with experts, ascending."""
        return layers_of_pattern(self.moe_layer_freq, self.num_layers) if self.is_moe else []

    @property
    def has_dense_layers(self) -> bool:
        """Whether any layer has a dense MLP."""
        return len(self.moe_layers) < self.num_layers

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def num_kv_heads(self) -> int:
        """Attention heads of keys and values."""
        return self.num_query_groups or self.num_attention_heads


@dataclass(kw_only=True)
class ParallelConfig:
    """How the model is distributed over ranks."""

    tensor_model_parallel_size: int = option(1, "tensor parallelism: ranks over which a layer's matrices are split")
    pipeline_model_parallel_size: int = option(1, "pipeline parallelism: number of stages")
    pipeline_schedule: PipelineSchedule = option(PipelineSchedule.ONE_F_ONE_B, "pipeline schedule")
    virtual_pipeline_model_parallel_size: int = option(1, "model chunks per pipeline rank")
    decoder_first_pipeline_num_layers: int | None = option(
        None, "layers of the first pipeline stage; default: balanced"
    )
    decoder_last_pipeline_num_layers: int | None = option(None, "layers of the last pipeline stage; default: balanced")
    context_parallel_size: int = option(1, "context parallelism: ranks over which a sequence is split")
    expert_model_parallel_size: int = option(
        1, "expert parallelism: ranks over which a layer's experts are distributed"
    )
    expert_tensor_parallel_size: int = option(1, "tensor parallelism of experts; 1: experts are not split")
    sequence_parallel: bool = option(
        True, "with tensor parallelism, split tokens over its ranks in norms and residuals"
    )
    tp_comm_overlap: bool = option(
        False, "with tensor parallelism, overlap its collectives with GEMMs, one rank's tokens at a time"
    )
    cp_comm_type: ContextCommunication = option(
        ContextCommunication.A2A, "context parallelism: a2a (Ulysses) or p2p (ring)"
    )
    model_converters: list[str] = option([], "files of parallel/converters, applied in this order before sharding")
    recompute_modules: list[Recompute] = option(
        [], "modules whose activations are recomputed in the backward: moe, attention, norm"
    )
    recompute_num_layers: int | None = option(None, "recompute in the first N layers of each stage; default: all")
    cpu_offloading_num_layers: int = option(0, "keep activations of the first N layers of each stage in host memory")
    moe_token_dispatcher_type: TokenDispatcherType = option(
        TokenDispatcherType.ALLGATHER, "token dispatcher: how tokens are sent to their experts"
    )
    moe_dispatch_chunks: int = option(
        1, "alltoall: chunks of a layer's tokens; sending one overlaps with the experts' work on another"
    )
    moe_hierarchical_node_size: int | None = option(
        None, "ranks per node for the hierarchical dispatcher; default: as launched"
    )
    moe_expert_placement: ExpertPlacement = option(ExpertPlacement.CONTIGUOUS, "assignment of experts to ranks")
    moe_expert_placement_file: str | None = option(
        None, "file with the assignment of every layer's experts to ranks, from `optimus expert-balance`"
    )
    device: Device = option(Device.AUTO, "device type; auto: cuda (ROCm too), xpu or cpu, the first that is found")
    distributed_backend: DistributedBackend = option(
        DistributedBackend.AUTO,
        "backend of collectives; auto: nccl (on ROCm RCCL), xccl (without it ccl) or gloo by device",
    )
    distributed_timeout_minutes: float = option(10.0, "time limit of a collective, after which the run ends")

    def __post_init__(self) -> None:
        check_modules("model_converters", self.model_converters, MODEL_CONVERTERS)
        at_least(self, 1, "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        at_least(self, 1, "expert_model_parallel_size", "expert_tensor_parallel_size")
        at_least(self, 1, "virtual_pipeline_model_parallel_size", "moe_hierarchical_node_size")
        at_least(self, 1, "moe_dispatch_chunks")
        at_least(self, 1, "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
        at_least(self, 0, "recompute_num_layers", "cpu_offloading_num_layers")
        positive(self, "distributed_timeout_minutes")


@dataclass(kw_only=True)
class OptimizerConfig:
    """Optimizer, ZeRO sharding, learning-rate schedule and gradient clipping."""

    optimizer: OptimizerName = option(
        OptimizerName.ADAM,
        "adam is AdamW; muon, normuon, soap, shampoo, galore and dion use AdamW for parameters that are not hidden "
        "matrices",
    )
    optimizer_backend: KernelLibrary = option(KernelLibrary.OPTIMUS, "kernels of AdamW's step; apex: its FusedAdam")
    optimizer_state_dtype: OptimizerStateDtype = option(
        OptimizerStateDtype.FP32, "dtype of moments; master weights are fp32"
    )
    zero_stage: int = option(
        1,
        "1: shard optimizer states (of experts over their replicas, of others over data parallel ranks); 2: gradients "
        "too; 3: parameters too, by DeepSpeed's own ZeRO (data parallelism only)",
    )
    optimizer_cpu_offload: bool = option(False, "zero_stage=3: keep master weights and moments in host memory")
    param_cpu_offload: bool = option(False, "zero_stage=3: keep parameters in host memory until they are used")
    overlap_grad_reduce: bool = option(True, "overlap gradient reduction with the backward")
    overlap_param_gather: bool = option(
        True, "overlap the all-gather of updated parameters, on one GPU their update, with the next forward"
    )
    accumulate_allreduce_grads_in_fp32: bool = option(
        True, "accumulate gradients of micro-batches in fp32, else in bf16"
    )
    grad_reduce_in_bf16: bool = option(False, "reduce gradients over ranks in bf16: half the bytes")
    ddp_bucket_size: int | None = option(None, "elements of a gradient bucket; default: 67,108,864")
    lr: float = option(4e-4, "peak learning rate")
    min_lr: float = option(4e-5, "learning rate at the start of warm-up and at the end")
    lr_decay_style: LRDecayStyle = option(LRDecayStyle.COSINE, "shape of the decay after warm-up")
    lr_decay_iters: int | None = option(None, "steps until min_lr; default: train_iters")
    lr_decay_samples: int | None = option(None, "the same in samples; needs train_samples, which is its default")
    lr_wsd_decay_iters: int | None = option(None, "WSD: steps of the decay at the end of lr_decay_iters")
    lr_wsd_decay_samples: int | None = option(None, "the same in samples; needs train_samples")
    lr_wsd_decay_style: WSDDecayStyle = option(WSDDecayStyle.LINEAR, "WSD: shape of the decay")
    lr_batch_rule: LRBatchRule = option(
        LRBatchRule.NONE,
        "how a resumed run with another global_batch_size changes its learning rates: not, by the root of the ratio, "
        "or by the ratio",
    )
    lr_warmup_iters: int = option(0, "steps of linear warm-up; with train_samples, full batches")
    lr_warmup_samples: int | None = option(None, "the same in samples; needs train_samples")
    weight_decay: float = option(0.1, "decoupled weight decay, by default of every parameter")
    weight_decay_norms: bool = option(True, "apply weight decay to norms")
    weight_decay_biases: bool = option(True, "apply weight decay to biases")
    weight_decay_embeddings: bool = option(True, "apply weight decay to embedding and output projection")
    adam_beta1: float = option(0.9, "decay rate of the first moment")
    adam_beta2: float = option(0.95, "decay rate of the second moment")
    adam_eps: float = option(1e-8, "added to the square root of the second moment")
    lion_beta1: float = option(0.9, "weight of the momentum in Lion's update")
    lion_beta2: float = option(0.99, "decay rate of Lion's momentum")
    sgd_momentum: float = option(0.9, "decay rate of SGD's momentum")
    muon_momentum: float = option(0.95, "decay rate of Muon's Nesterov momentum")
    muon_num_ns_steps: int = option(5, "Muon: Newton-Schulz iterations of the orthogonalisation")
    muon_adjust_lr_fn: MuonLRAdjustment = option(
        MuonLRAdjustment.MATCH_RMS_ADAMW, "Muon: scale of the learning rate by a matrix's shape"
    )
    qk_clip_threshold: float = option(
        0.0,
        "muon, normuon: scale the query and key weights of heads whose largest attention logit of a step exceeds this; "
        "0: no; 100 is usual",
    )
    qk_clip_interval: int = option(1, "steps from one measurement of attention logits to the next")
    normuon_beta2: float = option(0.95, "decay rate of NorMuon's second moment of rows; its other options are Muon's")
    soap_beta1: float = option(0.95, "decay rate of SOAP's first moment")
    soap_beta2: float = option(0.95, "decay rate of SOAP's second moment and of its factors")
    soap_precondition_frequency: int = option(10, "SOAP: steps from one renewal of the eigenbases to the next")
    soap_max_dim: int = option(8192, "SOAP: a side of a matrix that is longer keeps its own basis")
    shampoo_beta1: float = option(0.9, "decay rate of Shampoo's momentum")
    shampoo_beta2: float = option(0.99, "decay rate of Shampoo's factors and of the second moment of grafting")
    shampoo_eps: float = option(1e-6, "Shampoo: times a factor's mean eigenvalue, added to its eigenvalues")
    shampoo_graft: ShampooGraft = option(ShampooGraft.RMSPROP, "Shampoo: whose norm the update of a matrix gets")
    shampoo_block_size: int = option(1024, "Shampoo: longest side of the blocks that have factors of their own")
    shampoo_precondition_frequency: int = option(20, "Shampoo: steps from one computation of the roots to the next")
    galore_rank: int = option(128, "rank of GaLore's projection; smaller matrices are not reduced")
    galore_update_proj_gap: int = option(200, "GaLore: steps from one projector to the next")
    galore_scale: float = option(0.25, "GaLore: factor on the updates of matrices; betas are Adam's")
    dion_momentum: float = option(0.95, "share of the approximated momentum that Dion keeps")
    dion_rank_fraction: float = option(0.25, "rank of Dion's updates as a share of a matrix's shorter side")
    ema_decay: float | None = option(
        None, "keep an exponential moving average of the weights, with this decay a step; default: none"
    )
    ema_interval: int = option(1, "steps between updates of that average, each with the decay of all of them")
    evaluate_ema: bool = option(False, "evaluate the average of ema_decay instead of the trained weights")
    clip_grad: float = option(1.0, "clip gradients to this global norm; 0: no clipping")
    clip_grad_after_warmup: bool = option(False, "clip gradients only after the warm-up, as the Optimus paper does")
    grad_norm_spike_sigma: float = option(
        0.0,
        "skip a step whose gradient norm exceeds the mean of the last 128 by this many standard deviations; 0: never",
    )
    adafactor_beta2_decay: float = option(-0.8, "Adafactor: the second moment's decay rate at step t is 1 - t^this")
    adafactor_clip_threshold: float = option(1.0, "Adafactor: largest root mean square of an update")
    ademamix_beta1: float = option(0.9, "decay rate of AdEMAMix's fast momentum")
    ademamix_beta2: float = option(0.999, "decay rate of AdEMAMix's second moment")
    ademamix_beta3: float = option(0.9999, "decay rate of AdEMAMix's slow momentum")
    ademamix_alpha: float = option(5.0, "AdEMAMix: weight of the slow momentum")
    ademamix_warmup_iters: int = option(0, "AdEMAMix: steps over which alpha and beta3 grow; the paper: train_iters")
    adopt_beta1: float = option(0.9, "decay rate of ADOPT's momentum")
    adopt_beta2: float = option(0.9999, "decay rate of ADOPT's second moment")
    adopt_eps: float = option(1e-6, "ADOPT: least root of the second moment")
    lamb_max_weight_norm: float = option(10.0, "LAMB: largest norm of a tensor's weights that scales its update")
    lars_momentum: float = option(0.9, "decay rate of LARS's momentum")
    lars_trust_coefficient: float = option(1e-3, "LARS: norm of an update relative to the weights', at lr 1")
    mars_beta1: float = option(0.95, "decay rate of MARS's first moment")
    mars_beta2: float = option(0.99, "decay rate of MARS's second moment")
    mars_gamma: float = option(0.025, "MARS: weight of the change between gradients")
    schedule_free_beta: float = option(0.9, "schedule-free: where gradients are taken, from 0 (newest) to 1 (average)")
    schedule_free_warmup_iters: int = option(0, "schedule-free: steps of linear warm-up, its own")
    sophia_interval: int | None = option(None, "Sophia: steps between two estimates of the Hessian, usually 10")
    sophia_batch_size: int | None = option(
        None,
        "Sophia: sequences of an estimate; default: a micro-batch a rank, with pipeline stages the whole batch",
    )
    sophia_beta1: float = option(0.965, "decay rate of Sophia's momentum")
    sophia_beta2: float = option(0.99, "decay rate of Sophia's Hessian")
    sophia_gamma: float = option(0.05, "Sophia: factor on the Hessian; larger clips fewer elements")
    optimizer_options: list[str] = option([], "pytorch_optimizer:NAME: further options of that class, NAME=VALUE ...")

    def __post_init__(self) -> None:
        positive(self, "lr", "adam_eps", "adopt_eps", "lamb_max_weight_norm", "lars_trust_coefficient", "sophia_gamma")
        positive(self, "adafactor_clip_threshold")
        require(
            self.adafactor_beta2_decay <= 0, f"adafactor_beta2_decay={self.adafactor_beta2_decay} must be 0 or less"
        )
        at_least(self, 0, "min_lr", "lr_warmup_iters", "lr_warmup_samples", "weight_decay", "clip_grad")
        at_least(self, 0, "grad_norm_spike_sigma")
        at_least(self, 1, "lr_decay_iters", "lr_decay_samples", "lr_wsd_decay_iters", "lr_wsd_decay_samples")
        require(self.zero_stage in range(4), f"zero_stage={self.zero_stage} does not exist; use 0, 1, 2 or 3")
        require(self.min_lr <= self.lr, f"min_lr={self.min_lr} exceeds lr={self.lr}; use at most {self.lr}")
        is_rising = self.lr_decay_style is LRDecayStyle.RANGE_TEST
        require(
            not is_rising or self.min_lr > 0, f"min_lr={self.min_lr} with lr_decay_style=range-test: use 1e-6 or so"
        )
        at_least(self, 1, "muon_num_ns_steps", "ddp_bucket_size", "qk_clip_interval")
        at_least(self, 0, "qk_clip_threshold")
        at_least(self, 1, "soap_precondition_frequency", "soap_max_dim", "galore_rank", "galore_update_proj_gap")
        at_least(self, 1, "shampoo_block_size", "shampoo_precondition_frequency")
        positive(self, "shampoo_eps", "galore_scale", "dion_rank_fraction")
        require(self.dion_rank_fraction <= 1, f"dion_rank_fraction={self.dion_rank_fraction} exceeds 1; use at most 1")
        require(
            self.optimizer.keeps_flat_states or self.optimizer_state_dtype is OptimizerStateDtype.FP32,
            f"optimizer={self.optimizer.value} keeps its states in fp32, not "
            f"optimizer_state_dtype={self.optimizer_state_dtype.value}; use fp32, or muon or normuon",
        )
        at_least(self, 1, "sophia_interval", "sophia_batch_size")
        at_least(self, 0, "ademamix_alpha", "ademamix_warmup_iters", "mars_gamma", "schedule_free_warmup_iters")
        for name in (one.name for one in fields(self)):
            if re.search(r"_(beta\d?|momentum)$", name):
                beta = getattr(self, name)
                require(0 <= beta < 1, f"{name}={beta} is out of range; use 0 <= {name} < 1")
        at_least(self, 1, "ema_interval")
        check_ema(self)
        check_schedule(self)
        check_optimizer_options(self)


@dataclass(kw_only=True)
class TrainingConfig:
    """Length of the run, batch sizes, precision and evaluation."""

    train_iters: int = option(1000, "total optimizer steps")
    train_samples: int | None = option(
        None, "total sequences, instead of train_iters; schedules are then measured in samples"
    )
    micro_batch_size: int = option(1, "sequences per data parallel rank and forward pass")
    global_batch_size: int = option(8, "sequences per optimizer step, over all ranks")
    rampup_batch_size: list[int] = option(
        [], "batch-size ramp: first batch size, increment, samples until global_batch_size; needs train_samples"
    )
    seq_length: int = option(2048, "tokens per sequence")
    params_dtype: Precision = option(Precision.BF16, "dtype of weights and activations; master weights are fp32")
    fp8: Float8 = option(
        Float8.NONE, "hybrid: products of attention's projections, MLPs and experts in float8, one scale a matrix"
    )
    cuda_graphs: bool = option(
        False,
        "replay forward and backward of a micro-batch as a CUDA graph, so that small models do not wait for the host; "
        "with several ranks all but the last micro-batch of a step",
    )
    norm_backend: KernelLibrary = option(
        KernelLibrary.OPTIMUS, "kernels of the decoder's norms, those of queries and keys apart; apex: its fused norms"
    )
    seed: int = option(1234, "seed of initial weights and data order")
    eval_interval: int = option(100, "steps between evaluations on validation data; 0: never")
    eval_iters: int = option(10, "global batches per evaluation")
    skip_train: bool = option(False, "evaluate only: loss over eval_iters batches of the validation and test data")
    iterations_to_skip: list[int] = option([], "steps to skip: their samples are consumed without training")
    on_nan: OnNan = option(
        OnNan.STOP,
        "after 5 updates in a row left out for gradients that are not finite: stop; rollback: go back to a checkpoint "
        "and skip the samples of these steps; skip: go on, up to 100 in a row",
    )
    on_loss_spike: OnLossSpike = option(
        OnLossSpike.NONE, "rollback: where a loss is far above the usual, go back to a checkpoint and skip its samples"
    )
    max_rollbacks: int = option(3, "rollbacks of a run; a further one ends it, or is left out for a loss spike")
    rollback_margin: int = option(2, "steps before and after the bad ones whose samples a rollback skips too")
    integrity_interval: int = option(
        0,
        "steps between comparisons of checksums of weights and optimizer states, which find flipped bits; auto (-1): "
        "so that they cost 0.5% of the time; 0: never",
        words={"auto": -1},
    )
    integrity_gradient_interval: int = option(
        0,
        "steps between comparisons of a micro-batch's gradient that two ranks compute; auto (-1): so that they cost "
        "0.5% of the time, and at least every save_interval; 0: never",
        words={"auto": -1},
    )
    exit_interval: int = option(0, "save and stop at a step that is a multiple of this; 0: never")
    deterministic: bool = option(False, "use deterministic kernels only; others raise an error")
    tune_kernels: bool = option(
        False, "at the start, autotune the Triton expert kernels for shapes without tuned tile sizes"
    )
    eval_tasks: list[str] = option(
        [], "tasks of lm-eval's harness to evaluate during training, with commas or spaces between them"
    )
    eval_tasks_interval: int = option(1000, "steps between evaluations on eval_tasks; also after the last step")
    eval_tasks_limit: int | None = option(100, "only the first N items of each task; none: all")
    eval_tasks_include_path: str | None = option(None, "folder with tasks of your own, as YAML files")

    @property
    def eval_task_names(self) -> list[str]:
        """The names in ``eval_tasks``."""
        return [name for words in self.eval_tasks for name in words.split(",") if name]

    def __post_init__(self) -> None:
        at_least(self, 1, "train_iters", "micro_batch_size", "global_batch_size", "seq_length", "eval_iters")
        at_least(self, 0, "seed", "eval_interval", "exit_interval")
        at_least(self, 0, "max_rollbacks", "rollback_margin")
        at_least(self, -1, "integrity_interval", "integrity_gradient_interval")
        at_least(self, 1, "eval_tasks_interval", "eval_tasks_limit")
        require(
            min(self.iterations_to_skip, default=1) >= 1,
            f"iterations_to_skip={self.iterations_to_skip}: steps count from 1",
        )
        check_duration(self)
        require(self.seed < 2**63, f"seed={self.seed} is too large; use at most {2**63 - 1}")


@dataclass(kw_only=True)
class DataConfig:
    """Token files, their split and blend, and how samples are made of documents."""

    data_path: list[str] = option([], "prefixes of .bin/.idx pairs, or WEIGHT PREFIX WEIGHT PREFIX ...")
    data_file_list: str | None = option(
        None, "file with the blend, instead of data_path: lines WEIGHT PREFIX CORPUS, or YAML or JSON"
    )
    max_data_epochs: float | None = option(None, "error if a corpus would be repeated more often; default: no limit")
    allow_changed_data: bool = option(
        False, "warn, instead of an error, where training files are not those that the checkpoint was trained on"
    )
    split: str = option("969,30,1", "proportions of training, validation and test data")
    split_by: SplitBy = option(
        SplitBy.AUTO,
        "what a document's split depends on, its hash or its position; auto: what a resumed run had, else hash where "
        "`optimus preprocess` has prepared all files for it, else position",
    )
    valid_data_path: list[str] = option(
        [], "further validation sets, NAME=PREFIX or PREFIX of .bin/.idx pairs; each name has its own loss"
    )
    test_data_path: list[str] = option(
        [], "test sets, as in valid_data_path; evaluated after the last step and with skip_train"
    )
    tokenizer_type: TokenizerType | None = option(
        None, "type of the tokenizer; default: as tokenizer_model's file says"
    )
    tokenizer_model: str | None = option(
        None, "file or folder of the tokenizer; copied into checkpoints and exported models"
    )
    packing: Packing = option(
        Packing.NONE, "none: a sample is a window of the token stream; best-fit: it is packed with whole documents"
    )
    add_extra_token_to_sequence: bool = option(
        False, "read seq_length + 1 tokens, so that the last position has a label"
    )
    reset_attention_mask: bool = option(False, "restrict attention to the tokens of a document")
    reset_position_ids: bool = option(False, "restart position ids at each document")
    eod_mask_loss: bool = option(False, "mask the loss at end-of-document tokens")
    fim_rate: float = option(0.0, "fraction of training documents turned into fill-in-the-middle tasks")
    fim_spm_rate: float = option(0.5, "fraction of these with the suffix before the prefix (SPM)")
    fim_prefix_token: str = option("<fim_prefix>", "token before the prefix of a fill-in-the-middle task")
    fim_middle_token: str = option("<fim_middle>", "token before the middle of a fill-in-the-middle task")
    fim_suffix_token: str = option("<fim_suffix>", "token before the suffix of a fill-in-the-middle task")
    pin_memory: bool = option(True, "put batches into page-locked memory and copy them asynchronously")

    @property
    def valid_sets(self) -> dict[str, list[str]]:
        """Prefixes of the further validation sets, by name."""
        return parse_named_prefixes(self.valid_data_path, "valid_data_path")

    @property
    def test_sets(self) -> dict[str, list[str]]:
        """Prefixes of the test sets, by name."""
        return parse_named_prefixes(self.test_data_path, "test_data_path")

    @property
    def needs_eod(self) -> bool:
        """Whether the end-of-document token must be known; packing takes documents from the index."""
        by_document = self.reset_attention_mask or self.reset_position_ids or self.eod_mask_loss
        return self.fim_rate > 0 or (by_document and self.packing is Packing.NONE)

    def __post_init__(self) -> None:
        parse_split(self.split)
        both = sorted(self.valid_sets.keys() & self.test_sets.keys())
        require(not both, f"valid_data_path and test_data_path both have a set {one_of(both)}; use another name")
        require("" not in self.data_path, f"data_path={self.data_path} names an empty prefix; remove it")
        require(
            not self.data_path or self.data_file_list is None,
            f"data_path and data_file_list={self.data_file_list!r} are both given; keep one of them",
        )
        positive(self, "max_data_epochs")
        for name in ("fim_rate", "fim_spm_rate"):
            rate = getattr(self, name)
            require(0 <= rate <= 1, f"{name}={rate} is a fraction; use 0 to 1")


@dataclass(kw_only=True)
class CheckpointConfig:
    """Where and when checkpoints are saved, and what a run starts from."""

    save: str | None = option(None, "folder of checkpoints; default: <run_dir>/checkpoints")
    load: str | None = option(
        None, "folder or URL of checkpoints, or a checkpoint, to start from; default: the newest in save"
    )
    from_hf: str | None = option(
        None, "folder of a Hugging Face model to go on from: the run takes its architecture, weights and tokenizer"
    )
    save_interval: int = option(1000, "steps between full checkpoints; 0: only after the last step")
    save_retain: int = option(2, "number of full checkpoints to keep")
    model_only_save_interval: int = option(0, "steps between checkpoints of weights only, which are all kept; 0: none")
    async_save: bool = option(True, "save asynchronously, from a copy in host memory")
    save_local_dir: str | None = option(
        None, "folder on a local disk of each node: checkpoints are written there first, then copied to save"
    )
    checkpoint_mirror: str | None = option(
        None,
        "URL such as s3://bucket/run to which full checkpoints are uploaded too, and from which a run whose folder has "
        "none goes on; default: none",
    )
    checkpoint_mirror_interval: int = option(1, "upload every so many full checkpoints, and the last one of the run")
    max_unsaved_minutes: float = option(
        30.0,
        "minutes for which saves may fail, being tried again, before the run ends; 0: it ends at the first failure",
    )
    memory_checkpoint_interval: int = option(
        0,
        "under optimus launch --max-restarts: steps between copies of the training state to host memory, from which a "
        "restart goes on; auto (-1): so that they cost 0.5% of the time; 0: none",
        words={"auto": -1},
    )
    load_optim: bool = option(
        True, "load optimizer states; without them step, learning rate and data position still continue"
    )
    finetune: bool = option(False, "load weights only: step, data position and optimizer states start anew")
    from_scratch: bool = option(
        False, "begin again where a run has saved checkpoints and none can be read; what is left of it is kept aside"
    )

    def __post_init__(self) -> None:
        at_least(self, 0, "save_interval", "model_only_save_interval", "max_unsaved_minutes")
        at_least(self, -1, "memory_checkpoint_interval")
        at_least(self, 1, "save_retain", "checkpoint_mirror_interval")
        require(
            self.checkpoint_mirror is None or "://" in self.checkpoint_mirror,
            f"checkpoint_mirror={self.checkpoint_mirror!r} is not a URL; use such as s3://bucket/run or file:///folder",
        )
        require(not self.finetune or self.load is not None, "finetune=True starts from a checkpoint; name it in load")
        require(
            self.from_hf is None or self.load is None,
            f"from_hf={self.from_hf!r} and load={self.load!r} both say what the run starts from; keep one of them",
        )
        require(
            self.load_optim or self.load is not None,
            "load_optim=False leaves out what load would bring; name a checkpoint in load",
        )


@dataclass(kw_only=True)
class LoggingConfig:
    """Folder of the run, metrics and profiling."""

    run_dir: str = option("runs/optimus", "folder of the run: metrics.jsonl, checkpoints, plots")
    log_interval: int = option(1, "steps between log lines; metrics.jsonl has every step")
    tensorboard_dir: str | None = option(None, "folder of TensorBoard events; default: none are written")
    wandb_project: str | None = option(None, "Weights & Biases project; default: no logging there")
    wandb_exp_name: str | None = option(None, "name of the Weights & Biases run; default: the name of run_dir")
    device_peak_tflops: float | None = option(
        None, "dense peak of a device in params_dtype, for MFU; default: by the device's name, if known"
    )
    log_gradient_noise_scale: bool = option(
        False, "measure the gradient noise scale, the batch size in sequences beyond which steps gain little"
    )
    straggler_check_interval: int = option(
        0, "steps between checks for slow devices, by timing the same GEMMs on all, also at the start; 0: never"
    )
    profile: bool = option(False, "record a few steps with torch.profiler into <run_dir>/profile")
    profile_step_start: int = option(10, "first step to record, counted from the start or resumption of the run")
    profile_step_end: int = option(12, "last step to record")
    profile_ranks: list[int] = option([0], "ranks that record a profile")
    mlflow_uri: str | None = option(None, "MLflow server or folder; default: no logging there")
    mlflow_experiment: str = option("optimus", "MLflow experiment; made where there is none")
    mlflow_run_name: str | None = option(None, "name of the MLflow run; default: the name of run_dir")
    comet_project: str | None = option(None, "Comet project; default: no logging there")
    comet_exp_name: str | None = option(None, "name of the Comet experiment; default: the name of run_dir")
    alert_command: str | None = option(
        None, "shell command for each alert, which it gets as JSON on its standard input; default: none"
    )
    alert_stall_minutes: float = option(
        10.0, "alert where no step has ended for so long, evaluations and saves included; 0: never"
    )

    def __post_init__(self) -> None:
        at_least(self, 1, "log_interval", "profile_step_start", "profile_step_end")
        at_least(self, 0, "straggler_check_interval", "alert_stall_minutes")
        positive(self, "device_peak_tflops")
        require(
            self.profile_step_end >= self.profile_step_start,
            f"profile_step_end={self.profile_step_end} comes before profile_step_start={self.profile_step_start}; "
            f"use {self.profile_step_start} or more",
        )
        require(
            self.wandb_exp_name is None or self.wandb_project is not None,
            f"wandb_exp_name={self.wandb_exp_name!r} names a run of no project; give wandb_project too",
        )
        require(
            self.comet_exp_name is None or self.comet_project is not None,
            f"comet_exp_name={self.comet_exp_name!r} names an experiment of no project; give comet_project too",
        )
        require(self.run_dir != "", "run_dir is empty; name a folder, for example runs/first")


@dataclass(kw_only=True)
class RunConfig:
    """All options of a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    @property
    def checkpoint_folder(self) -> Path:
        """The folder to which the run saves its checkpoints."""
        return Path(self.checkpoint.save or Path(self.logging.run_dir) / "checkpoints")
