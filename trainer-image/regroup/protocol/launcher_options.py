"""The table of every option of every launcher, and what Regroup does with each.

Plain data. tests/unit/agent/test_launchers.py fails when a launcher's own parser has an option that is missing here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

MAPPED, IGNORED, REFUSED = "mapped", "ignored", "refused"


@dataclass(frozen=True)
class Option:
    """One option of a launcher."""

    names: tuple[str, ...]
    """Its names; the first one is the option's key."""
    takes: int
    """Number of values behind it."""
    effect: str
    """MAPPED: it does here what it does in the launcher. IGNORED: it changes nothing here. REFUSED: the job is not accepted."""
    says: str
    """One sentence: what the option becomes, or why it is ignored or refused, and what to do."""
    counts: bool = False
    """The option says how many processes or workers there are."""


def _both(name: str) -> tuple[str, ...]:
    """Return a long name with hyphens and with underscores; the one that was given comes first."""
    body = name[2:]
    return tuple(dict.fromkeys([name, "--" + body.replace("_", "-"), "--" + body.replace("-", "_")]))


def _options(
    effect: str, says: str, *names: str, takes: int = 1, counts: bool = False, both: bool = False
) -> Iterator[Option]:
    """Yield an option for each of `names`, in which `|` stands between names of one option."""
    for text in names:
        of_one = [each for name in text.split("|") for each in (_both(name) if both and name[:2] == "--" else (name,))]
        yield Option(tuple(of_one), takes, effect, says, counts)


_PROCESSES = "It is spec.processesPerWorker; gpu and auto mean the container's limit of GPUs."
_RENDEZVOUS = "Workers meet at an address that Regroup chooses for each generation."
_RANK = "Regroup gives each worker its rank, anew for each generation."
_RESTARTS = "spec.recovery.maxRestarts and spec.recovery.windowSeconds bound restarts."
_LOGS = "The output of all processes is in the pod's log, each line with its rank."
_SUPERVISES = "Regroup's agent starts and watches the processes."
_HOSTS = "The job's workers are the hosts, and spec.replicas counts them."
_SSH = "Regroup starts pods and uses no ssh."
_BINDING = "Regroup does not bind processes to cores. The kubelet's CPU manager gives a pod cores of its own."
_NO_TRAINING = "It trains nothing. Remove it."
_TPU = "Regroup does not train on TPUs. Remove it."
_VERBOSE = "It changes only what the launcher prints."
_ENVIRONMENT = "It reaches the program by the environment that the launcher makes for it."
_START = "It says how the program is started."
_WHICH_GPUS = "The container's limit of GPUs says which it gets. Remove the option, and set the limit."

_TORCHRUN = (
    *_options(MAPPED, _PROCESSES, "--nproc-per-node", counts=True, both=True),
    *_options(MAPPED, "N must be spec.replicas; MIN:MAX is spec.elasticPolicy.", "--nnodes", counts=True, both=True),
    *_options(MAPPED, _START, "-m|--module", "--no-python", "--run-path", "--use-env", takes=0, both=True),
    *_options(IGNORED, _RENDEZVOUS, "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", both=True),
    *_options(IGNORED, _RENDEZVOUS, "--standalone", takes=0, both=True),
    *_options(IGNORED, _RENDEZVOUS, "--master-addr", "--master-port", "--local-addr", both=True),
    *_options(IGNORED, _RANK, "--node-rank", both=True),
    *_options(IGNORED, _RESTARTS, "--max-restarts", both=True),
    *_options(IGNORED, _SUPERVISES, "--monitor-interval", "--start-method", "--event-log-handler", "--role", both=True),
    *_options(IGNORED, _SUPERVISES, "--signals-to-handle", both=True),
    *_options(IGNORED, "A process has 10 s between SIGTERM and SIGKILL.", "--shutdown-timeout", both=True),
    *_options(IGNORED, _LOGS, "--log-dir", "-r|--redirects", "-t|--tee", "--local-ranks-filter", "--logs-specs", both=True),
    *_options(IGNORED, _LOGS, "--duplicate-stdout-filters", "--duplicate-stderr-filters", both=True),
    *_options(IGNORED, _BINDING, "--numa-binding", both=True),
    *_options(
        REFUSED, "Each process sees all GPUs of its worker and takes the one of LOCAL_RANK. Remove it.", "--virtual-local-rank",
        takes=0, both=True,
    ),
    *_options(REFUSED, _NO_TRAINING, "-h|--help", takes=0),
)  # fmt: skip

_FSDP = """fsdp_version
fsdp_offload_params fsdp_min_num_params fsdp_sharding_strategy fsdp_reshard_after_forward fsdp_auto_wrap_policy
fsdp_transformer_layer_cls_to_wrap fsdp_backward_prefetch fsdp_state_dict_type fsdp_forward_prefetch fsdp_use_orig_params
fsdp_cpu_ram_efficient_loading fsdp_sync_module_states fsdp_activation_checkpointing fsdp_activation_checkpointing_offload"""
_MEGATRON = """tp_degree use_custom_fsdp no_load_optim eod_mask_loss overlap_cpu_optimizer_d2h_h2d no_save_optim
optimizer_cpu_offload use_precision_aware_optimizer decoder_last_pipeline_num_layers pp_degree num_micro_batches
sequence_parallelism recompute_activations use_distributed_optimizer gradient_clipping recompute_granularity recompute_method
recompute_num_layers attention_backend expert_model_parallel_size context_parallel_size attention_dropout hidden_dropout
attention_softmax_in_fp32 expert_tensor_parallel_size calculate_per_token_loss use_rotary_position_embeddings"""
_FP8 = """fp8_backend fp8_margin fp8_interval fp8_format fp8_amax_history_len fp8_amax_compute_algo fp8_override_linear_precision
fp8_opt_level fp8_enable_fsdp_float8_all_gather fp8_pad_inner_dim"""
_PARALLELISM = """dp_replicate_size dp_shard_size tp_size cp_size cp_backend cp_comm_strategy sp_size sp_backend sp_seq_length
sp_seq_length_is_variable sp_attn_implementation"""
_DEEPSPEED_BY_ACCELERATE = """deepspeed_config_file zero_stage offload_optimizer_device offload_param_device
offload_optimizer_nvme_path offload_param_nvme_path gradient_accumulation_steps gradient_clipping zero3_init_flag
zero3_save_16bit_model deepspeed_moe_layer_cls_names"""


def _long(text: str, prefix: str = "--") -> list[str]:
    return [prefix + name for name in text.split()]


_ACCELERATE = (
    *_options(
        MAPPED, "Divided by --num_machines it is spec.processesPerWorker.", "--num_processes", counts=True, both=True
    ),
    *_options(MAPPED, "It must be spec.replicas.", "--num_machines", counts=True, both=True),
    *_options(
        MAPPED, "accelerate reads the file in the pod. A number of processes there must be spec.processesPerWorker.",
        "--config_file", both=True,
    ),
    *_options(MAPPED, _START, "-m|--module", "--no_python", takes=0, both=True),
    *_options(MAPPED, _ENVIRONMENT, "--cpu", "--multi_gpu", "--enable_cpu_affinity", "--debug", takes=0, both=True),
    *_options(MAPPED, _ENVIRONMENT, "--use_deepspeed", "--use_fsdp", "--use_megatron_lm", takes=0, both=True),
    *_options(MAPPED, _ENVIRONMENT, "--use_parallelism_config", takes=0, both=True),
    *_options(MAPPED, _ENVIRONMENT, "--mixed_precision", "--num_cpu_threads_per_process", both=True),
    *_options(MAPPED, _ENVIRONMENT, "--dynamo_backend", "--dynamo_mode", both=True),
    *_options(MAPPED, _ENVIRONMENT, "--dynamo_use_fullgraph", "--dynamo_use_dynamic", takes=0, both=True),
    *_options(MAPPED, _ENVIRONMENT, "--dynamo_use_regional_compilation", takes=0, both=True),
    *_options(MAPPED, _ENVIRONMENT, *_long(_FSDP), *_long(_FP8), both=True),
    *_options(MAPPED, _ENVIRONMENT, *_long(_MEGATRON, "--megatron_lm_"), both=True),
    *_options(MAPPED, _ENVIRONMENT, *_long(_PARALLELISM, "--parallelism_config_"), both=True),
    *_options(MAPPED, _ENVIRONMENT, "--fp8_use_autocast_during_eval", takes=0, both=True),
    *_options(MAPPED, _ENVIRONMENT, *_long(_DEEPSPEED_BY_ACCELERATE), both=True),
    *_options(IGNORED, _RENDEZVOUS, "--main_process_ip", "--main_process_port", "--rdzv_backend", "--rdzv_conf", both=True),
    *_options(IGNORED, _RENDEZVOUS, "--same_network", takes=0, both=True),
    *_options(IGNORED, _RANK, "--machine_rank", both=True),
    *_options(IGNORED, _RESTARTS, "--max_restarts", both=True),
    *_options(IGNORED, _SUPERVISES, "--monitor_interval", "--role", both=True),
    *_options(IGNORED, _LOGS, "-t|--tee", "--log_dir", both=True),
    *_options(IGNORED, _VERBOSE, "--quiet|-q", takes=0, both=True),
    *_options(IGNORED, _HOSTS, "--deepspeed_hostfile", "--deepspeed_exclusion_filter", both=True),
    *_options(IGNORED, _HOSTS, "--deepspeed_inclusion_filter", "--mpirun_hostfile", both=True),
    *_options(IGNORED, _SSH, "--deepspeed_multinode_launcher", both=True),
    *_options(REFUSED, _WHICH_GPUS, "--gpu_ids", both=True),
    *_options(REFUSED, _TPU, "--tpu", "--tpu_cluster", "--no_tpu_cluster", "--tpu_use_sudo", takes=0, both=True),
    *_options(REFUSED, _TPU, "--downcast_bf16", takes=0, both=True),
    *_options(REFUSED, _TPU, "--vm", "--env", "--main_training_function", both=True),
    *_options(
        REFUSED, "Regroup does not start SageMaker jobs. Remove it.", "--aws_access_key_id", "--aws_secret_access_key",
        both=True,
    ),
    *_options(REFUSED, _NO_TRAINING, "-h|--help", takes=0),
)  # fmt: skip

_DEEPSPEED = (
    *_options(MAPPED, "It is spec.processesPerWorker; -1 says nothing.", "--num_gpus|--num_accelerators", counts=True),
    *_options(MAPPED, "It must be spec.replicas; -1 says nothing.", "--num_nodes", counts=True),
    *_options(MAPPED, _START, "--module", "--no_python", takes=0),
    *_options(MAPPED, "The program gets no --local_rank=N then.", "--no_local_rank", takes=0),
    *_options(IGNORED, _RENDEZVOUS, "--master_port", "--master_addr"),
    *_options(IGNORED, _RANK, "--node_rank"),
    *_options(IGNORED, _HOSTS, "-H|--hostfile"),
    *_options(IGNORED, _SSH, "--launcher", "--launcher_args", "--ssh_port"),
    *_options(IGNORED, _SSH, "--no_ssh", "--no_ssh_check", "--force_multi", takes=0),
    *_options(IGNORED, _SUPERVISES, "--save_pid", takes=0),
    *_options(IGNORED, _LOGS, "--enable_each_rank_log"),
    *_options(IGNORED, _BINDING, "--bind_cores_to_rank", takes=0),
    *_options(IGNORED, _BINDING, "--bind_core_list"),
    *_options(IGNORED, _VERBOSE, "--log_level"),
    *_options(IGNORED, _VERBOSE, "-q|--quiet", takes=0),
    *_options(REFUSED, _WHICH_GPUS, "-i|--include", "-e|--exclude"),
    *_options(REFUSED, "Write the path of that environment's deepspeed as the command.", "--venv_script"),
    *_options(REFUSED, "The autotuner starts jobs itself. Run it outside of Regroup.", "--autotuning"),
    *_options(REFUSED, _NO_TRAINING, "-h|--help", takes=0),
)

_TUNES = "It tunes Horovod's own transport, and processes here meet by torch.distributed."
_HOROVODRUN = (
    *_options(
        MAPPED, "All processes: spec.replicas times spec.processesPerWorker.", "--num-proc|-np", counts=True
    ),
    *_options(MAPPED, "It is spec.processesPerWorker.", "--slots-per-host", counts=True),
    *_options(
        MAPPED, "With --slots-per-host they are spec.elasticPolicy.", "--min-np|--min-num-proc", "--max-np|--max-num-proc",
        counts=True,
    ),
    *_options(IGNORED, _HOSTS, "-H|--hosts", "-hostfile|--hostfile", "--host-discovery-script"),
    *_options(IGNORED, _SSH, "-p|--ssh-port", "-i|--ssh-identity-file"),
    *_options(IGNORED, _RESTARTS, "--reset-limit"),
    *_options(IGNORED, _RESTARTS, "--blacklist-cooldown-range", takes=2),
    *_options(IGNORED, "spec.runPolicy.startDeadlineSeconds bounds the start.", "--start-timeout", "--elastic-timeout"),
    *_options(IGNORED, _LOGS, "--output-filename"),
    *_options(IGNORED, _VERBOSE, "--verbose", "-prefix-timestamp|--prefix-output-with-timestamp", takes=0),
    *_options(IGNORED, _VERBOSE, "--log-with-timestamp", "--log-without-timestamp", "--log-hide-timestamp", takes=0),
    *_options(IGNORED, _VERBOSE, "--no-log-hide-timestamp", takes=0),
    *_options(IGNORED, _VERBOSE, "--log-level"),
    *_options(IGNORED, _SUPERVISES, "--disable-cache", "--gloo", "--mpi", "--jsrun", takes=0),
    *_options(IGNORED, _TUNES, "--network-interfaces", "--network-interface", "--fusion-threshold-mb", "--cycle-time-ms"),
    *_options(IGNORED, _TUNES, "--cache-capacity", "--autotune-log-file", "--autotune-warmup-samples", "--config-file"),
    *_options(IGNORED, _TUNES, "--autotune-steps-per-sample", "--autotune-bayes-opt-max-samples"),
    *_options(IGNORED, _TUNES, "--autotune-gaussian-process-noise", "--timeline-filename", "--mpi-args", "--binding-args"),
    *_options(MAPPED, "It is HOROVOD_STALL_CHECK_TIME_SECONDS.", "--stall-check-warning-time-seconds"),
    *_options(MAPPED, "It is HOROVOD_STALL_CHECK_DISABLE.", "--no-stall-check", takes=0),
    *_options(IGNORED, _TUNES, "--stall-check-shutdown-time-seconds"),
    *_options(IGNORED, _TUNES, "--num-nccl-streams", "--thread-affinity", "--gloo-timeout-seconds"),
    *_options(IGNORED, _TUNES, "--hierarchical-allreduce", "--no-hierarchical-allreduce", takes=0),
    *_options(IGNORED, _TUNES, "--hierarchical-allgather", "--no-hierarchical-allgather", "--autotune", takes=0),
    *_options(IGNORED, _TUNES, "--no-autotune", "--timeline-mark-cycles", "--no-timeline-mark-cycles", takes=0),
    *_options(IGNORED, _TUNES, "--stall-check", "--mpi-threads-disable", takes=0),
    *_options(IGNORED, _TUNES, "--no-mpi-threads-disable", "--tcp", takes=0),
    *_options(REFUSED, _NO_TRAINING, "-h|--help", "-v|--version", "-cb|--check-build", takes=0),
)  # fmt: skip

_TRANSPORT = "It sets up MPI's own transport, and processes here meet by torch.distributed."
_MPIRUN = (
    *_options(
        MAPPED, "All processes: spec.replicas times spec.processesPerWorker.", "-np|-n|-c", counts=True
    ),
    *_options(MAPPED, "It is spec.processesPerWorker.", "-N|-npernode|-ppn|-perhost", counts=True),
    *_options(MAPPED, "NAME=VALUE is a variable of the processes; NAME alone is there already.", "-x"),
    *_options(MAPPED, "It is a variable of the processes.", "-genv|-env", takes=2),
    *_options(IGNORED, "The processes have all variables of the container.", "-genvlist|-envlist"),
    *_options(IGNORED, "The processes have all variables of the container.", "-genvall|-envall", takes=0),
    *_options(IGNORED, _HOSTS, "-H|-host|-hosts", "-hostfile|-machinefile|-f", "-default-hostfile", "-tune"),
    *_options(IGNORED, _HOSTS, "-nolocal", "-nooversubscribe", "-oversubscribe", "-use-hwthread-cpus", takes=0),
    *_options(IGNORED, _BINDING, "-map-by", "-bind-to", "-rank-by", "-cpu-set", "-rankfile|-rf", "-binding"),
    *_options(IGNORED, _BINDING, "-bynode", "-byslot", "-bycore", "-bysocket", "-bind-to-core", takes=0),
    *_options(IGNORED, _BINDING, "-bind-to-none", "-bind-to-socket", "-report-bindings", takes=0),
    *_options(IGNORED, _TRANSPORT, "-mca|-gmca|-pmca|-prtemca", takes=2),
    *_options(IGNORED, _TRANSPORT, "-prefix", "-am", "-launcher", "-iface", "-launch-agent", "-pmixmca"),
    *_options(IGNORED, "The container's user stays.", "-allow-run-as-root", takes=0),
    *_options(IGNORED, _LOGS, "-output-filename", "-output", "-xterm"),
    *_options(IGNORED, _LOGS, "-tag-output", "-timestamp-output", "-merge-stderr-to-stdout", "-prepend-rank|-l", takes=0),
    *_options(IGNORED, _VERBOSE, "-q|-quiet", "-v|-verbose", "-d|-debug-devel", "-display-map", takes=0),
    *_options(IGNORED, _VERBOSE, "-display-allocation", "-report-state-on-timeout", "-show-progress", takes=0),
    *_options(IGNORED, _RESTARTS, "-max-restarts"),
    *_options(IGNORED, _RESTARTS, "-enable-recovery", "-disable-recovery", "-continuous", takes=0),
    *_options(IGNORED, "spec.runPolicy.activeDeadlineSeconds bounds the job's time.", "-timeout"),
    *_options(IGNORED, "A program of Regroup has no standard input.", "-stdin"),
    *_options(REFUSED, "Set workingDir of the container.", "-wdir|-wd"),
    *_options(REFUSED, "Regroup starts one program. Write it behind the options.", "-app|-configfile"),
    *_options(REFUSED, _NO_TRAINING, "-h|-help", "-V|-version|-info", takes=0),
)  # fmt: skip

TABLE: Mapping[str, tuple[Option, ...]] = {
    "torchrun": _TORCHRUN,
    "accelerate": _ACCELERATE,
    "deepspeed": _DEEPSPEED,
    "horovodrun": _HOROVODRUN,
    "mpirun": _MPIRUN,
}
