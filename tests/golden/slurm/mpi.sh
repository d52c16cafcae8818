#!/bin/bash
#SBATCH --job-name=small
#SBATCH --nodes=2
#SBATCH --ntasks=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:2
#SBATCH --signal=B:USR1@50
#SBATCH --open-mode=append
#SBATCH --requeue

export STOKER_JOB=small
export STOKER_SAMPLING=exact
export STOKER_CHECKPOINT_KEEP=3
export STOKER_GRACE_S=5
export OMP_NUM_THREADS=1
export PYTHONUNBUFFERED=1
export OMPI_ALLOW_RUN_AS_ROOT=1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

retries=0 backoff=(1 5 15 30)
slots=3 lead=launcher lead_slots=1
fixed_port= observers='' is_mpi=1

run_slot() {
  local run=$1 port=$2 hosts=("${@:3}") command directory is_observer is_stopping= log pid code
  if ((SLURM_PROCID < 1)); then
    export STOKER_ROLE=launcher STOKER_INDEX=$((SLURM_PROCID - 0))
    export STOKER_SLOT=launcher/"$STOKER_INDEX"
    export MASTER_ADDR="${hosts[0]}"
    export MASTER_PORT="$port"
    export STOKER_OUTPUT="$run"'/logs/{slot}.'"$STOKER_ATTEMPT".log
    directory=/code is_observer=
    command=(mpirun -np 4 --host "${hosts[0]}":2,"${hosts[1]}":2 --tag-output --oversubscribe --bind-to none --map-by slot --mca pml ob1 --mca btl '^openib' --mca btl_tcp_if_exclude lo,docker0 --mca oob_tcp_if_exclude lo,docker0 --mca ess_base_forward_signals none -x STOKER_JOB -x STOKER_SAMPLING -x STOKER_CHECKPOINT_KEEP -x STOKER_GRACE_S -x OMP_NUM_THREADS -x PYTHONUNBUFFERED -x MASTER_ADDR -x MASTER_PORT -x STOKER_OUTPUT -x STOKER_RUN -x STOKER_ATTEMPT -x STOKER_CHECKPOINT_DIR /env/bin/python -I -S "$run"/mpi_rank.py --ranks 2 --gpus 2 --first 0 -- /env/bin/python /code/train.py)
  fi
