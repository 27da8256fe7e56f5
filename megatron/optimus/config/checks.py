"""Checks across sections of the configuration and against the number of ranks.

To add a rule, write a function whose docstring states what must hold and which returns None, or a message with the
values that would work; then add it to RULES. They are checked in that order: a rule may rely on those before it, and
the user sees the first message. ``check`` runs them for every run and every layout that the planner tries.
``check_trainable`` adds what training alone needs: an optimizer that supports the layout, data and a tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megatron.optimus.config.duration import batch_sizes, check_batch_sizes, schedule_lengths
from megatron.optimus.config.family import Family, ParameterKind, family_of, layer_parameters
from megatron.optimus.config.layout import Layout
from megatron.optimus.config.parametrization import ADAM_LIKE, MUON_LIKE
from megatron.optimus.config.schema import (
    ConfigError,
    ContextCommunication,
    Device,
    Float8,
    LoadBalancing,
    OptimizerName,
    OptimizerStateDtype,
    Parametrization,
    PipelineSchedule,
    Recompute,
    RunConfig,
    TokenDispatcherType,
    TokenizerType,
    divisors,
    one_of,
    parse_split,
)
from megatron.optimus.config.stages import check_micro_batches, stage_layers

Rule = Callable[[RunConfig, int], "str | None"]


def micro_batches(config: RunConfig, world_size: int) -> list[int]:
    """Returns the micro-batches per rank and optimizer step, for each stage of a batch-size ramp in ascending order.

    Args:
        config: the run.
        world_size: number of ranks.

    Returns:
        One number for each batch size; the last is that of the full batch.

    Raises:
        ConfigError: where a global batch is not a whole number of micro-batches on every rank.
    """
    dp = Layout.from_config(config.parallel, world_size).dp
    sizes, size = batch_sizes(config.training), config.training.micro_batch_size
    check_batch_sizes(sizes, size, dp)
    return [samples // (size * dp) for _, samples in sizes.stages()]


def gradient_accumulation_steps(config: RunConfig, world_size: int) -> int:
    """Returns the micro-batches per rank and step of a full batch. Raises ConfigError as ``micro_batches`` does."""
    return micro_batches(config, world_size)[-1]


def check(config: RunConfig, world_size: int) -> None:
    """Raises ConfigError for the first rule that the run violates on ``world_size`` ranks."""
    for rule in RULES:
        _raise_if(rule(config, world_size))


def check_optimizer(config: RunConfig) -> None:
    """Raises ConfigError for an optimizer or ZeRO stage that does not support the parallel layout."""
    _raise_if(_zero_stage_problem(config))
    _raise_if(_galore_rank_problem(config))


def check_trainable(config: RunConfig) -> None:
    """Raises ConfigError as ``check_optimizer`` does, and for missing data or tokenizer. A dry run needs neither."""
    check_optimizer(config)
    only_sets = config.training.skip_train and bool(config.data.valid_data_path or config.data.test_data_path)
    if not config.data.data_path and config.data.data_file_list is None and not only_sets:
        raise ConfigError(
            "data_path is empty: name the prefixes of the .bin/.idx pairs that `optimus preprocess` wrote, "
            "for example --data-path data/corpus_text_document (for --output-prefix data/corpus), "
            "or a blend in --data-file-list"
        )
    data, tokenizer = config.data, config.data.tokenizer_model
    if data.needs_eod and tokenizer is None and data.tokenizer_type is not TokenizerType.BYTE:
        raise ConfigError(
            "reset_attention_mask, reset_position_ids, eod_mask_loss and fim_rate need the token that ends a document: "
            "name the tokenizer in tokenizer_model"
        )
    if tokenizer is not None and not Path(tokenizer).exists():
        raise ConfigError(
            f"tokenizer_model={tokenizer!r} does not exist; give the tokenizer's file or folder, or leave it out: "
            "training does not need it, the export then comes without one"
        )


def _galore_rank_problem(config: RunConfig) -> str | None:
    rank, model = config.optimizer.galore_rank, config.model
    if config.optimizer.optimizer is not OptimizerName.GALORE:
        return None
    kinds = {layer in model.moe_layers for layer in range(model.num_layers)}
    specs = [
        spec
        for is_moe in kinds
        for spec in layer_parameters(model, is_moe=is_moe).values()
        if spec.kind is ParameterKind.MATRIX
    ]
    most = max(min(spec.shape[-2:]) for spec in specs)
    if rank <= most:
        return None
    return f"galore_rank={rank} exceeds the shorter side of every matrix of the model; use at most {most}"


def _zero_stage_problem(config: RunConfig) -> str | None:
    """Returns the option that DeepSpeed's ZeRO, which runs zero_stage=3, does not support, with a remedy; or None."""
    optimizer, parallel = config.optimizer, config.parallel
    stage = optimizer.zero_stage
    if stage == 0:
        return "zero_stage=0: use 1, which shards optimizer states, or 2 or 3"
    if stage < 3:
        offloads = [name for name in ("optimizer_cpu_offload", "param_cpu_offload") if getattr(optimizer, name)]
        return f"{offloads[0]} needs zero_stage=3, this run has zero_stage={stage}" if offloads else None
    for axis in ("tensor_model", "pipeline_model", "expert_model", "context"):
        name = f"{axis}_parallel_size"
        size = getattr(parallel, name)
        if size > 1:
            return f"zero_stage=3 shards over data-parallel ranks alone, but {name}={size}; use 1, or zero_stage=1 or 2"
    if optimizer.optimizer is not OptimizerName.ADAM:
        return f"zero_stage=3 needs optimizer=adam, not {optimizer.optimizer.value}; or use zero_stage=1 or 2"
    if optimizer.optimizer_state_dtype is not OptimizerStateDtype.FP32:
        kept = optimizer.optimizer_state_dtype.value
        return f"zero_stage=3 keeps states in fp32, not optimizer_state_dtype={kept}; or use zero_stage=1 or 2"
    return None


def _raise_if(message: str | None) -> None:
    if message:
        raise ConfigError(message)


def _message_of(check: Callable[..., object], *arguments: object) -> str | None:
    try:
        check(*arguments)
    except ConfigError as error:
        return str(error)
    return None


def sizes_fit_ranks(config: RunConfig, world_size: int) -> str | None:
    """The parallel sizes divide the number of ranks."""
    return _message_of(Layout.from_config, config.parallel, world_size)


def recomputed_layers_exist(config: RunConfig, world_size: int) -> str | None:
    """``recompute_num_layers`` is at most the number of layers and has modules to recompute."""
    parallel, num_layers = config.parallel, config.model.num_layers
    count = parallel.recompute_num_layers
    if not count:
        return None
    if not parallel.recompute_modules:
        modules = " ".join(module.value for module in Recompute)
        return (
            f"recompute_num_layers={count} without recompute_modules recomputes nothing; "
            f"name modules (--recompute-modules {modules}), or leave recompute_num_layers out"
        )
    if count <= num_layers:
        return None
    return f"recompute_num_layers={count} exceeds num_layers={num_layers}; use at most {num_layers}; default: all"


def offloaded_layers_exist(config: RunConfig, world_size: int) -> str | None:
    """``cpu_offloading_num_layers`` is at most the number of layers."""
    count, num_layers = config.parallel.cpu_offloading_num_layers, config.model.num_layers
    if count <= num_layers:
        return None
    return f"cpu_offloading_num_layers={count} exceeds num_layers={num_layers}; use at most {num_layers}, 0 for none"


def experts_need_a_moe_model(config: RunConfig, world_size: int) -> str | None:
    """Expert parallelism needs a model with experts."""
    ep = config.parallel.expert_model_parallel_size
    if ep == 1 or config.model.is_moe:
        return None
    return f"expert_model_parallel_size={ep} but num_experts=0: a dense model has no experts; use 1"


def expert_parallel_divides_experts(config: RunConfig, world_size: int) -> str | None:
    """``expert_model_parallel_size`` divides the number of experts."""
    ep, experts = config.parallel.expert_model_parallel_size, config.model.num_experts
    if experts % ep == 0:
        return None
    ranks = world_size // config.parallel.pipeline_model_parallel_size
    values = [size for size in divisors(ranks) if experts % size == 0]
    return f"expert_model_parallel_size={ep} must divide num_experts={experts}; use {one_of(values)}"


def only_all_to_all_sends_chunks(config: RunConfig, world_size: int) -> str | None:
    """Only the all-to-all dispatcher sends tokens in chunks."""
    chunks, dispatcher = config.parallel.moe_dispatch_chunks, config.parallel.moe_token_dispatcher_type
    if chunks == 1 or dispatcher is TokenDispatcherType.ALLTOALL:
        return None
    return (
        f"moe_dispatch_chunks={chunks} with moe_token_dispatcher_type={dispatcher.value}: only alltoall sends "
        "tokens in chunks; use alltoall, or 1"
    )


def hierarchical_dispatch_fits_nodes(config: RunConfig, world_size: int) -> str | None:
    """The hierarchical dispatcher needs experts over several nodes of the size given by the user.

    The launcher's node size is not known yet; it is checked when the process group has been initialised.
    """
    parallel = config.parallel
    layout = Layout.from_config(parallel, world_size)
    is_hierarchical = parallel.moe_token_dispatcher_type is TokenDispatcherType.HIERARCHICAL
    if not is_hierarchical or parallel.moe_hierarchical_node_size is None or layout.ep * layout.etp == 1:
        return None
    return layout.hierarchy_problem(parallel.moe_hierarchical_node_size)


def symmetric_dispatch_needs_cuda_and_whole_experts(config: RunConfig, world_size: int) -> str | None:
    """The symmetric-memory dispatcher needs CUDA devices and experts that are not split.

    Its GPUs must also be on one node with peer access, which is checked when the process group has been initialised.
    """
    parallel, name = config.parallel, "moe_token_dispatcher_type=symmetric"
    if parallel.moe_token_dispatcher_type is not TokenDispatcherType.SYMMETRIC:
        return None
    if parallel.device in (Device.CPU, Device.XPU, Device.MPS):
        return f"{name} needs GPUs of CUDA, and device={parallel.device.value}; use allgather or alltoall"
    shards = parallel.expert_tensor_parallel_size
    if shards > 1:
        return f"{name} needs whole experts: use expert_tensor_parallel_size=1 (it is {shards}), allgather or alltoall"
    return None


def tensor_parallel_divides_model(config: RunConfig, world_size: int) -> str | None:
    """``tensor_model_parallel_size`` divides every size of the model that it splits."""
    tp, model = config.parallel.tensor_model_parallel_size, config.model
    sizes = {
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_kv_heads,
        "vocab_size": model.vocab_size,
    }
    if model.has_dense_layers:
        sizes["ffn_hidden_size"] = model.ffn_hidden_size
    if model.moe_shared_expert_intermediate_size:
        sizes["moe_shared_expert_intermediate_size"] = model.moe_shared_expert_intermediate_size
    for name, value in sizes.items():
        if value % tp:
            remedy = f"use {one_of(divisors(value))}"
            if name == "vocab_size":
                remedy = f"use vocab_size={-(-value // tp) * tp}: unused rows are harmless"
            return f"tensor_model_parallel_size={tp} must divide {name}={value}; {remedy}"
    return None


def expert_tensor_parallel_divides_experts(config: RunConfig, world_size: int) -> str | None:
    """``expert_tensor_parallel_size`` divides the inner width of the experts."""
    etp, model = config.parallel.expert_tensor_parallel_size, config.model
    if etp == 1:
        return None
    if not model.is_moe:
        return f"expert_tensor_parallel_size={etp} but num_experts=0: a dense model has no experts; use 1"
    if model.moe_ffn_hidden_size % etp == 0:
        return None
    values = one_of(divisors(model.moe_ffn_hidden_size))
    return (
        f"expert_tensor_parallel_size={etp} must divide moe_ffn_hidden_size={model.moe_ffn_hidden_size}; use {values}"
    )


def experts_under_tensor_parallelism_need_split_tokens(config: RunConfig, world_size: int) -> str | None:
    """An MoE model under tensor parallelism needs sequence parallelism."""
    tp = config.parallel.tensor_model_parallel_size
    if tp == 1 or config.parallel.sequence_parallel or not config.model.is_moe:
        return None
    return (
        f"sequence_parallel=False with tensor_model_parallel_size={tp} and num_experts={config.model.num_experts}: "
        "every rank would route the same tokens; use sequence_parallel=True"
    )


def overlap_needs_split_tokens(config: RunConfig, world_size: int) -> str | None:
    """``tp_comm_overlap`` needs tensor parallelism with sequence parallelism."""
    parallel = config.parallel
    if not parallel.tp_comm_overlap or (parallel.tensor_model_parallel_size > 1 and parallel.sequence_parallel):
        return None
    return (
        f"tp_comm_overlap=True with tensor_model_parallel_size={parallel.tensor_model_parallel_size} and "
        f"sequence_parallel={parallel.sequence_parallel}: there are no tokens to communicate; use "
        "tensor_model_parallel_size=2 or more with sequence_parallel=True, or tp_comm_overlap=False"
    )


def float8_keeps_projections_whole(config: RunConfig, world_size: int) -> str | None:
    """Products in float8 need projections that neither tensor parallelism nor zero_stage=3 has split."""
    tp, fp8 = config.parallel.tensor_model_parallel_size, config.training.fp8
    if fp8 is Float8.NONE:
        return None
    if config.optimizer.zero_stage == 3:  # it gathers a layer's weights when the layer itself is called
        return f"fp8={fp8.value} with zero_stage=3: a rank lacks weights; use zero_stage=1 or 2, or fp8=none"
    if tp == 1:
        return None
    return (
        f"fp8={fp8.value} with tensor_model_parallel_size={tp}: projections are not split in float8; use 1, or fp8=none"
    )


def sequence_divides(config: RunConfig, world_size: int) -> str | None:
    """Context and sequence parallelism divide the tokens of a micro-batch."""
    parallel, training = config.parallel, config.training
    cp, tp = parallel.context_parallel_size, parallel.tensor_model_parallel_size
    unit, why = cp, f"context_parallel_size={cp}"
    if cp > 1 and parallel.cp_comm_type is ContextCommunication.P2P:
        unit, why = 2 * cp, f"2 x context_parallel_size={cp} (p2p gives each rank an early and a late chunk)"
    length = training.seq_length
    if length % unit:
        near = one_of([size for size in (length // unit * unit, (length // unit + 1) * unit) if size])
        return f"seq_length={length} must be a multiple of {why}; use {near}"
    tokens = training.micro_batch_size * length // cp
    if parallel.sequence_parallel and tokens % tp:
        return (
            f"micro_batch_size={training.micro_batch_size} x seq_length={length} / context_parallel_size={cp} = "
            f"{tokens} tokens must be a multiple of tensor_model_parallel_size={tp}; change one of them, "
            "or use sequence_parallel=False"
        )
    return None


def context_parallel_divides_heads(config: RunConfig, world_size: int) -> str | None:
    """All-to-all context parallelism divides the attention heads of a rank."""
    parallel = config.parallel
    cp, tp = parallel.context_parallel_size, parallel.tensor_model_parallel_size
    heads = config.model.num_attention_heads // tp
    if parallel.cp_comm_type is not ContextCommunication.A2A or heads % cp == 0:
        return None
    return (
        f"context_parallel_size={cp} with cp_comm_type=a2a must divide the {heads} attention heads of a rank "
        f"(num_attention_heads / tensor_model_parallel_size={tp}); use {one_of(divisors(heads))}, or cp_comm_type=p2p"
    )


def layers_fit_stages(config: RunConfig, world_size: int) -> str | None:
    """The layers can be split over the pipeline's stages."""
    return _message_of(stage_layers, config.model, config.parallel, config.training.seq_length)


def schedule_fits_chunks(config: RunConfig, world_size: int) -> str | None:
    """The pipeline schedule supports the number of model chunks per rank."""
    parallel = config.parallel
    schedule, chunks = parallel.pipeline_schedule, parallel.virtual_pipeline_model_parallel_size
    if parallel.pipeline_model_parallel_size == 1:
        return None if chunks == 1 else f"virtual_pipeline_model_parallel_size={chunks} needs a pipeline; use 1"
    fits = {
        PipelineSchedule.ONE_F_ONE_B: (chunks == 1, "1"),
        PipelineSchedule.ZBV: (chunks == 2, "2"),
    }.get(schedule, (chunks > 1, "2 or more"))
    if fits[0]:
        return None
    return (
        f"virtual_pipeline_model_parallel_size={chunks} does not fit pipeline_schedule={schedule.value}; use {fits[1]}"
    )


def micro_batches_fit_schedule(config: RunConfig, world_size: int) -> str | None:
    """The pipeline schedule supports the number of micro-batches of every batch size."""
    parallel = config.parallel
    stages = parallel.pipeline_model_parallel_size
    if stages == 1 or parallel.pipeline_schedule is PipelineSchedule.ONE_F_ONE_B:
        return None
    counts = reversed(micro_batches(config, world_size))
    return next(filter(None, (_message_of(check_micro_batches, count, stages) for count in counts)), None)


def batch_divides(config: RunConfig, world_size: int) -> str | None:
    """Every global batch is a whole number of micro-batches on every rank."""
    return _message_of(micro_batches, config, world_size)


def sequence_fits_positions(config: RunConfig, world_size: int) -> str | None:
    """``seq_length`` is at most ``max_position_embeddings``."""
    length, limit = config.training.seq_length, config.model.max_position_embeddings
    if length <= limit:
        return None
    return f"seq_length={length} exceeds max_position_embeddings={limit}; use at most {limit}, or raise the latter"


def samples_count_in_samples(config: RunConfig, world_size: int) -> str | None:
    """Schedule options in samples need ``train_samples``."""
    names = ("lr_warmup_samples", "lr_decay_samples", "lr_wsd_decay_samples")
    given = [name for name in names if getattr(config.optimizer, name) is not None]
    if not given or config.training.train_samples is not None:
        return None
    steps = given[0].replace("samples", "iters")
    return (
        f"{given[0]}={getattr(config.optimizer, given[0])} in a run measured in steps, train_iters="
        f"{config.training.train_iters}; use {steps}, or train_samples"
    )


def warmup_fits_run(config: RunConfig, world_size: int) -> str | None:
    """The warm-up ends before the learning-rate decay does."""
    warmup, end, _ = schedule_lengths(config.optimizer, config.training)
    if warmup <= end:  # lr_decay_* may lie beyond the run's end: a longer schedule that is cut short on purpose
        return None
    if config.training.train_samples is None:
        return f"lr_warmup_iters={warmup} exceeds train_iters={end}; use at most {end}, or set lr_decay_iters"
    return f"a warm-up of {warmup} samples exceeds the decay's end at {end}; use lr_warmup_samples of at most {end}"


def validation_has_data(config: RunConfig, world_size: int) -> str | None:
    """Evaluation has a validation or test set."""
    _, valid, test = parse_split(config.data.split)
    if config.data.valid_data_path or (config.training.skip_train and config.data.test_data_path):
        return None
    if config.training.skip_train:
        remedy = "give the second or third share a value, for example '0,1,0' for all of it"
        return (
            None if valid + test > 0 else f"skip_train=True but split={config.data.split!r} is training alone; {remedy}"
        )
    if config.training.eval_interval == 0 or valid > 0:
        return None
    return (
        f"eval_interval={config.training.eval_interval} but split={config.data.split!r} leaves nothing to validate on; "
        "give the second share a value, for example '969,30,1', or set eval_interval=0"
    )


def vocabulary_holds_bytes(config: RunConfig, world_size: int) -> str | None:
    """The byte-level tokenizer's 257 tokens fit the vocabulary."""
    if config.data.tokenizer_type is not TokenizerType.BYTE or config.model.vocab_size >= 257:
        return None
    return (
        f"vocab_size={config.model.vocab_size} is below the 257 tokens of {TokenizerType.BYTE.value}; use 257 or more"
    )


def backend_serves_device(config: RunConfig, world_size: int) -> str | None:
    """The distributed backend can move tensors of the device."""
    device, backend = config.parallel.device, config.parallel.distributed_backend
    devices = {"nccl": [Device.CUDA], "xccl": [Device.XPU], "ccl": [Device.CPU, Device.XPU]}
    served = devices.get(backend.value)  # gloo moves tensors of every device
    if served is None or device in (*served, Device.AUTO):
        return None
    return f"distributed_backend={backend.value} does not move tensors of device={device.value}; use auto"


def apple_gpus_run_one_process(config: RunConfig, world_size: int) -> str | None:
    """``device`` mps has no collectives, and only our own optimizer runs there."""
    if config.parallel.device is not Device.MPS:
        return None
    if world_size > 1:
        return f"device=mps with {world_size} ranks: no collectives run on Apple GPUs; start one process, or use cpu"
    if (stage := config.optimizer.zero_stage) > 2:
        return f"device=mps with zero_stage={stage}: use zero_stage=1"
    return None


def profiled_ranks_exist(config: RunConfig, world_size: int) -> str | None:
    """``profile_ranks`` are ranks of the run."""
    ranks = config.logging.profile_ranks
    wrong = [rank for rank in ranks if not 0 <= rank < world_size]
    if not config.logging.profile or (ranks and not wrong):
        return None
    return f"profile_ranks={ranks} with {world_size} ranks: use numbers from 0 to {world_size - 1}"


def only_own_optimizer_skips_spikes(config: RunConfig, world_size: int) -> str | None:
    """``grad_norm_spike_sigma`` needs zero_stage 1 or 2."""
    sigma, stage = config.optimizer.grad_norm_spike_sigma, config.optimizer.zero_stage
    if sigma == 0 or stage < 3:
        return None
    return f"grad_norm_spike_sigma={sigma} with zero_stage={stage}: use 0, or zero_stage=1 or 2"


def integrity_checks_fit_layout(config: RunConfig, world_size: int) -> str | None:
    """Checksums need zero_stage 1 or 2; comparing gradients needs two copies of the model without pipeline stages."""
    training, stage = config.training, config.optimizer.zero_stage
    for name, allowed in (("integrity_interval", (1, 2)), ("integrity_gradient_interval", (1,))):
        interval = getattr(training, name)
        if interval and stage not in allowed:
            return f"{name}={interval} with zero_stage={stage}: use 0, or zero_stage={' or '.join(map(str, allowed))}"
    interval, saves = training.integrity_gradient_interval, config.checkpoint.save_interval
    if not interval:
        return None
    layout = Layout.from_config(config.parallel, world_size)
    if layout.pp > 1:
        return f"integrity_gradient_interval={interval} needs whole layers on a rank, not pipeline stages; use 0"
    if layout.dp < 2 or layout.edp < 2:
        return (
            f"integrity_gradient_interval={interval} needs two data-parallel copies of all weights; this layout has "
            f"dp={layout.dp} and copies of experts edp={layout.edp}; use more ranks, fewer that share experts, or 0"
        )
    if 0 < saves < interval:
        return f"integrity_gradient_interval={interval} exceeds save_interval={saves}; use at most {saves}"
    return None


def tasks_fit_layout(config: RunConfig, world_size: int) -> str | None:
    """``eval_tasks`` need a tokenizer, and a model whose layers a rank has all of."""
    training, stages = config.training, config.parallel.pipeline_model_parallel_size
    if not training.eval_task_names:
        return None
    names, data = ",".join(training.eval_task_names), config.data
    remedy = "leave eval_tasks out and run `optimus evaluate` on the checkpoints"
    if stages > 1:
        return f"eval_tasks={names} with pipeline_model_parallel_size={stages}: a rank lacks layers; use 1, or {remedy}"
    if config.optimizer.zero_stage == 3:
        return f"eval_tasks={names} with zero_stage=3: a rank lacks weights; use zero_stage=1 or 2, or {remedy}"
    if data.tokenizer_model is None and data.tokenizer_type is not TokenizerType.BYTE:
        return f"eval_tasks={names} are texts: name the run's tokenizer in tokenizer_model"
    return None


def sophia_batch_fits(config: RunConfig, world_size: int) -> str | None:
    """``sophia_batch_size`` is a whole number of micro-batches on every rank, at most the global batch."""
    size, training = config.optimizer.sophia_batch_size, config.training
    if size is None:
        return None
    unit = training.micro_batch_size * Layout.from_config(config.parallel, world_size).dp
    if size % unit == 0 and size <= training.global_batch_size:
        return None
    return (
        f"sophia_batch_size={size} must be a multiple of micro_batch_size x data parallel size = {unit}, and at most "
        f"global_batch_size={training.global_batch_size}"
    )


def qk_clip_reaches_logits(config: RunConfig, world_size: int) -> str | None:
    """QK-clip scales projections whose products are the logits."""
    threshold, model = config.optimizer.qk_clip_threshold, config.model
    if threshold == 0:
        return None
    if model.qk_layernorm or model.clip_qkv is not None:
        what = "qk_layernorm" if model.qk_layernorm else f"clip_qkv={model.clip_qkv}"
        remedy = "--no-qk-layernorm" if model.qk_layernorm else "a model without clip_qkv"
        return (
            f"qk_clip_threshold={threshold} with {what}, which bounds logits already and does not follow the scale of "
            f"the projections; use qk_clip_threshold=0, or {remedy}"
        )
    if family_of(model).attention != Family.attention:
        return f"qk_clip_threshold={threshold} knows the decoder's own attention only, not that of {model.model_family}"
    return None


def parametrization_has_a_rule(config: RunConfig, world_size: int) -> str | None:
    """muP and CompleteP know how the optimizer's rates follow the width."""
    chosen, optimizer = config.model.parametrization, config.optimizer.optimizer
    if chosen is Parametrization.STANDARD or optimizer in (*ADAM_LIKE, *MUON_LIKE):
        return None
    known = one_of(name.value for name in (*ADAM_LIKE, *MUON_LIKE))
    return (
        f"parametrization={chosen.value} has no rule for the rates of optimizer={optimizer.value}; use {known}, or "
        "parametrization=standard"
    )


def noise_scale_is_measurable(config: RunConfig, world_size: int) -> str | None:
    """``log_gradient_noise_scale`` compares data-parallel ranks or micro-batches, of which a step must have two."""
    if not config.logging.log_gradient_noise_scale:
        return None
    optimizer, parallel, name = config.optimizer, config.parallel, "log_gradient_noise_scale=True"
    layout = Layout.from_config(parallel, world_size)
    stages, ranks = layout.pp, layout.dp * layout.cp
    if optimizer.zero_stage == 3:
        return f"{name} needs zero_stage=1 or 2, this run has zero_stage=3"
    if parallel.virtual_pipeline_model_parallel_size > 1 and optimizer.zero_stage == 2:
        chunks = parallel.virtual_pipeline_model_parallel_size
        return f"{name} with virtual_pipeline_model_parallel_size={chunks} needs zero_stage=1, not zero_stage=2"
    if ranks > 1 or (stages == 1 and gradient_accumulation_steps(config, world_size) > 1):
        return None
    if stages > 1:
        return (
            f"{name} with pipeline stages compares data-parallel ranks, and this run has one; use more, or leave it out"
        )
    return (
        f"{name} compares micro-batches or data-parallel ranks, and a step has one of each; use a "
        f"global_batch_size above {config.training.global_batch_size}, or a smaller micro_batch_size"
    )


def graphs_repeat_the_same_work(config: RunConfig, world_size: int) -> str | None:
    """``cuda_graphs`` repeats the kernels of one micro-batch, so nothing in it may depend on the host."""
    if not config.training.cuda_graphs:
        return None
    parallel, optimizer, model = config.parallel, config.optimizer, config.model
    allowed = {
        "tensor_model_parallel_size": (parallel.tensor_model_parallel_size, 1),
        "pipeline_model_parallel_size": (parallel.pipeline_model_parallel_size, 1),
        "context_parallel_size": (parallel.context_parallel_size, 1),
        "expert_model_parallel_size": (parallel.expert_model_parallel_size, 1),
        "recompute_modules": (parallel.recompute_modules, []),
        "cpu_offloading_num_layers": (parallel.cpu_offloading_num_layers, 0),
        "zero_stage": (optimizer.zero_stage, 1),
        "qk_clip_threshold": (optimizer.qk_clip_threshold, 0),
        "reset_attention_mask": (config.data.reset_attention_mask, False),
        "log_gradient_noise_scale": (config.logging.log_gradient_noise_scale, False),
    }
    if world_size > 1 and model.moe_layers and model.moe_router_load_balancing_type is LoadBalancing.GLOBAL_AUX_LOSS:
        allowed["moe_router_load_balancing_type"] = (LoadBalancing.GLOBAL_AUX_LOSS, LoadBalancing.AUX_LOSS)
    for name, (value, needed) in allowed.items():
        if value != needed:
            text = f"cuda_graphs=True needs {name}={_shown(needed)}, this run has {name}={_shown(value)}"
            return f"{text}; leave cuda_graphs out"
    if world_size > 1 and gradient_accumulation_steps(config, world_size) == 1:
        return (
            f"cuda_graphs=True on {world_size} ranks leaves out a step's last micro-batch, and it has 1; use a "
            f"global_batch_size above {config.training.global_batch_size}, or leave cuda_graphs out"
        )
    return None


def _shown(value: object) -> str:
    """A value as a command line has it."""
    if isinstance(value, list):
        return " ".join(map(_shown, value)) or "none"
    return str(getattr(value, "value", value))


RULES: list[Rule] = [
    sizes_fit_ranks,
    schedule_fits_chunks,  # before layers_fit_stages, which divides layers by the schedule's chunks
    layers_fit_stages,
    recomputed_layers_exist,
    offloaded_layers_exist,
    experts_need_a_moe_model,
    expert_parallel_divides_experts,
    hierarchical_dispatch_fits_nodes,
    only_all_to_all_sends_chunks,
    symmetric_dispatch_needs_cuda_and_whole_experts,
    tensor_parallel_divides_model,
    expert_tensor_parallel_divides_experts,
    experts_under_tensor_parallelism_need_split_tokens,
    overlap_needs_split_tokens,
    float8_keeps_projections_whole,
    sequence_divides,
    context_parallel_divides_heads,
    batch_divides,
    micro_batches_fit_schedule,
    sequence_fits_positions,
    samples_count_in_samples,
    warmup_fits_run,
    validation_has_data,
    vocabulary_holds_bytes,
    backend_serves_device,
    apple_gpus_run_one_process,
    profiled_ranks_exist,
    only_own_optimizer_skips_spikes,
    integrity_checks_fit_layout,
    tasks_fit_layout,
    sophia_batch_fits,
    qk_clip_reaches_logits,
    parametrization_has_a_rule,
    noise_scale_is_measurable,
    graphs_repeat_the_same_work,
]
