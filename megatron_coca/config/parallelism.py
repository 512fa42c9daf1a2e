"""Keys for ZeRO, for tensor, pipeline and sequence parallelism, and for launching the processes."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from megatron_coca.config.base import ConfigGroup, PathName, Seconds, Size, key, shown


def _with_valid_stage(section: dict[str, Any]) -> dict[str, Any]:
    stage = section.get("stage", 0)
    if type(stage) is not int or not 0 <= stage <= 3:
        message = f"stage {shown(stage)} is not one of 0 | 1 | 2 | 3"
        raise PydanticCustomError("option", "{message}", {"message": message})
    return section


class ParallelConfig(ConfigGroup):
    """The engine, and data, tensor, pipeline and sequence parallelism."""

    engine: Literal["auto", "deepspeed", "native"] = key(
        "auto",
        "Engine that trains the model: `deepspeed` supports everything; `native` supports data parallelism with ZeRO 0"
        " and 1 in bfloat16 and float32, with less work on the host. `auto` is deepspeed.",
    )
    cuda_graphs: bool = key(
        False,
        "Native engine on a GPU: capture the forward and backward passes of a micro-batch in a CUDA graph, which the"
        " host launches as a whole.",
    )
    zero_optimization: Annotated[dict[str, Any], AfterValidator(_with_valid_stage)] | None = key(
        None, "DeepSpeed's ZeRO section, passed through; `stage` is 0 to 3."
    )
    reduction_wait: Literal["device", "stream"] = key(
        "device",
        "ZeRO 1 and 2 with overlap_comm: before an optimizer step, `device` makes the host wait until all work on the"
        " GPU is done, as in DeepSpeed; `stream` makes only the optimizer's stream wait for the reductions.",
    )
    pipe_parallel_size: Annotated[int, Field(ge=0, le=2**20)] = key(
        0, "Number of pipeline stages; 0 and 1 both disable the pipeline."
    )
    pipe_partition_method: Literal["type:transformer|mlp", "parameters", "uniform"] = key(
        "type:transformer|mlp",
        "Balance pipeline stages by the number of blocks, by parameters, or by layers (the embedding and the head each"
        " count as one).",
    )
    model_parallel_size: Size = key(
        1, "Number of tensor-parallel ranks (DeepSpeed's AutoTP); must divide the heads and the inner width of the MLP."
    )
    sequence_parallel_size: Size = key(
        1,
        "Number of sequence-parallel ranks (DeepSpeed-Ulysses); must divide num_attention_heads, num_kv_heads and"
        " seq_length.",
    )
    context_parallel_size: Size = key(
        1,
        "Number of ranks that divide a sequence by tokens, also in attention, where keys and values pass between the"
        " ranks (ring attention). Any number is valid. This key works together with sequence_parallel_size.",
    )
    sequence_parallel: bool = key(
        False,
        "Accepted without effect. Megatron divides the activations of norms and dropouts among tensor ranks, which does"
        " not change results. For long sequences see sequence_parallel_size.",
    )
    deepspeed_extra_args: dict[str, Any] | None = key(None, "Further DeepSpeed keys, passed through.")
    distributed_backend: Literal["nccl", "gloo"] | None = key(
        None,
        "nccl: train on GPUs, and stop with an error if there are none; gloo: train on the CPU; null: like nccl if"
        " num_gpus is set; otherwise train on GPUs if the host has any, else on the CPU.",
    )

    @property
    def model_copies(self) -> int:
        """Number of ranks that together store the weights of one model."""
        return max(1, self.pipe_parallel_size) * self.model_parallel_size

    @property
    def sequence_ranks(self) -> int:
        """Number of ranks that together read one sequence."""
        return self.sequence_parallel_size * self.context_parallel_size

    @property
    def accumulates_in_fp32(self) -> bool:
        """True if `data_types: {grad_accum_dtype: fp32}` is set: gradients of micro-batches are summed in float32."""
        types = (self.deepspeed_extra_args or {}).get("data_types") or {}
        return isinstance(types, dict) and types.get("grad_accum_dtype") == "fp32"

    @property
    def stage(self) -> int:
        """ZeRO stage, 0 to 3."""
        return int((self.zero_optimization or {}).get("stage", 0))


MOST_SLOTS = 9999
"""Maximum number of processes on one host."""


class LaunchConfig(ConfigGroup):
    """Launch of the processes; see docs/launch.md."""

    hostfile: PathName | None = key(
        None, "File with host names and slots. If it does not exist, the run warns and uses this host, as in GPT-NeoX."
    )
    num_nodes: int = Field(
        default=-1, ge=-1, le=2**20, description="Number of hosts to use; -1: all hosts of the hostfile."
    )
    num_gpus: Annotated[int, Field(ge=1, le=MOST_SLOTS)] | None = key(
        None,
        "Processes per host, one per GPU, or on the CPU with distributed_backend gloo; null: one process, or with a"
        " hostfile one per slot.",
    )
    master_addr: str | None = key(None, "Address of rank 0.")
    master_port: int = Field(default=29500, ge=1, le=65535, description="Port of rank 0.")
    join_timeout: Seconds = key(600.0, "Seconds to wait for all processes at startup.")
    launcher: Literal["pdsh", "slurm"] = key("pdsh", "Multi-host launcher; docs/launch.md compares them.")
    no_ssh_check: bool = key(False, "pdsh: skip the check that the hosts are reachable.")
    comment: str | None = key(None, "Comment of the Slurm job.")
    account: str | None = key(None, "Account of the Slurm job.")
    deepspeed_slurm: bool = key(False, "The same as `launcher: slurm`.")
