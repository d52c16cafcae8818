#!/bin/bash
#SBATCH --job-name=small
#SBATCH --nodes=2
#SBATCH --ntasks=5
#SBATCH --ntasks-per-node=3
#SBATCH --mem=6144M
#SBATCH --signal=B:USR1@50
#SBATCH --open-mode=append
#SBATCH --requeue

export STOKER_JOB=small
export STOKER_SAMPLING=exact
export STOKER_CHECKPOINT_KEEP=3
export STOKER_GRACE_S=5
export OMP_NUM_THREADS=1
export PYTHONUNBUFFERED=1

retries=0 backoff=(1 5 15 30)
slots=5 lead=chief lead_slots=1
fixed_port= observers='evaluator' is_mpi=

run_slot() {
  local run=$1 port=$2 hosts=("${@:3}") command directory is_observer is_stopping= log pid code
  if ((SLURM_PROCID < 1)); then
    export STOKER_ROLE=chief STOKER_INDEX=$((SLURM_PROCID - 0))
    export STOKER_SLOT=chief/"$STOKER_INDEX"
    export TF_CONFIG='{"cluster": {"chief": ["'"${hosts[0]}":"$port"'"], "worker": ["'"${hosts[1]}":"$((port + 1))"'", "'"${hosts[2]}":"$((port + 2))"'"], "ps": ["'"${hosts[3]}":"$((port + 3))"'"]}, "task": {"type": "chief", "index": '"$STOKER_INDEX"'}}'
    export CLUSTER_CONFIG='{"ps": ["'"${hosts[3]}":"$((port + 3))"'"], "worker": ["'"${hosts[1]}":"$((port + 1))"'", "'"${hosts[2]}":"$((port + 2))"'"]}'
    export POD_NAME=chief-"$STOKER_INDEX"
    directory=/code is_observer=
    command=(/env/bin/python /code/train.py)
  elif ((SLURM_PROCID < 3)); then
    export STOKER_ROLE=worker STOKER_INDEX=$((SLURM_PROCID - 1))
    export STOKER_SLOT=worker/"$STOKER_INDEX"
    export TF_CONFIG='{"cluster": {"chief": ["'"${hosts[0]}":"$port"'"], "worker": ["'"${hosts[1]}":"$((port + 1))"'", "'"${hosts[2]}":"$((port + 2))"'"], "ps": ["'"${hosts[3]}":"$((port + 3))"'"]}, "task": {"type": "worker", "index": '"$STOKER_INDEX"'}}'
    export CLUSTER_CONFIG='{"ps": ["'"${hosts[3]}":"$((port + 3))"'"], "worker": ["'"${hosts[1]}":"$((port + 1))"'", "'"${hosts[2]}":"$((port + 2))"'"]}'
    export POD_NAME=worker-"$STOKER_INDEX"
    directory=/code is_observer=
    command=(/env/bin/python /code/train.py)
  elif ((SLURM_PROCID < 4)); then
    export STOKER_ROLE=ps STOKER_INDEX=$((SLURM_PROCID - 3))
    export STOKER_SLOT=ps/"$STOKER_INDEX"
    export TF_CONFIG='{"cluster": {"chief": ["'"${hosts[0]}":"$port"'"], "worker": ["'"${hosts[1]}":"$((port + 1))"'", "'"${hosts[2]}":"$((port + 2))"'"], "ps": ["'"${hosts[3]}":"$((port + 3))"'"]}, "task": {"type": "ps", "index": '"$STOKER_INDEX"'}}'
    export CLUSTER_CONFIG='{"ps": ["'"${hosts[3]}":"$((port + 3))"'"], "worker": ["'"${hosts[1]}":"$((port + 1))"'", "'"${hosts[2]}":"$((port + 2))"'"]}'
    export POD_NAME=ps-"$STOKER_INDEX"
    directory=/code is_observer=
    command=(/env/bin/python /code/train.py)
  elif ((SLURM_PROCID < 5)); then
    export STOKER_ROLE=evaluator STOKER_INDEX=$((SLURM_PROCID - 4))
    export STOKER_SLOT=evaluator/"$STOKER_INDEX"
    export TF_CONFIG='{"cluster": {"chief": ["'"${hosts[0]}":"$port"'"], "worker": ["'"${hosts[1]}":"$((port + 1))"'", "'"${hosts[2]}":"$((port + 2))"'"], "ps": ["'"${hosts[3]}":"$((port + 3))"'"]}, "task": {"type": "evaluator", "index": '"$STOKER_INDEX"'}}'
    export CLUSTER_CONFIG='{"ps": ["'"${hosts[3]}":"$((port + 3))"'"], "worker": ["'"${hosts[1]}":"$((port + 1))"'", "'"${hosts[2]}":"$((port + 2))"'"]}'
    export POD_NAME=evaluator-"$STOKER_INDEX"
    directory=/code is_observer=1
    command=(/env/bin/python /code/train.py)
  fi
