#!/bin/bash
# @script with @file on @size.
# Made by accel-fsdp @version. Lines with <- are yours to edit.
@{if_several}# Start it on each machine from a folder that all see: bash FILE NUMBER ADDRESS, NUMBER from 0, ADDRESS machine 0's
@{if_alone}# Start it from the folder that has both files: bash FILE
set -euo pipefail
cd @shared
# source .venv/bin/activate           # <- where accel-fsdp is installed
export HF_HOME="${HF_HOME:-$PWD/.huggingface}"
@{if_expandable}export PYTORCH_ALLOC_CONF=expandable_segments:True
# source ~/.tokens                    # <- export HF_TOKEN=... and WANDB_API_KEY=..., in a file for you alone
# export NCCL_DEBUG=INFO              # <- NCCL's log says which network it takes
@{if_several}# export NCCL_SOCKET_IFNAME=ib0       # <- InfiniBand, if NCCL takes another interface
@{if_several}# export FI_PROVIDER=efa              # <- AWS with EFA
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=@shutdown
@{if_several}number="${1:?NUMBER of this machine, from 0}"
@{if_several}address="${2:?ADDRESS of machine 0}"
@{if_several}is_host="$([ "$number" = 0 ] && echo 1 || echo 0)"
mkdir -p logs/@name
exec @{timeout}torchrun --nnodes=@machines --nproc-per-node=@gpus \
    @{if_several}--rdzv-backend=c10d --rdzv-endpoint="$address:29500" --rdzv-conf="is_host=$is_host" --rdzv-id=@name \
    @{if_alone}--standalone \
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --log-dir=logs/@name --tee=3 \
    @command
