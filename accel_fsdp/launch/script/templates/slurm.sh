#!/bin/bash
# @script with @file on @size.
# Made by accel-fsdp @version. Lines with <- are yours to edit.
# Submit it from a folder that all machines see: sbatch FILE
#SBATCH --job-name=@name
#SBATCH --nodes=@machines
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=@gpus
#SBATCH --cpus-per-task=@cpus
#SBATCH --mem=@mem
@{if_no_time}# <- No duration was given. A shorter limit lets the scheduler start the job earlier:
#SBATCH --time=@time
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --chdir=@shared
#SBATCH --signal=@signal
#SBATCH --@requeue
# <- With one # where your cluster wants them:
##SBATCH --partition=NAME
##SBATCH --account=NAME

set -euo pipefail
# source .venv/bin/activate              # <- where accel-fsdp is installed
export HF_HOME="${HF_HOME:-$PWD/.huggingface}"
@{if_expandable}export PYTORCH_ALLOC_CONF=expandable_segments:True
# source ~/.tokens                       # <- export HF_TOKEN=... and WANDB_API_KEY=..., in a file for you alone
# export NCCL_DEBUG=INFO                 # <- NCCL's log says which network it takes
@{if_several}# export NCCL_SOCKET_IFNAME=ib0          # <- InfiniBand, if NCCL takes another interface
@{if_several}# export FI_PROVIDER=efa                 # <- AWS with EFA
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=@shutdown

# One launcher for each machine, with a separate log.
code=0
srun @early_end --open-mode=append --output=%x-%j-machine-%n.log \
    @command || code=$?
@{if_resumes}# 75 or 138: the job got the signal to stop, and has saved a checkpoint.
@{if_resumes}if [ $code = 75 ] || [ $code = 138 ]; then
@{if_resumes}    scontrol requeue "$SLURM_JOB_ID"
@{if_resumes}fi
exit $code
