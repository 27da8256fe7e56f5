"""The typed sections of a run. Every field is an option with Megatron's name where Megatron has one.

A field is a flag: ``num_layers`` is ``--num-layers`` on the command line and ``model: {num_layers: ...}`` in a file.
Field names are unique over all sections, so a flag needs no prefix. ``metadata["help"]`` is the flag's help text.
Rules that involve one section live in its ``__post_init__`` (a section cannot exist with impossible values); rules
across sections live in checks.py, the choices (enums) in choices.py. Comparisons are written so that NaN fails them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron.optimus.config.choices import (
    Backend,
    ContextCommunication,
    Device,
    ExpertPlacement,
    LoadBalancing,
    LRDecayStyle,
    MuonLRAdjustment,
    Normalization,
    OptimizerName,
    Packing,
    PipelineSchedule,
    Precision,
    QKNormScope,
    Recompute,
    RotaryScaling,
    ScoreFunction,
    StateDtype,
    TokenDispatcherType,
    TokenizerType,
    WSDDecayStyle,
)
from megatron.optimus.config.duration import check_duration, check_schedule
from megatron.optimus.config.layer_pattern import check_layer_pattern, layers_of_pattern, shown
from megatron.optimus.config.values import (
    ConfigError,  # noqa: F401  # everyone imports it from here
    at_least,
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
    """Shape of the decoder. Defaults are those of the Mula-1B family that do not change with size."""

    num_layers: int = option(16, "decoder blocks")
    hidden_size: int = option(2048, "model width D")
    num_attention_heads: int = option(16, "query heads")
    num_query_groups: int | None = option(None, "key/value heads; default: num_attention_heads")
    kv_channels: int | None = option(None, "width of one head; default: hidden_size / num_attention_heads")
    ffn_hidden_size: int = option(8192, "inner width of the dense MLP (layers without experts)")
    vocab_size: int = option(50304, "rows of the embedding; token ids must be below it")
    max_position_embeddings: int = option(4096, "longest sequence the exported model claims")
    normalization: Normalization = option(Normalization.RMSNORM, "norm before attention and MLP, and the final one")
    norm_epsilon: float = option(1e-5, "added to the variance in every norm")
    qk_layernorm: bool = option(True, "RMSNorm of queries and keys, before RoPE")
    qk_layernorm_scope: QKNormScope = option(QKNormScope.FULL, "over all heads together, or over each head")
    clip_qkv: float | None = option(None, "clamp queries, keys and values to [-x, x]")
    add_qkv_bias: bool = option(False, "biases of queries, keys and values (Qwen2)")
    rotary_base: float = option(10000.0, "RoPE theta")
    rotary_scaling: RotaryScaling = option(RotaryScaling.NONE, "stretching of RoPE beyond the trained positions")
    rotary_scaling_factor: float = option(8.0, "how many times longer (unused without rotary_scaling)")
    rotary_low_freq_factor: float = option(1.0, "llama3: frequencies of fewer turns over the trained positions stretch")
    rotary_high_freq_factor: float = option(4.0, "llama3: frequencies with more turns than this are kept")
    rotary_original_positions: int = option(8192, "llama3: positions before stretching")
    untie_embeddings_and_output_weights: bool = option(True, "the output projection has weights of its own")
    output_z_loss_coeff: float = option(
        0.0, "weight of the z-loss of the output's logits (PaLM: 1e-4), in gradients only"
    )
    init_method_std: float = option(0.02, "standard deviation of the normal initialisation")
    num_experts: int = option(0, "routed experts per layer; 0 makes every layer dense")
    moe_layer_freq: list[int] = option(
        [1], "layers with experts: N, every N-th from the first on; or a 0 or 1 for each, as in '[0]*3+[1]*13'"
    )
    moe_ffn_hidden_size: int = option(1024, "inner width F of one expert")
    moe_shared_expert_intermediate_size: int = option(
        0, "inner width of the shared experts in all, which every token passes beside its own; 0: there are none"
    )
    moe_shared_expert_gate: bool = option(False, "weigh what shared experts give a token by the sigmoid of a product")
    moe_router_topk: int = option(8, "experts per token K")
    moe_router_score_function: ScoreFunction = option(ScoreFunction.SOFTMAX, "scores from router logits, in fp32")
    moe_router_norm_topk_prob: bool = option(False, "rescale the K chosen scores to sum to one (OLMoE, Mula: no)")
    moe_router_load_balancing_type: LoadBalancing = option(LoadBalancing.AUX_LOSS, "load-balancing loss")
    moe_aux_loss_coeff: float = option(0.01, "weight of the load-balancing loss (mean over layers)")
    moe_z_loss_coeff: float = option(0.0, "weight of the router z-loss (mean over layers)")
    moe_router_enable_expert_bias: bool = option(False, "aux-loss-free balancing: a bias per expert steers selection")
    moe_router_bias_update_rate: float = option(1e-3, "step of that bias after each optimizer step")
    moe_router_force_load_balancing: bool = option(False, "benchmarks only: ignore the router, spread tokens evenly")

    def __post_init__(self) -> None:
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
        weighs_something = shared > 0 or not self.moe_shared_expert_gate
        require(weighs_something, "moe_shared_expert_gate=True: set moe_shared_expert_intermediate_size, or use False")

    @property
    def is_moe(self) -> bool:
        """Whether any layer has experts."""
        return self.num_experts > 0

    @property
    def moe_layers(self) -> Sequence[int]:
        """Numbers of the layers that have experts, ascending."""
        return layers_of_pattern(self.moe_layer_freq, self.num_layers) if self.is_moe else []

    @property
    def has_dense_layers(self) -> bool:
        return len(self.moe_layers) < self.num_layers

    @property
    def head_dim(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def num_kv_heads(self) -> int:
        return self.num_query_groups or self.num_attention_heads


@dataclass(kw_only=True)
class ParallelConfig:
    tensor_model_parallel_size: int = option(1, "ranks that share one layer's matrices")
    pipeline_model_parallel_size: int = option(1, "stages of the pipeline")
    pipeline_schedule: PipelineSchedule = option(PipelineSchedule.ONE_F_ONE_B, "order of the micro-batches")
    virtual_pipeline_model_parallel_size: int = option(1, "chunks of layers per pipeline rank")
    decoder_first_pipeline_num_layers: int | None = option(None, "layers of the first stage; default: as others")
    decoder_last_pipeline_num_layers: int | None = option(None, "layers of the last stage; default: as others")
    context_parallel_size: int = option(1, "ranks that share one sequence")
    expert_model_parallel_size: int = option(1, "ranks that share the experts of one layer")
    expert_tensor_parallel_size: int = option(1, "ranks that share one expert's matrices; 1: experts are whole")
    sequence_parallel: bool = option(True, "tensor parallelism: norms and residuals on shards of the tokens")
    tp_comm_overlap: bool = option(
        False, "tensor parallelism: send one rank's tokens in and out of it while others' are multiplied"
    )
    cp_comm_type: ContextCommunication = option(
        ContextCommunication.A2A, "context parallelism: a2a (Ulysses) or p2p (ring)"
    )
    model_converters: list[str] = option([], "files of parallel/converters, applied in this order before sharding")
    recompute_modules: list[Recompute] = option([], "parts recomputed in the backward: moe, attention, norm")
    recompute_num_layers: int | None = option(None, "first layers of each stage that recompute; default: all of them")
    cpu_offloading_num_layers: int = option(0, "first layers of each stage whose activations wait in host memory")
    moe_token_dispatcher_type: TokenDispatcherType = option(
        TokenDispatcherType.ALLGATHER, "how tokens reach their experts"
    )
    moe_dispatch_chunks: int = option(
        1, "alltoall: parts in which a layer's tokens travel, each while experts work on another"
    )
    moe_hierarchical_node_size: int | None = option(
        None, "ranks that the hierarchical dispatcher takes for a node; default: ranks of a node as launched"
    )
    moe_expert_placement: ExpertPlacement = option(ExpertPlacement.CONTIGUOUS, "which rank owns which expert")
    moe_expert_placement_file: str | None = option(
        None, "which rank owns which expert of each layer, from tools/expert_balance.py, instead of the above"
    )
    device: Device = option(Device.AUTO, "where to run")
    distributed_backend: Backend = option(Backend.AUTO, "collectives; auto: nccl, xccl or gloo by device")
    distributed_timeout_minutes: float = option(10.0, "a collective that takes longer ends the run")

    def __post_init__(self) -> None:
        at_least(self, 1, "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        at_least(self, 1, "expert_model_parallel_size", "expert_tensor_parallel_size")
        at_least(self, 1, "virtual_pipeline_model_parallel_size", "moe_hierarchical_node_size")
        at_least(self, 1, "moe_dispatch_chunks")
        at_least(self, 1, "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
        at_least(self, 0, "recompute_num_layers", "cpu_offloading_num_layers")
        positive(self, "distributed_timeout_minutes")


@dataclass(kw_only=True)
class OptimizerConfig:
    optimizer: OptimizerName = option(OptimizerName.ADAM, "adam is AdamW; muon takes AdamW for what is not a matrix")
    optimizer_state_dtype: StateDtype = option(StateDtype.FP32, "how moments are kept; master weights are fp32")
    zero_stage: int = option(
        1,
        "1: optimizer states sharded (non-experts over DP, experts over replicas); 2: gradients too; "
        "3: parameters too, by DeepSpeed's own optimizer (data parallelism alone)",
    )
    optimizer_cpu_offload: bool = option(False, "zero_stage=3: master weights and moments in host memory")
    param_cpu_offload: bool = option(False, "zero_stage=3: parameters in host memory until they are needed")
    overlap_grad_reduce: bool = option(True, "reduce gradients while backward runs")
    overlap_param_gather: bool = option(True, "gather updated weights while the next forward runs")
    accumulate_allreduce_grads_in_fp32: bool = option(True, "add up micro-batches in fp32, else in bf16")
    grad_reduce_in_bf16: bool = option(False, "sum over ranks in bf16: half the bytes")
    ddp_bucket_size: int | None = option(None, "elements reduced at a time; default: 67,108,864")
    lr: float = option(4e-4, "peak learning rate")
    min_lr: float = option(4e-5, "learning rate at the start of warm-up and at the end")
    lr_decay_style: LRDecayStyle = option(LRDecayStyle.COSINE, "shape of the decay after warm-up")
    lr_decay_iters: int | None = option(None, "steps until min_lr; default: train_iters")
    lr_decay_samples: int | None = option(None, "the same in samples, with train_samples, its default")
    lr_wsd_decay_iters: int | None = option(None, "WSD: the last steps of lr_decay_iters, in which the rate goes down")
    lr_wsd_decay_samples: int | None = option(None, "the same in samples, with train_samples")
    lr_wsd_decay_style: WSDDecayStyle = option(WSDDecayStyle.LINEAR, "WSD: shape of that decay")
    lr_warmup_iters: int = option(0, "linear warm-up steps; with train_samples, so many full batches")
    lr_warmup_samples: int | None = option(None, "the same in samples, with train_samples")
    weight_decay: float = option(0.1, "decoupled weight decay, on every parameter as in the paper unless excluded")
    weight_decay_norms: bool = option(True, "decay the weights of norms")
    weight_decay_biases: bool = option(True, "decay biases")
    weight_decay_embeddings: bool = option(True, "decay embedding and output projection")
    adam_beta1: float = option(0.9, "first-moment decay")
    adam_beta2: float = option(0.95, "second-moment decay")
    adam_eps: float = option(1e-8, "added to the root of the second moment")
    lion_beta1: float = option(0.9, "share of the momentum in Lion's direction")
    lion_beta2: float = option(0.99, "decay of Lion's momentum")
    sgd_momentum: float = option(0.9, "decay of SGD's momentum")
    muon_momentum: float = option(0.95, "decay of Muon's momentum (Nesterov)")
    muon_num_ns_steps: int = option(5, "Newton-Schulz iterations that orthogonalise an update")
    muon_adjust_lr_fn: MuonLRAdjustment = option(MuonLRAdjustment.MATCH_RMS_ADAMW, "lr of a matrix by its shape")
    clip_grad: float = option(1.0, "largest global gradient norm; 0 switches clipping off")
    clip_grad_after_warmup: bool = option(False, "clip from the end of warm-up on only, as the Optimus paper does")
    grad_norm_spike_sigma: float = option(
        0.0, "skip updates whose gradient norm is so many standard deviations above the last 128 steps' mean; 0: never"
    )

    def __post_init__(self) -> None:
        positive(self, "lr", "adam_eps")
        at_least(self, 0, "min_lr", "lr_warmup_iters", "lr_warmup_samples", "weight_decay", "clip_grad")
        at_least(self, 0, "grad_norm_spike_sigma")
        at_least(self, 1, "lr_decay_iters", "lr_decay_samples", "lr_wsd_decay_iters", "lr_wsd_decay_samples")
        require(self.zero_stage in range(4), f"zero_stage={self.zero_stage} does not exist; use 0, 1, 2 or 3")
        require(self.min_lr <= self.lr, f"min_lr={self.min_lr} exceeds lr={self.lr}; use at most {self.lr}")
        at_least(self, 1, "muon_num_ns_steps", "ddp_bucket_size")
        for name in ("adam_beta1", "adam_beta2", "lion_beta1", "lion_beta2", "sgd_momentum", "muon_momentum"):
            beta = getattr(self, name)
            require(0 <= beta < 1, f"{name}={beta} is out of range; use 0 <= {name} < 1")
        check_schedule(self)


@dataclass(kw_only=True)
class TrainingConfig:
    train_iters: int = option(1000, "optimizer steps in all")
    train_samples: int | None = option(
        None, "sequences in all, instead of train_iters; schedules then count in samples"
    )
    micro_batch_size: int = option(1, "sequences per rank and forward pass")
    global_batch_size: int = option(8, "sequences per optimizer step over all ranks")
    rampup_batch_size: list[int] = option(
        [], "first batch size, what each stage adds, samples until global_batch_size; with train_samples"
    )
    seq_length: int = option(2048, "tokens per sequence")
    params_dtype: Precision = option(Precision.BF16, "dtype of weights and activations; the master copy is fp32")
    seed: int = option(1234, "initial weights and data order")
    eval_interval: int = option(100, "steps between validations; 0 switches them off")
    eval_iters: int = option(10, "global batches per validation")
    skip_train: bool = option(False, "only evaluate: loss over eval_iters batches of the validation and test shares")
    iterations_to_skip: list[int] = option(
        [], "steps that are left out: their samples are passed over, nothing is trained"
    )
    exit_interval: int = option(0, "stop (after saving) when the step is a multiple of this; 0: never")
    deterministic: bool = option(False, "refuse kernels whose result can change from run to run")
    tune_kernels: bool = option(
        False, "at the start, time tiles of the Triton expert kernels for shapes without tuned ones, and keep the best"
    )

    def __post_init__(self) -> None:
        at_least(self, 1, "train_iters", "micro_batch_size", "global_batch_size", "seq_length", "eval_iters")
        at_least(self, 0, "seed", "eval_interval", "exit_interval")
        require(
            min(self.iterations_to_skip, default=1) >= 1,
            f"iterations_to_skip={self.iterations_to_skip}: steps count from 1",
        )
        check_duration(self)
        require(self.seed < 2**63, f"seed={self.seed} is too large; use at most {2**63 - 1}")


@dataclass(kw_only=True)
class DataConfig:
    data_path: list[str] = option([], "prefixes of .bin/.idx pairs, or weight prefix weight prefix ...")
    data_file_list: str | None = option(None, "blend instead of data_path: lines 'weight prefix corpus', or YAML/JSON")
    max_data_epochs: float | None = option(None, "refuse to read any corpus more often than this; default: repeat")
    split: str = option("969,30,1", "shares of training, validation and test")
    valid_data_path: list[str] = option(
        [], "further validation sets, NAME=PREFIX or PREFIX each: whole .bin/.idx pairs, a loss for each name"
    )
    test_data_path: list[str] = option(
        [], "test sets, as valid_data_path has them: evaluated after the last step, and with skip_train"
    )
    tokenizer_type: TokenizerType = option(TokenizerType.HF, "kind of tokenizer")
    tokenizer_model: str | None = option(None, "its file or folder; copied into exports")
    packing: Packing = option(Packing.NONE, "what a sample is made of: a stretch of documents, or whole ones")
    add_extra_token_to_sequence: bool = option(
        False, "read one token more than seq_length, as the label of the last position, which else has none"
    )
    reset_attention_mask: bool = option(False, "attention inside documents only")
    reset_position_ids: bool = option(False, "positions count from the beginning of each document")
    eod_mask_loss: bool = option(False, "no loss at the position of an end-of-document token")
    fim_rate: float = option(0.0, "share of documents turned into fill-in-the-middle tasks; training only")
    fim_spm_rate: float = option(0.5, "share of those whose suffix comes first")
    fim_prefix_token: str = option("<fim_prefix>", "the tokenizer's name of that sentinel")
    fim_middle_token: str = option("<fim_middle>", "the tokenizer's name of that sentinel")
    fim_suffix_token: str = option("<fim_suffix>", "the tokenizer's name of that sentinel")
    pin_memory: bool = option(True, "batches in page-locked memory, copied to an accelerator while it computes")

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
        """Whether the id of the end-of-document token must be known; packing finds documents in the index."""
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
            require(0 <= rate <= 1, f"{name}={rate} is a share; use 0 to 1")


@dataclass(kw_only=True)
class CheckpointConfig:
    save: str | None = option(None, "folder of checkpoints; default: <run_dir>/checkpoints")
    load: str | None = option(None, "folder or one checkpoint to start from; default: newest one in save")
    save_interval: int = option(1000, "steps between full checkpoints; 0: only the last step")
    save_retain: int = option(2, "newest full checkpoints to keep")
    model_only_save_interval: int = option(0, "steps between checkpoints of the weights alone, all kept; 0: none")
    async_save: bool = option(True, "write beside training, from a copy in host memory")
    save_local_dir: str | None = option(None, "folder on a disk of each node: written first, then copied to save")
    load_optim: bool = option(
        True, "take moments from load; without them step, rate and data position go on all the same"
    )
    finetune: bool = option(False, "take only the weights from load: step, data position and moments start anew")

    def __post_init__(self) -> None:
        at_least(self, 0, "save_interval", "model_only_save_interval")
        at_least(self, 1, "save_retain")
        require(not self.finetune or self.load is not None, "finetune=True starts from a checkpoint; name it in load")
        require(
            self.load_optim or self.load is not None,
            "load_optim=False leaves out what load would bring; name a checkpoint in load",
        )


@dataclass(kw_only=True)
class LoggingConfig:
    run_dir: str = option("runs/optimus", "metrics.jsonl, checkpoints and pictures of this run")
    log_interval: int = option(1, "steps between progress lines; metrics.jsonl gets every step")
    tensorboard_dir: str | None = option(None, "also write TensorBoard events here")
    wandb_project: str | None = option(None, "also log to this project of Weights & Biases")
    wandb_exp_name: str | None = option(None, "name of the run there; default: that of run_dir")
    device_peak_tflops: float | None = option(
        None, "dense peak of a device in params_dtype, which MFU is a share of; default: of the devices known"
    )
    straggler_check_interval: int = option(
        0, "at the start and every so many steps, time the same products on every device, name slow ones; 0: never"
    )
    profile: bool = option(False, "record a few steps with torch.profiler into <run_dir>/profile")
    profile_step_start: int = option(10, "first of them, counted from the start or resumption of the run")
    profile_step_end: int = option(12, "last of them")
    profile_ranks: list[int] = option([0], "ranks that record")

    def __post_init__(self) -> None:
        at_least(self, 1, "log_interval", "profile_step_start", "profile_step_end")
        at_least(self, 0, "straggler_check_interval")
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
        require(self.run_dir != "", "run_dir is empty; name a folder, for example runs/first")


@dataclass(kw_only=True)
class RunConfig:
    """Everything one run needs: one typed value."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
